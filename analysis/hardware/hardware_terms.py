"""The figures of the hardware section, for `hoptrace explain`."""

from __future__ import annotations

from hoptrace.analysis.term import Term, sql_of

__all__ = ["TERMS"]

_TOTALS = sql_of("counter_totals")


def _of(figure: str, where: str) -> str:
    return f"SELECT {figure} AS value\nFROM (\n{_TOTALS}\n)\nWHERE {where}"


def _per(what: str, of: str) -> str:
    """A sum of counters of the servers' processes (of their threads where no process has it) by output token or step."""
    total = f"SELECT sum(total) FROM totals WHERE name = '{what}' AND starts_with(entity, "
    return (
        f"WITH totals AS (\n{_TOTALS}\n)\nSELECT coalesce(({total}'process:')), ({total}'thread:'))) / nullif({of}, 0) AS value"
    )


_TOKENS = "(SELECT sum(output_tokens) FROM requests)"
_STEPS = "(SELECT count(*) FROM steps WHERE coalesce(pp_rank, 0) = 0)"


def _calls(name: str, title: str, doc: str) -> tuple[Term, Term]:
    kind = name.removesuffix("_calls")
    return (
        Term(f"{kind}_per_token", "hardware", f"{title} per output token", "calls/token",
             f"Σ increase of {name} ÷ output tokens", doc, _per(name, _TOKENS)),
        Term(f"{kind}_per_step", "hardware", f"{title} per step", "calls/step",
             f"Σ increase of {name} ÷ steps", "See " + f"{kind}_per_token.", _per(name, _STEPS)),
    )  # fmt: skip


TERMS: tuple[Term, ...] = (
    Term(
        "stolen_steps",
        "hardware",
        "is another process stealing my step?",
        "yes, no, unknown",
        "Spearman's ρ of (run-queue delay ÷ (delay + CPU time)) and (Σ step time ÷ Σ predicted step time − 1), over bins of the "
        "clock",
        "Of the threads that compute. No: together they waited less than 1 % of the steps' time for a CPU, or steps are not "
        "slower where they waited more. Yes: the 95 % interval of ρ lies above 0 and steps waited longer where they were slower; "
        "others are told from the server's own threads by their share of the busy CPU time then (10 %). Unknown: fewer than 10 "
        "bins with 3 steps, a delay that hardly varied, or an interval that holds both. Bins of a second (a twentieth of a short "
        "trace, 600 of a long one); predicted: by the step cost, from what each step held. The interval: a block bootstrap.",
        sql_of("counter_totals"),
    ),
    Term(
        "run_delay_share",
        "hardware",
        "run-queue delay share",
        "share",
        "Σ run_delay_ns ÷ (Σ run_delay_ns + Σ on_cpu_ns), of the servers' processes",
        "Of the time in which threads wanted a CPU, how much they waited for one.",
        _of("sum(total) FILTER (name = 'run_delay_ns') / nullif(sum(total) FILTER (name IN ('run_delay_ns', 'on_cpu_ns')), 0)",
            "starts_with(entity, 'process:')"),
    ),
    Term(
        "run_delay_per_step",
        "hardware",
        "run-queue delay per step",
        "ns/step",
        "Σ run_delay_ns of the servers' processes ÷ steps",
        "What all threads together waited for a CPU, for each step: at the mean no more of a step can have been lost that way. "
        "It bounds nothing where it is longer than the step.",
        _per("run_delay_ns", _STEPS),
    ),
    Term(
        "explained_delay",
        "hardware",
        "slowdown that run-queue delay can explain",
        "ns/step",
        "min(slower, more delay) per step, of the third of the bins that waited most against the third that waited least",
        "Slower: (Σ taken ÷ Σ predicted there − Σ taken ÷ Σ predicted in the calm third) × predicted time of a step there. At "
        "most so much, since the delay is summed over threads and a step need not wait for each.",
    ),
    *_calls("futex_calls", "Futex calls", "How often a thread entered the kernel to wait at a lock or to wake who waits. Locks "
            "that are free take no call. Needs tracepoints: attach --tracepoints."),
    *_calls("poll_calls", "Poll calls", "poll, ppoll, select and epoll waits: looks whether something is ready. Busy polling in "
            "user space makes no call and shows as CPU time with few voluntary switches."),
    *_calls("ioctl_calls", "Ioctl calls", "Requests to drivers. On a GPU host a stand-in for doorbells that go through the "
            "driver; submissions that write a mapped register make no call."),
    *_calls("yield_calls", "Yield calls", "sched_yield: a thread that spins offers its CPU."),
    Term(
        "involuntary_switches_per_step",
        "hardware",
        "involuntary switches per step",
        "switches/step",
        "Σ involuntary_switches ÷ steps",
        "How often a thread of the server lost its CPU though it could have gone on: another thread was let in.",
        _per("involuntary_switches", _STEPS),
    ),
    Term(
        "migrations_per_step",
        "hardware",
        "migrations per step",
        "moves/step",
        "Σ migrations ÷ steps",
        "How often a thread of the server went on on another CPU, away from its caches.",
        _per("migrations", _STEPS),
    ),
    Term(
        "major_faults",
        "hardware",
        "major page faults",
        "faults",
        "Σ increase of major_faults of the servers' processes",
        "Pages that had to come from a disk: weights mapped from a file that memory did not hold.",
        _of("sum(total)", "name = 'major_faults' AND starts_with(entity, 'process:')"),
    ),
    Term(
        "collecting_cost",
        "hardware",
        "what collecting cost",
        "share of a core",
        "Σ increase of cpu_ns of each collector ÷ the time it ran",
        "CPU time of all sources' samples; it may be 1 % (attach --max-overhead).",
        _of("sum(total / nullif(counted_ns, 0))", "starts_with(entity, 'collector:') AND name = 'cpu_ns'"),
    ),
    Term(
        "contradiction",
        "hardware",
        "contradicting counters",
        "",
        "two counters of one thing over the same time: one saw at least 1 MiB, the other less than a thousandth of that",
        "Payload and payload with protocol of a link are the same traffic, whichever source tells; so are the paths of an NVMe "
        "namespace and its head. No word where the common time is under a second or either covers less than 80 % of it.",
        sql_of("contradicted_series"),
    ),
    Term(
        "tier_pages",
        "hardware",
        "pages moved between memory tiers",
        "bytes",
        "Σ increase of pgpromote_success and pgdemote_* of each node × page size",
        "What the kernel moved between nodes by itself, beside the engine's moves and never one of them. Promotions are counted "
        "at the node that receives, demotions at the one that loses the page; base pages also of huge ones.",
        sql_of("ledger_tier_pages"),
    ),
)  # fmt: skip
