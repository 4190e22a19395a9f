"""(d) Shared state serialized, synchronized or polled again and again: waits for locks and syncs, looks at metrics, published
events, prompts that are sent again."""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View, best_known, int_sum, sentence
from hoptrace.analysis.arranging.operations import summed
from hoptrace.analysis.query import query
from hoptrace.analysis.term import sql_of
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent

__all__ = ["shared"]

_TITLE = "shared state serialized, synchronized or polled again and again"
_KINDS = ("sync", "lock", "serialize", "poll", "interrupt", "switch", "doorbell")
_HASHES_AT_ONCE = 4_000_000  # some 100 bytes each while they are counted


def shared(seen: Seen) -> View:
    """Waits that belong to no transfer of state, steps' syncs, looks at metrics, KV events, and repeated prompts."""
    rows = _own(seen)
    figures = [*_waits(seen, rows), *_syncs(seen), *_looks(seen), *_prompts(seen)]
    time = next(f.value for f in figures if f.name == "shared_wait_ns")
    basis = next(f.basis for f in figures if f.name == "shared_wait_ns")
    unseen = []
    if not rows.height:
        unseen.append(
            "No wait of kind sync, lock, serialize or poll was recorded outside transfers: their time is unknown, not 0."
        )
    return View(
        "shared",
        _TITLE,
        figures,
        _sentence({f.name: f for f in figures}, seen),
        rows,
        None if time is None else int(time),
        basis,
        "recorded waits of these kinds that belong to no transfer of state" if time is not None else "",
        None,
        unseen,
    )


def _own(seen: Seen) -> pl.DataFrame:
    """Recorded waits of these kinds by kind, on and basis, less those that belong to transfers: operations, wait_ns; scopes and
    most: requests or steps that have such a wait, and its most repeats in one of them."""
    keys = ("kind", "on", "basis")
    theirs = {tuple(r[k] for k in keys): r for r in seen.confirm.to_dicts()}
    repeats = {tuple(r[k] for k in keys): r for r in query(seen.trace, "hidden_repeats").to_dicts()}
    rows = []
    for key, (n, ns) in summed(seen.waits.filter(pl.col("kind").is_in(_KINDS)), keys, ("operations", "wait_ns")):
        taken, again = theirs.get(key), repeats.get(key, {})
        if taken is not None:
            n = None if n is None or taken["operations"] is None else n - taken["operations"]
            ns = None if ns is None or taken["wait_ns"] is None else ns - taken["wait_ns"]
        if n != 0 or ns != 0:
            rows.append(
                {
                    **dict(zip(keys, key, strict=True)),
                    "operations": n,
                    "wait_ns": ns,
                    "scopes": again.get("scopes"),
                    "most": again.get("most"),
                }
            )
    text, number = dict.fromkeys(keys, pl.String), dict.fromkeys(("operations", "wait_ns", "scopes", "most"), pl.Int64)
    return pl.DataFrame(rows, schema={**text, **number})


def _waits(seen: Seen, rows: pl.DataFrame) -> list[Figure]:
    rows, basis, more = best_known(rows)
    why = None if rows.height else "would need waits of kind sync, lock, serialize or poll"
    n, time, scopes = (int_sum(rows[c]) for c in ("operations", "wait_ns", "scopes"))
    most = rows["most"].max() if rows.height else None
    source = "waits of these kinds that belong to no transfer of state"
    return [
        Figure("shared_waits", "recorded syncs, locks, serializations, polls", n, "operations", basis, source, more, why),
        Figure(
            "shared_waits_per_token",
            "of them per output token",
            seen.per_token(n),
            "operations/token",
            basis,
            source,
            more,
            why or (None if seen.per_token(n) is not None else "would need the number of output tokens"),
        ),
        Figure("shared_wait_ns", "time in them", time, "ns", basis, source, more, why),
        Figure(
            "repeats",
            "times that one request or step does the same wait",
            n / scopes if n and scopes else None,
            "×",
            basis if n and scopes else None,
            "Σ count ÷ (request or step, kind, on)",
            why=why,
        ),
        Figure(
            "most_repeats",
            "most times",
            most if isinstance(most, int) else None,
            "×",
            basis if isinstance(most, int) else None,
            "waits.count",
            why=why,
        ),
    ]


def _syncs(seen: Seen) -> list[Figure]:
    n, known = seen.step_sum("syncs"), seen.step_sum("syncs_known") or 0
    per = n / known if n is not None and known else None
    return [
        Figure(
            "syncs_per_step",
            "times that the host waits for the device in a step",
            per,
            "syncs",
            seen.steps_basis,
            "steps.syncs",
            why="would need steps.syncs",
        )
    ]


def _looks(seen: Seen) -> list[Figure]:
    found = query(seen.trace, "hidden_shared")
    out = []
    for name, what, words, need in (
        (
            "metric_looks",
            "metrics",
            "looks at the server's metrics and state pages, by the capture",
            "counters of a server's metrics",
        ),
        ("kv_events", "kv events", "events that the server published of its KV blocks", "`blocks`"),
    ):
        rows = found.filter(pl.col("what") == what)
        n = int(rows["n"].sum()) if rows.height else None
        each = seen.per_token(n)
        why = None if n is not None else f"would need {need}"
        source = "counters (distinct times by source)" if what == "metrics" else "blocks"
        out += [
            Figure(name, words, n, "times", "counted", source, what == "metrics" and n is not None, why),
            Figure(
                f"{name}_per_token",
                "of them per output token",
                each,
                "times/token",
                "counted",
                source,
                what == "metrics" and each is not None,
                why or (None if each is not None else "would need the number of output tokens"),
            ),
        ]
    return out


