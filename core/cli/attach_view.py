"""What `hoptrace attach` prints: the begin, the live line, what was seen and what not."""

from __future__ import annotations

import shlex
import time
from typing import Any

from rich.console import Console
from rich.text import Text

from hoptrace.collectors.session import Session
from hoptrace.collectors.status import Status

__all__ = ["StatusLine", "begin", "end", "summary"]

# Not being there is nothing to wonder at while a capture begins; `--explain` and the end tell.
_OPTIONAL = ("llamacpp-log", "vllm-log", "sglang-log", "sglang-export", "kv-events", "forward-pass")


def begin(err: Console, session: Session) -> None:
    """Where to send requests, and what can't be recorded."""
    urls = [t.ctx.api.url for t in session.targets]
    err.print(f"Recording {', '.join(urls)} into {session.out}. Ctrl-C stops.", markup=False)
    if session.outside == "proxy":
        for proxy, url in zip(session.proxy_urls, urls, strict=True):
            err.print(f"Send requests to {proxy} instead of {url}.", style="bold", markup=False)
    here = sum(f.available for f in session.machine_found.values())
    away = len(session.machine_found) - here
    err.print(f"Beside them {here} sources of counters of this machine; {away} are not here (`hoptrace doctor` says why).")
    for name, finding in session.findings.items():
        if name in session.machine_found and not _servers_own(name):
            continue
        if finding.reason and (finding.available or name.split("@")[0] not in _OPTIONAL):
            err.print(f"  {name}: {finding.reason}", markup=False)


def _servers_own(name: str) -> bool:
    """Whether a source of counters is a server's process: where it is not found, its user wants to know at once."""
    return name.split("@")[0] == "process"


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
        parts += [f"{r.tokens} tokens", f"{rate:.0f} tokens/s", f"{sum(status.samples.values())} other rows"]
        if dropped := sum(status.dropped.values()):
            parts.append(f"{dropped} dropped")
        line = Text(" · ".join(parts))
        if status.away:
            line.append(" · the server does not answer, waiting", style="bold yellow")
        return line


def _unseen(session: Session, status: Status) -> list[str]:
    machine = {n: f for n, f in session.machine_found.items() if not _servers_own(n)}
    out = [
        f"{name}: {f.reason}"
        for name, f in sorted(session.findings.items())
        if not f.available and f.reason and name not in machine
    ]
    # Pages and files that the user named ("scrape HOST:PORT", "pcm FILE"): their reasons matter now.
    named = [name for name, f in sorted(machine.items()) if not f.available and " " in name]
    out += [f"{name}: {machine[name].reason}" for name in named]
    if away := sorted(name for name, f in machine.items() if not f.available and name not in named):
        out.append(f"counters that are not here ({', '.join(away)}): `hoptrace doctor` says why")
    r = status.requests
    if session.outside == "proxy" and not r.started:
        out.append(f"no request came through the proxy: point clients at it instead of {session.url}")
    if session.outside == "sniff" and not r.started:
        out.append(
            "no request was seen on the wire: do clients come by this interface and port? (--sniff any:PORT sees all interfaces)"
        )
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
        "urls": [t.ctx.api.url for t in session.targets],
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
    if session.outside:
        ended = f"{r.finished} finished, {r.failed} failed, {r.cancelled} cancelled"
        lines.append(f"  seen: {r.started} requests ({ended}), {r.tokens} streamed tokens")
    for name, rows in sorted(status.samples.items()):
        if name.split("@")[0] != "sniff":
            lines.append(f"  seen: {rows} rows of {name}")
    lines += [f"  not seen: {what}" for what in _unseen(session, status)]
    if r.finished:
        lines += [
            "Next:",
            f"  hoptrace report {out}",
            f"  hoptrace replay {out} --policy one-slot -o what-if.trace",
        ]
        lines.append(f"  hoptrace app {out}")
    elif session.outside == "proxy":
        lines += ["Next:", f"  hoptrace attach {session.url} --proxy :9000 -o again.trace", "  and send requests to the proxy"]
    else:
        lines += ["Next:", f'  hoptrace sql {out} "SELECT name, count(*) FROM counters GROUP BY name"']
        lines.append(f"  hoptrace attach {session.url} --proxy :9000 -o with-requests.trace")
    return "\n".join(lines)
