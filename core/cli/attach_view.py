"""What `hoptrace attach` prints: the begin, the live line, what was seen and what not."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from hoptrace.collectors.base import Finding
from hoptrace.collectors.session import Session, Status
from hoptrace.manifest import Server

__all__ = ["StatusLine", "begin", "end", "explained", "summary"]


def begin(err: Console, session: Session) -> None:
    """Where to send requests, and what can't be recorded."""
    err.print(f"Recording {session.url} into {session.out}. Ctrl-C stops.", markup=False)
    if session.findings["proxy"].available:
        err.print(f"Send requests to {session.proxy_url} instead of {session.url}.", style="bold", markup=False)
    for name, finding in session.findings.items():
        if finding.reason:
            err.print(f"  {name}: {finding.reason}", markup=False)


class StatusLine:
    """One line, with the tokens per second since the last one."""

    def __init__(self) -> None:
        self._tokens = 0
        self._at = time.monotonic()

    def text(self, status: Status) -> Text:
        """The line for ``status``."""
        now = time.monotonic()
        rate = (status.requests.tokens - self._tokens) / max(now - self._at, 1e-3)
        self._tokens, self._at = status.requests.tokens, now
        r = status.requests
        parts = [f"{status.elapsed_s:.0f} s", f"{r.started} requests", f"{r.in_flight} running"]
        if r.failed or r.cancelled:
            parts.append(f"{r.failed} failed, {r.cancelled} cancelled")
        parts += [f"{r.tokens} tokens", f"{rate:.0f} tokens/s", f"{sum(status.samples.values())} samples"]
        if dropped := sum(status.dropped.values()):
            parts.append(f"{dropped} dropped")
        line = Text(" · ".join(parts))
        if status.away:
            line.append(" · the server does not answer, waiting", style="bold yellow")
        return line


def _unseen(session: Session, status: Status) -> list[str]:
    out = [f"{name}: {f.reason}" for name, f in sorted(session.findings.items()) if not f.available and f.reason]
    r = status.requests
    if session.findings["proxy"].available and not r.started:
        out.append(f"no request came through the proxy: point clients at it instead of {session.url}")
    if r.in_flight:
        out.append(f"{r.in_flight} requests were still running")
    if r.counts_differ:
        out.append(f"{r.counts_differ} streams: some chunks held several tokens, how many is not known")
    if r.counts_untold:
        out.append(f"{r.counts_untold} requests: the server told no total (clients: stream_options.include_usage)")
    if r.totals_of_one:
        out.append(f"{r.totals_of_one} requests for several sequences: the server's total is that of one, tokens seen are taken")
    out += [f"dropped {n}: {reason}" for reason, n in sorted(status.dropped.items())]
    if session.steps_note:
        out.append(session.steps_note)
    return out


def summary(session: Session) -> dict[str, Any]:
    """The capture's figures, for JSON."""
    status = session.status()
    r = status.requests
    return {
        "trace": str(session.out),
        "url": session.url,
        "engine": session.server.engine if session.server else None,
        "duration_s": round(status.elapsed_s, 3),
        "requests": r.started,
        "finished": r.finished,
        "failed": r.failed,
        "cancelled": r.cancelled,
        "tokens": r.tokens,
        "samples": status.samples,
        "missed": status.missed,
        "dropped": status.dropped,
        "not_seen": _unseen(session, status),
    }


def end(session: Session) -> str:
    """What was recorded, what was not, and what to do next."""
    status = session.status()
    r = status.requests
    out = shlex.quote(str(session.out))
    lines = [f"{session.out}: {status.elapsed_s:.1f} s of {(session.server and session.server.engine) or 'a server'}"]
    if session.findings["proxy"].available:
        ended = f"{r.finished} finished, {r.failed} failed, {r.cancelled} cancelled"
        lines.append(f"  seen: {r.started} requests ({ended}), {r.tokens} streamed tokens")
    for name, rows in sorted(status.samples.items()):
        lines.append(f"  seen: {rows} samples of {name}")
    lines += [f"  not seen: {what}" for what in _unseen(session, status)]
    if r.finished:
        lines += [
            "Next:",
            f"  hoptrace report {out}",
            f"  hoptrace replay {out} --policy one-slot -o what-if.trace",
        ]
        lines.append(f"  hoptrace app {out}")
    elif session.findings["proxy"].available:
        lines += ["Next:", f"  hoptrace attach {session.url} --proxy :9000 -o again.trace", "  and send requests to the proxy"]
    else:
        lines += ["Next:", f'  hoptrace sql {out} "SELECT name, count(*) FROM counters GROUP BY name"']
        lines.append(f"  hoptrace attach {session.url} --proxy :9000 -o with-requests.trace")
    return "\n".join(lines)


def explained(server: Server, findings: dict[str, Finding], as_json: bool) -> str:
    """What can be recorded at a server."""
    told = {k: v for k, v in server.model_dump().items() if v is not None and k not in ("config", "name")}
    if as_json:
        listed = {name: {"available": f.available, "reason": f.reason} for name, f in findings.items()}
        return json.dumps({"server": told, "collectors": listed}, indent=1)
    lines = [f"{server.url}: {server.engine or 'an OpenAI-compatible server of unknown kind'}"]
    lines += [f"  {name}: {value}" for name, value in told.items() if name not in ("url", "engine")]
    lines.append("Can be recorded:")
    lines.append("  proxy: requests, token times, totals, prefix hashes (with --proxy [HOST]:PORT)")
    lines += [f"  {name}{f': {f.reason}' if f.reason else ''}" for name, f in findings.items() if f.available]
    missing = [f"  {name}: {f.reason}" for name, f in findings.items() if not f.available]
    return "\n".join([*lines, *(["Can't be recorded:", *missing] if missing else [])])
