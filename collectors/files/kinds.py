"""The kinds of files there are, one module a line. The first that knows a file's beginning reads it: narrow kinds come first."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from hoptrace.collectors.files.base import Importer
from hoptrace.collectors.files.raw import head, packed
from hoptrace.errors import InputError, UsageError

__all__ = ["ARRAY", "MODULES", "importers", "kind_of"]

# Modules of this folder that have an IMPORTER.
MODULES = (
    "pcap",
    "otlp_json",
    "vllm_bench",
    "sglang_bench",
    "aiperf",
    "aiperf_figures",
    "genai_perf",
    "guidellm",
    "inference_perf",
    "llmperf",
    "aibrix",
    "vllm_vcr",
    "llmservingsim_run",
    "sglang_export_file",
    "llamacpp_log_file",
    "vllm_log_file",
    "request_csv",
    "burstgpt",
    "bailian",
    "llmservingsim",
    "servegen",
    "mooncake",
    "access_log",
)


ARRAY = "If its elements are requests, make it JSON lines (jq -c '.[]' FILE) and describe them with --map."


@cache
def importers() -> dict[str, Importer]:
    """Every importer by its kind, in the order in which they are asked."""
    found = [import_module(f"hoptrace.collectors.files.{name}").IMPORTER for name in MODULES]
    return {i.kind: i for i in found}


def kind_of(path: Path, kind: str | None) -> Importer:
    """The importer for a file: the one of that ``kind``, or the first that knows it by its content.

    Raises:
        UsageError: there is no such kind.
        InputError: the file cannot be read, is empty, or is of no kind that is known.
    """
    known = importers()
    if kind is not None and kind not in known:
        raise UsageError(f"There is no importer {kind!r}.", hint=f"Choose one of: {', '.join(known)}.")
    start = head(path)
    if not start.strip():
        raise InputError(f"{path} is empty.")
    if how := packed(start):
        raise InputError(f"{path} is {how}: hoptrace undoes gzip and zstandard only.", hint="Unpack it first.")
    if kind is not None:
        return known[kind]
    for importer in known.values():
        if importer.matches(path, start):
            return importer
    if start.lstrip().startswith(b"["):
        raise InputError(f"{path} is one JSON array of a kind that hoptrace does not know.", hint=ARRAY)
    raise InputError(
        f"{path} is of no kind that hoptrace knows.",
        hint=f"Known kinds: {', '.join(known)}. Name one with --kind, or describe the columns of a log with --map.",
    )
