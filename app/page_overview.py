"""The Overview page as Streamlit runs it; what it shows is in view_overview.py."""

from hoptrace.app.view_overview import show

show()
