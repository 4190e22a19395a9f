"""Live replay: send a workload to an OpenAI-compatible server, at its own times, and see what comes back.

An open loop: a request is sent at its time whatever became of the others, so that a slow server shows as waiting and not as less
load. The times that hoptrace's proxy cannot see (when a request was meant to be sent, and when it was) travel in headers.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import numpy as np

from hoptrace.clock import TraceClock
from hoptrace.errors import EnvironmentProblem, UsageError
from hoptrace.openai_stream import StreamDecoder
from hoptrace.reader import Trace
from hoptrace.replay.prompts import Calibration, Sizes, id_prompts, prompts, sizes, text
from hoptrace.replay.workload import Workload, workload
from hoptrace.sse import SSEParser

__all__ = ["INTENDED", "SENT", "SESSION", "DriveResult", "Sent", "drive", "drive_until_stopped"]

INTENDED = "x-hoptrace-intended-ns"
SENT = "x-hoptrace-sent-ns"
SESSION = "x-session-id"
_START_S = 0.2  # between the last preparation and the first request
_CONNECT_S = 10.0
_PROBE_S = 60.0
_OURS = ("prompt", "max_tokens", "stream")


@dataclass(frozen=True, slots=True)
class Sent:
    """One request that was sent: times on the trace clock; null where it did not come so far."""

    request: int
    intended_ns: int
    sent_ns: int | None = None
    first_token_ns: int | None = None
    finish_ns: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None


@dataclass
class DriveResult:
    """What a drive did. ``calibration``: tokens for words as the server counts them; ``stopped``: whether it was cut short."""

    records: list[Sent] = field(default_factory=list)
    planned: int = 0
    calibration: Calibration = field(default_factory=Calibration)
    model: str | None = None
    stopped: bool = False

    @property
    def sent(self) -> int:
        """Requests sent."""
        return len(self.records)

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return len(self.errors)

    @property
    def errors(self) -> list[str]:
        """Why, one per failed request, in the order of the requests."""
        return [s.error for s in self.records if s.error is not None]

    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by reason."""
        found: dict[str, int] = {}
        for error in self.errors:
            found[error] = found.get(error, 0) + 1
        return dict(sorted(found.items()))

    def as_dict(self) -> dict[str, Any]:
        """Figures for people and JSON. Lateness: sent − intended, the generator's own delay."""
        done = [s for s in self.records if s.error is None and s.finish_ns is not None]
        late = [s.sent_ns - s.intended_ns for s in self.records if s.sent_ns is not None]
        return {
            "planned": self.planned,
            "sent": self.sent,
            "finished": len(done),
            "failed": self.failed,
            "failures": self.failures,
            "stopped": self.stopped,
            "model": self.model,
            "prompt_tokens": _sum([s.prompt_tokens for s in done]),
            "output_tokens": _sum([s.output_tokens for s in done]),
            "ttft_ns": _stats([s.first_token_ns - s.intended_ns for s in done if s.first_token_ns is not None]),
            "e2e_ns": _stats([s.finish_ns - s.intended_ns for s in done if s.finish_ns is not None]),
            "lateness_ns": _stats(late),
        }


def drive_until_stopped(work: Workload | Trace, url: str, **options: Any) -> DriveResult:
    """:func:`drive`, run to its end; Ctrl-C stops it and gives what there is by then."""
    result = DriveResult()
    try:
        asyncio.run(drive(work, url, result=result, **options))
    except KeyboardInterrupt:
        result.stopped = True
    result.records.sort(key=lambda s: s.request)
    return result


