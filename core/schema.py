"""The trace schema: the one place where tables, columns, Arrow types, units and meanings are written down.

``docs/schema.md`` is generated from here (``python -m hoptrace.schema_docs``). Collectors, importers and replays write these
columns, everything else reads them; nothing else passes between the folders.

Types: times and durations are int64 nanoseconds, sizes are int64 bytes, counts are int64. Unknown is null, never 0.
"""

from __future__ import annotations

import pyarrow as pa

from hoptrace.schema_types import Column, Table

__all__ = ["MAJOR", "MINOR", "TABLES", "VERSION", "Column", "Table", "table"]

MAJOR = 1
MINOR = 1
VERSION = f"{MAJOR}.{MINOR}"

_INT = pa.int64()
_STR = pa.string()
_FLOAT = pa.float64()
_BOOL = pa.bool_()
_HASHES = pa.list_(pa.int64())
_STRINGS = pa.list_(pa.string())


def _ns(name: str, doc: str, *, required: bool = False) -> Column:
    return Column(name, _INT, "ns", doc, required)


def _n(name: str, unit: str, doc: str, *, required: bool = False) -> Column:
    return Column(name, _INT, unit, doc, required)


def _s(name: str, doc: str, *values: str, required: bool = False) -> Column:
    return Column(name, _STR, "", doc, required, values)


_SOURCE = _s("source", "Which collector or importer wrote the row, or `replay`.", required=True)
_BASIS = _s(
    "basis",
    "How a count of hops or operations is known: observed, from descriptors and sizes, or from a mechanism's table.",
    "counted", "derived", "assumed",
)  # fmt: skip
_REQUEST = _n("request", "", "Number of the request within the trace.")
_REQUEST_REQUIRED = _n("request", "", "Number of the request within the trace.", required=True)
_SEQUENCE = _n("sequence", "", "Which of the request's sequences (n > 1, beams); 0 for the first.")
_SERVER = _s("server", "Name of the server, as in the manifest.")
_RANK = _n("dp_rank", "", "Data-parallel rank within the server; 0 where there is one.")

ROLES = ("route", "encode", "prefill", "decode", "both")
END_REASONS = ("done", "handed over", "preempted", "cancelled", "failed", "refused")
PHASES = ("chunk", "decode", "skipped", "preempted")
WAIT_KINDS = (
    "queue", "capacity", "batch", "launch", "doorbell", "poll", "sync", "interrupt", "switch", "lock", "message",
    "serialize", "host", "transfer", "recompute",
)  # fmt: skip
MECHANISMS = ("load_store", "uncached", "dma", "memcpy", "rdma", "collective", "message", "file")
OBJECTS = ("kv", "weights", "activations", "logits", "tokens", "prompt", "other")
ORIGINS = ("observed", "reconstructed", "replayed")
VANTAGES = ("engine", "proxy", "wire", "client")

REQUESTS = Table(
    "requests",
    "one request, merged from all who saw it",
    (
        _REQUEST_REQUIRED,
        _s("request_id", "Identifier as the client or the server knows it."),
        _s("session", "Conversation that the request belongs to (keyed hash or the importer's name)."),
        _n("parent_request", "", "The request whose answer this one continues."),
        _ns("think_ns", "Time between the parent's end and this arrival."),
        _n("client_slot", "", "Which of a closed-loop client's slots sent it."),
        _s("tenant", "Who pays."),
        _s("model", "Model asked for."),
        _s("adapter", "LoRA adapter asked for."),
        _ns("intended_ns", "When the load generator meant to send it."),
        _ns("sent_ns", "When the load generator sent it."),
        _ns("received_ns", "When the proxy or the server had it whole (a client's slow upload is before it)."),
        _ns("queued_ns", "When it entered the engine's queue."),
        _ns("scheduled_ns", "When the engine first worked on it."),
        _ns("engine_first_token_ns", "First token, as the engine says."),
        _ns("first_token_ns", "First token of any kind, at the vantage of `tokens`."),
        _ns("first_visible_ns", "First token that a user sees (not reasoning), same vantage."),
        _ns("last_token_ns", "Last token, same vantage."),
        _ns("finish_ns", "End of the request as seen from outside; null while it runs."),
        _ns("arrival_ns", "The earliest of intended, sent and received.", required=True),
        _s("arrival_of", "Which of them `arrival_ns` is.", "intended", "sent", "received"),
        _n("prompt_tokens", "tokens", "Length of the prompt, cached part included."),
        _n("output_tokens", "tokens", "Tokens generated, reasoning included."),
        _n("max_tokens", "tokens", "Limit that the client set."),
        Column("prefix_blocks", _HASHES, "", "Keyed hash of each leading block of the prompt, chained."),
        _s("hash_space", "Key group of the hashes; only equal spaces are joined."),
        _n("block_size", "", "Length of a block in `block_unit`."),
        _s("block_unit", "Unit of `block_size`.", "tokens", "characters"),
        _n("prompt_chars", "characters", "Length of the prompt text, to scale character blocks to tokens."),
        _n("priority", "", "Priority, lower is sooner."),
        _s("finish_reason", "As the server said: stop, length …"),
        _s("error", "What went wrong, in one sentence; null if nothing did."),
        _SOURCE,
    ),
    key=("request",),
    sort=("request",),
    merge=True,
)

