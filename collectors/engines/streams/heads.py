"""What a transparent proxy changes in the requests that pass: their heads, as little as can be.

The host becomes the server's, a path before ``/v1`` is added where the client left it out, the absolute form of a target becomes
the plain one, what is meant for a proxy (``x-hoptrace-…``, ``Proxy-…``, headers that ``Connection`` names) is taken out. Bodies,
and whatever is no well-formed HTTP/1.1, pass as they are: the server is to say what it says to a client that comes directly.
Each client has its own connection to the server, so ``Connection``, ``Keep-Alive``, ``Transfer-Encoding`` and ``Expect`` mean
on one what they mean on the other, and stay.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["HEAD_LIMIT_BYTES", "Heads"]

HEAD_LIMIT_BYTES = 1 << 16
_END = re.compile(rb"\r?\n\r?\n")
_START = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) (HTTP/1\.[01])")
_KEPT = frozenset((b"close", b"keep-alive", b"upgrade", b"te", b""))
_MEANT_FOR_PROXIES = (b"proxy-connection", b"proxy-authorization", b"http2-settings")
_SIZE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,16})[ \t]*(;.*)?\r?")


class Heads:
    """The client's side of one connection. ``authority``: host and port of the server."""

    def __init__(self, authority: str, prefix: str = "") -> None:
        self._authority = authority.encode("latin-1")
        self._prefix = prefix.encode("latin-1")
        self._held = bytearray()
        self._left = 0
        self._chunks: _Chunks | None = None
        self.raw = False
        self.begun = 0
        self.ended = 0
        self.expects = False
        self.method = b""
        self.switching = False

    @property
    def held(self) -> int:
        """Bytes that wait for the rest of a head, or for the server's word on another protocol."""
        return len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Bytes of the client; gives those that go on now."""
        if self.raw:
            return data
        if not self._held and len(data) <= self._left and not self.switching:
            self._body(len(data))  # the usual case in a long body
            return data
        self._held += data
        return self._advance()

    def answered(self, data: bytes) -> bytes:
        """The server's first bytes after a request for another protocol; gives what may go on now."""
        self.switching = False
        self.raw = data.startswith((b"HTTP/1.1 101", b"HTTP/1.0 101"))
        return self._all() if self.raw else self._advance()

    def _all(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return held

    def _advance(self) -> bytes:
        out: list[bytes] = []
        while self._held and not self.switching:
            if self.raw:
                out.append(self._all())
            elif self._left:
                piece = bytes(self._held[: self._left])
                del self._held[: len(piece)]
                self._body(len(piece))
                out.append(piece)
            elif self._chunks is not None:
                n = self._chunks.feed(self._held)
                out.append(bytes(self._held[:n]))
                del self._held[:n]
                self.raw = self._chunks.broken
                if self._chunks.over:
                    self._chunks = None
                    self.ended += 1
                elif not self.raw:
                    break
            elif not self._head(out):
                break
        return b"".join(out)

    def _body(self, n: int) -> None:
        if n:
            self._left -= n
            if not self._left:
                self.ended += 1

    def _head(self, out: list[bytes]) -> bool:
        """Take a head off what is held; gives whether there was a whole one (or it turned out to be none)."""
        blank = len(self._held) - len(self._held.lstrip(b"\r\n"))
        if blank:
            out.append(bytes(self._held[:blank]))
            del self._held[:blank]
            if not self._held:
                return False
        found = _END.search(self._held)
        if found is None:
            # No server takes a head that long; and this one is not ours to answer.
            self.raw = len(self._held) > HEAD_LIMIT_BYTES
            return self.raw
        head = bytes(self._held[: found.end()])
        rewritten = self._rewrite(head)
        if rewritten is None:
            self.raw = True
            return True
        del self._held[: found.end()]
        out.append(rewritten)
        return True

    def _rewrite(self, head: bytes) -> bytes | None:
        start, *lines = head.split(b"\n")
        told = _START.fullmatch(start.rstrip(b"\r"))
        if told is None:
            return None
        headers: list[tuple[bytes, bytes, bytes]] = []
        for line in lines:
            name, colon, value = line.partition(b":")
            if line.strip(b"\r"):
                if not colon or not name or name.strip() != name:
                    return None  # folded or malformed
                headers.append((name.lower(), value.strip(), line))
        length, chunked, named, upgrade = 0, False, set(), b""
        for name, value, _ in headers:
            if name == b"content-length":
                if not value.isdigit():
                    return None
                length = int(value)
            elif name == b"transfer-encoding":
                chunked |= b"chunked" in value.lower()
            elif name == b"connection":
                named |= {w.strip().lower() for w in value.split(b",")} - _KEPT
            elif name == b"upgrade":
                upgrade = value.lower()
        # HTTP/2 on an unencrypted connection could not be read; whoever offers it goes on in HTTP/1.1 if it is not taken up.
        plain = upgrade.startswith(b"h2")
        out = [b" ".join((told[1], self._target(told[1], told[2]), told[3])) + start[len(start.rstrip(b"\r")) :]]
        for name, value, line in headers:
            if name.startswith(b"x-hoptrace-") or name in named or name in _MEANT_FOR_PROXIES or (plain and name == b"upgrade"):
                continue
            if name == b"host":
                line = line[:4] + b": " + self._authority + line[len(line.rstrip(b"\r")) :]
            elif name == b"connection":
                words = [w.strip() for w in value.split(b",")]
                kept = [w for w in words if w.lower() in _KEPT - {b""} and not (plain and w.lower() == b"upgrade")]
                if kept != words:
                    if not kept:
                        continue
                    line = line[:10] + b": " + b", ".join(kept) + line[len(line.rstrip(b"\r")) :]
            out.append(line)
        self._begin(told[1], length, chunked, bool(upgrade) and not plain, headers)
        ending = b"\r\n" if head.endswith(b"\r\n") else b"\n"
        return b"\n".join(out) + b"\n" + ending

    def _begin(
        self, method: bytes, length: int, chunked: bool, switching: bool, headers: list[tuple[bytes, bytes, bytes]]
    ) -> None:
        self.begun += 1
        self.method = method
        self.expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value, _ in headers)
        if chunked:
            self._chunks = _Chunks()
        elif length:
            self._left = length
        else:
            self.ended += 1
        self.raw = method == b"CONNECT"
        self.switching = switching and not chunked and not length

    def _target(self, method: bytes, target: bytes) -> bytes:
        if method == b"CONNECT":
            return target
        if b"://" in target.split(b"?", 1)[0]:  # a client that takes us for a forward proxy
            parts = urlsplit(target)
            target = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        if self._prefix and target.startswith(b"/") and not target.startswith(self._prefix + b"/"):
            target = self._prefix + target
        return target


class _Chunks:
    """Finds the end of a body in chunks (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._left = 0
        self._trailer = False
        self.over = self.broken = False

    def feed(self, data: bytearray) -> int:
        """How many of these bytes belong to the body and can go on; what is left waits for more."""
        at = 0
        while at < len(data) and not self.over:
            if self._left:
                n = min(self._left, len(data) - at)
                self._left -= n
                at += n
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self.broken = len(data) - at > HEAD_LIMIT_BYTES
                break
            line = bytes(data[at:end]).rstrip(b"\r")
            at = end + 1
            if self._trailer:
                self.over = not line
            elif line:
                size = _SIZE.fullmatch(line)
                if size is None:
                    self.broken = True
                    break
                self._left = int(size[1], 16)
                self._trailer = not self._left
        return at
