"""The multi-round question benchmark of vLLM's production stack, as AIBrix uses it: a CSV row a request.

`launch_time` is when the request was sent, `finish_time` = launch + TTFT + generation time; both UTC seconds. When the last token
came is not told apart from the end of the stream.
"""

from __future__ import annotations

from pathlib import Path

from hoptrace.collectors.files.base import Importer, Sink
from hoptrace.collectors.files.bench_rows import Measured, Reject, Rows, epoch_ns, number, tokens_of
from hoptrace.collectors.files.blocks import BAD, ROW
from hoptrace.collectors.files.csv_rows import CsvFile, header_of

__all__ = ["IMPORTER", "Aibrix"]

_NEEDED = ("ttft", "generation_time", "launch_time", "finish_time")
_APART = "{n} rows: launch_time + ttft + generation_time is not finish_time (by more than 0.1 ms); finish_time is kept."
_APART_NS = 100_000
_NO_LAST = "The last token's time is not told apart from the end of the stream: TPOT is unknown."
_ORDER = "Rows lie in the order in which answers ended; requests keep that order as their numbers."


class Aibrix(Importer):
    """AIBrix's and the vLLM production stack's multi-round QA benchmark."""

    kind = "multi-round-qa"
    summary = "vLLM production stack / AIBrix multi-round QA results (CSV): sending, TTFT, end, user"

    def matches(self, path: Path, head: bytes) -> bool:
        return {"generation_tokens", "generation_time", "launch_time", "ttft"} <= set(header_of(head))

    def read(self, path: Path, sink: Sink) -> None:
        sink.epoch = "utc"
        sink.note(_NO_LAST)
        sink.note(_ORDER)
        rows = Rows(sink)
        for frame in CsvFile(sink).frames():
            for row in frame.iter_rows(named=True):
                rows.record(row[ROW], _measured, sink, row)
        rows.close()


def _measured(sink: Sink, row: dict[str, str | None]) -> Measured:
    if row[BAD] is not None:
        raise Reject(str(row[BAD]))
    seconds = {name: _float(row, name) for name in _NEEDED}
    launch, ttft, generation, finish = (seconds[n] for n in ("launch_time", "ttft", "generation_time", "finish_time"))
    if launch is None:
        raise Reject("it has no launch_time")
    sent = epoch_ns(launch, "launch_time")
    end = None if finish is None else epoch_ns(finish, "finish_time")
    if None not in (end, ttft, generation) and abs(sent + round((ttft + generation) * 1e9) - end) > _APART_NS:  # type: ignore[operator]
        sink.tally(_APART)
    user, question = (row.get(n) or None for n in ("user_id", "question_id"))
    return Measured(
        request_id=None if user is None or question is None else f"{user}/{question}",
        session=user,
        sent_ns=sent,
        first_ns=None if ttft is None else sent + round(ttft * 1e9),
        finish_ns=end,
        prompt_tokens=tokens_of(_float(row, "prompt_tokens"), "prompt_tokens"),
        output_tokens=tokens_of(_float(row, "generation_tokens"), "generation_tokens"),
    )


def _float(row: dict[str, str | None], name: str) -> float | None:
    value = (row.get(name) or "").strip()
    if not value:
        return None
    try:
        return number(float(value), name)
    except ValueError:
        raise Reject(f"{name} is not a number", value) from None


IMPORTER = Aibrix()
