"""A file of UCX statistics, followed as it grows: `UCX_STATS_DEST=file:F UCX_STATS_TRIGGER=timer:1s`. Only a UCX that was built
with --enable-stats writes one; those of distributions and of NIXL's wheel are not.

A report bears no time: it was written between our last look and this one. None has been recorded from a real UCX: the form is
its source's.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.hardware.appended import Appended
from hoptrace.collectors.hardware.network.ucx_text import is_report, meaning, report_of
from hoptrace.collectors.hardware.sink import Sink
from hoptrace.collectors.hardware.source import Found, Pace, found_by_error, status_of

__all__ = ["MAX_SERIES", "UcxSource", "looks_like_ucx"]

MAX_SERIES = 4000
"""Endpoints come and go, and each has counters of its own: beyond so many they are dropped, and counted."""

_REMEDY = "run a UCX built with --enable-stats under UCX_STATS_DEST=file:FILE UCX_STATS_TRIGGER=timer:1s"


def looks_like_ucx(path: Path) -> bool:
    """By what it begins with; an empty or missing one by its name."""
    try:
        with path.open("rb") as f:
            begin = f.read(512)
    except OSError:
        begin = b""
    return is_report(begin.decode("utf-8", "replace")) if begin else "ucx" in path.name.lower()


class UcxSource:
    """One file. Entities ``ucx:HOST:PID/NODE/…``."""

    answers = "what UCX moved and how often it had to wait, by endpoint"
    pace: Pace = "slow"
    every_s = 1.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"ucx {path.name}"
        self._file = Appended(path)
        self._report: list[str] | None = None
        self._numbers: dict[tuple[str, str], int] = {}
        self._last: set[tuple[str, str]] = set()
        self._begun = 0
        self._looked_ns: int | None = None

    def probe(self) -> Found:
        try:
            with self._path.open("rb") as f:
                begin = f.read(512)
        except OSError as e:
            return found_by_error(e, _REMEDY)
        if begin and not is_report(begin.decode("utf-8", "replace")):
            return Found("unsupported", f"{self._path.name} is no text of UCX statistics (binary?)", "leave out `:bin`")
        return Found("ok", None if begin else "nothing has been written yet", sees=self._path.name)

    def open(self, out: Sink) -> None:
        """What stands in the file by now belongs to another time: a report counts from its first line after this one."""
        self._file.skip()

    def sample(self, out: Sink) -> None:
        now_ns = out.now_ns()
        since_ns = self._looked_ns if self._looked_ns is not None else now_ns
        self._looked_ns = now_ns
        try:
            anew, lines = self._file.lines(out)
        except OSError as e:
            # Each counter is unknown from here on.
            out.at(now_ns, now_ns)
            out.fail(self._numbers.values(), status_of(e))
            self._file.lost(e, out)
            return
        if anew:
            # Another process writes it now: its counters begin at 0.
            self._report = None
            self._begun += 1
            self._numbers.clear()
            self._last.clear()
        out.at(since_ns, now_ns)
        for line in lines:
            self._line(line.decode("utf-8", "replace"), out)

    def close(self) -> None:
        return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _line(self, line: str, out: Sink) -> None:
        if line.strip() and not line.startswith(" "):
            if self._report is not None:
                out.drop("reports that were cut short")
            self._report = [line]
            if "{" in line:  # a summary is one line
                self._done(out)
        elif not line.strip():
            self._done(out)
        elif self._report is not None:
            self._report.append(line)
            if len(self._report) > 20 * MAX_SERIES:
                out.drop("reports of too many lines")
                self._report = None

    def _done(self, out: Sink) -> None:
        if self._report is None:
            return
        found, odd = report_of(self._report)
        self._report = None
        if odd:
            out.drop("lines of no known form", odd)
        for key, value in found.items():
            number = self._numbers.get(key)
            if number is None:
                if len(self._numbers) >= MAX_SERIES:
                    out.drop("counters beyond those that are kept")
                    continue
                name, unit, way = meaning(key[1])
                number = self._numbers[key] = out.series(
                    f"ucx:{key[0]}", name, unit, "cumulative", direction=way, incarnation=str(self._begun)
                )  # fmt: skip
            out.put(number, value)
        # An endpoint that was closed is not in the report any more.
        out.fail((self._numbers[k] for k in self._last - found.keys() if k in self._numbers), "absent")
        self._last = set(found)