STAGES = Table(
    "stages",
    "one stay of a request (or one of its sequences) on one engine",
    (
        _REQUEST_REQUIRED,
        _SEQUENCE,
        _n("attempt", "", "0 for the first; each retry is one more."),
        _n("stage", "", "Order of the stay within the request.", required=True),
        _SERVER,
        _RANK,
        _s("role", "What the engine did for it.", *ROLES),
        _s("engine_request_id", "Identifier that the engine gave it."),
        _n("prompt_tokens", "tokens", "Length of this sequence's own prompt; null where that is the request's."),
        _ns("enqueued_ns", "Handed to the engine."),
        _ns("scheduled_ns", "First worked on."),
        _ns("end_ns", "Left the engine."),
        _s("end_reason", "Why it left.", *END_REASONS),
        _n("cached_tokens", "tokens", "Prompt tokens served from a cache, whatever the tier."),
        _n("cached_device_tokens", "tokens", "… from the device's own memory."),
        _n("cached_host_tokens", "tokens", "… from host memory."),
        _n("cached_peer_tokens", "tokens", "… from a peer."),
        _n("cached_pool_tokens", "tokens", "… from a pool."),
        _n("cached_disk_tokens", "tokens", "… from a disk."),
        _n("resumed_tokens", "tokens", "Own tokens found again after a preemption: no reuse."),
        _n("recomputed_tokens", "tokens", "Tokens computed a second time."),
        _SOURCE,
    ),
    key=("request", "sequence", "attempt", "stage"),
    sort=("request", "stage"),
    merge=True,
)

TOKENS = Table(
    "tokens",
    "one emission",
    (
        _REQUEST_REQUIRED,
        _SEQUENCE,
        _n("index", "", "Index of its first token within the sequence.", required=True),
        _ns("time_ns", "When it was seen.", required=True),
        _n("count", "tokens", "Tokens in it (a chunk may hold several); null if unknown."),
        Column("coalesced", _BOOL, "", "It arrived in one read with the one before: the gap is not the server's."),
        _s("vantage", "Where it was seen.", *VANTAGES),
        _SOURCE,
    ),
    key=("request", "sequence", "index", "vantage"),
    sort=("request", "sequence", "index"),
)

