"""What the two sides' servers, replays and measurements were set to, and where they differ.

Some settings change the *work* (another model, weights of another precision): then figures do not compare. All others are what a
comparison is about: slots, batch, caches, KV precision, placement, engine and version. They are listed, never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hoptrace.manifest import Manifest, Server

__all__ = ["Setting", "other_model", "settings"]

# Where a server runs and under what name is no setting.
_PLACE = {"name", "url", "host", "pid", "model_path", "config"}
# Of `config`: what names processes, ports, files, or hoptrace's own ways of reading.
_INCIDENTAL = {
    "processes", "otlp_traces_endpoint", "kv_events_endpoint", "kv_event_sources", "kv_events_config", "step_source",
    "endpoint_slots", "endpoint_metrics", "enable_logging_iteration_details", "enable_prompt_tokens_details", "scheduler_cls",
    "modalities",
}  # fmt: skip
# The model is these; a name alone may be an alias.
_GEOMETRY = ("parameters", "layers", "hidden_size", "heads", "kv_heads", "head_size")
# Precision of the weights, as engines call it.
_PRECISION = ("model_ftype", "quantization", "dtype")
_CLOSE = 0.001


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that is known on both sides and differs."""

    name: str
    a: str
    b: str

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "a": self.a, "b": self.b}


def settings(a: Manifest, b: Manifest) -> list[Setting]:
    """All settings that are known on both sides and differ, of servers of one name (or of the only ones), and of replays."""
    out = []
    if len(a.servers) != len(b.servers) and a.servers and b.servers:
        out.append(Setting("servers", *(", ".join(s.name for s in m.servers) for m in (a, b))))
    for x, y in _partners(a, b):
        label = "" if len(a.servers) == len(b.servers) == 1 else f"{x.name}: "
        left, right = _of_server(x), _of_server(y)
        out += [
            Setting(label + k, _text(left[k]), _text(right[k])) for k in sorted(left.keys() & right.keys()) if left[k] != right[k]
        ]
    if a.replay is not None and b.replay is not None:
        left = {**_flat(a.replay.policy, ""), **_flat(a.replay.cost_model, "cost "), "arrivals": a.replay.arrivals}
        right = {**_flat(b.replay.policy, ""), **_flat(b.replay.cost_model, "cost "), "arrivals": b.replay.arrivals}
        named = {s.name for s in out}
        out += [
            Setting(f"replay: {k}", _text(left[k]), _text(right[k]))
            for k in sorted(left.keys() & right.keys())
            if left[k] != right[k] and k not in ("name", "description") and k.rpartition(".")[2] not in named
        ]
    return out


def other_model(a: Manifest, b: Manifest) -> list[str]:
    """Why the two sides did not run the same model with the same precision of weights, in words; empty if they did, or if one of
    them does not say."""
    out: list[str] = []
    for x, y in _partners(a, b):
        geometry = [(f, getattr(x, f), getattr(y, f)) for f in _GEOMETRY]
        known = [(f, u, v) for f, u, v in geometry if u is not None and v is not None]
        differ = [f"{f.replace('_', ' ')} {u:,} against {v:,}" for f, u, v in known if u != v]
        named = x.model is not None and y.model is not None and _base(x.model) != _base(y.model)
        if differ:
            out.append(f"another model: {', '.join(differ)}")
        elif named and len(known) != len(_GEOMETRY):
            # Where the whole geometry is known and equal, two names are two names for one.
            out.append(f"another model: {x.model} against {y.model}")
        if precision := _precision(x, y):
            out.append(precision)
    return list(dict.fromkeys(out))


def _precision(x: Server, y: Server) -> str | None:
    told = [(k, u, v) for k in _PRECISION if (u := x.config.get(k)) is not None and (v := y.config.get(k)) is not None]
    for key, u, v in told:
        if u != v:
            return f"weights of another precision: {key} {u} against {v}"
    if told:
        return None  # the engines' own words go before a size that was derived from something else
    size_x, size_y = x.weight_bytes, y.weight_bytes
    if size_x and size_y and x.parameters == y.parameters and abs(size_x - size_y) > _CLOSE * max(size_x, size_y):
        return f"weights of another precision: {size_x:,} against {size_y:,} bytes"
    return None


def _partners(a: Manifest, b: Manifest) -> list[tuple[Server, Server]]:
    """Servers to compare: those of one name; else, each of the smaller side with the first of the other (one model, split)."""
    named = [(x, y) for x in a.servers if (y := next((s for s in b.servers if s.name == x.name), None)) is not None]
    if named or not a.servers or not b.servers:
        return named
    n = max(len(a.servers), len(b.servers))
    return [(a.servers[min(i, len(a.servers) - 1)], b.servers[min(i, len(b.servers) - 1)]) for i in range(n)]


def _of_server(s: Server) -> dict[str, Any]:
    own = {k: v for k, v in s.model_dump(exclude_none=True).items() if k not in _PLACE}
    return {**own, **_flat({k: v for k, v in s.config.items() if k not in _INCIDENTAL}, "")}


def _flat(found: Mapping[str, Any], before: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for k, v in found.items():
        if isinstance(v, Mapping):
            out |= _flat(v, f"{before}{k}.")
        elif v is not None:
            out[before + k] = v
    return out


def _base(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()


def _text(v: Any) -> str:
    text = f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else str(v)
    return text if len(text) <= 60 else text[:57] + "…"
