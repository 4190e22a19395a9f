"""Which step cost a replay uses: fitted to the trace's steps, a roofline of a platform, or fixed by hand."""

from __future__ import annotations

from typing import Any

from hoptrace.errors import InputError, UsageError
from hoptrace.manifest import Server
from hoptrace.platform import load_platform, platforms
from hoptrace.stepcost import StepCost, fit, fixed, roofline

__all__ = ["choose_cost"]

_HINT = "Use fitted, roofline (with --platform), or fixed:PREFILL_MS,DECODE_MS."


def choose_cost(text: str, steps: Any, server: Server | None, platform: str | None = None) -> tuple[StepCost, dict[str, Any]]:
    """The step cost that ``text`` names, and what the manifest says of it.

    Args:
        text: ``fitted``, ``roofline`` or ``fixed:PREFILL_MS,DECODE_MS`` (ms of a step that holds prompt tokens, plus ms of one
            that holds decode tokens).
        steps: the trace's steps (polars frame) or null.

    Raises:
        UsageError: no such cost model, or the platform is missing. InputError: the trace does not tell enough.
    """
    name, _, rest = text.partition(":")
    if platform is not None and name != "roofline":
        raise UsageError(
            f"A platform goes with --cost roofline, not with {name}.", hint="Leave out --platform, or change --cost."
        )
    if name == "fitted" and not rest:
        if steps is None or not steps.height:
            # What the trace cannot do either is no remedy.
            sized = server is not None and server.parameters is not None and server.weight_bytes is not None
            hint = "Use --cost fixed:PREFILL_MS,DECODE_MS" + (
                ", or --cost roofline --platform NAME."
                if sized
                else "; --cost roofline --platform NAME needs the model's sizes, which the trace's manifest lacks."
            )
            raise InputError("The trace has no steps to fit a step cost to.", hint=hint)
        return fit(steps), {"kind": "fitted"}
    if name == "roofline" and not rest:
        if platform is None:
            raise UsageError("A roofline needs a platform.", hint=f"--platform {' | '.join(platforms())} | FILE.toml")
        if server is None:
            raise InputError("The trace says nothing of its server, so it has no roofline.", hint=_HINT)
        data = load_platform(platform)
        return roofline(server, data), {"kind": "roofline", "platform": data}
    if name == "fixed":
        try:
            prefill, decode = (float(x) for x in rest.split(","))
            if not (0 <= prefill < 1e9 and 0 <= decode < 1e9 and prefill + decode > 0):
                raise ValueError
        except ValueError:
            raise UsageError(f"{text!r} is not a fixed cost.", hint="Write fixed:50,12 for 50 ms and 12 ms.") from None
        return fixed(any_prefill_ns=prefill * 1e6, any_decode_ns=decode * 1e6), {"kind": "fixed"}
    raise UsageError(f"There is no cost model {text!r}.", hint=_HINT)