STEPS = Table(
    "steps",
    "one engine iteration of one rank",
    (
        _s("server", "Name of the server.", required=True),
        _RANK,
        _n("pp_rank", "", "Pipeline rank; 0 where there is one."),
        _n("step", "", "Number of the step within (server, dp_rank), ascending.", required=True),
        _ns("start_ns", "Start.", required=True),
        _ns("end_ns", "End.", required=True),
        _ns("schedule_ns", "Time spent choosing the batch."),
        _ns("launch_ns", "Time spent launching work on the device."),
        _ns("device_ns", "Time the device worked."),
        _ns("update_ns", "Time spent on the results (sampling, bookkeeping)."),
        _ns("collective_ns", "Time in collectives."),
        _n("collective_bytes", "bytes", "Bytes sent in collectives."),
        _n("launches", "", "Kernel or graph launches."),
        _n("syncs", "", "Host-device synchronisations."),
        _n("prefill_requests", "", "Requests with prompt tokens in the step."),
        _n("prefill_tokens", "tokens", "Prompt tokens computed."),
        _n("prefill_context_tokens", "tokens", "Sum over them of the context that stood before the chunk."),
        _n("decode_requests", "", "Requests that decode in the step."),
        _n("decode_tokens", "tokens", "Tokens they compute (more than one each under speculation)."),
        _n("decode_context_tokens", "tokens", "Sum of their context lengths."),
        Column("prefill_length_variance", _FLOAT, "tokens²", "Variance of the prompts' lengths."),
        Column("decode_context_variance", _FLOAT, "tokens²", "Variance of the decoders' contexts."),
        _n("queued_prefill_requests", "", "Requests waiting for their prompt."),
        _n("queued_prefill_tokens", "tokens", "Their prompt tokens."),
        Column("queued_prefill_length_variance", _FLOAT, "tokens²", "Variance of their prompts' lengths."),
        _n("queued_decode_requests", "", "Requests waiting to decode (preempted, or transferred in)."),
        _n("queued_decode_context_tokens", "tokens", "Their context tokens."),
        Column("queued_decode_context_variance", _FLOAT, "tokens²", "Variance of their contexts."),
        _n("running", "", "Requests that hold a place."),
        _n("waiting", "", "Requests that wait for one."),
        _n("kv_used_tokens", "tokens", "KV places that requests hold (cached blocks that no request holds are not in it)."),
        _n("kv_capacity_tokens", "tokens", "KV places there are."),
        _n("preempted", "", "Requests preempted in the step."),
        _n("draft_proposed", "tokens", "Tokens that a draft proposed."),
        _n("draft_accepted", "tokens", "Proposed tokens that were accepted."),
        _n("weight_bytes", "bytes", "Weights read from the device's own memory."),
        _n("kv_read_bytes", "bytes", "KV read."),
        _n("kv_write_bytes", "bytes", "KV written."),
        _s("origin", "How the row came to be.", *ORIGINS),
        Column("confidence", _FLOAT, "", "How sure a reconstructed row is of its members, 0 to 1; null for others."),
        _SOURCE,
    ),
    key=("server", "dp_rank", "pp_rank", "step"),
    sort=("server", "dp_rank", "step"),
)

RESIDENCY = Table(
    "residency",
    "a run of steps in which a request's share does not change",
    (
        _REQUEST_REQUIRED,
        _SEQUENCE,
        _s("server", "Name of the server.", required=True),
        _RANK,
        _n("first_step", "", "First step of the run.", required=True),
        _n("last_step", "", "Last step of the run, included.", required=True),
        _s("phase", "What it did there.", *PHASES, required=True),
        _n("tokens_per_step", "tokens", "Tokens of it in each step of the run."),
        _n("context_at_start", "tokens", "Its context before the run's first step."),
        _SOURCE,
    ),
    key=("request", "sequence", "server", "dp_rank", "first_step"),
    sort=("request", "first_step"),
)

MOVES = Table(
    "moves",
    "data going from one place to another",
    (
        _ns("start_ns", "Start.", required=True),
        _ns("end_ns", "End; null if it was never seen to end."),
        _REQUEST,
        _SERVER,
        _n("step", "", "Step that it belongs to."),
        _s("object", "What moves.", *OBJECTS, required=True),
        _s("src", "Node of the platform graph that it leaves.", required=True),
        _s("dst", "Node that it reaches.", required=True),
        Column("path", _STRINGS, "", "Links that it crosses; each is charged the bytes."),
        _n("bytes", "bytes", "Payload."),
        _n("transfers", "", "Separate transfers (messages, descriptors, writes)."),
        _s("mechanism", "How it moves.", *MECHANISMS),
        _n("payload_hops", "", "Steps of the access path that carry the payload."),
        _n("control_ops", "", "Steps that carry none (doorbells, completions, polls, headers)."),
        _BASIS,
        _SOURCE,
    ),
    sort=("start_ns",),
)

