"""`hoptrace import`: read other tools' files into a trace."""

from __future__ import annotations

import json
from pathlib import Path

import click


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
@click.option("--kind", metavar="K", help="Kind of the files: azure or mooncake. Found out from the files if not given.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Keep the first N requests by arrival.")
@click.option("--source", metavar="TEXT", help="Where the files come from; written into the manifest.")
@click.option("--licence", metavar="TEXT", help="Their licence; written into the manifest.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
def command(
    files: tuple[Path, ...],
    out: Path,
    kind: str | None,
    limit: int | None,
    source: str | None,
    licence: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read other tools' request logs into a trace.

    The kind of each file is found from its content. What a file does not tell stays null; what had to be assumed is printed
    and written into the manifest. Rows that cannot be used are dropped and counted.

    \b
    Kinds:
      azure      Azure LLM inference traces (CSV), and Vidur's form of them
      mooncake   Mooncake traces (JSON lines) with prefix block hashes

    \b
    Examples:
      hoptrace import AzureLLMInferenceTrace_conv.csv -o azure.trace
      hoptrace import conversation_trace.jsonl --limit 1000 -o mooncake.trace
    """
    from hoptrace.collectors.files.run import import_files

    done = import_files(files, out, kind=kind, limit=limit, source=source, licence=licence)
    manifest, rows = done.manifest, done.written
    if as_json:
        click.echo(json.dumps({"trace": str(out), "requests": rows, "dropped": done.reasons, "notes": manifest.notes}))
    elif not quiet:
        click.echo(f"{out}: {rows} request{'' if rows == 1 else 's'}")
        for reason, lost in done.reasons.items():
            click.echo(f"  dropped {lost}: {reason}")
        for note in manifest.notes:
            click.echo(f"  note: {note}")
