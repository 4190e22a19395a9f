"""(e) Local work made remote: what crosses devices, servers and pipeline stages, its bytes, and the time that a local run would
not have had."""

from __future__ import annotations

import polars as pl

from hoptrace.analysis.arranging.hidden_view import Figure, Seen, View, sentence
from hoptrace.analysis.arranging.operations import summed
from hoptrace.analysis.query import query
from hoptrace.analysis.text import bytes_text, count_text, duration_text, percent
from hoptrace.platform import Graph, graph_of

__all__ = ["crossing", "remote"]

_TITLE = "local work made remote"
_SERVERS = ("other server", "other host")


def remote(seen: Seen) -> View:
    """Moves of state by what they cross, collectives, pipeline ranks and hand-overs. ``rows``: one per way and mechanism, with
    ``crosses`` and ``bytes_per_s`` (of one such move while it lasts), which tells the wire that was really taken."""
    graph = graph_of(seen.manifest)
    rows = query(seen.trace, "hidden_remote")
    crossed = [crossing(r["src"], r["dst"], r["mechanism"], graph) for r in rows.to_dicts()]
    timed = pl.when((pl.col("move_ns") > 0) & (pl.col("bytes_unknown") == 0) & (pl.col("unended") == 0)).then("move_ns")
    rows = rows.with_columns(
        pl.Series("crosses", crossed, dtype=pl.String), (pl.col("bytes").cast(pl.Float64) * 1e9 / timed).alias("bytes_per_s")
    )
    figures = [*_moves(seen, rows), *_collectives(seen), *_pipeline(seen)]
    transfer = seen.sum_ns("transfer")
    figures.append(
        Figure(
            "transfer_ns",
            "time in which requests waited for such data, outside steps",
            transfer,
            "ns",
            "derived",
            "part transfer of the finished requests",
            why="would need waits of kind transfer, or moves of KV",
        )
    )
    unseen = []
    if not rows.height:
        unseen.append("No move of KV, weights or activations was recorded: what crosses devices or servers is unknown.")
    odd = rows.filter(pl.col("crosses") == "unknown")
    if odd.height:
        unseen.append(f"Whether {_ways(odd)} stay on one device is unknown: the platform graph does not name the places.")
    if seen.steps and seen.step_sum("collective_ns_known") in (None, 0):
        unseen.append(
            "The steps do not say their collectives (collective_ns, collective_bytes): tensor parallelism's share is unknown."
        )
    return View(
        "remote",
        _TITLE,
        figures,
        _sentence({f.name: f for f in figures}, seen),
        rows,
        transfer,
        "derived",
        "part transfer of the finished requests" if transfer is not None else "",
        seen.share_of(transfer),
        unseen,
    )


def crossing(src: str, dst: str, mechanism: str | None, graph: Graph) -> str:
    """What a move crosses: `other host`, `other server`, `other device` (of one server), `own memory`, or `unknown`.

    By host and server of the two nodes where the platform graph names them, else by their names: ``server:X`` and what lies under
    it (``server:X/offload``) are X's, ``remote`` is somewhere else."""
    if mechanism == "collective":
        return "other device"
    a, b = _place(src, graph), _place(dst, graph)
    if a[0] is not None and b[0] is not None and a[0] != b[0]:
        return "other host"
    if "remote" in (src, dst):
        return "other server"
    if a[1] is not None and b[1] is not None:
        if a[1] != b[1]:
            return "other server"
        inside = {src.split(":", 1)[0], dst.split(":", 1)[0]} == {"memory", "compute"}
        return "own memory" if src == dst or inside else "other device"
    if a[0] is not None and b[0] is not None and src != dst and src in graph.nodes and dst in graph.nodes:
        return "other device"
    return "own memory" if src == dst else "unknown"


def _place(name: str, graph: Graph) -> tuple[str | None, str | None]:
    """Host and server of a node."""
    node = graph.nodes.get(name)
    server = node.server if node is not None else None
    kind, _, rest = name.partition(":")
    if server is None and rest and kind in ("server", "memory", "compute"):
        server = rest.split("/", 1)[0]
    return (node.host if node is not None else None), server


def _ways(rows: pl.DataFrame) -> str:
    ways = rows.select("src", "dst").unique(maintain_order=True).head(3)
    return "moves " + ", ".join(f"{a} → {b}" for a, b in ways.rows())


