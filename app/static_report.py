"""The report as one HTML file: the dashboard's charts, every section's figures as tables. It holds no script and asks nobody for
anything, so it can be mailed, archived and opened anywhere; what stands in a trace is text in it, never markup."""

from __future__ import annotations

from html import escape

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hoptrace.analysis.latency.time_text import Bars
from hoptrace.analysis.report import SECTIONS, Report
from hoptrace.analysis.report_text import section_blocks
from hoptrace.app.static_figures import figures
from hoptrace.printable import printable
from hoptrace.reader import Trace

__all__ = ["page"]

_ROWS = 300  # of a table; all of them are in the JSON

_STYLE = """
:root { color-scheme: light dark; --fg: #1a1a1a; --dim: #5c5c5c; --bg: #fff; --line: #ddd; --warn: #8a4b00; --head: #f4f4f4; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e8e8e8; --dim: #a8a8a8; --bg: #14161a; --line: #3a3d42; --warn: #ffb454; --head: #1f2227; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; max-width: 1000px;
  padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; } .dim { color: var(--dim); } .headline { font-size: 1.1rem; font-weight: 600; }
.warn { color: var(--warn); } nav a { margin-right: 1em; color: inherit; } ul { padding-left: 1.2rem; margin: .4rem 0; }
figure { margin: 1rem 0; padding-left: 4%; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; overflow: visible; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .15rem .7rem .15rem 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--head); font-weight: 600; } .n { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; } footer { margin-top: 2.5rem; color: var(--dim); font-size: .85rem; }
"""


def page(report: Report, trace: Trace) -> str:
    """The whole file. ``report`` holds all sections; ``trace`` is read for what is drawn over time.

    Raises:
        EnvironmentProblem: the charts cannot be drawn, for want of vl-convert.
        InputError: a table is damaged.
    """
    body = [
        f"<h1>{escape(report.name)}</h1>",
        f'<p class="dim">{escape(report.origin_note)}</p>',
        f'<p class="headline">{escape(report.headline)}</p>',
        _list(report.warnings, "warn"),
    ]
    charts = figures(report, trace)
    shown = []
    for name, title in SECTIONS.items():
        drawn = [f"<figure><figcaption>{escape(text)}</figcaption>{image}</figure>" for text, image in charts.get(name, [])]
        inner = "".join(drawn) + "".join(_html(b) for b in section_blocks(report, name, full=True))
        if inner:
            shown.append((name, title))
            body.append(f'<section id="{name}"><h2>{escape(title)}</h2>{inner}</section>')
    body.insert(4, "<nav>" + "".join(f'<a href="#{n}">{escape(t)}</a>' for n, t in shown) + "</nav>")
    return printable(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        # Nothing may be loaded and nothing run, whatever a trace's text may look like.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.name)}: hoptrace report</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "<footer>Written by hoptrace. Shapes in the charts tell their figures when pointed at. All figures by name: "
        "<code>hoptrace report TRACE --json</code>; what each means: <code>hoptrace explain NAME</code>.</footer></body></html>\n"
    )


def _html(block: RenderableType) -> str:
    """One block of a section: its text and figures, whatever its colours."""
    if isinstance(block, Bars):
        return ""  # the charts say it
    if isinstance(block, Text):
        return f"<p>{escape(block.plain.strip())}</p>" if block.plain.strip() else ""
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Group):
        return "".join(_html(b) for b in block.renderables)
    if isinstance(block, Table):
        return _table(block)
    console = Console(width=110, color_system=None, highlight=False)
    lines = ["".join(s.text for s in line).rstrip() for line in console.render_lines(block, pad=False)]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _table(table: Table) -> str:
    cells = [[_cell(c) for c in column.cells] for column in table.columns]
    rows = list(zip(*cells, strict=True))
    if not table.show_header and len(cells) == 2 and all(c == "•" for c in cells[0]):
        return _list(cells[1], "")
    sides = [' class="n"' if column.justify == "right" else "" for column in table.columns]
    head = [f"<th{s}>{escape(_cell(column.header))}</th>" for s, column in zip(sides, table.columns, strict=True)]
    lines = [
        "<tr>" + "".join(f"<td{s}>{escape(c)}</td>" for s, c in zip(sides, row, strict=True)) + "</tr>" for row in rows[:_ROWS]
    ]
    caption = f"<p>{escape(_cell(table.caption))}</p>" if table.caption else ""
    left = f'<p class="dim">{len(rows) - _ROWS:,} more rows: --json</p>' if len(rows) > _ROWS else ""
    header = f"<thead><tr>{''.join(head)}</tr></thead>" if table.show_header else ""
    return f'<div class="wide"><table>{header}<tbody>{"".join(lines)}</tbody></table></div>{left}{caption}'


def _cell(value: object) -> str:
    return value.plain if isinstance(value, Text) else str(value)


def _list(lines: list[str], style: str) -> str:
    kind = f' class="{style}"' if style else ""
    return f"<ul{kind}>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""
