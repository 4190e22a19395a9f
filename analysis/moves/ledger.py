"""What moved, how often and how far: the ledger of moves, with the memory traffic of the steps beside it.

Counted, derived and assumed figures are kept apart: they are never added up in one number. ``basis`` says how a row's own hops
and operations are known; those that a move does not say are in columns of their own (``*_assumed``, from :mod:`hoptrace.access`).
The parts are in files of their own: rows (:mod:`.ledger_rows`), amplification (:mod:`.ledger_size`), links
(:mod:`.ledger_links`), re-use (:mod:`.ledger_reuse`), what could have been re-used (:mod:`.ledger_reusable`), KV geometry
(:mod:`.ledger_geometry`), law 2 (:mod:`.ledger_resident`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from hoptrace.access import ACCESS
from hoptrace.analysis.moves.ledger_geometry import ServerKv, server_kv
from hoptrace.analysis.moves.ledger_links import LinkUse, link_uses
from hoptrace.analysis.moves.ledger_resident import Residency, residency
from hoptrace.analysis.moves.ledger_reusable import Reusable, reusable
from hoptrace.analysis.moves.ledger_reuse import EngineRate, Reuse, Upkeep, engine_rates, reuse, upkeep
from hoptrace.analysis.moves.ledger_rows import SUMS, known_sum, memory_rows, moved_rows
from hoptrace.analysis.moves.ledger_size import Amplification, amplification
from hoptrace.analysis.moves.movecover import blind
from hoptrace.analysis.moves.stepcover import StepCover, step_cover
from hoptrace.analysis.moves.tiering import TierPages, switched_off, tier_pages
from hoptrace.analysis.query import query
from hoptrace.analysis.term import sql_of
from hoptrace.analysis.text import counted
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps
from hoptrace.step_source import StepSource, step_source

__all__ = ["Amplification", "Ledger", "Reuse", "ledger"]

_PER = ("moves", "bytes", "transfers", "payload_hops", "control_ops", "payload_hops_assumed", "control_ops_assumed")


@dataclass(frozen=True)
class Ledger:
    """The ledger of a trace.

    Attributes:
        rows: object, src, dst, path (list of links, null if not told), mechanism, basis, and sums: moves, bytes, bytes_unknown,
            link_bytes, transfers, payload_hops, control_ops, and how many moves do not say theirs (*_unknown); for these
            payload_hops_assumed and control_ops_assumed (and assumed_payload_bytes ÷ assumed_payload_ops: the semantic density of
            those of known size). ``partly``: who tells of them did not see all of them. Sums are null where nothing is known;
            ``link_bytes`` charges every link of a path; hops and control operations are those of the access path times the
            transfers that take it.
        links: link, object, src, dst, mechanism, basis, moves, bytes, bytes_unknown, transfers (only moves with a path).
        output_tokens, requests, duration_ns: what the figures per token, request and second are divided by; null if unknown.
            All requests count, also failed and unfinished ones: they moved data too.
        amplification, reuse: see there.
        cover: how much of the servers' work the known steps are. Where it is not whole, the rows of own memory are lower bounds,
            and nothing of them is given per token but as such (:meth:`memory_at_least`).
        link_uses: utilisation of each link of the platform graph, its counters against the moves; ``elsewhere``: sentences about
            data that took another way than its moves say.
        engine_rates: hit rates that engines tell of themselves, each with its window.
        upkeep: bytes moved to keep the cache ÷ bytes that hits served.
        reusable: what one shared cache would have given, null without block hashes.
        geometry: the KV of a token on each server.
        residency: law 2, from the events of KV blocks.
        tier_pages: what the kernel moved between memory nodes by itself, beside all moves.
        tiering_off: what of that was switched off.
        unseen: what the ledger cannot show, in sentences. notes: what a reader should know of the figures.
    """

    rows: pl.DataFrame
    links: pl.DataFrame
    output_tokens: int | None
    requests: int
    duration_ns: int | None
    amplification: list[Amplification]
    reuse: Reuse
    unseen: list[str]
    cover: StepCover
    link_uses: list[LinkUse] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    engine_rates: list[EngineRate] = field(default_factory=list)
    upkeep: Upkeep | None = None
    reusable: Reusable | None = None
    geometry: list[ServerKv] = field(default_factory=list)
    residency: Residency = field(default_factory=lambda: Residency([], [], []))
    notes: list[str] = field(default_factory=list)
    tier_pages: list[TierPages] = field(default_factory=list)
    tiering_off: tuple[str, ...] = ()

    def is_bound(self, row: Mapping[str, Any]) -> bool:
        """Whether the bytes of a row of ``rows`` are a lower bound: moves that do not say theirs or were not all recorded, or
        steps that are missing."""
        return bool(row["bytes_unknown"]) or bool(row["partly"]) or self._lacks_steps(row)

    def _lacks_steps(self, row: Mapping[str, Any]) -> bool:
        inside = str(row["src"]).startswith("compute:") or str(row["dst"]).startswith("compute:")
        return inside and row["basis"] == "derived" and not self.cover.whole

    def memory_at_least(self) -> float | None:
        """Derived bytes of own memory per output token where the steps are not all known: a lower bound; null without them."""
        rows = self.totals(memory=True).filter(pl.col("basis") == "derived")
        if not rows.height or rows["bytes"].null_count() or not self.output_tokens:
            return None
        return float(int(rows["bytes"].sum()) / self.output_tokens)

    def totals(self, *, memory: bool) -> pl.DataFrame:
        """Sums by basis: with ``memory`` what compute reads and writes of its own memory, without it all other moves."""
        inside = pl.any_horizontal(
            pl.col(a).str.starts_with("memory:") & pl.col(b).str.starts_with("compute:")
            for a, b in (("src", "dst"), ("dst", "src"))
        )
        rows = self.rows.filter(inside if memory else ~inside)
        return rows.group_by("basis").agg(*(known_sum(c) for c in SUMS), pl.col("partly").any()).sort("basis")

    def per_token(self, *, memory: bool = False) -> pl.DataFrame:
        """``totals`` per output token: basis, moves, bytes, transfers, payload_hops, control_ops, and the latter two assumed
        (Float64, null if unknown: so is own memory where not all steps are known)."""
        return self._per(self.output_tokens, memory)

    def per_request(self, *, memory: bool = False) -> pl.DataFrame:
        """``totals`` per request, as :meth:`per_token`."""
        return self._per(self.requests, memory)

    def per_second(self, *, memory: bool = False) -> pl.DataFrame:
        """``totals`` per second between first arrival and last finish, as :meth:`per_token`."""
        return self._per(None if self.duration_ns is None else self.duration_ns / 1e9, memory)

    def _per(self, n: float | None, memory: bool) -> pl.DataFrame:
        by = pl.lit((n or None) if self.cover.whole or not memory else None, dtype=pl.Float64)
        return self.totals(memory=memory).select("basis", *((pl.col(c) / by).alias(c) for c in _PER))

    def density_assumed(self) -> tuple[int, int] | None:
        """(payload bytes, control operations) of the moves that know their bytes and not their operations: assumed ones, from the
        mechanism's access path; their quotient is the semantic density. Null where there are none."""
        held = self.rows.drop_nulls(["assumed_payload_bytes", "assumed_payload_ops"])
        size, ops = int(held["assumed_payload_bytes"].sum()), int(held["assumed_payload_ops"].sum())
        return (size, ops) if held.height and ops else None

    def matrix(self) -> pl.DataFrame:
        """Object × way for charts: object, way (``src → dst``), basis, bytes, bytes_per_output_token (null where it is unknown,
        or a lower bound), transfers, at_least."""
        rows = [
            {
                "object": r["object"],
                "way": f"{r['src']} → {r['dst']}",
                "basis": r["basis"],
                "bytes": r["bytes"],
                "bytes_per_output_token": self._rates(r)["bytes_per_output_token"],
                "transfers": r["transfers"],
                "at_least": self.is_bound(r),
            }
            for r in self.rows.to_dicts()
        ]
        schema = {
            "object": pl.String, "way": pl.String, "basis": pl.String, "bytes": pl.Int64, "bytes_per_output_token": pl.Float64,
            "transfers": pl.Int64, "at_least": pl.Boolean,
        }  # fmt: skip
        return pl.DataFrame(rows, schema=schema)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON.

        ``rows`` and ``links`` as the frames, rows with rates; ``per_output_token``, ``per_request``, ``per_second``: sums by
        basis, ``moved`` and ``memory`` apart; ``assumed``: access paths that stood in; ``link_use``, ``elsewhere``, ``reuse``
        with ``engine_rates`` and ``upkeep``, ``reusable``, ``geometry``, ``resident`` (law 2): see the dataclasses of those
        names.
        """
        density = self.density_assumed()
        used = sorted(set(self.rows.filter(pl.col("control_ops_assumed") > 0)["mechanism"].drop_nulls().to_list()))
        return {
            "output_tokens": self.output_tokens,
            "requests": self.requests,
            "duration_ns": self.duration_ns,
            "rows": [{**r, **self._rates(r)} for r in self.rows.to_dicts()],
            "links": self.links.to_dicts(),
            **{
                name: {"moved": self._rounded(per(memory=False)), "memory": self._rounded(per(memory=True))}
                for name, per in (
                    ("per_output_token", self.per_token), ("per_request", self.per_request), ("per_second", self.per_second),
                )
            },
            "assumed": {
                "payload_bytes": None if density is None else density[0],
                "control_ops": None if density is None else density[1],
                "bytes_per_control_op": None if density is None else round(density[0] / density[1], 3),
                "access": {m: ACCESS[m].source for m in used if m in ACCESS},
            },
            "steps": {**self.cover.as_dict(), "memory_bytes_per_output_token_at_least": self._bound()},
            "amplification": [a.as_dict() for a in self.amplification],
            "link_use": [u.as_dict() for u in self.link_uses],
            "elsewhere": self.elsewhere,
            "tier_pages": [t.as_dict() for t in self.tier_pages],
            "tiering_off": list(self.tiering_off),
            "reuse": self.reuse.as_dict(),
            "engine_rates": [r.as_dict() for r in self.engine_rates],
            "upkeep": None if self.upkeep is None else self.upkeep.as_dict(),
            "reusable": None if self.reusable is None else self.reusable.as_dict(),
            "geometry": [g.as_dict() for g in self.geometry],
            "resident": self.residency.as_dict(),
            "notes": self.notes,
            "unseen": self.unseen,
        }  # fmt: skip

    def _bound(self) -> float | None:
        least = None if self.cover.whole else self.memory_at_least()
        return None if least is None else round(least, 3)

    def _rates(self, row: Mapping[str, Any]) -> dict[str, Any]:
        b, bound = row["bytes"], self.is_bound(row)
        own = self._lacks_steps(row)  # of steps that are missing, rates would be far too low
        return {
            "lower_bound": bound and b is not None,
            "bytes_per_output_token": None if own or b is None or not self.output_tokens else round(b / self.output_tokens, 3),
            "bytes_per_request": None if own or b is None or not self.requests else round(b / self.requests, 3),
            "bytes_per_s": None if own or b is None or not self.duration_ns else round(b * 1e9 / self.duration_ns, 3),
        }

    @staticmethod
    def _rounded(frame: pl.DataFrame) -> dict[str, Any]:
        return {r.pop("basis"): {k: None if v is None else round(v, 4) for k, v in r.items()} for r in frame.to_dicts()}


def ledger(trace: Trace, *, steps: StepSource | Steps | None = None, curve: bool = True, rows_only: bool = False) -> Ledger:
    """The ledger of any trace. ``steps``: what ``step_source`` gave, if the caller has it. Without ``curve`` what could have been
    re-used is told for a cache without a limit only: the curve plays every block through five caches. ``rows_only``: the
    rows, what they are divided by and ``cover``; all else stays empty. InputError if a table is damaged."""
    found = step_source(trace) if steps is None else StepSource.of(steps) if isinstance(steps, Steps) else steps
    told = query(trace, "ledger_requests").row(0, named=True)
    missed = blind(trace, told["first_ns"], told["last_ns"])
    moved = moved_rows(trace, missed)
    memory, unseen = memory_rows(trace, found.steps)
    rows = pl.concat([moved, memory]).sort("object", "src", "dst", pl.col("path").list.join(" "), "mechanism", "basis")
    if not trace.has("moves"):
        unseen.insert(0, "No moves were recorded: what crossed the network, a proxy or a link is unknown.")
    if moved["partly"].any():
        unseen.append(
            f"Not all moves were recorded ({', '.join(f'{s}: {x:.0%} of the time' for s, x in sorted(missed.items()))}): "
            "what these sources tell is a lower bound."
        )
    tokens = _output_tokens(trace, told)
    if broken := _broken_off(trace, told):
        # Their tokens count and what they moved is not there: a quotient of the two would be of nothing.
        tokens = None
        unseen.append(
            f"The recording broke off during {counted(broken, 'request')}: what they moved was not "
            "written yet, so nothing is given per token."
        )
    elif tokens is None and told["requests"]:
        unseen.append("The number of output tokens is unknown for some requests, so nothing is given per token.")
    cover = step_cover(trace, found, tokens)
    if not cover.whole and memory.height:
        unseen.append(f"Own memory: {'; '.join(cover.missing)}. What compute read and wrote is a lower bound.")
    first, last = told["first_ns"], told["last_ns"]
    duration_ns = last - first if first is not None and last is not None and last > first else None
    if rows_only:
        none = sql_of("ledger_links")
        links = trace.sql(f"SELECT * FROM ({none}) LIMIT 0")
        nothing = reuse(trace.sql(f"SELECT * FROM ({sql_of('ledger_reuse')}) LIMIT 0"))
        return Ledger(rows, links, tokens, told["requests"], duration_ns, [], nothing, unseen, cover)
    by_server = query(trace, "ledger_reuse")
    reused = reuse(by_server)
    if n := reused.impossible:
        unseen.append(
            f"{counted(n, 'stay')} on a server: more tokens are said to come from a cache than the prompt has; "
            "left out of the reuse."
        )
    if n := reused.unsure:
        unseen.append(f"{counted(n, 'stay')} of several sequences: nobody tells their own prompts; left out of the reuse.")
    resident = residency(trace)
    kept = upkeep(trace, by_server, resident.blocks)
    uses, elsewhere = link_uses(trace)
    unseen += [*resident.unseen, *kept.unseen]
    return Ledger(
        rows=rows,
        links=query(trace, "ledger_links"),
        output_tokens=tokens,
        requests=told["requests"],
        duration_ns=duration_ns,
        amplification=amplification(trace, rows, found.steps, tokens, cover),
        reuse=reused,
        unseen=unseen,
        cover=cover,
        link_uses=uses,
        elsewhere=elsewhere,
        engine_rates=engine_rates(trace),
        upkeep=kept,
        reusable=reusable(trace) if curve else reusable(trace, ()),
        geometry=server_kv(trace.manifest),
        residency=resident,
        notes=[c.says for c in resident.checks if not c.holds] + elsewhere,
        tier_pages=tier_pages(trace),
        tiering_off=switched_off(trace),
    )


def _output_tokens(trace: Trace, told: Mapping[str, Any]) -> int | None:
    """Over all requests: what the request says, else the tokens seen; null if one request has neither."""
    if not told["requests"]:
        return None
    total = told["output_tokens"] or 0
    if not told["output_unknown"]:
        return int(total)
    missing = trace.table("requests").filter(pl.col("output_tokens").is_null()).select("request")
    seen = trace.table("tokens").join(missing, on="request", how="semi").group_by("request").agg(
        pl.when(pl.col("count").is_not_null().all()).then(pl.col("count").sum()).alias("n")
    )  # fmt: skip
    sums = missing.join(seen.with_columns(pl.lit(True).alias("any")), on="request", how="left").select(
        pl.col("n").sum(),
        pl.col("n").null_count().alias("unknown"),
        (pl.col("any") & pl.col("n").is_null()).sum().alias("unsized"),
    )
    n, unknown, unsized = sums.collect(engine="streaming").row(0)
    # A request without a row in a recorded table of tokens emitted none.
    if unknown and (unsized or not trace.has("tokens")):
        return None
    return int(total + n)


def _broken_off(trace: Trace, told: Mapping[str, Any]) -> int:
    """Unfinished requests that emitted tokens and of which no move of tokens was written, in a trace that has such moves. (A
    recorder writes one when a request ends; after a kill it has not.)"""
    if not told["unfinished"]:
        return 0
    moves = trace.table("moves").filter((pl.col("object") == "tokens") & pl.col("request").is_not_null()).select("request")
    open_ = trace.table("requests").filter(pl.col("finish_ns").is_null()).select("request")
    emitted = trace.table("tokens").select("request")
    lost = open_.join(emitted, on="request", how="semi").join(moves, on="request", how="anti").select(pl.len())
    n = int(lost.collect(engine="streaming").item())
    return n if n and moves.head(1).collect().height else 0
