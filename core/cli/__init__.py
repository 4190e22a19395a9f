"""The command line, thin: parse, call, print. One file per verb; a verb's module is imported only when it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from importlib import import_module

import click

from hoptrace.errors import HoptraceError
from hoptrace.printable import printable

__all__ = ["main"]

# Our matrices have a few columns: several threads of a linear algebra library would only wait for each other, busily. It reads
# this when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# verb -> (module, one line for the overview). The order is that of a first day with the tool.
_VERBS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "The whole way on a real small model, on any machine."),
    "doctor": ("doctor", "What can be collected here, what not and why; the platform graph."),
    "attach": ("attach", "Capture a live server into a trace."),
    "drive": ("drive", "Send a trace's work to a live server."),
    "import": ("import_files", "Read other tools' files into a trace."),
    "replay": ("replay", "Ask what-if: the same work under another policy."),
    "calibrate": ("calibrate", "Fit what a step costs, and keep it; probe a server for a wider domain."),
    "sweep": ("sweep", "Ask many what-ifs: the product of policies, platforms and loads."),
    "advise": ("advise", "Which flag of the captured engine to change, how much it gains, how to prove it."),
    "fidelity": ("fidelity", "Predicted against observed: how far a what-if is off."),
    "policies": ("policies", "List the policies there are, or print one as TOML."),
    "platforms": ("platforms", "List the platforms there are, or print one as TOML."),
    "paths": ("paths", "List the ways that data moves, by hops, or price one on a platform."),
    "report": ("report", "Where the time went, what moved, what coordination cost."),
    "diff": ("diff", "Compare two traces."),
    "app": ("app", "Open the dashboard."),
    "export": ("export", "Write a trace as a Perfetto timeline."),
    "sql": ("sql", "Query the tables by their names."),
    "explain": ("explain", "Say what a figure means and how it is computed."),
    "validate": ("validate", "Check that a trace is whole and keeps its laws."),
    "compact": ("compact", "Tidy a trace whose writer was killed."),
}


class _LazyGroup(click.Group):
    """Imports a verb's module when it is asked for: `--help` must not wait for Polars."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = import_module(f"hoptrace.cli.{_VERBS[cmd_name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in _VERBS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else " Run `hoptrace --help` for the list."
            ctx.fail(f"There is no command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 a gate failed, 2 wrong use, 3 bad input, 4 environment. "
    "`hoptrace COMMAND --help` has examples.",
)
@click.version_option(package_name="hoptrace", prog_name="hoptrace")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Count what coordination and data movement cost in LLM inference.

    Attach to a live server, get a trace (a folder of Parquet tables), replay it under another policy, and look at both.

    \b
      hoptrace demo                                              see it work on this machine
      hoptrace attach http://127.0.0.1:8000 --proxy :9000 -o run.trace
      hoptrace report run.trace                                  accounting, moves, coordination
      hoptrace replay run.trace --policy one-slot -o what-if.trace
      hoptrace app run.trace what-if.trace                       the dashboard
    """


def main() -> None:
    """Entry point of the `hoptrace` command: turns errors into one sentence and an exit code."""
    debug = "--debug" in sys.argv
    if debug:
        # A flag of the whole command: it may stand anywhere on the line.
        sys.argv = [sys.argv[0], "--debug", *(a for a in sys.argv[1:] if a != "--debug")]
    sys.exit(_flushed(_run(debug)))


def _run(debug: bool) -> int:
    stdout = sys.stdout
    try:
        cli(standalone_mode=False)
    except click.ClickException as e:
        e.show()
        return e.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return 130
    except click.exceptions.Exit as e:
        return e.exit_code
    except SystemExit as e:
        # click and rich each turn a closed pipe into exit code 1, which here would mean that a gate failed. rich raises it from
        # the error; click puts a wrapper in place of stdout.
        if sys.stdout is not stdout or (isinstance(e.__context__, OSError) and e.__context__.errno == errno.EPIPE):
            return 0
        raise
    except BrokenPipeError:
        # `hoptrace report … | head`: the reader has gone, which is no error of ours.
        return 0
    except HoptraceError as e:
        if debug:
            traceback.print_exc()
        click.echo(printable(f"hoptrace: {e}"), err=True)
        return e.exit_code
    except Exception as e:
        if debug:
            traceback.print_exc()
        click.echo(printable(f"hoptrace: {_in_words(e)}"), err=True)
        return 4 if isinstance(e, OSError) else 3
    return 0


def _flushed(code: int) -> int:
    """Write out what is still buffered, which the interpreter would do too late for a sentence; gives the exit code."""
    try:
        for stream in (sys.stdout, sys.__stdout__):  # click's wrapper and what it wraps
            if stream is not None:
                stream.flush()
        return code
    except OSError as e:
        # What cannot be written must not be tried again at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if e.errno == errno.EPIPE or code:
            return code
        click.echo(f"hoptrace: {_in_words(e)}", err=True)
        return 4


def _in_words(e: Exception) -> str:
    """One sentence for what no code of ours foresaw: a damaged page in a Parquet file, a full disk, a fault of hoptrace."""
    first = (str(e).strip().splitlines() or [""])[0][:300]
    if isinstance(e, OSError):
        if e.filename and e.strerror:
            return f"{e.filename}: {e.strerror}."
        if e.errno == errno.ENOSPC:
            return "No space left where the output goes. Make room, or write it elsewhere."
        return f"{e.strerror or first}."
    if type(e).__module__.split(".")[0] in ("polars", "pyarrow", "duckdb"):
        return f"A file of the trace is damaged ({first}). Run `hoptrace validate` on it, and restore it from a copy."
    what = f"{type(e).__name__}: {first}"
    return f"This is a fault of hoptrace, not yours: {what}. Run it again with --debug and report what it prints."