def _prompts(seen: Seen) -> list[Figure]:
    found = _repeated(seen)
    sizes = query(seen.trace, "hidden_prompt_bytes").row(0, named=True)
    blocks = int(found["blocks"].sum()) if found.height else 0
    again = int(found["repeated"].sum()) if found.height else 0
    turns, turn_blocks = (int(found[c].sum()) if found.height else 0 for c in ("repeated_in_session", "session_blocks"))
    source = "requests.prefix_blocks (equal hash spaces)"
    why = None if blocks else "would need requests.prefix_blocks"
    no_turns = why or (None if turn_blocks else "no request names its session")
    size = _bytes(found, "repeated", sizes)
    turn_size = _bytes(found, "repeated_in_session", sizes) if turn_blocks else None
    no_bytes = "would need moves of prompts with bytes, and the prompts' lengths"
    return [
        Figure("prompt_blocks", "blocks of prompts that were hashed", blocks or None, "blocks", "counted", source, why=why),
        Figure(
            "repeated_prompt_share",
            "share of prompt blocks that some request had sent before",
            again / blocks if blocks else None,
            "share",
            "counted",
            source,
            why=why,
        ),
        Figure(
            "repeated_prompt_bytes",
            "bytes of them on the wire",
            size,
            "bytes",
            "derived",
            f"{source} × bytes of prompts ÷ their length",
            why=why or (None if size is not None else no_bytes),
        ),
        Figure(
            "turn_blocks",
            "of them in requests that name their session",
            turn_blocks or None,
            "blocks",
            "counted",
            f"{source}, session",
            why=no_turns,
        ),
        Figure(
            "repeated_turn_share",
            "share of sessions' prompt blocks that an earlier turn had sent",
            turns / turn_blocks if turn_blocks else None,
            "share",
            "counted",
            f"{source}, session",
            why=no_turns,
        ),
        Figure(
            "repeated_turn_bytes",
            "bytes of them on the wire",
            turn_size,
            "bytes",
            "derived",
            f"{source}, session × bytes of prompts ÷ their length",
            why=no_turns or (None if turn_size is not None else no_bytes),
        ),
    ]


def _bytes(found: pl.DataFrame, column: str, sizes: dict[str, int | None]) -> int | None:
    """Blocks × their size × the bytes that a unit of a prompt takes on the wire; null where one of the units is unknown."""
    total = 0.0
    for r in found.to_dicts():
        if not r[column]:
            continue
        carried, length = (
            (sizes["char_bytes"], sizes["characters"])
            if r["block_unit"] == "characters"
            else (sizes["token_bytes"], sizes["tokens"])
        )
        if not carried or not length or not r["block_size"] or r["block_unit"] not in ("characters", "tokens"):
            return None
        total += r[column] * r["block_size"] * carried / length
    return round(total) if found.height else None


def _repeated(seen: Seen) -> pl.DataFrame:
    """``hidden_prompts``, a part of the hashes at a time where there are many."""
    text = sql_of("hidden_prompts")
    n = (
        seen.trace.table("requests")
        .select(pl.col("prefix_blocks").list.len().cast(pl.Int64).sum())
        .collect(engine="streaming")
        .item()
    )
    parts = max(1, -(-int(n or 0) // _HASHES_AT_ONCE))
    found = [seen.trace.sql(text.replace("WHERE true", f"WHERE abs(hash % {parts}) = {k}")) for k in range(parts)]
    sums = ("blocks", "repeated", "session_blocks", "repeated_in_session")
    return pl.concat(found).group_by("block_unit", "block_size", maintain_order=True).agg(pl.col(c).sum() for c in sums)


def _sentence(f: dict[str, Figure], seen: Seen) -> str:
    said = []
    if (n := f["shared_waits"].value) is not None:
        each = f["repeats"].value
        again = "" if each is None else f", {count_text(round(float(each), 1))} times by the same request or step"
        said.append(
            f"{'at least ' if f['shared_waits'].at_least else ''}{n:,} syncs, locks, serializations and polls outside transfers"
            f"{' (assumed)' if f['shared_waits'].basis == 'assumed' else ''} took "
            f"{duration_text(f['shared_wait_ns'].value)}{again}"
        )
    if (n := f["syncs_per_step"].value) is not None:
        said.append(f"the host waits for the device {count_text(n)} times a step")
    if (share := f["repeated_turn_share"].value) is not None:
        size = f["repeated_turn_bytes"].value
        of = "" if size is None else f", {bytes_text(size)} of them on the wire"
        said.append(
            f"{percent(float(share))} of the {f['turn_blocks'].value:,} prompt blocks of sessions had been sent in an earlier "
            f"turn{of}"
        )
    elif (share := f["repeated_prompt_share"].value) is not None:
        size = f["repeated_prompt_bytes"].value
        of = "" if size is None else f", {bytes_text(size)} on the wire"
        said.append(f"{percent(float(share))} of the prompts' {f['prompt_blocks'].value:,} blocks had been sent before{of}")
    if (n := f["kv_events_per_token"].value) is not None:
        said.append(f"the server publishes {count_text(round(float(n), 2))} KV events per output token")
    return sentence(said, "Not known: no such wait, event or prompt hash was recorded.")
