"""The Requests page as Streamlit runs it; what it shows is in view_requests.py."""

from hoptrace.app.view_requests import show

show()
