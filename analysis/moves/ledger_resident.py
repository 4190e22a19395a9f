"""Law 2: nothing is lost from the ledger. Per server and medium resident = before + produced + copied in - freed, from the events
of KV blocks, held against what the steps say was in use and computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.query import query, query_with
from hoptrace.analysis.text import counted
from hoptrace.reader import Trace

__all__ = ["Check", "Resident", "Residency", "residency"]


@dataclass(frozen=True, slots=True)
class Resident:
    """The KV blocks of one server, rank and medium over the recording: ``resident_blocks`` (at its end) = ``before_blocks`` +
    ``produced_blocks`` + ``copied_in_blocks`` - ``freed_blocks``.

    ``before_blocks``: what must have been there when the recording began (more was freed than had come): at least so many.
    ``freed_blocks``: evicted, and dropped when the whole cache was cleared. ``unseen_blocks``: freed after a clearing without
    having been stored; anything but 0 is a contradiction. Bytes are null where the events do not say them. Counted, all of it.
    """

    server: str
    dp_rank: int
    medium: str
    before_blocks: int
    produced_blocks: int
    copied_in_blocks: int
    freed_blocks: int
    resident_blocks: int
    peak_blocks: int
    unseen_blocks: int
    hit_blocks: int
    produced_bytes: int | None
    copied_in_bytes: int | None
    evicted_bytes: int | None
    hit_bytes: int | None
    from_ns: int
    to_ns: int

    @property
    def balanced(self) -> bool:
        """Whether the law holds to the block."""
        inwards = self.before_blocks + self.unseen_blocks + self.produced_blocks + self.copied_in_blocks
        return self.resident_blocks == inwards - self.freed_blocks and not self.unseen_blocks

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"balanced": self.balanced}


@dataclass(frozen=True, slots=True)
class Check:
    """One law that two recordings of the same thing must keep. ``cases`` were looked at, ``broken`` broke it, by ``worst`` at
    most (in ``unit``). ``says``: the result as a sentence."""

    name: str
    server: str
    dp_rank: int
    cases: int
    broken: int
    worst: int
    unit: str
    says: str

    @property
    def holds(self) -> bool:
        return self.broken == 0

    def as_dict(self) -> dict[str, Any]:
        return {f: getattr(self, f) for f in self.__slots__} | {"holds": self.holds}


@dataclass(frozen=True, slots=True)
class Residency:
    """``blocks``: law 2 per server, rank and medium. ``checks``: block events against steps. ``unseen``: why there is none."""

    blocks: list[Resident]
    checks: list[Check]
    unseen: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {"blocks": [b.as_dict() for b in self.blocks], "checks": [c.as_dict() for c in self.checks]}


def residency(trace: Trace) -> Residency:
    """Law 2 of any trace. Raises InputError if a table is damaged."""
    if not trace.has("blocks"):
        return Residency([], [], ["No events of KV blocks were recorded: what was resident, stored and evicted is unknown."])
    blocks = [_resident(r) for r in query(trace, "ledger_resident").to_dicts()]
    checks = [c for b in blocks if (c := _capacity(trace, b)) is not None]
    return Residency(blocks, checks + _against_steps(trace, blocks), [])


def _resident(row: dict[str, Any]) -> Resident:
    return Resident(
        **{n: row[n] for n in ("server", "dp_rank", "medium", "before_blocks", "produced_blocks", "copied_in_blocks")},
        freed_blocks=row["evicted_blocks"] + row["dropped_blocks"],
        unseen_blocks=row["freed_unseen_blocks"],
        **{n: row[n] for n in ("resident_blocks", "peak_blocks", "hit_blocks", "produced_bytes", "copied_in_bytes")},
        **{n: row[n] for n in ("evicted_bytes", "hit_bytes", "from_ns", "to_ns")},
    )


def _capacity(trace: Trace, block: Resident) -> Check | None:
    """No more blocks than the engine has: its ``block_count`` is of the device."""
    server = trace.manifest.server(block.server)
    count = server.block_count if server is not None and block.medium == "device" else None
    if not count:
        return None
    over = max(0, block.peak_blocks - count)
    says = f"At most {block.peak_blocks:,} blocks were cached, of {count:,} that there are."
    return Check("blocks_within_capacity", block.server, block.dp_rank, 1, int(over > 0), over, "blocks", says)


def _against_steps(trace: Trace, blocks: list[Resident]) -> list[Check]:
    sizes = _sizes(trace, blocks)
    if not sizes.height:
        return []
    stored = {(b.server, b.dp_rank): b for b in blocks if b.medium == "device"}
    stays = _stays(trace)
    out: list[Check] = []
    for row in query_with(trace, "ledger_resident_steps", {"sizes": sizes}).to_dicts():
        server, rank, size = row["server"], row["dp_rank"], row["block_tokens"]
        if row["steps"]:
            broken, worst = row["steps_beyond"], max(0, row["most_beyond_blocks"] or 0)
            says = (
                f"In all {counted(row['steps'], 'step')} the KV in use is within the cached blocks and one unfinished block for "
                "each running request."
                if not broken
                else f"In {broken:,} of {counted(row['steps'], 'step')} up to {counted(worst, 'block')} more were in use than "
                "cached: events were lost, blocks were there before the recording, or the engine reserves ahead."
            )
            out.append(Check("in_use_within_cached", server, rank, row["steps"], broken, worst, "blocks", says))
        block, n = stored.get((server, rank)), stays.get(server)
        if row["computed_tokens"] is None or block is None or n is None:
            continue
        rest = row["computed_tokens"] - block.produced_blocks * size
        most = n * (size - 1)
        out_by = max(0, -rest, rest - most)
        says = f"{row['computed_tokens']:,} tokens were computed and {block.produced_blocks * size:,} of them stored as blocks; "
        says += (
            f"the rest, {rest:,}, fits in the {counted(n, 'unfinished block')} of {size} tokens that the stays left."
            if not out_by
            else f"{counted(n, 'stay')} can leave up to {most:,} outside whole blocks: {out_by:,} do not add up ("
            + ("steps are missing)." if rest < 0 else "steps stand there twice, or events of stored blocks were lost).")
        )
        out.append(Check("computed_equals_stored", server, rank, n, int(out_by > 0), out_by, "tokens", says))
    return out


def _sizes(trace: Trace, blocks: list[Resident]) -> pl.DataFrame:
    """Servers with device blocks of a known size, and when their events were recorded: by the coverage, else between the
    events."""
    told = trace.table("coverage").filter(pl.col("table") == "blocks").select("server", "from_ns", "to_ns").collect().rows()
    rows = []
    for name in sorted({b.server for b in blocks if b.medium == "device"}):
        server = trace.manifest.server(name)
        size = server.block_size_tokens if server is not None else None
        if not size or size < 1:
            continue
        mine = [b for b in blocks if b.server == name]
        spans = [(a, z) for s, a, z in told if s in (None, name)]
        first = min((a for a, _ in spans), default=min(b.from_ns for b in mine))
        ends = [z for _, z in spans]
        last = max(b.to_ns for b in mine) if not ends else (1 << 62) if None in ends else max(ends)
        rows.append((name, size, first, last))
    schema = {"server": pl.String, "block_tokens": pl.Int64, "from_ns": pl.Int64, "to_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _stays(trace: Trace) -> dict[str, int]:
    """Stays on each server: a sequence comes back after a preemption as a stay of its own."""
    found = trace.table("stages").group_by("server").agg(pl.len()).collect(engine="streaming")
    return {str(s): int(n) for s, n in found.rows() if s is not None}
