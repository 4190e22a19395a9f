"""What `hoptrace attach --explain` prints: the server, and the plan for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from hoptrace.collectors.context import Options
from hoptrace.collectors.explain import Explained
from hoptrace.collectors.explain import explain as look

__all__ = ["explain"]


async def explain(
    urls: Sequence[str], *, pid: int | Literal["auto"] | None, key: str | None, options: Options, as_json: bool
) -> str:
    """The plan for each server, as text or JSON (one object for one server, a list for several)."""
    found = [await look(url, pid=pid, key=key, options=options) for url in urls]
    if as_json:
        told = [_json(e) for e in found]
        return json.dumps(told[0] if len(told) == 1 else told, indent=1)
    return "\n\n".join(_text(e) for e in found)


def _told(e: Explained) -> dict[str, Any]:
    return {k: v for k, v in e.server.model_dump().items() if v is not None and k != "name"}


def _json(e: Explained) -> dict[str, Any]:
    listed = {name: {"available": f.available, "reason": f.reason} for name, f in e.findings.items()}
    return {"server": _told(e), "collectors": listed, "plan": e.plan.as_json()}


def _text(e: Explained) -> str:
    lines = [f"{e.server.url}: {e.server.engine or 'an OpenAI-compatible server of unknown kind'}"]
    lines += [f"  {name}: {value}" for name, value in _told(e).items() if name not in ("url", "engine", "config")]
    if e.server.config:
        shown = ", ".join(f"{k}={_short(v)}" for k, v in list(e.server.config.items())[:24])
        lines.append(f"  config: {shown}")
    return "\n".join([*lines, e.plan.text()])


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
