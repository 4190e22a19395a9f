"""Walk a JSON document on the disk without holding it: what an object's members and an array's elements are, one at a time.

Benchmarks write one document with everything in it, generated text too. Here only the values that are asked for are parsed; the
rest is stepped over, and a document that ends too early is read as far as it goes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from hoptrace.collectors.files.base import Sink
from hoptrace.errors import EnvironmentProblem, InputError

__all__ = ["Buffer", "Cut", "Malformed", "document", "elements", "load", "members", "one_line", "roots", "starts", "whole_object"]

Buffer: TypeAlias = "mmap.mmap | bytes"

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\r\n,\]}:]++")
# One set of bytes is searched several times as fast as a choice of patterns.
_STOP = re.compile(rb'["\[\]{}]')
_COPY_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_QUOTE, _COMMA, _COLON = b'"', b",", b":"


class Cut(Exception):
    """The document ends inside a value; ``at`` is the byte where that value begins."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class Malformed(Exception):
    """What stands at byte ``at`` is no JSON."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


@contextlib.contextmanager
def document(sink: Sink) -> Iterator[Buffer]:
    """The sink's file as bytes that are paged in as they are looked at; a compressed file is unpacked to a temporary one.

    Raises:
        InputError: it cannot be read, or something in it is no JSON (names the byte).
    """
    with tempfile.TemporaryFile() as plain:
        with sink.open() as file:
            try:
                while piece := file.read(_COPY_BYTES):
                    plain.write(piece)
                plain.flush()
            except OSError as e:
                raise EnvironmentProblem(
                    f"A copy of {sink.path} cannot be made in {tempfile.gettempdir()}: {e.strerror}.",
                    hint="Make room there, or set TMPDIR to a folder that has some.",
                ) from None
        if not plain.tell():
            yield b""
            return
        buffer = mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            yield buffer
        except Malformed as e:
            raise InputError(_malformed(sink.path, e.at), hint="Copy it again from where the benchmark wrote it.") from None
        finally:
            with contextlib.suppress(BufferError):
                buffer.close()


def _malformed(path: Path, at: int) -> str:
    return f"{path} is not JSON at byte {at:,}."


def roots(buffer: Buffer) -> Iterator[int]:
    """Where each document of the file begins: one, or one after another (JSON lines, a benchmark that appends)."""
    at = len(_BOM) if buffer[:3] == _BOM else 0
    while (at := _space(buffer, at)) < len(buffer):
        yield at
        at = _end(buffer, at)


def members(buffer: Buffer, at: int) -> Iterator[tuple[str, int]]:
    """Name and place of each member of the object at ``at``. One whose value is cut is given before :class:`Cut` is raised."""
    yield from _inside(buffer, at, named=True)


def elements(buffer: Buffer, at: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each whole element of the array at ``at``; :class:`Cut` where the document ends inside it."""
    for _, begin in _inside(buffer, at, named=False):
        yield begin, _end(buffer, begin)


def starts(buffer: Buffer, at: int) -> Iterator[int]:
    """Where each element of the array at ``at`` begins, one that is cut included, before :class:`Cut` is raised."""
    for _, begin in _inside(buffer, at, named=False):
        yield begin


def load(buffer: Buffer, at: int, end: int | None = None) -> Any:
    """The value at ``at``, parsed (NaN and Infinity as Python's json has them).

    Raises:
        Cut: the document ends inside it.
        Malformed: it is no JSON.
    """
    end = _end(buffer, at) if end is None else end
    try:
        return json.loads(buffer[at:end])
    except (ValueError, RecursionError):
        raise Malformed(at) from None


def whole_object(sink: Sink) -> dict[str, Any]:
    """A small file's one object.

    Raises:
        InputError: it is cut off, no JSON, or no object.
    """
    with document(sink) as buffer:
        try:
            found = load(buffer, next(roots(buffer), 0))
        except Cut:
            raise InputError(f"{sink.path} is cut off: it ends inside a value.", hint="Copy it again.") from None
    if not isinstance(found, dict):
        raise InputError(f"{sink.path} does not hold a JSON object.")
    return found


def one_line(text: object, most: int = 200) -> str | None:
    """An error's text as one short sentence: the last line of a traceback; null if there is none."""
    if not isinstance(text, str) or not text.strip():
        return None
    line = text.strip().splitlines()[-1].strip().encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return line[: most - 1] + "…" if len(line) > most else line


def _inside(buffer: Buffer, at: int, *, named: bool) -> Iterator[tuple[str, int]]:
    begin = at
    if buffer[at : at + 1] != (b"{" if named else b"["):
        raise Malformed(at)
    at = _space(buffer, at + 1)
    if buffer[at : at + 1] == (b"}" if named else b"]"):
        return
    while True:
        name = ""
        if named:
            end = _end(buffer, at)
            name = str(load(buffer, at, end))
            at = _space(buffer, end)
            _expect(buffer, at, _COLON, begin)
            at = _space(buffer, at + 1)
        if at >= len(buffer):
            raise Cut(begin)
        yield name, at
        at = _space(buffer, _end(buffer, at))
        if at >= len(buffer):
            raise Cut(begin)
        if buffer[at : at + 1] in (b"}", b"]"):
            return
        _expect(buffer, at, _COMMA, begin)
        at = _space(buffer, at + 1)


def _expect(buffer: Buffer, at: int, byte: bytes, begin: int) -> None:
    if at >= len(buffer):
        raise Cut(begin)
    if buffer[at : at + 1] != byte:
        raise Malformed(at)


def _space(buffer: Buffer, at: int) -> int:
    found = _SPACE.match(buffer, at)
    return found.end() if found else at


def _end(buffer: Buffer, at: int) -> int:
    """Where the value at ``at`` ends."""
    first = buffer[at : at + 1]
    if not first:
        raise Cut(at)
    if first == _QUOTE:
        found = _STRING.match(buffer, at)
        if found is None:
            raise Cut(at)
        return found.end()
    if first not in (b"[", b"{"):
        found = _SCALAR.match(buffer, at)
        if found is None:
            raise Malformed(at)
        return found.end()
    depth, begin = 0, at
    stop = _STOP.search(buffer, at)
    while stop is not None:
        token, at = stop.group(), stop.end()
        if token == _QUOTE:
            string = _STRING.match(buffer, at - 1)
            if string is None:
                raise Cut(at - 1)
            at = string.end()
        elif token in (b"[", b"{"):
            depth += 1
        else:
            depth -= 1
            if not depth:
                return at
        stop = _STOP.search(buffer, at)
    raise Cut(begin)
