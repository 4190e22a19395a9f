"""``manifest.json``: how a trace came to be, what it is made of, and which files belong to it.

The file is replaced whole (write, fsync, rename), so a reader never sees half of one. Readers list the files it names, and never
glob.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hoptrace.errors import InputError
from hoptrace.schema import MAJOR, VERSION

__all__ = [
    "FILE",
    "CollectorInfo",
    "Manifest",
    "Part",
    "ReplayInfo",
    "Server",
    "manifest_text",
    "read_manifest",
    "replace_manifest",
    "write_manifest",
]

FILE = "manifest.json"
_RESTORE = "Restore it from a copy of the trace; the Parquet files beside it are untouched."


class _Model(BaseModel):
    # A newer minor version may add fields: keep what we do not know, so that rewriting a manifest loses nothing.
    model_config = ConfigDict(extra="allow")


class Part(_Model):
    """One file of a table: a closed Parquet part, or the journal in progress."""

    file: str
    rows: int | None = None
    kind: Literal["parquet", "journal"] = "parquet"
    merged: bool = Field(default=False, description="Within this file a table that merges has one row per key.")
    keys: tuple[int, int] | None = Field(default=None, description="Least and greatest key in it, where the key is one number.")
    crc32: int | None = Field(default=None, description="Of the whole closed file: Parquet's own checksums leave out its footer.")


class Server(_Model):
    """One server with its configuration as far as it could be read; null is unknown."""

    name: str
    url: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    model: str | None = None
    model_path: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    heads: int | None = None
    head_size: int | None = None
    hidden_size: int | None = None
    kv_dtype: str | None = None
    max_sequences: int | None = Field(default=None, description="Slots, or max-num-seqs.")
    max_batched_tokens: int | None = None
    context_tokens: int | None = Field(default=None, description="Longest context of one sequence.")
    block_size_tokens: int | None = None
    block_count: int | None = None
    kv_capacity_tokens: int | None = None
    prefix_caching: bool | None = None
    host: str | None = None
    pid: int | None = None
    config: dict[str, Any] = Field(default_factory=dict, description="What else the engine said, as it said it.")


class CollectorInfo(_Model):
    """One collector: what its probe found, what it wrote, what it had to drop and why."""

    name: str
    available: bool
    status: str | None = None
    reason: str | None = None
    remedy: str | None = None
    sees: str | None = None
    rows: int = 0
    dropped: dict[str, int] = Field(default_factory=dict)


class ReplayInfo(_Model):
    """How a replay was made: enough to make it again, and how wrong it is."""

    parent: str
    policy: dict[str, Any]
    cost_model: dict[str, Any]
    seed: int = 0
    arrivals: str = "recorded"
    error: dict[str, Any] | None = Field(
        default=None, description="Relative error under the trace's own policy, by metric and statistic."
    )
    warnings: list[str] = Field(default_factory=list)


class Manifest(_Model):
    """The whole of ``manifest.json``."""

    schema_version: str = VERSION
    hoptrace_version: str = ""
    origin: Literal["recorded", "imported", "replayed"]
    title: str | None = None
    created_utc: str = ""
    utc_offset_ns: int | None = None
    hosts: list[dict[str, Any]] = Field(default_factory=list)
    servers: list[Server] = Field(default_factory=list)
    platform: dict[str, Any] = Field(default_factory=dict)
    collectors: list[CollectorInfo] = Field(default_factory=list)
    imported_from: list[dict[str, Any]] = Field(default_factory=list, description="Source, licence, sha256 of each file.")
    replay: ReplayInfo | None = None
    notes: list[str] = Field(default_factory=list)
    tables: dict[str, list[Part]] = Field(default_factory=dict)
    rows_dropped: dict[str, int] = Field(default_factory=dict, description="Rows lost, by reason.")
    values_dropped: dict[str, int] = Field(
        default_factory=dict, description="Values that their column cannot hold, stored as null."
    )
    closed: bool = False

    def server(self, name: str | None) -> Server | None:
        """The server of that name, or the only one if ``name`` is null."""
        if name is None:
            return self.servers[0] if len(self.servers) == 1 else None
        return next((s for s in self.servers if s.name == name), None)


def read_manifest(folder: Path) -> Manifest:
    """Read a trace folder's manifest; InputError names the file and the remedy."""
    path = folder / FILE
    try:
        raw = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if not folder.exists():
            raise InputError(f"There is no trace at {folder}.", hint="Check the path.") from None
        raise InputError(
            f"{folder} is not a trace: it has no {FILE}.", hint="Name the folder that `hoptrace attach -o` or `import -o` wrote."
        ) from None
    except NotADirectoryError:
        raise InputError(
            f"{folder} is a file; a trace is a folder.", hint="To read other tools' files: hoptrace import."
        ) from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except UnicodeDecodeError as e:
        raise InputError(f"{path} is damaged ({e.reason}).", hint=_RESTORE) from None
    try:
        data = json.loads(raw)
        version = str(data["schema_version"])
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9}){1,2}", version):
            raise KeyError
        major = int(version.split(".")[0])
    except ValueError as e:
        raise InputError(f"{path} is damaged ({e}).", hint=_RESTORE) from None
    except (KeyError, TypeError):
        raise InputError(f"{path} is damaged: it names no schema version.", hint=_RESTORE) from None
    if major > MAJOR:
        raise InputError(
            f"{folder} has schema {version}, newer than this hoptrace reads ({VERSION}).",
            hint="Upgrade: pip install -U hoptrace.",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}.") from None


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON: pure ASCII, unknown left out, numbers that are not finite null."""
    return json.dumps(manifest.model_dump(mode="json", exclude_none=True), indent=1, allow_nan=False) + "\n"


def replace_manifest(folder: Path, text: str, *, into: Path | None = None) -> None:
    """Replace the manifest at one stroke. Raises OSError, with the manifest as it was before.

    ``into``: an existing file of the folder to write it into, whose room on a full disk it takes; it is gone afterwards.
    """
    tmp = into or folder / (FILE + ".tmp")
    try:
        with tmp.open("r+" if into else "w", encoding="ascii") as f:
            f.write(text)
            f.truncate()
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, folder / FILE)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_folder(folder)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest at one stroke. Only for a folder that no writer holds: see :class:`hoptrace.folder.TraceFolder`."""
    replace_manifest(folder, manifest_text(manifest))


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