def _moves(seen: Seen, rows: pl.DataFrame) -> list[Figure]:
    stays = query(seen.trace, "coordination_stays")
    out = [
        Figure(
            "handovers",
            "requests' stays handed over to another server",
            int(stays["handed_over"].sum()) if stays.height else None,
            "stays",
            "counted",
            "stages.end_reason",
            why="would need `stages`",
        )
    ]
    for name, crosses, words in (
        ("server", _SERVERS, "between servers or hosts"),
        ("device", ("other device",), "between devices of one server"),
    ):
        mine = rows.filter(pl.col("crosses").is_in(crosses))
        told = mine.filter(pl.col("bytes").is_not_null())
        # Of several bases the one with most bytes: they are never added up.
        sums = [
            (v[0], str(k[0]), v[1], v[2])
            for k, v in summed(told, ("basis",), ("bytes", "bytes_unknown", "move_ns"))
            if v[0] is not None
        ]
        size, basis, unknown, time = max(sums, key=lambda x: (x[0], x[1])) if sums else (None, None, None, None)
        least = bool(unknown) or mine.height > told.height or len(sums) > 1
        why = None if size is not None else "would need moves with bytes between places that the manifest names"
        each = seen.per_token(size)
        source = "moves.bytes by src and dst"
        out += [
            Figure(f"{name}_bytes", f"bytes of state moved {words}", size, "bytes", basis, source, least, why),
            Figure(
                f"{name}_bytes_per_token",
                "of them per output token",
                each,
                "bytes/token",
                basis,
                source,
                least,
                why or (None if each is not None else "would need the number of output tokens"),
            ),
            Figure(
                f"{name}_move_ns",
                "time of those moves, overlapping ones each",
                time,
                "ns",
                basis,
                "moves.start_ns, end_ns",
                why=why,
            ),
        ]
    return out


def _collectives(seen: Seen) -> list[Figure]:
    t = seen.totals.filter(pl.col("collective_ns_known") > 0)
    time = round(float(t["collective_ns"].sum())) if t.height else None
    # Of the steps' own time, over servers that tell.
    share = (
        time / float(t["step_ns"].sum()) if time is not None and t["step_ns"].drop_nulls().len() and t["step_ns"].sum() else None
    )
    sent = seen.step_sum("collective_bytes")
    size = None if sent is None else round(sent)
    basis, why = seen.steps_basis, "would need steps.collective_ns"
    partial = seen.step_sum("collective_ns_known") != seen.steps
    each = seen.per_token(size)
    no_bytes = "would need steps.collective_bytes"
    return [
        Figure("collective_ns", "time of steps in collectives", time, "ns", basis, "steps.collective_ns", partial, why),
        Figure(
            "collective_share",
            "share of the steps' time",
            share,
            "share",
            basis,
            "steps.collective_ns, start_ns, end_ns",
            why=why,
        ),
        Figure(
            "collective_bytes",
            "bytes sent in collectives",
            size,
            "bytes",
            basis,
            "steps.collective_bytes",
            seen.step_sum("collective_bytes_known") != seen.steps and size is not None,
            None if size is not None else no_bytes,
        ),
        Figure(
            "collective_bytes_per_token",
            "of them per output token",
            each,
            "bytes/token",
            basis,
            "steps.collective_bytes",
            why=no_bytes if size is None else "would need the number of output tokens",
        ),
    ]


def _pipeline(seen: Seen) -> list[Figure]:
    most = seen.totals["pp_ranks"].max()
    n = int(most) if isinstance(most, int) else None
    return [
        Figure(
            "pipeline_ranks",
            "pipeline stages that each token passes",
            n,
            "stages",
            seen.steps_basis,
            "steps.pp_rank",
            why="would need `steps`",
        )
    ]


def _sentence(f: dict[str, Figure], seen: Seen) -> str:
    said = []
    for name, words in (("server", "between servers"), ("device", "between devices of a server")):
        if (size := f[f"{name}_bytes"].value) is not None:
            each = f[f"{name}_bytes_per_token"].value
            per = "" if each is None else f" ({bytes_text(float(each))} per output token)"
            how = " (assumed)" if f[f"{name}_bytes"].basis == "assumed" else ""
            least = "at least " if f[f"{name}_bytes"].at_least else ""
            said.append(f"{least}{bytes_text(size)} of state went {words}{per}{how}")
    if (time := f["transfer_ns"].value) and (share := seen.share_of(int(time))) is not None:
        said.append(f"requests waited {duration_text(float(time))} for it ({percent(share)} of latency)")
    if (share := f["collective_share"].value) is not None:
        said.append(f"collectives take {percent(float(share))} of the steps' time")
    if (n := f["pipeline_ranks"].value) is not None and n > 1:
        said.append(f"each token passes {count_text(n)} pipeline stages")
    if not said and f["handovers"].value == 0 and f["pipeline_ranks"].value == 1:
        return "No hand-over, one pipeline stage, and no move of state between places was recorded."
    return sentence(said, "Not known: no move of state, no collective and no pipeline rank was recorded.")
