"""Text of a trace (names of servers, models, requests) as it may be shown: nothing in it steers a terminal or breaks XML."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["printable", "printable_tree"]

# Control characters but tab and line ends (ESC begins a terminal's commands), what turns the direction of the text around it
# (U+202A…202E, U+2066…2069), halves of surrogate pairs, and the two that XML has not.
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """``text`` with "\N{REPLACEMENT CHARACTER}" in place of each character that is no text."""
    return _NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)


def printable_tree(value: Any) -> Any:
    """``value`` (of JSON) with every string in it printable, keys too."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_tree(k): printable_tree(v) for k, v in value.items()}
    return [printable_tree(v) for v in value] if isinstance(value, list | tuple) else value
