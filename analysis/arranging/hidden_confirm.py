"""(b) A direct access turned into queue-and-confirm: what is rung, polled and confirmed around each transfer, and what arranging
a hand-over takes beside its data. The question behind it: am I waiting for data, or for news of it?"""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View, best_known, int_sum, sentence
from hoptrace.analysis.arranging.operations import access_of
from hoptrace.analysis.query import query
from hoptrace.analysis.text import count_text, counted, duration_text, percent

__all__ = ["confirm"]

_TITLE = "a direct access turned into queue-and-confirm"
_ASKS = ("doorbell", "poll", "interrupt", "sync")


def confirm(seen: Seen) -> View:
    """Confirmations around transfers of state, and the arranging of hand-overs."""
    rows = seen.confirm.filter(pl.col("kind").is_in(_ASKS))
    figures = [*_transfers(seen, rows), *_assumed(seen), *_handovers(seen)]
    f = {x.name: x for x in figures}
    handover, asked = seen.sum_ns("handover"), f["confirming_ns"].value
    # The hand-over of a request holds the waits in it: one of the two, never both.
    time, basis, share = handover, "derived" if handover is not None else None, seen.share_of(handover)
    of = "part hand-over of the finished requests" if handover is not None else ""
    if not handover and asked is not None:
        time, basis, share = int(asked), f["confirming_ns"].basis, None
        of = "recorded waits around transfers, taken once where they overlap"
    unseen = []
    if not rows.height:
        unseen.append(
            "No wait of kind doorbell, poll, interrupt or sync was recorded around a transfer: how long news of data was waited "
            "for is unknown."
        )
    return View("confirm", _TITLE, figures, _sentence(f, handover, seen), rows, time, basis, of, share, unseen)


def _transfers(seen: Seen, rows: pl.DataFrame) -> list[Figure]:
    spans = {r["kind"]: r for r in seen.confirm.filter(pl.col("kind").is_in(["(moving)", "(confirming)"])).to_dicts()}
    n = spans["(moving)"]["transfers"] if "(moving)" in spans else 0
    moving = spans["(moving)"]["wait_ns"] if n else None
    asking = spans["(confirming)"]["wait_ns"] if n else None
    rows, basis, more = best_known(rows)
    operations = int_sum(rows["operations"])
    why = None if n else "would need waits of kind doorbell, poll, interrupt or sync beside `moves` of state"
    source = "waits that touch a move of the same request, step or server"
    per = operations / n if n and operations is not None else None
    ratio = asking / moving if n and moving and asking is not None else None
    return [
        Figure(
            "confirmations_per_transfer",
            "doorbells, polls, interrupts and syncs around a recorded move of state",
            per,
            "operations",
            basis,
            source,
            more,
            why,
        ),
        Figure("confirming_ns", "time in which somebody rang, asked or confirmed", asking, "ns", basis, source, more, why),
        Figure(
            "moving_ns",
            "the rest of those moves' time: at most so long the data took",
            moving,
            "ns",
            basis,
            "moves.start_ns to end_ns, less those waits",
            why=why,
        ),
        Figure(
            "confirming_per_moving",
            "time confirming ÷ time moving",
            ratio,
            "×",
            basis,
            "the two above",
            at_least=ratio is not None,
            why=why
            if not n
            else None
            if ratio is not None
            else "the waits cover the moves whole: how long the data took is unknown",
        ),
    ]


def _assumed(seen: Seen) -> list[Figure]:
    """Control operations that the mechanisms' access paths take for what was moved, clients' messages included."""
    total, transfers = 0, 0
    for r in query(seen.trace, "coordination_moves").to_dicts():
        path = access_of(r["mechanism"], r["server"], seen.manifest)
        if path is not None and r["transfers"]:
            total += path.control_ops(r["links"]) * r["transfers"]
            transfers += r["transfers"]
    value = total / transfers if transfers else None
    return [
        Figure(
            "control_ops_per_transfer",
            "control operations that the shortest access path of a transfer takes",
            value,
            "operations",
            "assumed",
            "moves.transfers × access path of the mechanism",
            at_least=value is not None,
            why="would need moves with a mechanism",
        )
    ]


def _handovers(seen: Seen) -> list[Figure]:
    stays = query(seen.trace, "coordination_stays")
    n = int(stays["handed_over"].sum())
    arranging, carrying = seen.sum_ns("handover"), seen.sum_ns("transfer")
    why = None if arranging is not None else "would need the ends and starts of the stays of handed-over requests"
    ratio = arranging / carrying if arranging and carrying else None
    waits = _waits_between(seen) if n else None
    source = "parts hand-over and transfer of the finished requests"
    return [
        Figure(
            "handovers",
            "stays that were handed over to another server",
            n if stays.height else None,
            "stays",
            "counted",
            "stages.end_reason",
            why="would need `stages`",
        ),
        Figure("arranging_ns", "time arranging hand-overs", arranging, "ns", "derived", source, why=why),
        Figure(
            "carrying_ns",
            "time transferring in requests' latency",
            carrying,
            "ns",
            "derived",
            source,
            why="would need waits of kind transfer, or moves of KV",
        ),
        Figure(
            "arranging_per_carrying",
            "time arranging a hand-over ÷ time transferring",
            ratio,
            "×",
            "derived",
            source,
            why="no hand-over with a transfer is seen",
        ),
        Figure(
            "waits_per_handover",
            "recorded waits of a hand-over, repeats counted",
            waits,
            "operations",
            "counted",
            "waits of the request between the end of a stay and the start of the next",
            why="no hand-over with waits is recorded",
        ),
    ]


def _waits_between(seen: Seen) -> float | None:
    found = query(seen.trace, "hidden_handover_waits").row(0, named=True)
    return found["operations"] / found["handovers"] if found["handovers"] and found["operations"] else None


def _sentence(f: dict[str, Figure], handover: int | None, seen: Seen) -> str:
    said = []
    if handover and (n := f["handovers"].value):
        carrying = f["carrying_ns"].value
        data = (
            "the transfer itself is not seen"
            if not carrying
            else f"the transfer itself {duration_text(float(carrying) / int(n))}"
        )
        said.append(
            f"a hand-over is arranged for {duration_text(handover / int(n))}, {data} ({counted(int(n), 'hand-over')}, "
            f"{percent(seen.share_of(handover))} of latency)"
        )
    if (asked := f["confirming_ns"].value) is not None:
        moving, ratio = f["moving_ns"].value, f["confirming_per_moving"].value
        news = "" if ratio is None else f": {count_text(round(float(ratio), 1))} times as long waiting for news as for data"
        times = count_text(round(float(f["confirmations_per_transfer"].value or 0), 1))
        said.append(
            f"around transfers somebody rang or asked {times} times each, for {duration_text(float(asked))} in all, beside "
            f"{duration_text(moving)} of moving{news}"
        )
    if not said and (ops := f["control_ops_per_transfer"].value) is not None:
        said.append(
            f"no confirmation was recorded; the access paths of what moved take at least {count_text(ops)} a transfer (assumed)"
        )
    return sentence(said, "Not known: neither transfers of state nor hand-overs were recorded.")
