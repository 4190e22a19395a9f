"""The Time page as Streamlit runs it; what it shows is in view_time.py."""

from hoptrace.app.view_time import show

show()
