"""Results of vLLM's and SGLang's serving benchmarks: one object a run, whose lists have one element a request.

Short lists are read whole; the lists of gaps, which are nearly all of the file, one request at a time; generated text is stepped
over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hoptrace.collectors.files.base import Sink
from hoptrace.collectors.files.bench_figures import Figures
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows
from hoptrace.collectors.files.json_walk import Buffer, Cut, Malformed, document, elements, load, members, one_line, roots
from hoptrace.errors import InputError

__all__ = ["Element", "Run", "failure", "read_bench"]

# Read one element at a time.
_LONG = ("itls", "errors")
_NEVER = ("generated_texts", "text_chunks")
NO_TOKEN = "failed without a message: no token came"


@dataclass(slots=True)
class Run:
    """One run: its settings and figures, and where its lists are."""

    number: int
    settings: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    long: dict[str, int] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the file has this list."""
        return name in self.lists or name in self.long


@dataclass(frozen=True, slots=True)
class Element:
    """One request of a run: the elements of the run's lists, null where there is no such list."""

    run: Run
    index: int
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)


def read_bench(
    sink: Sink,
    tool: str,
    rows_of: Callable[[Run], Rows],
    measure: Callable[[Element], Measured],
    detail: tuple[str, ...],
    no_detail: str,
) -> None:
    """Read a file of runs that have their requests in lists, and their figures. ``no_detail`` is the note where none has any.

    ``detail``: the lists of which one must be there for a run to have requests. ``rows_of`` is asked once, with the first run
    that has them.

    Raises:
        InputError: lists of one run differ in length, or the only run is cut off.
    """
    figures = Figures(sink, tool)
    rows = _read_runs(sink, figures, rows_of, measure, detail)
    if rows is None:
        sink.note(no_detail)
    figures.write(None if rows is None else rows.last_ns, requests=sink.read)
    if rows is not None:
        rows.close()


def _read_runs(
    sink: Sink, figures: Figures, rows_of: Callable[[Run], Rows], measure: Callable[[Element], Measured], detail: tuple[str, ...]
) -> Rows | None:
    """Read every run of the file; gives the rows, null if no run has requests."""
    rows: Rows | None = None
    record = count = 0
    with document(sink) as buffer:
        for at in roots(buffer):
            count += 1
            try:
                run = _run(buffer, at, count)
                if not any(run.has(name) for name in detail):
                    _keep_figures(figures, run)
                    continue
                size = _size(sink, run)
                rows = rows or rows_of(run)
                for element in _elements(sink, buffer, run, size):
                    record += 1
                    rows.record(record, measure, element)
                _keep_figures(figures, run)
            except Cut as cut:
                if rows is None:
                    raise InputError(
                        f"{sink.path} ends in the middle of a run's results (inside what begins at byte {cut.at:,}).",
                        hint="The benchmark was stopped while it wrote, or the copy is not whole.",
                    ) from None
                record += 1
                sink.count()
                sink.reject(record, f"run {count} is cut off: the file ends inside it")
                break
    return rows


def failure(element: Element, first_s: float | None) -> str | None:
    """Why a request failed, in one sentence; null if it did not. A failed request has an error, or neither token nor length."""
    told = one_line(element["errors"])
    if told is not None:
        return told
    lengths = element.run.lists.get("output_lens")
    nothing = not first_s and not element["itls"] and (lengths is None or not element["output_lens"])
    return NO_TOKEN if nothing and element.run.has("ttfts") else None


def _run(buffer: Buffer, at: int, number: int) -> Run:
    run = Run(number)
    for name, begin in members(buffer, at):
        if name in _NEVER:
            continue
        if buffer[begin : begin + 1] == b"[" and name in _LONG:
            run.long[name] = begin
            continue
        value = load(buffer, begin)
        if isinstance(value, list):
            run.lists[name] = value
        elif value is not None:
            run.settings[name] = value
    return run


def _size(sink: Sink, run: Run) -> int:
    sizes = {name: len(values) for name, values in run.lists.items() if name.endswith(("lens", "ttfts", "latencies", "_times"))}
    if not sizes:
        raise InputError(f"{sink.path}: run {run.number} has no list of lengths or times.")
    if len(set(sizes.values())) > 1:
        raise _differ(sink, run, sizes)
    return next(iter(sizes.values()))


def _differ(sink: Sink, run: Run, sizes: dict[str, int]) -> InputError:
    told = ", ".join(f"{n}: {k}" for n, k in sizes.items())
    return InputError(
        f"{sink.path}: the lists of run {run.number} differ in length ({told}).", hint="The file was edited or is damaged."
    )


def _elements(sink: Sink, buffer: Buffer, run: Run, size: int) -> Iterator[Element]:
    long = {name: elements(buffer, at) for name, at in run.long.items()}
    empty: set[str] = set()
    for index in range(size):
        values = {name: found[index] for name, found in run.lists.items() if len(found) == size}
        for name, each in long.items():
            span = next(each, None)
            if span is None and index:
                if name not in empty:
                    raise _differ(sink, run, {name: index, "requests": size})
            elif span is None:
                empty.add(name)
            values[name] = None if span is None else _value(buffer, span)
        yield Element(run, index, values)
    for name, each in long.items():
        if (more := sum(1 for _ in each)) and size:
            raise _differ(sink, run, {name: size + more, "requests": size})


def _value(buffer: Buffer, span: tuple[int, int]) -> Any:
    try:
        return load(buffer, *span)
    except Malformed:
        return _BROKEN


_BROKEN = object()


def gaps(element: Element) -> Any:
    """The request's list of gaps; null if the file has none. Rejects what is no list."""
    found = element["itls"]
    if found is _BROKEN:
        raise Reject("its list of inter-token latencies is no JSON")
    return found


def _keep_figures(figures: Figures, run: Run) -> None:
    for name, value in run.settings.items():
        figures.add(name, value, run=run.number)
