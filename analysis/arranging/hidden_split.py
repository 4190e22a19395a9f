"""(a) One operation split into several messages: transfers per operation, what each carries, and what the splitting costs."""

from __future__ import annotations

import polars as pl

from hoptrace.access import OVERHEAD, is_loopback
from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View, sentence
from hoptrace.analysis.arranging.operations import summed
from hoptrace.analysis.query import query
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent
from hoptrace.kv import geometry

__all__ = ["split"]

_TITLE = "one operation split into several messages"


def split(seen: Seen) -> View:
    """Operations and messages: of answers to clients, of prompts, and of state (KV, weights, activations) apart."""
    rows = _groups(query(seen.trace, "hidden_split"))
    state = rows.filter(~pl.col("object").is_in(["prompt", "tokens"]))
    figures = [*_answer(seen), *_state(seen, state)]
    time, basis = _serialize(seen)
    figures.append(
        Figure(
            "describing_ns",
            "time spent building descriptors or serializing for transfers of state",
            time,
            "ns",
            basis,
            "waits of kind serialize that touch a move of the same request, step or server",
            why="would need waits of kind serialize beside `moves`",
        )
    )
    unseen = []
    if not rows.height:
        unseen.append("No move was recorded, so how many messages an operation takes is unknown.")
    elif not state.height:
        unseen.append("No move of KV, weights or activations was recorded: whether such are split is unknown.")
    untold = rows.filter(pl.col("untold_operations") > 0)
    if untold.height:
        unseen.append(f"{int(untold['untold_operations'].sum()):,} operations do not say their transfers; they are left out.")
    return View(
        "split",
        _TITLE,
        figures,
        _sentence(figures, time, seen),
        rows,
        time,
        basis,
        "waits of kind serialize around transfers" if time is not None else "",
        None,
        unseen,
    )


def _groups(found: pl.DataFrame) -> pl.DataFrame:
    """One row per (object, mechanism, basis, client): operations, messages, per_operation, most, bytes, bytes_per_message,
    untold_operations (those that do not say their transfers, in nothing else). Products are Float64."""
    told = pl.col("transfers").is_not_null()
    sized = told & (pl.col("bytes_unknown") == 0) & pl.col("bytes").is_not_null()
    messages = pl.col("transfers").cast(pl.Float64) * pl.col("operations")
    return (
        found.group_by("object", "mechanism", "basis", "client", maintain_order=True)
        .agg(
            pl.col("operations").filter(told).sum(),
            messages.filter(told).sum().alias("messages"),
            pl.col("transfers").max().alias("most"),
            pl.when(sized.any()).then(pl.col("bytes").cast(pl.Float64).filter(sized).sum()).alias("bytes"),
            messages.filter(sized).sum().alias("_sized"),
            pl.col("operations").filter(~told).sum().alias("untold_operations"),
        )
        .with_columns(
            (pl.col("messages") / pl.when(pl.col("operations") > 0).then(pl.col("operations"))).alias("per_operation"),
            (pl.col("bytes") / pl.when(pl.col("_sized") > 0).then(pl.col("_sized"))).alias("bytes_per_message"),
        )
        .drop("_sized")
    )


def _one(rows: pl.DataFrame, column: str) -> float | None:
    """The figure of the row with most messages: rows of unlike mechanism or basis are never added up."""
    if not rows.height:
        return None
    top = rows.sort("messages", descending=True, maintain_order=True).row(0, named=True)
    value = top[column]
    return None if value is None else float(value)


def _basis(rows: pl.DataFrame) -> str | None:
    return str(rows.sort("messages", descending=True, maintain_order=True)["basis"][0]) if rows.height else None


