"""What moved, how often and how far: the ledger of moves, with the memory traffic of the steps beside it.

Counted, derived and assumed figures are kept apart (``basis``): they are never added up in one number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from hoptrace.analysis.query import query
from hoptrace.analysis.stepcover import StepCover, step_cover
from hoptrace.kv import step_bytes
from hoptrace.reader import Trace
from hoptrace.reconstruct import Steps, steps_of

__all__ = ["Amplification", "Ledger", "Reuse", "ledger"]

_SUMS = ("moves", "bytes", "bytes_unknown", "link_bytes", "transfers", "payload_hops", "control_ops", "control_ops_unknown")
_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    **dict.fromkeys(("object", "src", "dst", "mechanism", "basis"), pl.String),
    **dict.fromkeys(_SUMS, pl.Int64),
}  # fmt: skip
_TOKEN_ID_BYTES = 4  # a token id is an int32 in every engine's batch


@dataclass(frozen=True, slots=True)
class Amplification:
    """``moved_bytes`` for an object (links, own memory) ÷ ``size_bytes``, its size counted once, known as ``size_is`` says.
    ``at_least``: not all that moved is known."""

    object: str
    moved_bytes: int
    size_bytes: int
    size_is: str
    at_least: bool = False

    @property
    def factor(self) -> float:
        return self.moved_bytes / self.size_bytes

    def as_dict(self) -> dict[str, Any]:
        return {
            "object": self.object,
            "moved_bytes": self.moved_bytes,
            "size_bytes": self.size_bytes,
            "size_is": self.size_is,
            "factor": round(self.factor, 4),
            "at_least": self.at_least,
        }


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens by where they came from, over stays that say so; null is unknown. ``cached`` counts every tier.
    ``impossible`` stays say that more came from caches than their prompt has: they are left out."""

    prompt_tokens: int | None
    cached_tokens: int | None
    by_tier: dict[str, int | None]
    resumed_tokens: int | None
    recomputed_tokens: int | None
    impossible: int = 0

    @property
    def share(self) -> float | None:
        """Cached ÷ prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    def as_dict(self) -> dict[str, Any]:
        share = self.share
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "share": None if share is None else round(share, 6),
            "by_tier": self.by_tier,
            "resumed_tokens": self.resumed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "impossible_stays": self.impossible,
        }


@dataclass(frozen=True)
class Ledger:
    """The ledger of a trace.

    Attributes:
        rows: object, src, dst, mechanism, basis, moves, bytes, bytes_unknown, link_bytes, transfers, payload_hops, control_ops,
            control_ops_unknown. Sums are null where nothing is known; ``link_bytes`` charges every link of a path; hops and
            control operations are those of the access path times the transfers that take it.
        links: link, object, moves, bytes (only moves with a path).
        output_tokens, requests, duration_ns: what the figures per token, request and second are divided by; null if unknown.
            All requests count, also failed and unfinished ones: they moved data too.
        amplification, reuse: see there.
        cover: how much of the servers' work the known steps are. Where it is not whole, the rows of own memory are lower bounds,
            and nothing of them is given per token but as such (:meth:`memory_at_least`).
        unseen: what the ledger cannot show, in sentences.
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

    def is_bound(self, row: Mapping[str, Any]) -> bool:
        """Whether the bytes of a row of ``rows`` are a lower bound: moves that do not say theirs, or steps that are missing."""
        inside = str(row["src"]).startswith("compute:") or str(row["dst"]).startswith("compute:")
        return bool(row["bytes_unknown"]) or (inside and row["basis"] == "derived" and not self.cover.whole)

    def memory_at_least(self) -> float | None:
        """Derived bytes of own memory per output token where the steps are not all known: a lower bound; null without them."""
        rows = self.totals(memory=True).filter(pl.col("basis") == "derived")
        if not rows.height or rows["bytes"].null_count() or not self.output_tokens:
            return None
        return float(int(rows["bytes"].sum()) / self.output_tokens)

    def totals(self, *, memory: bool) -> pl.DataFrame:
        """Sums by basis: with ``memory`` what compute reads and writes of its own memory, without it all other moves."""
        inside = pl.col("src").str.starts_with("memory:") | pl.col("dst").str.starts_with("memory:")
        rows = self.rows.filter(inside if memory else ~inside)
        return rows.group_by("basis").agg(_known_sum(c) for c in _SUMS).sort("basis")

    def per_token(self, *, memory: bool = False) -> pl.DataFrame:
        """``totals`` per output token: basis, moves, bytes, transfers, payload_hops, control_ops (Float64, null if unknown: so is
        own memory where not all steps are known)."""
        n = pl.lit((self.output_tokens or None) if self.cover.whole or not memory else None, dtype=pl.Int64)
        figures = ("moves", "bytes", "transfers", "payload_hops", "control_ops")
        return self.totals(memory=memory).select("basis", *((pl.col(c) / n).alias(c) for c in figures))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "output_tokens": self.output_tokens,
            "requests": self.requests,
            "duration_ns": self.duration_ns,
            "rows": [{**r, **self._rates(r)} for r in self.rows.to_dicts()],
            "links": self.links.to_dicts(),
            "per_output_token": {
                "moved": self._rounded(self.per_token(memory=False)),
                "memory": self._rounded(self.per_token(memory=True)),
            },
            "steps": {**self.cover.as_dict(), "memory_bytes_per_output_token_at_least": self._bound()},
            "amplification": [a.as_dict() for a in self.amplification],
            "reuse": self.reuse.as_dict(),
            "unseen": self.unseen,
        }

    def _bound(self) -> float | None:
        least = None if self.cover.whole else self.memory_at_least()
        return None if least is None else round(least, 3)

    def _rates(self, row: dict[str, Any]) -> dict[str, Any]:
        b, bound = row["bytes"], self.is_bound(row)
        own = bound and not row["bytes_unknown"]  # of steps that are missing, rates would be far too low
        return {
            "lower_bound": bound and b is not None,
            "bytes_per_output_token": None if own or b is None or not self.output_tokens else round(b / self.output_tokens, 3),
            "bytes_per_request": None if own or b is None or not self.requests else round(b / self.requests, 3),
            "bytes_per_s": None if own or b is None or not self.duration_ns else round(b * 1e9 / self.duration_ns, 3),
        }

    @staticmethod
    def _rounded(frame: pl.DataFrame) -> dict[str, Any]:
        return {r.pop("basis"): {k: None if v is None else round(v, 4) for k, v in r.items()} for r in frame.to_dicts()}


