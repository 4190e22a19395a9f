"""The dashboard's front: which trace, which page. `hoptrace app` starts it; its arguments are the traces.

Streamlit puts this file's folder first on the import path, so everything here is imported by its full name.
The page files stand beside it, not in a folder named `pages`: on a deep link Streamlit would serve such a folder by itself,
without this file.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from hoptrace.app import data
from hoptrace.app.words import plain
from hoptrace.errors import HoptraceError

_HERE = Path(__file__).parent

st.set_page_config(page_title="hoptrace", page_icon=str(_HERE / "assets" / "icon.png"), layout="wide")

page = st.navigation(
    [
        st.Page(_HERE / "page_overview.py", title="Overview", icon=":material/space_dashboard:", default=True),
        st.Page(_HERE / "page_time.py", url_path="time", title="Time", icon=":material/timeline:"),
        st.Page(_HERE / "page_requests.py", url_path="requests", title="Requests", icon=":material/list_alt:"),
        st.Page(_HERE / "page_compare.py", url_path="compare", title="Compare", icon=":material/compare_arrows:"),
        st.Page(_HERE / "page_fidelity.py", url_path="fidelity", title="Fidelity", icon=":material/science:"),
    ]
)

try:
    paths = data.given()
    if not paths:
        st.info("There is no trace to show. Start it with one: hoptrace app run.trace")
        st.stop()
    with st.sidebar:
        st.selectbox("Trace", paths, format_func=data.name_of, key="trace", help="Overview, Time and Requests show this trace.")
    page.run()
except HoptraceError as e:
    # What is wrong with a trace is the user's to mend: one sentence with the remedy, no stack trace.
    st.error(plain(e), icon=":material/error:")