async def drive(
    work: Workload | Trace,
    url: str,
    *,
    rate: Fraction | float = 1,
    limit: int | None = None,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    max_concurrency: int = 1024,
    timeout_s: float = 600.0,
    model: str | None = None,
    token_ids: bool = False,
    body: Mapping[str, Any] | None = None,
    name: str | None = None,
    progress: Callable[[int], None] | None = None,
    result: DriveResult | None = None,
) -> DriveResult:
    """Send a workload to the server at ``url`` (streaming ``/v1/completions``) and wait for the answers.

    Prompts are made of real words with about the wanted tokens (the server's own tokenizer is asked), or of token ids; answers
    have exactly ``output_tokens``, where the server knows ``ignore_eos``. A request's ``priority`` goes with it.

    Args:
        rate: 1.5 for arrivals one and a half times as fast.
        limit: only the first so many requests.
        prompt_scale, output_scale, max_prompt_tokens, max_output_tokens: lengths for a smaller machine.
        max_concurrency: requests on their way at once; more wait here, and their lateness is reported.
        timeout_s: a request that takes longer has failed.
        token_ids: prompts are lists of ids, of exactly the wanted length; also for servers without a tokenizer (vLLM, SGLang).
        body: further fields of each request's body; ``temperature`` and the like are overridden.
        name: the first part of each request's id; else one drawn for this drive. The same name in two drives of one workload
            gives a request the same id in both recordings.
        progress: told how many requests have come to their end.
        result: filled as it goes, for those who may have to stop.

    Raises:
        UsageError: ``url`` is no URL, a length or the timeout is not possible, or ``body`` sets what the workload sets.
        EnvironmentProblem: nobody answers at ``url``, or no OpenAI-compatible server.
    """
    if not 0 < timeout_s < float("inf"):
        raise UsageError(f"A timeout of {timeout_s} s is not possible.", hint="Give a positive number of seconds.")
    if ours := [k for k in _OURS if k in (body or {})]:
        raise UsageError(f"{ours[0]!r} of a request's body comes from the trace.", hint="Give other fields.")
    if name is not None and not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII):
        raise UsageError(f"{name[:60]!r} cannot be part of a request's id.", hint="Use letters, digits, . _ and -.")
    base = _base(url)
    out = result if result is not None else DriveResult()
    work = (workload(work) if isinstance(work, Trace) else work).at_rate(rate)
    if limit is not None and limit < work.n:
        work = work.take(np.arange(limit))
    size = sizes(work, prompt_scale=prompt_scale, output_scale=output_scale, max_prompt_tokens=max_prompt_tokens,
                 max_output_tokens=max_output_tokens)  # fmt: skip
    out.planned = work.n
    # llama.cpp closes idle connections after some seconds, and a request that meets the closing is lost: one each.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        out.model = model or await _model(session, base)
        made: list[Any]
        if token_ids:
            made = id_prompts(work, size)
        else:
            out.calibration = await _calibrate(session, base, out.model)
            made = prompts(work, size, out.calibration)
        # Unlike any other drive's: two of them may meet in one capture.
        run = name or secrets.token_hex(4)
        await _send_all(session, base, work, size, made, run, dict(body or {}), max_concurrency, timeout_s, progress, out)
    return out