def ledger(trace: Trace, *, steps: Steps | None = None) -> Ledger:
    """The ledger of any trace. ``steps``: what ``steps_of`` gave, if the caller has it. InputError if a table is damaged."""
    moved = query(trace, "ledger_moves").cast(dict(_SCHEMA))  # type: ignore[arg-type]
    found = steps if steps is not None else steps_of(trace)
    memory, unseen = _memory(trace, found.steps)
    rows = pl.concat([moved, memory]).sort("object", "src", "dst", "mechanism", "basis")
    requests = trace.table("requests").select("request", "arrival_ns", "finish_ns", "output_tokens", "prompt_tokens").collect()
    if not trace.has("moves"):
        unseen.insert(0, "No moves were recorded: what crossed the network, a proxy or a link is unknown.")
    tokens = _output_tokens(trace, requests)
    if broken := _broken_off(trace, requests):
        # Their tokens count and what they moved is not there: a quotient of the two would be of nothing.
        tokens = None
        unseen.append(
            f"The recording broke off during {broken:,} {'request' if broken == 1 else 'requests'}: what they moved was not "
            "written yet, so nothing is given per token."
        )
    elif tokens is None and requests.height:
        unseen.append("The number of output tokens is unknown for some requests, so nothing is given per token.")
    cover = step_cover(trace, found, tokens)
    if not cover.whole and memory.height:
        unseen.append(f"Own memory: {'; '.join(cover.missing)}. What compute read and wrote is a lower bound.")
    reuse = _reuse(trace, requests)
    if n := reuse.impossible:
        unseen.append(
            f"{n:,} {'stay' if n == 1 else 'stays'} on a server: more tokens are said to come from a cache than the prompt has; "
            "left out of the reuse."
        )
    first, last = requests["arrival_ns"].min(), requests["finish_ns"].max()
    duration = last - first if isinstance(first, int) and isinstance(last, int) and last > first else None
    return Ledger(
        rows=rows,
        links=query(trace, "ledger_links"),
        output_tokens=tokens,
        requests=requests.height,
        duration_ns=duration,
        amplification=_amplification(trace, rows, tokens, cover),
        reuse=reuse,
        unseen=unseen,
        cover=cover,
    )


def _known_sum(column: str) -> pl.Expr:
    return pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(column)


def _output_tokens(trace: Trace, requests: pl.DataFrame) -> int | None:
    """Over all requests: what the request says, else the tokens seen; null if one request has neither."""
    if not requests.height:
        return None
    missing = requests.filter(pl.col("output_tokens").is_null())
    total = int(requests["output_tokens"].sum())
    if not missing.height:
        return total
    seen = (
        trace.table("tokens")
        .group_by("request")
        .agg(pl.when(pl.col("count").is_not_null().all()).then(pl.col("count").sum()).alias("n"))
        .collect()
    )
    found = missing.join(seen, on="request", how="left")["n"]
    # A request without a row in a recorded table of tokens emitted none.
    if trace.has("tokens"):
        found = found.fill_null(0) if not seen["n"].null_count() else found
    return None if found.null_count() else total + int(found.sum())


