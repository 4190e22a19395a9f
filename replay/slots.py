"""Moved to :mod:`hoptrace.replay.compiled.slots`; the old kernel still looks here."""

from hoptrace.replay.compiled.slots import *  # noqa: F403
