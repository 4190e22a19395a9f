"""`hoptrace import`: read other tools' files into a trace."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hoptrace.collectors.files.run import Imported

# A bar before this would only flicker.
_PATIENCE_S = 2.0
_SHOWN = 8


def _kinds(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    from hoptrace.collectors.files.kinds import importers

    width = max(len(k) for k in importers())
    for kind, importer in importers().items():
        click.echo(f"{kind:{width}}  {importer.summary}")
    context.exit()


@click.command("import", short_help="Read other tools' files into a trace.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="T.trace",
    help="The trace to write; must not exist.",
)
@click.option("--kind", metavar="K", help="Kind of the files, if their content is not to decide; --kinds lists them.")
@click.option("--kinds", is_flag=True, is_eager=True, expose_value=False, callback=_kinds, help="List the kinds there are.")
@click.option("--map", "mapping", metavar="T=COL,...", help="What a log's columns are: TARGET=COLUMN[:FORMAT], comma between.")
@click.option("--format", "line_format", metavar="F", help="Format of a log's lines: nginx, envoy, istio, or as they write it.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Keep the first N requests by arrival.")
@click.option(
    "--context", "context_tokens", type=click.IntRange(min=1), metavar="N", help="The model's context: count what exceeds it."
)
@click.option("--block-size", type=click.IntRange(1, 65535), metavar="N", help="Tokens that a block hash stands for.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of kinds that are drawn (servegen).")
@click.option("--rejects", type=click.Path(path_type=Path), metavar="F.csv", help="Write every rejected record with its reason.")
@click.option("--strict", is_flag=True, help="A rejected record is an error (exit code 3).")
@click.option("--source", metavar="TEXT", help="Where the files come from; written into the manifest.")
@click.option("--licence", metavar="TEXT", help="Their licence; written into the manifest.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    files: tuple[Path, ...],
    out: Path,
    kind: str | None,
    mapping: str | None,
    line_format: str | None,
    limit: int | None,
    context_tokens: int | None,
    block_size: int | None,
    seed: int,
    rejects: Path | None,
    strict: bool,
    source: str | None,
    licence: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read other tools' files into a trace: request traces, benchmarks' outputs, spans, access logs.

    The kind of each file is found from its content (gzip and zstandard are undone); `--kinds` lists the kinds. What a file does
    not tell stays null; what had to be assumed is printed and written into the manifest. Every record is written or rejected, and
    counted: read = written + rejected.

    Any CSV, TSV or JSON-lines log can be described with --map. Targets: arrival, finish, first_token … (with a format: s, ms, us,
    ns, iso8601, nginx or a strptime pattern), duration_s, ttft_ms …, prompt_tokens, output_tokens, cached_tokens, session, model,
    request_id, status and more: docs/files.md.

    \b
    Examples:
      hoptrace import AzureLLMInferenceTrace_conv.csv -o azure.trace
      hoptrace import conversation_trace.jsonl --limit 1000 -o mooncake.trace
      hoptrace import access.log --format nginx -o nginx.trace
      hoptrace import log.csv --map prompt_tokens=Ctx,output_tokens=Gen,arrival=ts:iso8601,duration_ms=took -o log.trace
      hoptrace import run1.json run2.json --rejects bad.csv -o runs.trace
    """
    from hoptrace.collectors.files.base import Options
    from hoptrace.collectors.files.run import import_files

    options = Options(
        mapping=mapping, line_format=line_format, context_tokens=context_tokens, block_tokens=block_size, seed=seed
    )  # fmt: skip
    with _progress(quiet or as_json) as progress:
        done = import_files(
            files, out, kind=kind, limit=limit, source=source, licence=licence, options=options, rejects=rejects,
            strict=strict, progress=progress,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(_as_json(out, done)))
    elif not quiet:
        _show(out, done, rejects)


def _as_json(out: Path, done: Imported) -> dict[str, object]:
    return {
        "trace": str(out),
        "requests": sum(p.rows or 0 for p in done.manifest.tables.get("requests", [])),
        "read": done.read,
        "written": done.written,
        "rejected": done.rejected,
        "beyond_limit": done.beyond_limit,
        "reasons": done.reasons,
        "first_rejects": done.first_rejects,
        "values_lost": done.manifest.values_dropped,
        "notes": done.manifest.notes,
    }


def _show(out: Path, done: Imported, rejects: Path | None) -> None:
    requests = sum(p.rows or 0 for p in done.manifest.tables.get("requests", []))
    click.echo(f"{out}: {requests:,} request{'' if requests == 1 else 's'}")
    beyond = f" + {done.beyond_limit:,} beyond --limit" if done.beyond_limit else ""
    records = f"{done.read:,} record{'' if done.read == 1 else 's'}"
    click.echo(f"  {records} read = {done.written:,} written + {done.rejected:,} rejected{beyond}")
    reasons = sorted(done.reasons.items(), key=lambda r: -r[1])
    for reason, n in reasons[:_SHOWN]:
        click.echo(f"  rejected {n:,}: {reason}")
    if len(reasons) > _SHOWN:
        click.echo(f"  rejected {sum(n for _, n in reasons[_SHOWN:]):,}: {len(reasons) - _SHOWN} other reasons")
    for r in done.first_rejects:
        value = f" ({r['value']!r})" if r["value"] is not None else ""
        click.echo(f"    {Path(str(r['file'])).name}, row {r['row']}: {r['reason']}{value}")
    if done.rejected > len(done.first_rejects):
        where = f"all are in {rejects}" if rejects else "--rejects FILE.csv writes all"
        click.echo(f"    … ({where})")
    for what, n in done.manifest.values_dropped.items():
        click.echo(f"  left unknown {n:,}: {what}")
    for note in done.manifest.notes:
        click.echo(f"  note: {note}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Path, int, int], None] | None]:
    """A bar of bytes on the terminal once the work has taken two seconds."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    tasks: dict[Path, int] = {}
    begin = time.monotonic()

    def show(path: Path, done: int, size: int) -> None:
        if time.monotonic() - begin < _PATIENCE_S:
            return
        if not tasks:
            bar.start()
        if path not in tasks:
            tasks[path] = bar.add_task(path.name, total=size)
        bar.update(tasks[path], completed=done)  # type: ignore[arg-type]

    try:
        yield show
    finally:
        if tasks:
            bar.stop()
