"""What `hoptrace explain` says of the accounting beyond its parts and classes."""

from __future__ import annotations

from hoptrace.analysis.term import Term

__all__ = ["TERMS"]

TERMS: tuple[Term, ...] = (
    Term(
        "interference_error",
        "part of latency",
        "Standard error of interference",
        "ns",
        "√(gᵀΣg + (b·Σa)² + Σ a²(σ² + σ_a²)); per mixed step: y lasted, c its cost, a its cost without the other phase, "
        "interference y(1 − a/c); g = Σ (y/c)((a/c)x − x_a), Σ the fit's covariance, b = Σy ÷ Σc − 1 of mixed steps, σ and σ_a "
        "the relative spread of mixed steps and of steps with the phase alone",
        "How far the split of mixed steps may be off: by the fitted coefficients, by a cost that does not fit mixed steps, and "
        "by the spread of the steps themselves. The same for the work that is left of the phase. The mean over requests is the "
        "most that a mean share can be off by, since requests that share steps and coefficients err together.",
    ),
    Term(
        "ttft_parts",
        "part of latency",
        "Parts of the time to the first token",
        "ns",
        "the parts' time before first_token_ns; Σ = first_token_ns − arrival_ns exactly",
        "What a user waits for until the first token, of the requests that TTFT is told of. Once the prompt is computed the "
        "token is on its way: that is delivery, whatever steps go on meanwhile.",
    ),
    Term(
        "accounting_level",
        "part of latency",
        "Level of the accounting",
        "tables",
        "observed steps, else reconstructed steps, else tokens, else stamps; with residency, waits and moves where there are any",
        "What the accounting of this trace rests on. What is missing leaves something unseen, and the report says what.",
    ),
)
