"""The Compare page as Streamlit runs it; what it shows is in view_compare.py."""

from hoptrace.app.view_compare import show

show()
