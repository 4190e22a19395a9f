"""What `hoptrace explain` says of the layers."""

from __future__ import annotations

from hoptrace.analysis.latency.parts import part
from hoptrace.analysis.layers.layer_of import IN_STEPS, LAYER_OF_PART, LAYERS
from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]


def _parts_of(layer: str) -> str:
    return ", ".join(part(p).label for p, (where, _) in LAYER_OF_PART.items() if where == layer)


_OF_STEPS = {
    "compute": "Σ over its steps of min(arithmetic time, length), where arithmetic time ≥ memory time",
    "state": "Σ over its steps of min(memory time, length), where memory time is the larger",
    "scheduling": "Σ over its steps of min(length − roofline, host + collective time)",
    "unexplained": "Σ over its steps of what is left",
    "undivided": "Σ over its steps of length − host time, where the roofline is unknown or contradicted",
}


def _formula(layer: str) -> str:
    found = [f for f in (_OF_STEPS.get(layer), _parts_of(layer)) if f]
    return " + ".join(found) + ", ÷ e2e"


TERMS = (
    *(
        Term(
            f"layer_{layer}",
            "layers",
            f"layer: {layer}",
            "share of e2e",
            _formula(layer),
            doc + (" Of a step, a request has the share that its steps have." if layer in _OF_STEPS else ""),
        )
        for layer, doc in LAYERS.items()
    ),
    Term(
        "roofline",
        "layers",
        "roofline of a step",
        "ns",
        "max((2 × parameters × tokens + 4 × layers × heads × head size × pairs) ÷ FLOP/s, (weights + KV read) ÷ bytes/s)",
        "The least time that the platform's arithmetic and memory allow. Rates are those of one device × tensor-parallel ranks; "
        "parameters without the table of embeddings where the vocabulary is known; every drafted token is a token; weights once "
        "a pass (n_ubatch). At most this much of a step is compute or state. Steps that are faster contradict it: they are not "
        "divided, and a warning says so.",
    ),
    Term(
        "times_roofline",
        "layers",
        "times the roofline",
        "×",
        "Σ length of steps ÷ Σ their roofline",
        "How far from the bound the steps run, over those whose roofline is known and holds. What recorded host and collective "
        "time does not explain of it is slow kernels, or not recorded.",
    ),
    Term(
        "host_share",
        "layers",
        "host's share of steps",
        "share of step time",
        "Σ (length − device_ns, else schedule_ns + launch_ns + update_ns; + collective_ns) ÷ Σ length",
        "How much of each step the device waits for the host, or is in collectives, as far as steps record it. Steps that record "
        "nothing count in the length, so it is a lower bound.",
        sql_of("layers_host"),
    ),
    Term(
        "device_share",
        "layers",
        "device at work",
        "share of time",
        "Σ device_ns ÷ Σ (length + time since the step before while decoders waited)",
        "How much of the time the device worked while there was work, over the steps that record it.",
    ),
)

assert not {p for p, (layer, _) in LAYER_OF_PART.items() if layer not in LAYERS and layer != IN_STEPS}
