"""Short questions to a server's HTTP interface: an answer, or why there is none. Nothing raises for what a server does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from hoptrace.errors import UsageError

__all__ = ["Api", "Reply", "base_url"]

_LIMIT_BYTES = 16 << 20


def base_url(url: str) -> str:
    """``url`` as scheme, host, port and perhaps a path, without a trailing ``/v1``.

    Raises:
        UsageError: it is no URL of a server.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        # A bare word is a mistake rather than a host: those have a port, a dot or a scheme.
        named = "://" in url or parts.port is not None or "." in (parts.hostname or "") or parts.hostname == "localhost"
        usable = named and parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = None
    if not usable:
        raise UsageError(f"{url} is not the URL of a server.", hint="Write it like http://127.0.0.1:8000.")
    return f"{parts.scheme}://{parts.netloc.rsplit('@', 1)[-1]}{parts.path.rstrip('/').removesuffix('/v1')}"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: ``status`` is null where there was none, and ``problem`` says why: refused, unknown host, timeout, not HTTP.

    ``headers`` by their names in lower case; of a repeated one the last. ``cut``: the body went on beyond 16 MiB.
    """

    status: int | None
    body: bytes = b""
    problem: str | None = None
    server: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def denied(self) -> bool:
        """It wants a key, or another one."""
        return self.status in (401, 403)

    def why(self, path: str, off: str = "is not there") -> str:
        """Why there is nothing to read, and what would help. ``off``: what a 404 or 501 means here."""
        if self.denied:
            return f"{path} needs the server's API key: name the variable that holds it with --key-env"
        if self.status in (404, 405, 501):
            return f"{path} {off}"
        return f"{path}: {self.problem or f'HTTP {self.status}'}"

    def json(self) -> Any:
        """The body as JSON; null if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class Api:
    """Asks one server. ``key`` goes out as a bearer token and is kept nowhere else."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, timeout_s: float = 15.0) -> Reply:
        """GET ``path``; each question has a connection of its own, since servers close idle ones."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True), headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        try:
            limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
            async with self._session.get(self.url + path, timeout=limits, allow_redirects=False) as answer:
                parts, size = [], 0
                while size < _LIMIT_BYTES and (more := await answer.content.read(_LIMIT_BYTES - size)):
                    parts.append(more)
                    size += len(more)
                headers = {k.lower(): v for k, v in answer.headers.items()}
                return Reply(answer.status, b"".join(parts), None, headers.get("server", ""), headers, size >= _LIMIT_BYTES)
        except aiohttp.ClientConnectorDNSError:
            return Reply(None, problem="unknown host")
        except aiohttp.ClientConnectorError as e:
            refused = isinstance(e.os_error, ConnectionRefusedError)
            return Reply(None, problem="refused" if refused else f"unreachable ({e.os_error.strerror or e.os_error})")
        except TimeoutError:
            return Reply(None, problem="timeout")
        except aiohttp.ClientError:
            return Reply(None, problem="not HTTP")
        except OSError as e:
            return Reply(None, problem=f"unreachable ({e.strerror or e})")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
