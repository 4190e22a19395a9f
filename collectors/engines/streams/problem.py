"""What the proxy itself says to a client, where there is no server to say it."""

from __future__ import annotations

import json

__all__ = ["problem"]

_REASONS = {502: "Bad Gateway"}


def problem(status: int, why: str, *, body: bool = True) -> bytes:
    """A whole answer that ends the connection, in the form that OpenAI-compatible clients read."""
    told = {"error": {"message": f"hoptrace proxy: {why}.", "type": "proxy_error", "code": status}}
    data = json.dumps(told).encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (data if body else b"")