WAITS = Table(
    "waits",
    "time spent arranging, not doing: one row per (request or step, kind, contiguous interval)",
    (
        _ns("start_ns", "Start.", required=True),
        _ns("end_ns", "End.", required=True),
        _REQUEST,
        _SERVER,
        _n("step", "", "Step that it belongs to."),
        _s("kind", "What was waited for.", *WAIT_KINDS, required=True),
        _s("on", "Whom or what it waited on: proxy, slot, server, …"),
        _n("count", "", "Repeats that the row sums up."),
        _BASIS,
        _SOURCE,
    ),
    sort=("start_ns",),
)

BLOCKS = Table(
    "blocks",
    "an event in the life of a KV block",
    (
        _ns("time_ns", "When.", required=True),
        _SERVER,
        _RANK,
        _s("event", "What happened.", "stored", "copied", "evicted", "cleared", "hit", required=True),
        _n("hash", "", "Keyed hash of the block."),
        _n("parent", "", "Hash of the block before it."),
        _s("medium", "Where: device, host, disk …"),
        _n("bytes", "bytes", "Size."),
        _REQUEST,
        _SOURCE,
    ),
    sort=("time_ns",),
)

COUNTERS = Table(
    "counters",
    "a sample",
    (
        _ns("time_ns", "Middle of the reading.", required=True),
        _ns("uncertainty_ns", "Half the time that the reading took."),
        _s("host", "Host."),
        _s("entity", "What was read: `process:PID`, `thread:PID/TID`, `server:NAME`, `cpu`, a link …", required=True),
        _s("incarnation", "Boot, process start or driver load: a cumulative counter restarts when it changes."),
        _s("name", "Name of the counter, with its unit where it has one.", required=True),
        _s("direction", "read, write, tx, rx where it has one."),
        _n("value_int", "", "Value of an integer counter."),
        Column("value_float", _FLOAT, "", "Value of any other."),
        _s("unit", "ns, bytes, tokens, 1 …"),
        _s("semantics", "How the value reads.", "cumulative", "gauge", "delta", "rate"),
        _ns("window_ns", "Window of a rate."),
        _n("width_bits", "bits", "Width at which the source wraps."),
        _s(
            "status", "Whether there is a value.",
            "ok", "absent", "unsupported", "denied", "lost", "stale", "error",
        ),
        _SOURCE,
    ),
    sort=("entity", "name", "time_ns"),
)  # fmt: skip

EVENTS = Table(
    "events",
    "a thing that happened",
    (
        _ns("time_ns", "When.", required=True),
        _s("host", "Host."),
        _SERVER,
        _s("kind", "start, stop, restart, gap, role change, configuration change, device error, clock step …", required=True),
        _s("detail", "In words."),
        _SOURCE,
    ),
    sort=("time_ns",),
)

CLOCK_SYNC = Table(
    "clock_sync",
    "what a foreign clock said against the trace clock",
    (
        _ns("time_ns", "When, on the trace clock.", required=True),
        _s("host", "Host of the foreign clock."),
        _s("clock", "Which clock: utc, monotonic, gpu …", required=True),
        _ns("offset_ns", "Foreign time less trace time.", required=True),
        _ns("uncertainty_ns", "Half the width of the bracket."),
        _SOURCE,
    ),
    sort=("time_ns",),
)

COVERAGE = Table(
    "coverage",
    "who recorded what, when: a figure is computed only over what coverage includes",
    (
        _s("table", "Table that was recorded.", required=True),
        Column("columns", _STRINGS, "", "Columns that the source fills; null for all it can."),
        _s("server", "Server it is about; null for all."),
        _ns("from_ns", "From.", required=True),
        _ns("to_ns", "To."),
        Column("fraction", _FLOAT, "", "Share of what happened that was recorded, if it is known."),
        _SOURCE,
    ),
    # A live session moves `to_ns` on each second, so that a kill leaves what was covered until then.
    key=("table", "server", "source", "from_ns"),
    sort=("from_ns",),
    merge=True,
)

TABLES: dict[str, Table] = {
    t.name: t
    for t in (
        REQUESTS, STAGES, TOKENS, STEPS, RESIDENCY, MOVES, WAITS, BLOCKS, COUNTERS, EVENTS, CLOCK_SYNC, COVERAGE,
    )
}  # fmt: skip


def table(name: str) -> Table:
    """The table of that name; KeyError with the names there are."""
    try:
        return TABLES[name]
    except KeyError:
        raise KeyError(f"no table {name!r}; tables: {', '.join(TABLES)}") from None
