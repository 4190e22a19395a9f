"""Step costs out of NVIDIA aiconfigurator's silicon database: operators measured on its systems, tabulated once.

The optional extra ``hoptrace[aiconfigurator]`` brings the package (aiconfigurator-core, Apache-2.0) and its data. What it holds
is the device's time of a step; the host's is not in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from hoptrace.errors import EnvironmentProblem, InputError
from hoptrace.manifest import Server
from hoptrace.model_catalogue import known_as
from hoptrace.roofline import rank_count
from hoptrace.stepcost import StepCost
from hoptrace.stepcost_table import MILLION, Piece, grid

__all__ = ["SYSTEMS", "aiconfigurator"]

SYSTEMS: dict[str, str] = {
    "a100-sxm-80gb": "a100_sxm",
    "a100-pcie-80gb": "a100_pcie",
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""Its name of a platform of ours."""

_BACKEND = "vllm"
_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREFIXES = (0, 1024, 4096, 16384, 32768)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (1, 256, 1024, 4096, 8192, 16384, 32768)
# The models package of aiconfigurator has some under an older name.
_OTHER_NAMES = {"meta-llama/Llama-3.1-": "meta-llama/Meta-Llama-3.1-"}


def aiconfigurator(server: Server, platform: str) -> tuple[StepCost, dict[str, Any]]:
    """The step cost of the server's model on a platform, and what the manifest says of it.

    A step of decoders is looked up whole; one with prompts is the operators of all its tokens, plus either phase's attention, as
    aiconfigurator itself composes it. Several prompts of a step attend each to itself: they cost what one of √Σ tokens² does,
    within 2 % of its price for a batch of prompts without cached tokens (as one prompt of all tokens up to 28 % more).

    Raises:
        EnvironmentProblem: the package is not installed. InputError: it has no such system or model.
    """
    _engine()
    if platform not in SYSTEMS:
        raise InputError(f"aiconfigurator has no data of {platform!r}.", hint=f"It has {', '.join(SYSTEMS)}.")
    model, ranks = _model_name(server), rank_count(server)
    if not (files("aiconfigurator_core") / "model_configs" / f"{model.replace('/', '--')}_config.json").is_file():
        # Asked for another, it would fetch the model's configuration from the network.
        raise InputError(f"aiconfigurator does not come with {model}.", hint="--cost roofline, or a like model: --model NAME.")
    pieces = _tabulated(model, SYSTEMS[platform], ranks)
    how = {
        "kind": "aiconfigurator",
        "model": model,
        "platform": platform,
        "system": SYSTEMS[platform],
        "backend": _BACKEND,
        "tensor_parallel_size": ranks,
        "version": version("aiconfigurator-core"),
        "licence": "Apache-2.0",
    }
    note = (
        f"Step times of {model} on {platform} ({ranks} ranks) from aiconfigurator-core {how['version']} ({_BACKEND}), tabulated; "
        "the device's time, without the host's."
    )
    return StepCost({}, "aiconfigurator", pieces=pieces, notes=(note,)), how


@cache
def _tabulated(model: str, system: str, ranks: int) -> tuple[Piece, ...]:
    """Once a process: a sweep asks for the same again and again."""
    with _quiet():
        try:
            handle = _engine().compile(model, system, _BACKEND, tp_size=ranks)
        except Exception as e:
            raise InputError(f"aiconfigurator can't price {model} on {system}: {_first_line(e)}") from None
        return _pieces(handle)


def _engine() -> Any:
    try:
        with _quiet():
            from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found,unused-ignore]
    except ImportError as e:
        raise EnvironmentProblem(
            f"--cost aiconfigurator needs the package aiconfigurator-core ({_first_line(e)}).",
            hint="pip install 'hoptrace[aiconfigurator]' (Python 3.11 to 3.13), or use --cost roofline.",
        ) from None
    return EngineHandle


def _model_name(server: Server) -> str:
    known = known_as(server.model) if server.model else None
    name = known.model if known is not None else server.model
    if not name:
        raise InputError("aiconfigurator needs to know the model.", hint="--model NAME")
    for ours, theirs in _OTHER_NAMES.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return name


def _pieces(handle: Any) -> tuple[Piece, ...]:
    decoders = _points(_BATCHES, _CONTEXTS, lambda batch, context: handle.predict_decode_latency(batch, context))
    # (total, operators of all tokens, attention of the prompt, attention of the decoders), in ms
    operators = {n: handle.mixed_step_breakdown(n, 0, n, 2)[1] for n in _TOKENS}
    shared = _points((0,), _TOKENS, lambda _, n: operators[n])
    # Its mixed step leaves out the attention over tokens that were there before; its prompt step has it.
    prompt_attention = _points(
        _PREFIXES, _TOKENS, lambda prefix, n: handle.predict_prefill_latency(1, prefix + n, prefix) - operators[n]
    )  # fmt: skip
    decode_attention = _points(
        _BATCHES, _CONTEXTS, lambda batch, context: handle.mixed_step_breakdown(1, batch, context, 2)[3]
    )  # fmt: skip
    decoding, prompting, mixed = (0, MILLION, 0), (MILLION, 0, MILLION), (0, 0, MILLION)
    prompt, decode = ("prompt_tokens_rms", "prefill_context_tokens"), ("decode_context", "decode_batch")
    by_prompt, by_decoder = (0, _TOKENS[-1], 0, _PREFIXES[-1]), (1, _CONTEXTS[-1], 1, _BATCHES[-1])
    return (
        Piece(grid(decoders), *decode, decoding, seen=by_decoder, name="decode step"),
        Piece(grid(shared), "tokens", factors=prompting, seen=(0, _TOKENS[-1], 0, 0), name="operators"),
        Piece(grid(prompt_attention), *prompt, prompting, seen=by_prompt, name="prompt's attention"),
        Piece(grid(decode_attention), *decode, mixed, seen=by_decoder, name="decoders' attention"),
    )


def _points(outer: tuple[int, ...], inner: tuple[int, ...], ms: Callable[[int, int], float]) -> dict[tuple[int, int], int]:
    return {(o, i): max(0, round(float(ms(o, i)) * 1e9)) for o in outer for i in inner}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """It warns of each fallback that it considers; what it took is not among them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _first_line(e: BaseException) -> str:
    return (str(e) or type(e).__name__).splitlines()[0][:300]
