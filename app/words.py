"""Foreign text as people read it. Figures become text in :mod:`hoptrace.analysis.text`, as in the terminal's report.

Foreign text (request ids, model names, errors, a trace's name) goes through :func:`plain` before it meets Markdown.
"""

from __future__ import annotations

import re
import string

from hoptrace.analysis.text import count_text

__all__ = ["per_second", "plain", "signed_percent"]

_LONGEST = 300
_PUNCTUATION = re.compile("([" + re.escape(string.punctuation) + "])")


def plain(text: object, longest: int = _LONGEST) -> str:
    """Text that Markdown shows as it is: one line, at most ``longest`` characters, all punctuation escaped."""
    line = " ".join(str(text).split())
    line = "".join(c for c in line if c.isprintable())
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    # Streamlit reads :name: and :name[…] after Markdown has unescaped: a word joiner keeps them from being seen.
    return _PUNCTUATION.sub(r"\\\1", line).replace("\\:", "\\:\u2060")


def per_second(value: float | None, what: str) -> str:
    """12.3 tokens/s."""
    return "–" if value is None else f"{count_text(value)} {what}/s"


def signed_percent(share: float | None) -> str:
    """0.123 as +12.3 %."""
    return "–" if share is None else f"{share:+.1%}"
