"""What `hoptrace explain` says of comparisons and verdicts."""

from __future__ import annotations

from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]

TERMS: tuple[Term, ...] = (
    Term(
        "within_noise",
        "comparison",
        "within noise",
        "yes or no",
        "0 in the 95 % interval over requests, or |B − A| ≤ t · √(s_A² + s_B²)",
        "Whether chance explains a change: because of which requests there were (bootstrap over requests, the same ones on both "
        "sides where they can be matched), or because two runs of one policy differ as much (--noise, --noise-b; s²: variance "
        "between runs, t: Student's quantile at 95 %, with a single repeat at 80 %). Without repeats the second is unknown.",
    ),
    Term(
        "access_path",
        "verdict",
        "access path: shorter or dearer",
        "words",
        "servers that an answer visits; per output token: payload hops, control operations, bytes × links or latency, "
        "arranging operations",
        "Does a change shorten the access path, or change it for a dearer one? Counted and derived figures that changed by 5 % "
        "or more beyond noise decide; assumed ones are shown only.",
    ),
    Term(
        "sharing_of_meaning",
        "verdict",
        "sharing: meaning or only hardware",
        "words",
        "cached ÷ prompt tokens, weight bytes per token, against interference",
        "Does a change share meaning (what was computed or read for one serves others) or only hardware (what runs together "
        "slows each other)? KV that a decode server was handed over is no cache hit. The query gives what each finished request "
        "looked up and found.",
        sql_of("diff_reuse"),
    ),
    Term(
        "repetition",
        "verdict",
        "repeated work: removed or managed",
        "words",
        "prompt tokens computed and tokens recomputed per output token, against KV carried, hand-overs, polls, syncs, messages",
        "Does a change remove repeated work, or manage it? Both sides have the same prompts, so prompt tokens that are computed "
        "more often on one side are repeated work.",
        sql_of("diff_reuse"),
    ),
    Term(
        "moved_share",
        "verdict",
        "moved, not removed",
        "share of what fell",
        "min(1, Σ rises ÷ Σ falls), within one balance",
        "Of the costs of one kind that fell, how much stands elsewhere: in other parts of latency, at other servers, nodes, "
        "links or ways. From one half on a cost counts as moved. It says that one fell while another rose, and claims no cause.",
        sql_of("diff_servers"),
    ),
)
