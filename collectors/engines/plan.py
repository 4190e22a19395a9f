"""What `attach` would record of a server, best first, and what would make it more: printed by ``attach --explain``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hoptrace.collectors.base import Finding
from hoptrace.collectors.context import Context
from hoptrace.collectors.engines.catalog import GIVES
from hoptrace.collectors.engines.identify import GATEWAYS
from hoptrace.collectors.hardware.listener import local_address
from hoptrace.collectors.urls import port_of

__all__ = ["Choice", "Plan", "plan"]

_NET_RAW = 13  # capability number, linux/capability.h

_MORE = {
    "vllm-plugin": "install hoptrace[vllm] beside vLLM and restart it: steps and requests from inside",
    "vllm-log": "restart vLLM with --enable-logging-iteration-details: each step's composition",
    "forward-pass": "restart SGLang with --enable-forward-pass-metrics: each step's composition and length",
}

# What the advice asks for, as the server's configuration names it: nobody is told to set what is set.
_FLAG = {"vllm-log": "enable_logging_iteration_details", "forward-pass": "enable_forward_pass_metrics"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One source: what it ``gives``, whether it is ``available``, else the ``reason``. ``how``: what to write after attach."""

    name: str
    gives: str
    available: bool
    reason: str | None = None
    how: str | None = None


@dataclass(slots=True)
class Plan:
    """``data_path``: ways to see requests and tokens, the first that is available is proposed. ``sources``: the rest, best first.
    ``advice``: what would make the capture more, in the order of its worth. ``command``: the proposal, to be typed."""

    data_path: list[Choice] = field(default_factory=list)
    sources: list[Choice] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: str = ""

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def text(self) -> str:
        """For the screen."""
        lines = ["Requests and tokens:"]
        lines += [_line(c, i + 1) for i, c in enumerate(self.data_path)]
        here = [c for c in self.sources if c.available]
        missing = [c for c in self.sources if not c.available]
        if here:
            lines += ["Beside them:", *(_line(c) for c in here)]
        if missing:
            lines += ["Not here:", *(f"  {c.name}: {c.reason}" for c in missing)]
        if self.advice:
            lines += ["To see more:", *(f"  {a}" for a in self.advice)]
        if self.notes:
            lines += ["Not known:", *(f"  {n}" for n in self.notes)]
        if self.command:
            lines += ["Do:", f"  {self.command}"]
        return "\n".join(lines)


def plan(ctx: Context, findings: Mapping[str, Finding], notes: list[str] | None = None) -> Plan:
    """The plan for a server. ``findings``: by the collectors' names; ``sniff`` among them if it was looked for."""
    made = Plan(notes=list(notes or ()))
    made.data_path = _data_path(ctx, findings)
    for name, finding in findings.items():
        if name in ("sniff", "proxy"):
            continue
        made.sources.append(Choice(name, GIVES.get(name, ""), finding.available, finding.reason))
        # A source that is there may still lack what it could give.
        flag = _FLAG.get(name)
        if name in _MORE and (finding.reason is not None or not finding.available) and not (flag and ctx.server.config.get(flag)):
            made.advice.append(_MORE[name])
    made.sources.sort(key=lambda c: not c.available)
    if ctx.server.config.get("metrics_only"):
        made.data_path = []
        made.notes.append("This address serves no completions: only its metrics are recorded. Requests go to its frontend.")
    if (workers := ctx.server.config.get("workers")) and ctx.server.engine in GATEWAYS:
        made.advice.insert(0, f"attach to the router's workers too: {' '.join(workers)}")
    first = next((c for c in made.data_path if c.available), None)
    words = ["hoptrace", "attach", shlex.quote(ctx.api.url), *([first.how] if first and first.how else []), "-o", "run.trace"]
    made.command = " ".join(words)
    return made


def _line(c: Choice, number: int | None = None) -> str:
    head = f"  {number}. {c.name}" if number is not None else f"  {c.name}"
    text = f"{head}: {c.gives}"
    if c.available:
        return f"{text}{f'  [{c.how}]' if c.how else ''}{f' ({c.reason})' if c.reason else ''}"
    return f"{text}; not here: {c.reason}"


def _data_path(ctx: Context, findings: Mapping[str, Finding]) -> list[Choice]:
    sniff = findings.get("sniff") or _may_sniff(ctx)
    parts = urlsplit(ctx.api.url)
    port = port_of(parts)
    # All interfaces: a server that one reaches by loopback here has clients elsewhere as a rule.
    how = f"--sniff any:{port}"
    return [
        Choice("sniff", GIVES["sniff"], sniff.available, sniff.reason, how),
        Choice("proxy", GIVES["proxy"], True, None, "--proxy :9000"),
    ]


def _may_sniff(ctx: Context) -> Finding:
    """Whether packets of the server can be captured from here, without trying."""
    parts = urlsplit(ctx.api.url)
    if parts.scheme == "https":
        return Finding(False, "the server speaks TLS, which can't be read on the wire: capture behind its end")
    if not local_address(parts.hostname or ""):
        return Finding(False, f"{parts.hostname} is another machine: run hoptrace there")
    try:
        status = Path("/proc/self/status").read_text()
        rights = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return Finding(False, "capturing packets needs Linux")
    if not rights >> _NET_RAW & 1:
        return Finding(
            False, "it needs the right CAP_NET_RAW: run hoptrace with sudo, or give it to its Python (setcap cap_net_raw+ep)"
        )
    return Finding(True)