def _answer(seen: Seen) -> list[Figure]:
    """Of answers whose messages, bytes and tokens are all known, and of the basis that most of them have."""
    found = query(seen.trace, "hidden_answers")
    top = found.row(0, named=True) if found.height and found["messages"][0] else None
    basis = None if top is None else str(top["basis"])
    why = None if top is not None else "would need moves of tokens to clients, with transfers and bytes"
    per, each, size, cost, why_size = None, None, None, None, why
    overhead = OVERHEAD["loopback" if all(is_loopback(s.url) for s in seen.manifest.servers) else "tcp"]
    if top is not None:
        per, each = top["messages"] / top["answers"], top["output_tokens"] / top["messages"]
        if top["bytes"] is None:  # beyond what a column of the answer holds
            why_size = "the bytes of the answers do not add up to a number that a trace can hold"
        else:
            size = top["bytes"] / top["messages"]
            head = overhead.of(round(size), 1)
            cost = head / (head + size) if size else None
    source = "moves of tokens to clients: transfers, bytes"
    return [
        Figure("messages_per_answer", "messages in which an answer reaches the client", per, "messages", basis, source, why=why),
        Figure("tokens_per_message", "tokens in each", each, "tokens", basis, "output tokens ÷ those messages", why=why),
        Figure("bytes_per_message", "bytes of each, as HTTP carries them", size, "bytes", basis, source, why=why_size),
        Figure(
            "header_share",
            "share of packet headers in what the link then carries",
            cost,
            "share",
            "assumed",
            f"{overhead.packet_bytes} bytes a packet ({overhead.source})",
            why=why_size,
        ),
    ]


def _state(seen: Seen, rows: pl.DataFrame) -> list[Figure]:
    basis, source = _basis(rows), "moves of KV, weights, activations: transfers"
    per, most, size = _one(rows, "per_operation"), _one(rows, "most"), _one(rows, "bytes_per_message")
    why = None if per is not None else "would need `moves` of state, with their transfers"
    return [
        Figure(
            "messages_per_transfer",
            "messages (descriptors, writes) in which one transfer of state goes",
            per,
            "messages",
            basis,
            source,
            why=why,
        ),
        Figure(
            "most_messages",
            "most messages of one transfer",
            None if most is None else int(most),
            "messages",
            basis,
            source,
            why=why,
        ),
        Figure("state_bytes_per_message", "bytes of each", size, "bytes", basis, source, why=why if size is None else None),
        _per_block(seen, rows),
    ]


def _per_block(seen: Seen, rows: pl.DataFrame) -> Figure:
    """Messages per KV block: block bytes ÷ bytes of a message, where all servers keep KV alike."""
    kv = rows.filter(pl.col("object") == "kv")
    size = _one(kv, "bytes_per_message")
    blocks = {
        g.bytes_per_token * s.block_size_tokens
        for s in seen.manifest.servers
        if (g := geometry(s)) is not None and s.block_size_tokens
    }
    what, source = "messages in which one KV block goes", "KV block's bytes (manifest) ÷ bytes of a message"
    if size and len(blocks) == 1:
        return Figure("messages_per_block", what, blocks.pop() / size, "messages", "derived", source)
    why = (
        "would need moves of KV with bytes and transfers"
        if not size
        else "would need one KV geometry and block size in the manifest"
    )
    return Figure("messages_per_block", what, None, "messages", None, source, why=why)


def _serialize(seen: Seen) -> tuple[int | None, str | None]:
    """Σ of serialize waits around transfers, of the basis that has most of it; null where none was recorded."""
    mine = seen.confirm.filter((pl.col("kind") == "serialize") & pl.col("wait_ns").is_not_null())
    sums = [(time, str(basis)) for (basis,), (time,) in summed(mine, ("basis",), ("wait_ns",)) if time is not None]
    return max(sums) if sums else (None, None)


def _sentence(figures: list[Figure], time: int | None, seen: Seen) -> str:
    f = {x.name: x for x in figures}
    said = []
    if (per := f["messages_per_answer"].value) is not None:
        size, head = f["bytes_per_message"].value, f["header_share"].value
        each = f["tokens_per_message"].value
        holds = "" if each is None else f", {count_text(round(each, 2))} tokens and"
        share = "" if head is None else f" ({percent(head)} of packet headers on top, assumed)"
        said.append(f"An answer goes out in {count_text(round(per, 1))} messages{holds} {bytes_text(size)} each{share}")
    if (per := f["messages_per_transfer"].value) is not None:
        block, each_size = f["messages_per_block"].value, bytes_text(f["state_bytes_per_message"].value)
        more = "" if block is None else f", {count_text(round(block, 1))} for each KV block"
        said.append(f"a transfer of state takes {count_text(round(per, 1))} messages of {each_size}{more}")
    if time is not None:
        said.append(f"describing and serializing them took {duration_text(time)}")
    return sentence(said, "Not known: no move says its transfers.")
