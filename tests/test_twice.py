"""One server under two names: refused before anything is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.toy_server import Toy, serve

from hoptrace.collectors.session import Session
from hoptrace.collectors.twice import refuse_twice
from hoptrace.errors import UsageError

MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


@pytest.mark.parametrize(
    ("urls", "wire"),
    [
        (("http://127.0.0.1:8000", "http://127.0.0.1:8000"), False),
        (("http://localhost:8000", "http://127.0.0.1:8000"), False),
        (("http://127.0.0.1", "http://localhost:80"), False),
        (("http://Gone.invalid:8000", "http://gone.invalid.:8000"), False),
        (("http://127.0.0.1:1", "http://127.0.0.1:2", "http://localhost:1"), True),
        (("http://127.0.0.1:8000/a", "http://127.0.0.1:8000/b"), True),  # a packet tells no path of a server
        (("http://127.0.0.1:8000", "http://127.0.0.2:8000"), True),  # on the wire all addresses of this machine are one
    ],
)
def test_one_server_twice(urls: tuple[str, ...], wire: bool) -> None:
    with pytest.raises(UsageError, match="counted twice"):
        refuse_twice(urls, wire=wire)


@pytest.mark.parametrize(
    ("urls", "wire"),
    [
        (("http://127.0.0.1:8000", "http://127.0.0.1:8001"), True),
        (("http://127.0.0.1:8000/a", "http://127.0.0.1:8000/b"), False),
        (("http://127.0.0.1:8000", "http://127.0.0.2:8000"), False),
        (("http://192.0.2.1:8000", "http://192.0.2.2:8000"), True),
        (("http://127.0.0.1:8000",), True),
    ],
)
def test_several_servers(urls: tuple[str, ...], wire: bool) -> None:
    refuse_twice(urls, wire=wire)


def _get(request: web.BaseRequest) -> web.Response | None:
    return web.Response(body=MODELS) if request.path == "/v1/models" else None


@pytest.mark.parametrize("outside", [{"proxy": ("127.0.0.1", 0)}, {"sniff": ("any", 1)}, {}])
async def test_a_session_of_one_server_twice_leaves_nothing(tmp_path: Path, outside: dict[str, Any]) -> None:
    out = tmp_path / "t.trace"
    async with serve(Toy(get=_get)) as server:
        urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
        with pytest.raises(UsageError, match="counted twice"):
            async with Session(urls, out, pid=None, **outside):
                pass
    assert not out.exists()


async def test_a_port_to_sniff_that_no_url_has(tmp_path: Path) -> None:
    async with serve(Toy(get=_get)) as a, serve(Toy(get=_get)) as b:
        with pytest.raises(UsageError, match="none of the URLs"):
            async with Session([a.url, b.url], tmp_path / "t.trace", sniff=("any", 1), pid=None):
                pass