async def _send_all(
    session: aiohttp.ClientSession,
    base: str,
    work: Workload,
    size: Sizes,
    made: list[Any],
    run: str,
    more: dict[str, Any],
    max_concurrency: int,
    timeout_s: float,
    progress: Callable[[int], None] | None,
    out: DriveResult,
) -> None:
    clock = TraceClock.start()
    places = asyncio.Semaphore(max_concurrency)
    begin = clock.now_ns() + int(_START_S * 1e9)
    first = int(work.arrival_ns[0])

    async def one(i: int, intended: int) -> None:
        async with places:
            body = {
                "model": out.model, "prompt": made[i], "max_tokens": size.output_tokens[i], "stream": True, "temperature": 0,
                "ignore_eos": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            if work.priority is not None:
                body["priority"] = int(work.priority[i])
            body |= more
            number = int(work.request[i])
            headers = {"x-request-id": f"hoptrace-{run}-{number}", INTENDED: str(intended), "Accept": "text/event-stream"}
            if work.session and (talk := work.session[i]) is not None:
                headers[SESSION] = quote(talk)
            out.records.append(await _send(session, base, body, headers, number, intended, clock, timeout_s))
        if progress:
            progress(out.sent)

    async with asyncio.TaskGroup() as tasks:
        for i in range(work.n):
            intended = begin + int(work.arrival_ns[i]) - first
            await asyncio.sleep(max(0.0, (intended - clock.now_ns()) / 1e9))
            tasks.create_task(one(i, intended))
    out.records.sort(key=lambda s: s.request)


async def _send(
    session: aiohttp.ClientSession,
    base: str,
    body: dict[str, Any],
    headers: dict[str, str],
    number: int,
    intended: int,
    clock: TraceClock,
    timeout_s: float,
) -> Sent:
    seen: dict[str, Any] = {"request": number, "intended_ns": intended, "sent_ns": clock.now_ns()}
    headers = headers | {SENT: str(seen["sent_ns"])}
    parser, decoder = SSEParser(), StreamDecoder()
    count = 0
    try:
        async with session.post(f"{base}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                return Sent(**seen, finish_ns=clock.now_ns(), error=await _refusal(answer))
            done = False
            async for data in answer.content.iter_any():
                now = clock.now_ns()
                for event in parser.feed(data):
                    chunk = decoder.event(event)
                    done |= chunk.done
                    if chunk.error is not None:
                        return Sent(**seen, finish_ns=now, error=f"the stream says: {chunk.error[:120]}")
                    if any(e.count != 0 for e in chunk.emissions):
                        seen.setdefault("first_token_ns", now)
                        count += sum(e.count or 1 for e in chunk.emissions)
                    if chunk.usage is not None and chunk.usage.prompt is not None:
                        seen["prompt_tokens"] = chunk.usage.prompt
                        seen["output_tokens"] = chunk.usage.output
            seen["finish_ns"] = clock.now_ns()
            seen.setdefault("output_tokens", count)
            if not done and "prompt_tokens" not in seen:
                return Sent(**seen, error="the stream broke off")
            return Sent(**seen)
    except TimeoutError:
        return Sent(**seen, error=f"no answer within {timeout_s:g} s")
    except aiohttp.ClientError as e:
        seen.pop("finish_ns", None)
        return Sent(**seen, error=_plain(e))


async def _refusal(answer: aiohttp.ClientResponse) -> str:
    try:
        data = await answer.json(content_type=None)
        error = data.get("error", data) if isinstance(data, dict) else data
        words = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, aiohttp.ClientError):
        words = None
    return f"HTTP {answer.status}" + (f": {str(words)[:120]}" if words else "")


def _base(url: str) -> str:
    """The server's address without a path that stands for the protocol."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # .port raises if it is none
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"{url!r} is not a URL of a server.", hint="Write http://HOST:PORT.")
    return url.rstrip("/").removesuffix("/v1")


async def _model(session: aiohttp.ClientSession, base: str) -> str | None:
    """The first model that the server names; also the proof that it is there and speaks the protocol."""
    try:
        async with session.get(f"{base}/v1/models", timeout=aiohttp.ClientTimeout(total=_PROBE_S, sock_connect=_CONNECT_S)) as a:
            data = await a.json(content_type=None) if a.status == 200 else None
    except (aiohttp.ClientConnectorError, TimeoutError, aiohttp.ServerDisconnectedError) as e:
        raise EnvironmentProblem(
            f"Nobody answers at {base} ({_plain(e)}).", hint="Start the server, or check the port."
        ) from None
    except aiohttp.InvalidURL:
        raise UsageError(f"{base!r} is not a URL.", hint="Write http://HOST:PORT.") from None
    except (ValueError, aiohttp.ClientError) as e:
        raise EnvironmentProblem(f"{base} does not speak the OpenAI protocol ({_plain(e)}).") from None
    models = data.get("data") if isinstance(data, dict) else None
    if not isinstance(models, list) or not models or not isinstance(models[0], dict):
        raise EnvironmentProblem(
            f"{base} is not an OpenAI-compatible server: /v1/models names no model.", hint="Give the URL without a path."
        )
    return str(models[0].get("id"))


async def _calibrate(session: aiohttp.ClientSession, base: str, model: str | None) -> Calibration:
    """How many tokens the server makes of words: two texts, by its /tokenize, else by the usage of one-token requests."""
    few, many = 32, 160
    seed = f"calibrate {time.time_ns()}"
    counts = []
    for n in (few, many):
        t = text(n, seed)
        counts.append(await _tokenized(session, base, model, t) or await _used(session, base, model, t))
    a, b = counts
    if a is None or b is None or b <= a:
        return Calibration()
    per_word = (b - a) / (many - few)
    return Calibration(a - per_word * few, per_word)


async def _tokenized(session: aiohttp.ClientSession, base: str, model: str | None, prompt: str) -> int | None:
    # llama.cpp takes `content` (and adds a start token only if asked), vLLM `prompt`.
    body = {"content": prompt, "add_special": True, "model": model, "prompt": prompt}
    data = await _post(session, f"{base}/tokenize", body)
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("count"), int):
        return int(data["count"])
    return len(data["tokens"]) if isinstance(data.get("tokens"), list) else None


async def _used(session: aiohttp.ClientSession, base: str, model: str | None, prompt: str) -> int | None:
    data = await _post(session, f"{base}/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    usage = data.get("usage") if isinstance(data, dict) else None
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    try:
        limit = aiohttp.ClientTimeout(total=_PROBE_S, sock_connect=_CONNECT_S)
        async with session.post(url, json=body, timeout=limit) as answer:
            return await answer.json(content_type=None) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


def _plain(e: BaseException) -> str:
    if isinstance(e, aiohttp.ClientConnectorError):
        return os.strerror(e.os_error.errno) if e.os_error.errno else "cannot connect"
    if isinstance(e, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    if isinstance(e, aiohttp.ClientPayloadError):
        return "the stream broke off"
    return str(e).splitlines()[0][:120] if str(e) else type(e).__name__


def _sum(values: list[int | None]) -> int | None:
    return None if any(v is None for v in values) else sum(v for v in values if v is not None)


def _stats(values: list[int]) -> dict[str, int] | None:
    if not values:
        return None
    p = np.percentile(np.array(values, dtype=np.float64), [50, 95, 99])
    return {"mean": round(sum(values) / len(values)), **{f"p{q}": round(float(v)) for q, v in zip((50, 95, 99), p, strict=True)}}
