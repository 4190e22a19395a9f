"""Synthetic prompts: real words, or token ids, as many tokens as wanted, beginning alike where a workload's prefix blocks are
equal."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from hoptrace.errors import UsageError
from hoptrace.replay.workload import Workload

__all__ = ["TOKEN_IDS", "WORDS", "Calibration", "Sizes", "id_prompts", "prompts", "sizes", "text"]

# Longer than any model's context; a prompt of so many words takes a second to make and 5 MB.
MOST_TOKENS = 10_000_000
# All prompts are made before the first is sent: some 5 bytes of memory a token.
MOST_PROMPT_TOKENS = 200_000_000

# Frequent English words: nearly every tokenizer has each of them, with the space before it, as one token.
_TEXT = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an they you were her "
    "she all would there been one their we him has when who will more no if out so said what up its about into than them can "
    "only other new some could time these two may then do first any my now such like our over man me even most made after also "
    "did many before must through back years where much your way well down should because each just those people how too little "
    "state good very make world still own see men work long get here between both life being under never day same another know "
    "while last might us great old year off come since against go came right used take three"
)
WORDS = tuple(_TEXT.split())

TOKEN_IDS = range(100, 1000)
"""Ids that every vocabulary has, past the special tokens that most have first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A server's tokens for ``n`` words: ``base`` (a start token, a template) plus ``per_word`` each."""

    base: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Words for a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.base) / self.per_word))


@dataclass(frozen=True)
class Sizes:
    """How long each request is made, in the order of the workload: prompt and output tokens; ``scale`` of the prompts' blocks."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    scale: float


def sizes(
    work: Workload,
    *,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Sizes:
    """Scale and cap the lengths; at least one token each.

    Raises:
        UsageError: a scale is not a positive number, or the lengths are beyond what can be made or sent.
    """

    def scaled(values: np.ndarray, scale: float, most: int | None, what: str) -> list[int]:
        if not 0 < scale < math.inf:
            raise UsageError(f"A scale of {scale} is not possible.", hint="Give a positive number: 0.5 is half as long.")
        long = np.maximum(1, np.rint(values * scale))
        long = long if most is None else np.minimum(long, most)
        if long.size and long.max() > MOST_TOKENS:
            raise UsageError(
                f"{what} of {long.max():,.0f} tokens is longer than any server takes.",
                hint=f"Choose a smaller --{what.split()[1]}-scale, or cap it with --max-{what.split()[1]}-tokens.",
            )
        return [int(v) for v in long]

    made = Sizes(
        scaled(work.prompt_tokens, prompt_scale, max_prompt_tokens, "A prompt"),
        scaled(work.output_tokens, output_scale, max_output_tokens, "An output"),
        prompt_scale,
    )
    total = sum(made.prompt_tokens)
    if total > MOST_PROMPT_TOKENS:
        raise UsageError(
            f"Prompts of {total:,} tokens in all are more than can be made before the first is sent.",
            hint="Take fewer requests (--limit), or shorter ones (--max-prompt-tokens).",
        )
    return made


def text(words: int, seed: str) -> str:
    """So many words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def prompts(work: Workload, size: Sizes, calibration: Calibration) -> list[str]:
    """A prompt per request. Requests whose first k blocks are equal begin with the same words; others differ from the first on.

    A block has as many words as it has tokens in the request that shows it first.
    """
    block_text: dict[int, str] = {}
    made = []
    for i in range(work.n):
        wanted = calibration.words(size.prompt_tokens[i])
        parts: list[str] = []
        have = before = 0
        for j in range(int(work.block_ptr[i]), int(work.block_ptr[i + 1])):
            block, end = int(work.block_id[j]), int(work.block_end[j])
            if block not in block_text:
                n = max(1, round((end - before) * size.scale / calibration.per_word))
                block_text[block] = text(n, f"block {block}")
            before = end
            parts.append(block_text[block])
            have += block_text[block].count(" ") + 1
            if have >= wanted:
                break
        if have < wanted:
            parts.append(text(wanted - have, f"request {work.request[i]}"))
        made.append(" ".join(" ".join(parts).split(" ")[:wanted]))
    return made


def id_prompts(work: Workload, size: Sizes) -> list[list[int]]:
    """A prompt of token ids per request, of exactly the wanted length.

    Requests whose first k blocks are equal begin with the same ids, others differ from the first on. A block has as many ids as
    it has tokens in the request that shows it first.
    """
    block_ids: dict[int, list[int]] = {}
    made = []
    for i in range(work.n):
        wanted = size.prompt_tokens[i]
        ids: list[int] = []
        before = 0
        for j in range(int(work.block_ptr[i]), int(work.block_ptr[i + 1])):
            block, end = int(work.block_id[j]), int(work.block_end[j])
            if block not in block_ids:
                block_ids[block] = _ids(max(1, round((end - before) * size.scale)), f"block {block}")
            before = end
            ids += block_ids[block]
            if len(ids) >= wanted:
                break
        if len(ids) < wanted:
            ids += _ids(wanted - len(ids), f"request {work.request[i]}")
        made.append(ids[:wanted])
    return made


def _ids(n: int, seed: str) -> list[int]:
    return random.Random(seed).choices(TOKEN_IDS, k=n)