def _broken_off(trace: Trace, requests: pl.DataFrame) -> int:
    """Unfinished requests that emitted tokens and of which no move of tokens was written, in a trace that has such moves. (A
    recorder writes one when a request ends; after a kill it has not.)"""
    told = trace.table("moves").filter((pl.col("object") == "tokens") & pl.col("request").is_not_null()).select("request")
    open_ = requests.filter(pl.col("finish_ns").is_null()).lazy().select("request")
    emitted = trace.table("tokens").select("request")
    lost = open_.join(emitted, on="request", how="semi").join(told, on="request", how="anti").collect().height
    return lost if lost and told.head(1).collect().height else 0


def _memory(trace: Trace, steps: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Memory → compute from the steps: weights and KV read, KV written (derived from the composition of the steps)."""
    empty = pl.DataFrame(schema=_SCHEMA)
    if not steps.height:
        return empty, ["No steps are known: what compute read and wrote of its own memory is unknown."]
    frames = [empty]
    unseen: list[str] = []
    for (name,), group in steps.group_by(["server"], maintain_order=True):
        server = trace.manifest.server(str(name))
        filled = step_bytes(group, server) if server is not None else group
        ways = (("weights", "weight_bytes", True), ("kv", "kv_read_bytes", True), ("kv", "kv_write_bytes", False))
        for what, column, read in ways:
            known = filled[column].drop_nulls()
            if not known.len():
                unseen.append(f"{name}: {column} is unknown (the manifest lacks the model's geometry).")
                continue
            frames.append(
                pl.DataFrame(
                    [{
                        "object": what,
                        "src": f"memory:{name}" if read else f"compute:{name}",
                        "dst": f"compute:{name}" if read else f"memory:{name}",
                        "mechanism": "load_store",
                        "basis": "derived",
                        "moves": known.len(),
                        "bytes": int(known.sum()),
                        "bytes_unknown": filled.height - known.len(),
                        "link_bytes": int(known.sum()),
                    }],
                    schema=_SCHEMA,
                )
            )  # fmt: skip
    return pl.concat(frames), unseen


def _amplification(trace: Trace, rows: pl.DataFrame, output_tokens: int | None, cover: StepCover) -> list[Amplification]:
    moved = dict(rows.group_by("object").agg(_known_sum("link_bytes")).rows())
    out: list[Amplification] = []
    weights = [s.weight_bytes for s in trace.manifest.servers]
    if moved.get("weights") and weights and all(weights):
        size = sum(w for w in weights if w)
        out.append(Amplification("weights", moved["weights"], size, "the manifest's weight_bytes", not cover.whole))
    written = rows.filter((pl.col("object") == "kv") & pl.col("dst").str.starts_with("memory:"))["bytes"].sum()
    if moved.get("kv") and written:
        known = "" if cover.whole else " in the known steps"
        out.append(Amplification("kv", moved["kv"], int(written), f"each token's KV once, as written{known}"))
    if moved.get("tokens") and output_tokens:
        out.append(Amplification("tokens", moved["tokens"], output_tokens * _TOKEN_ID_BYTES, "4 bytes a token id (assumed)"))
    chars = trace.table("requests").select("prompt_chars").collect()["prompt_chars"]
    if moved.get("prompt") and chars.len() and not chars.null_count() and chars.sum():
        out.append(Amplification("prompt", moved["prompt"], int(chars.sum()), "1 byte a character of the prompt (assumed)"))
    return out


def _reuse(trace: Trace, requests: pl.DataFrame) -> Reuse:
    tiers = ("device", "host", "peer", "pool", "disk")
    whole = requests.lazy().select("request", pl.col("prompt_tokens").alias("all_prompt_tokens"))
    stays = trace.table("stages").join(whole, on="request", how="left").collect()
    over = (pl.col("cached_tokens") > pl.coalesce("prompt_tokens", "all_prompt_tokens")).fill_null(False)
    impossible = stays.filter(over).height
    stays = stays.filter(~over)
    knows = stays.filter(pl.col("cached_tokens").is_not_null())
    # A prompt is looked up once per stay: the denominator is counted as often as the numerator.
    # Of several prompts in one request each sequence has its own.
    prompt = knows.select(pl.coalesce("prompt_tokens", "all_prompt_tokens")).to_series()

    def total(column: str) -> int | None:
        values = stays[column].drop_nulls()
        return int(values.sum()) if values.len() else None

    return Reuse(
        prompt_tokens=int(prompt.sum()) if prompt.len() and not prompt.null_count() else None,
        cached_tokens=total("cached_tokens"),
        by_tier={t: total(f"cached_{t}_tokens") for t in tiers},
        resumed_tokens=total("resumed_tokens"),
        recomputed_tokens=total("recomputed_tokens"),
        impossible=impossible,
    )
