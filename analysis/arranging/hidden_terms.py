"""What `hoptrace explain` says of the five hidden kinds of carrying: the exact formula of each."""

from __future__ import annotations

from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]

TERMS: tuple[Term, ...] = (
    Term(
        "hidden_split",
        "hidden carrying",
        "one operation split into several messages",
        "messages",
        "messages of an operation = Σ transfers of its moves; bytes of a message = Σ bytes ÷ Σ transfers",
        "An operation is what one request sends or gets of one object over one way; without a request, what one step "
        "moves. Answers: messages ÷ answers, output tokens ÷ messages. KV: messages per block = (bytes per token × block "
        "size) ÷ bytes of a message. Packet headers (assumed): headers ÷ (headers + bytes of a message). Its time: waits "
        "of kind serialize that touch a move of state of the same request, else step, else server.",
        sql_of("hidden_split"),
    ),
    Term(
        "hidden_confirm",
        "hidden carrying",
        "a direct access turned into queue-and-confirm",
        "ns",
        "time confirming = length of the union of doorbell, poll, interrupt and sync waits around moves of state; time "
        "moving = length of those moves outside that union; ratio = confirming ÷ moving",
        "A wait is around a move if both are of one request (else of one step, else of one server) and touch in time; a "
        "sync only with a request. The time moving is an upper bound of what the data took, so the ratio is a lower "
        "bound. Hand-overs: Σ part hand-over ÷ Σ part transfer. Where hand-overs are seen, the view's time is theirs, "
        "else that of the waits: never both. Control operations per transfer come from the mechanisms' access paths "
        "(assumed).",
        sql_of("hidden_confirm"),
    ),
    Term(
        "hidden_unlike",
        "hidden carrying",
        "unlike work forced into one batch",
        "ns",
        "Σ prefill_interference + decode_interference of the finished requests; ÷ their output tokens; ÷ Σ e2e",
        "Modelled by the step cost, so derived. Mixed steps: steps with prompt tokens and decoders ÷ steps that say what "
        "is in them. Decoders held by prompts: Σ decoders of mixed steps ÷ Σ decoders, and the same weighted by the "
        "length of the step. Spread of contexts: √(Σ n · variance ÷ Σ n) over steps with n ≥ 2 decoders, ÷ their mean "
        "context. Short against long: interference ÷ e2e of the shortest and of the longest quarter by prompt and output "
        "tokens.",
    ),
    Term(
        "hidden_shared",
        "hidden carrying",
        "shared state serialized, synchronized or polled again and again",
        "operations, ns",
        "Σ count and Σ (end − start) of waits of kind sync, lock, serialize, poll, interrupt, switch and doorbell, less "
        "those around transfers of state (see hidden_confirm, hidden_split)",
        "Repeats of one wait: Σ count ÷ number of (request or step, kind, on). Looks at metrics: distinct times of "
        "counters that come from a server's pages (the capture's own looks, at least so many). KV events: rows of "
        "`blocks`.",
        sql_of("hidden_repeats"),
    ),
    Term(
        "repeated_prompts",
        "hidden carrying",
        "prompts sent again",
        "share of blocks",
        "(blocks − distinct hashes) ÷ blocks; of sessions: (blocks − distinct (session, hash)) ÷ blocks, over requests that name "
        "their session",
        "A block's hash stands for it and all before it, so an equal hash is an equal prefix. Only equal hash spaces are "
        "compared. Bytes: repeated blocks × block size × bytes of prompts on the wire ÷ their length (derived).",
        sql_of("hidden_prompts"),
    ),
    Term(
        "hidden_remote",
        "hidden carrying",
        "local work made remote",
        "bytes, ns",
        "Σ bytes of moves of state whose ends lie on different hosts, servers or devices; Σ part transfer of the finished"
        " requests; Σ collective_ns ÷ Σ step time",
        "Where an end lies comes from the platform graph, else from its name (server:X and what is under it are X's). "
        "Clients' messages and what compute reads of its own memory are not in it. Times of moves that overlap are added "
        "each; the part transfer is what requests waited for.",
        sql_of("hidden_remote"),
    ),
)
