"""Which bottleneck layer each part of a request's time belongs to, and why: one table for report, `explain` and app."""

from __future__ import annotations

from hoptrace.analysis.latency.parts import PARTS

__all__ = ["IN_STEPS", "LAYERS", "LAYER_OF_PART", "layer_of"]

LAYERS: dict[str, str] = {
    "compute": "Arithmetic: in each step at most its roofline time, where arithmetic is the larger side.",
    "state": "Weights and KV: in each step at most its roofline time, where memory is the larger side; outside steps carrying "
    "state, computing lost state again, and waiting for KV space.",
    "scheduling": "What waits though the resource exists: host and collective time of steps, time between steps, queues.",
    "unexplained": "Nothing recorded says what it was: of steps, what is neither roofline nor recorded host or collective time.",
    "undivided": "In steps whose roofline is not known: compute, state or more scheduling, nothing tells which.",
    "outside": "Client and network: outside the serving system.",
}

IN_STEPS = "steps"
"""The parts of this layer lie in steps, whose own split tells the layer."""

# part -> (layer, why)
LAYER_OF_PART: dict[str, tuple[str, str]] = {
    "client": ("outside", "The load generator's own lateness; no server can mend it."),
    "network_in": ("outside", "The way to the server; none of its layers works or waits."),
    "proxy": ("scheduling", "The serving system's own front: routing and handing over, while the engine could have begun."),
    "handover": ("scheduling", "Arranging who goes on; the transfer itself is state."),
    "queue_room": ("scheduling", "A place was free all the while."),
    "queue_slots": (
        "scheduling",
        "Places (slots) are a setting, not a device's limit. Whether the device could have served more at once, the ceiling "
        "`unlimited` asks.",
    ),
    "queue_kv": ("state", "It waits for KV space."),
    "queue_budget": ("scheduling", "The token budget of a step is a setting of the scheduler."),
    "queue_full": ("unexplained", "The server was full, but nobody says of what: places are scheduling, KV space is state."),
    "queue_unknown": ("unexplained", "Nobody knows whether the server was full."),
    "host_gap": ("scheduling", "It holds a place, and no step runs: the device waits for the host."),
    "prefill": (IN_STEPS, "In steps: each step's own split."),
    "prefill_interference": (IN_STEPS, "In steps, shared with decoders: each step's own split."),
    "decode": (IN_STEPS, "In steps: each step's own split."),
    "decode_interference": (IN_STEPS, "In steps, shared with prompts: each step's own split."),
    "skipped": ("scheduling", "It holds a place, and the step runs without it: the scheduler's choice."),
    "preempted": ("state", "It lost its KV space and waits to get it back."),
    "recompute": (
        "state",
        "Paid only because state had been thrown away. What lies in steps: their roofline time, of either side; the rest of the "
        "step keeps its layer.",
    ),
    "transfer": ("state", "State is carried."),
    "delivery": ("scheduling", "The engine is done; hosts still pass the answer on."),
    "unexplained": ("unexplained", "No recorded column says what it was."),
}


def layer_of(part: str) -> tuple[str, str]:
    """Layer (a key of LAYERS, or IN_STEPS) and the reason, of a part by its name. KeyError if there is none."""
    return LAYER_OF_PART[part.removesuffix("_ns")]


assert set(LAYER_OF_PART) == {p.name for p in PARTS}
