"""The Fidelity page as Streamlit runs it; what it shows is in view_fidelity.py."""

from hoptrace.app.view_fidelity import show

show()
