"""What can be recorded at a server, without recording it."""

from __future__ import annotations

from typing import Literal

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Options
from hoptrace.collectors.target import Target
from hoptrace.manifest import Server

__all__ = ["explain"]


async def explain(
    url: str, *, pid: int | Literal["auto"] | None = "auto", key: str | None = None, options: Options | None = None
) -> tuple[Server, dict[str, Finding]]:
    """What a session could record, without recording: the server as it describes itself, and each collector's finding."""
    target = await Target.find(url, key=key, pid=pid, options=options or Options())
    try:
        return target.server, {c.name: finding for c, finding in await target.probe(target.collectors())}
    finally:
        await target.ctx.api.close()
