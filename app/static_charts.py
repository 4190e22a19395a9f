"""Charts as SVG that stand in a page without any script: the dashboard's own charts, drawn by Vega when the page is written.

vl-convert is the Vega project's own converter (Vega in an embedded engine, no browser, no network). Colours of text and axes
become those of the page, so that a chart is readable in light and dark; what would be a tooltip becomes the shape's title.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import altair as alt

from hoptrace.errors import EnvironmentProblem
from hoptrace.printable import printable_tree

__all__ = ["WIDTH", "svg"]

WIDTH = 900
"""Width of a chart's plotting area in px; the page scales it down where there is less room."""

_TEXT = "#010203"  # stands for the page's own colour of text
_SVG = "http://www.w3.org/2000/svg"
_ID = re.compile(r"url\(#([^)]+)\)")
_CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _TEXT, "titleColor": _TEXT, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
        "gridColor": "#8884", "domainColor": "#888", "tickColor": "#888",
    },
    "legend": {"labelColor": _TEXT, "titleColor": _TEXT, "labelFontSize": 12},
    "header": {"labelColor": _TEXT, "titleColor": _TEXT},
    "text": {"color": _TEXT},
}  # fmt: skip


def svg(chart: alt.Chart | alt.LayerChart | alt.FacetChart, name: str) -> str:
    """The chart as an ``<svg>`` element without scripts, links or fonts. ``name`` sets its inner ids apart from other charts'.

    Raises:
        EnvironmentProblem: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise EnvironmentProblem(
            "Charts need the package vl-convert-python, which is not installed.", hint="pip install vl-convert-python"
        ) from None
    # What is no text breaks the SVG that the charts pass through on their way.
    spec = printable_tree(chart.to_dict())
    spec.get("spec", spec)["width"] = WIDTH  # of facets: the inner one's
    spec["config"] = _merged(spec.get("config", {}), _CONFIG)
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = vl_convert.get_vegalite_versions()
    text = vl_convert.vegalite_to_svg(spec, vl_version=version if version in known else None, allowed_base_urls=[])
    return _plain(text, name)


def _merged(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(own)
    for key, value in more.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _plain(text: str, name: str) -> str:
    """The SVG as it may stand in a page."""
    root = ET.fromstring(text)
    # Vega numbers its ids over the life of the process: here they begin anew with each chart.
    ids = [e.attrib["id"] for e in root.iter() if "id" in e.attrib]
    names = {old: f"{name}-{i}" for i, old in enumerate(ids)}
    for element in root.iter():
        said = element.attrib.pop("aria-label", None)
        is_mark = element.attrib.pop("aria-roledescription", None) not in (None, "axis", "legend", "title", "container")
        role = element.attrib.pop("role", None)
        if said and is_mark and role == "graphics-symbol":
            # First child, so that readers take it for the shape's own.
            title = ET.Element(f"{{{_SVG}}}title")
            title.text = said
            element.insert(0, title)
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.set(key, names[value])
            elif value == _TEXT:
                element.set(key, "currentColor")
            elif "url(#" in value:
                element.set(key, _ID.sub(lambda m: f"url(#{names[m[1]]})", value))
            elif key.startswith("{http://www.w3.org/1999/xlink}"):
                del element.attrib[key]
    root.attrib.pop("width", None), root.attrib.pop("height", None)
    root.set("role", "img")
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")
