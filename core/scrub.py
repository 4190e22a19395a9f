"""Copy a trace without what tells where it was recorded: host names become host-1, host-2 …, paths are cut to their base name.

``python -m hoptrace.scrub IN OUT``, before a trace is given away. Process numbers, ports, times, lengths and counts stay: the
copy gives the same figures. Prompts are in no trace, only keyed hashes.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hoptrace.errors import EnvironmentProblem, HoptraceError, InputError, UsageError
from hoptrace.folder import being_written, new_folder
from hoptrace.journal import read_journal
from hoptrace.manifest import Manifest, Part, read_manifest, write_manifest
from hoptrace.parts import checksum, write_part
from hoptrace.schema import TABLES, Table

__all__ = ["scrub"]

_LOCAL = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|::1?")
# Names that tell nothing, and are words of the trace itself: replaced where a host is meant, and nowhere else.
_WORDS = frozenset({"client", "cpu", "engine", "host", "hoptrace", "process", "proxy", "server", "test", "thread"})
# Columns whose values the schema or hoptrace itself chooses.
_OWN = frozenset({"source", "unit", "table", "columns"})
_KEPT = frozenset({"schema_version", "hoptrace_version", "created_utc", "origin", "tables"})
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[^\s\"'<>`]+")
# An absolute path of two parts and more, or one that begins at a home folder or relative to a folder; `/props` tells nothing.
_PART = r"[^\s/\"'`<>|:;,()\[\]{}=]+"
_PATH = re.compile(rf"(?<![\w/.~])(?:(?:~[\w.-]*|\.{{1,2}})(?:/{_PART})+|(?:/{_PART}){{2,}})/?")


def scrub(source: Path | str, target: Path | str) -> Path:
    """Copy the trace ``source`` to ``target`` (it must not exist); returns ``target``.

    Raises:
        InputError: there is no trace, or a file of it is damaged.
        UsageError: something is already at ``target``, or the trace is still being written.
        EnvironmentProblem: the disk refuses; nothing is left.
    """
    source, target = Path(source), Path(target)
    manifest = read_manifest(source)
    if being_written(source):
        raise UsageError(f"{source} is still being written.", hint="Stop the capture first.")
    new_folder(target, "Choose another name, or remove it first.")
    try:
        tables = {name: [(p, _read(source, p)) for p in parts] for name, parts in manifest.tables.items()}
        names = _Names(manifest, (data for parts in tables.values() for _, data in parts if data is not None))
        copy = Manifest.model_validate(names.manifest(manifest.model_dump(mode="json")))
        copy.tables = {}
        for name, parts in tables.items():
            spec = TABLES.get(name) or Table(name, "", ())
            for part, data in parts:
                if data is not None:
                    copy.tables.setdefault(name, []).append(_write(target, part, names.table(data, spec), spec))
        write_manifest(target, copy)
    except OSError as e:
        shutil.rmtree(target, ignore_errors=True)
        raise EnvironmentProblem(f"{target} cannot be written: {e.strerror}.", hint="Free some space and run it again.") from None
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def _read(folder: Path, part: Part) -> pa.Table | None:
    """The rows of one file as they lie there; null if there are none."""
    path = folder / part.file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder / 'manifest.json'} names a file outside the trace: {part.file}.")
    try:
        return read_journal(path).table() if part.kind == "journal" else pq.ParquetFile(path).read()
    except FileNotFoundError:
        raise InputError(f"{path} is missing though the manifest names it.") from None
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"{path} is damaged ({(str(e).splitlines() or [type(e).__name__])[0]}).") from None


def _write(folder: Path, part: Part, data: pa.Table, spec: Table) -> Part:
    file = part.file.removesuffix(".journal").removesuffix(".parquet") + ".parquet"
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = write_part(path, data, spec)
    merged = spec.merge if part.kind == "journal" else part.merged
    return part.model_copy(update={"file": file, "kind": "parquet", "rows": rows, "crc32": checksum(path), "merged": merged})


class _Names:
    """Which host is called what, and how a text reads then. The same name gives the same alias everywhere."""

    def __init__(self, manifest: Manifest, tables: Iterable[pa.Table]) -> None:
        told = [str(h["name"]) for h in manifest.hosts if h.get("name")]
        told += [s.host for s in manifest.servers if s.host]
        told += [host for s in manifest.servers if s.url and (host := _host(s.url))]
        seen: set[str] = set()
        for data in tables:
            if "host" in data.column_names:
                seen.update(v for v in pc.unique(data["host"]).to_pylist() if v)
        self._alias: dict[str, str] = {}
        aliases = 0
        for name in (*told, *sorted(seen)):
            if name.lower() in self._alias or _LOCAL.fullmatch(name):
                continue
            # `node7.example.org` and `node7` are one machine.
            short = name.lower().split(".")[0]
            known = None if short.isdigit() else next((a for n, a in self._alias.items() if n.split(".")[0] == short), None)
            aliases += known is None
            self._alias[name.lower()] = known or f"host-{aliases}"
            if known is None and "." in name and not short.isdigit() and ":" not in name:
                self._alias.setdefault(short, self._alias[name.lower()])
        free = sorted((n for n in self._alias if len(n) > 1 and n not in _WORDS), key=lambda n: (-len(n), n))
        words = "|".join(map(re.escape, free))
        self._host = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE) if free else None
        # Whole paths that are known as such may hold blanks, where no pattern finds their end.
        folders = {s.model_path.rsplit("/", 1)[0] + "/" for s in manifest.servers if s.model_path and s.model_path[0] in "/~"}
        alternatives = "|".join(map(re.escape, sorted((f for f in folders if len(f) > 1), key=lambda f: (-len(f), f))))
        self._folder = re.compile(rf"(?<![\w/.~])(?:{alternatives})") if alternatives else None
        self._done: dict[str, str] = {}

    # -- values -------------------------------------------------------------------------------------------------------

    def host(self, name: str) -> str:
        """A value that is a host's name."""
        return self._alias.get(name.lower(), name)

    def text(self, text: str) -> str:
        """Any other value: names and paths in it are replaced."""
        done = self._done.get(text)
        if done is None:
            pieces, at = [], 0
            for url in _URL.finditer(text):
                pieces += [self._plain(text[at : url.start()]), self._url(url[0])]
                at = url.end()
            done = self._done[text] = "".join([*pieces, self._plain(text[at:])])
        return done

    def _plain(self, text: str) -> str:
        if self._folder is not None:
            text = self._folder.sub("", text)
        return self._hosts(_PATH.sub(_base, text))

    def _hosts(self, text: str) -> str:
        return self._host.sub(lambda m: self._alias[m[0].lower()], text) if self._host is not None else text

    def _url(self, url: str) -> str:
        scheme, rest = url.split("://", 1)
        if scheme.lower() == "file":
            return rest.rstrip("/").rsplit("/", 1)[-1]
        at, slash, path = rest.partition("/")
        return f"{scheme}://{self._hosts(at.rsplit('@', 1)[-1])}{slash}{self._hosts(path)}"

    # -- the whole ----------------------------------------------------------------------------------------------------

    def table(self, data: pa.Table, spec: Table) -> pa.Table:
        """``data`` with its strings replaced; each distinct one is looked at once."""
        chosen = {c.name for c in spec.columns if c.values} | _OWN
        for i, field in enumerate(data.schema):
            if field.name in chosen:
                continue
            replace = self.host if field.name == "host" else self.text
            column = data.column(i).combine_chunks()
            if pa.types.is_string(field.type) or pa.types.is_large_string(field.type):
                new: Any = _mapped(column, replace)
            elif pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):
                new = pa.array([None if v is None else [x if x is None else replace(x) for x in v] for v in column.to_pylist()])
            else:
                continue
            data = data.set_column(i, field, pa.chunked_array([new.cast(field.type)]))
        return data

    def manifest(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest's fields."""
        return {k: v if k in _KEPT else self._value(v, (k,)) for k, v in data.items()}

    def _value(self, value: Any, where: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {self.text(k): self._value(v, (*where, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self._value(v, where) for v in value]
        if not isinstance(value, str):
            return value
        if where[-1] == "host" or where == ("hosts", "name"):
            return self.host(value)
        if where[-1] == "model_path" and "://" not in value:
            return self._hosts(value.rstrip("/").rsplit("/", 1)[-1])
        return self.text(value)


def _mapped(column: pa.Array | pa.ChunkedArray, replace: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    encoded = column.dictionary_encode()
    words = pa.array([replace(v) for v in encoded.dictionary.to_pylist()], type=pa.string())
    return words.take(encoded.indices)


def _base(match: re.Match[str]) -> str:
    """A path's base name; the API's own paths stay."""
    path = match[0]
    return path if path.startswith("/v1/") else path.rstrip("/").rsplit("/", 1)[-1]


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0].startswith("-"):
        print("Usage: python -m hoptrace.scrub IN.trace OUT.trace\n\n" + (__doc__ or ""), file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        print(scrub(arguments[0], arguments[1]))
    except HoptraceError as e:
        print(f"hoptrace: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
