"""``python -m hoptrace``."""

from hoptrace.cli import main

main()
