"""Which counters become tracks of a timeline, in which groups and order: a machine has thousands of them."""

from __future__ import annotations

import re

import polars as pl

__all__ = ["MANY", "grouped", "kept"]

MANY = 8
"""Entities of a kind from which they lie in one group, and those of their counters that never change are left out."""

_ORDER = ("server", "process", "thread", "cpu", "pressure", "gpu", "nvlink", "c2c", "xgmi", "pcie", "rdma", "net", "block", "cxl",
          "node")  # fmt: skip
_OWN = re.compile(r"^collector:|^hoptrace:")


def kept(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Samples of the counters that are worth a track, and how many counters are left out: where there are many entities of a
    kind, those that never change. A link at rest or a vector that never fires would bury the others."""
    key = ["host", "entity", "name", "direction", "source"]
    value = pl.coalesce(pl.col("value_int").cast(pl.Float64), pl.col("value_float"))
    kind = pl.col("entity").str.split(":").list.first()
    series = frame.group_by(key).agg((value.min() == value.max()).alias("still")).with_columns(kind.alias("kind"))
    many = series.with_columns((pl.col("entity").n_unique().over("host", "kind") > MANY).alias("many"))
    out = many.filter(pl.col("still") & pl.col("many"))
    return frame.join(out, on=key, how="anti", nulls_equal=True), out.height


def grouped(entities: list[tuple[str | None, str]]) -> dict[tuple[str | None, str], tuple[str, str]]:
    """By (host, entity): the title of its group, and what precedes its counters' names in it. Where a kind has many entities they
    share a group; threads lie with their process's threads."""
    kinds: dict[tuple[str | None, str], int] = {}
    for host, entity in entities:
        kinds[host, _kind(entity)] = kinds.get((host, _kind(entity)), 0) + 1
    out = {}
    for host, entity in sorted(entities, key=lambda e: (_rank(e[1]), e[0] or "", _natural(e[1]))):
        at = f" on {host}" if host else ""
        kind = _kind(entity)
        if kind.startswith("thread:") or kinds[host, kind] > MANY:
            rest = entity.partition(":")[2] or entity
            threads = kind.startswith("thread:")
            title = f"threads of process {kind.partition(':')[2]}" if threads else f"{kind}, all"
            out[host, entity] = (f"{title}{at}", f"{rest.split('/')[-1] if threads else rest} ")
        else:
            out[host, entity] = (f"{entity}{at}", "")
    return out


def _kind(entity: str) -> str:
    kind, _, rest = entity.partition(":")
    return f"thread:{rest.split('/')[0]}" if kind == "thread" and "/" in rest else kind


def _rank(entity: str) -> tuple[int, int]:
    kind = entity.partition(":")[0]
    return (1 if _OWN.match(entity) else 0, _ORDER.index(kind) if kind in _ORDER else len(_ORDER))


def _natural(text: str) -> list[tuple[int, str]]:
    """So that link 10 comes behind link 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]
