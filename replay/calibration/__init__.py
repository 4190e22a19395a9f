"""Calibration: a step cost out of one or several captures, kept in a file; what it covers; a probe that widens it.

:mod:`fitting` fits, :mod:`held` says what the steps held, :mod:`cost_file` keeps it, :mod:`use` brings it to a replay,
:mod:`coverage` judges a what-if, :mod:`design` and :mod:`probing` make and send the probe.
"""
