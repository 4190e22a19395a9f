"""What can be recorded at a server, without recording it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Options
from hoptrace.collectors.engines.plan import Plan, plan
from hoptrace.collectors.hardware.processes.process import ProcessSource
from hoptrace.collectors.hardware.source import Server as Watched
from hoptrace.collectors.target import Target
from hoptrace.manifest import Server

__all__ = ["Explained", "explain"]


@dataclass(frozen=True, slots=True)
class Explained:
    """The server as it describes itself, what each of its sources finds, and the plan that follows."""

    server: Server
    findings: dict[str, Finding]
    plan: Plan


async def explain(
    url: str, *, pid: int | Literal["auto"] | None = "auto", key: str | None = None, options: Options | None = None
) -> Explained:
    """What a session could record at ``url``. Raises what entering a session raises for it."""
    target = await Target.find(url, key=key, pid=pid, options=options or Options())
    try:
        findings = {c.name: finding for c, finding in await target.probe(target.collectors())}
        if target.ctx.find is not None:
            found = ProcessSource(Watched(target.name, target.ctx.find), target.ctx.options.roots).probe()
            findings["process"] = Finding(found.available, found.reason, found.remedy, found.sees)
        return Explained(target.server, findings, plan(target.ctx, findings, target.notes))
    finally:
        await target.ctx.api.close()
