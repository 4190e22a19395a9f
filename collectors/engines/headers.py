"""Which HTTP headers a proxy hands on (RFC 9110, section 7.6.1), and which it keeps to itself."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict, CIMultiDictProxy

__all__ = ["to_client", "to_server"]

_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade")
)  # fmt: skip


def _end_to_end(headers: CIMultiDictProxy[str], without: Iterable[str]) -> CIMultiDict[str]:
    named = {w.strip().lower() for v in headers.getall("connection", ()) for w in v.split(",")}
    drop = _HOP_BY_HOP | named | set(without)
    return CIMultiDict((k, v) for k, v in headers.items() if k.lower() not in drop)


def to_server(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers of the request to the server: hoptrace's own are taken out, and the answer is asked for uncompressed, so that its
    chunks can be read."""
    out = _end_to_end(headers, ("host", "expect", "accept-encoding"))
    for name in [k for k in out if k.lower().startswith("x-hoptrace-")]:
        out.popall(name, None)
    out["Accept-Encoding"] = "identity"
    return out


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers of the answer to the client."""
    return _end_to_end(headers, ())
