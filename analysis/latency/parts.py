"""The parts that a request's time is split into, their classes and meanings: one table for `explain`, the report and the app.

Each nanosecond from arrival to finish is in exactly one part, each part in exactly one class (design: "class of a nanosecond").
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CLASSES", "FULL", "PARTS", "PART_OF_CAPACITY", "PART_OF_WAIT", "Part", "part"]


@dataclass(frozen=True, slots=True)
class Part:
    """``name`` is the column in ``Accounting.parts`` without its ``_ns``; ``needs`` says what must have been recorded."""

    name: str
    klass: str
    label: str
    doc: str
    needs: str

    @property
    def column(self) -> str:
        return self.name + "_ns"


CLASSES: dict[str, str] = {
    "work": "The step's arithmetic and its own memory traffic.",
    "coordination": "Arranging: hand-overs, host work, waiting for a batch, queueing while the server has room.",
    "carrying": "Moving data between places while the request waits for it.",
    "repeated work": "Computing again what had been computed before.",
    "sharing": "The part of a mixed step that the request would not have paid without the other phase in it.",
    "capacity": "Waiting because the server is full: slots, KV space or token budget; also the time after a preemption.",
    "unexplained": "No recorded column says what it was.",
}

PARTS: tuple[Part, ...] = (
    Part("client", "coordination", "client", "The load generator was late: intended → sent.", "requests.intended_ns, sent_ns"),
    Part(
        "network_in", "coordination", "network in",
        "Sent → first byte at the proxy or server. Where sent is unknown, the client's own delay is in here too.",
        "requests.sent_ns (or intended_ns), received_ns",
    ),
    Part(
        "proxy", "coordination", "proxy, router",
        "Received → handed to the engine, and from a stay that failed or was refused to the next try.",
        "requests.received_ns, stages.enqueued_ns",
    ),
    Part(
        "handover", "coordination", "hand-over",
        "Arranging to go on elsewhere (prefill → decode): from the end of a stay that was handed over until the next server's "
        "first work, less the transfer itself and less waiting for a full server.",
        "stages.end_ns, end_reason, enqueued_ns, scheduled_ns of each stay",
    ),
    Part(
        "queue_room", "coordination", "queue, with room",
        "In the engine's queue while fewer stays ran on the server than it has slots, and neither KV nor budget was full.",
        "stages.enqueued_ns, scheduled_ns, end_ns; servers.max_sequences",
    ),
    Part(
        "queue_slots", "capacity", "queue, no slot",
        "In the engine's queue while all slots of the server were taken.",
        "stages.enqueued_ns, scheduled_ns, end_ns; servers.max_sequences, events; counters",
    ),
    Part(
        "queue_kv", "capacity", "queue, no KV space",
        "In the engine's queue while a slot was free, but the KV places left were too few for the first in the queue: who was "
        "preempted, else who waits longest.",
        "steps.kv_used_tokens, kv_capacity_tokens, preempted, queued_decode_context_tokens; stages.enqueued_ns, scheduled_ns",
    ),
    Part(
        "queue_budget", "capacity", "queue, no token budget",
        "In the engine's queue while a slot and KV space were free, but the step's token budget was used up.",
        "steps.prefill_tokens, decode_tokens; servers.max_batched_tokens; stages.enqueued_ns, scheduled_ns",
    ),
    Part(
        "queue_full", "capacity", "queue, full of what unknown",
        "In the engine's queue while requests were seen deferred, and nobody says for want of what.",
        "counters of deferred requests; stages.enqueued_ns, scheduled_ns",
    ),
    Part(
        "queue_unknown", "unexplained", "queue, cause unknown",
        "In the engine's queue while nobody knows whether the server was full: its slots are unknown, it was away, or it may "
        "have worked for clients that had gone and no counter was sampled.",
        "stages.enqueued_ns, scheduled_ns",
    ),
    Part(
        "host_gap", "coordination", "between steps",
        "It holds a place, but no step runs on its server: before its first step and between steps. Host time.",
        "steps, residency",
    ),
    Part("prefill", "work", "prefill", "In steps that compute its prompt, less interference and repetition.", "steps, residency"),
    Part(
        "prefill_interference", "sharing", "prefill, shared",
        "What decoding requests in the same steps added to its prefill (modelled by the fitted step cost).",
        "steps, residency, a step cost that can be fitted",
    ),
    Part("decode", "work", "decode", "In steps that generate its tokens, less interference.", "steps, residency"),
    Part(
        "decode_interference", "sharing", "decode, shared",
        "What other requests' prompts in the same steps added to its decoding (modelled by the fitted step cost).",
        "steps, residency, a step cost that can be fitted",
    ),
    Part("skipped", "coordination", "left out of steps", "It holds a place, and a step runs without it.", "steps, residency"),
    Part(
        "preempted", "capacity", "preempted",
        "It lost its place and waits to get it back, until the step that takes it up again.",
        "steps.preempted, or residency, or stages.end_reason",
    ),
    Part("recompute", "repeated work", "recomputed", "In steps that compute tokens of it a second time.", "residency or waits"),
    Part("transfer", "carrying", "transfer", "Outside steps, while its KV or other state is carried.", "moves or waits"),
    Part(
        "delivery", "coordination", "delivery",
        "After its last step or last token, until the end of the response.",
        "requests.last_token_ns, or residency",
    ),
    Part("unexplained", "unexplained", "unexplained", "No recorded column says what it was.", ""),
)  # fmt: skip

# What a server can be full of, where several in this order; `full` is where nobody says of what.
FULL: tuple[str, ...] = ("slots", "kv", "budget", "full")

# A recorded wait of kind `capacity`, by `on`; any other value, or none, is `queue_full`.
PART_OF_CAPACITY: dict[str, str] = {"slot": "queue_slots", "kv": "queue_kv", "budget": "queue_budget"}

# A recorded wait outside the request's own steps, by kind. Kinds of the host's own doing share one part.
PART_OF_WAIT: dict[str, str] = {
    "queue": "queue_room",
    "capacity": "queue_full",
    "batch": "skipped",
    "launch": "host_gap",
    "doorbell": "host_gap",
    "poll": "host_gap",
    "sync": "host_gap",
    "interrupt": "host_gap",
    "switch": "host_gap",
    "lock": "host_gap",
    "message": "proxy",
    "serialize": "host_gap",
    "host": "host_gap",
    "transfer": "transfer",
    "recompute": "recompute",
}


def part(name: str) -> Part:
    """The part of that name (with or without ``_ns``); KeyError if there is none."""
    for p in PARTS:
        if p.name == name.removesuffix("_ns"):
            return p
    raise KeyError(name)
