"""The modelled scheduler with hoptrace's recorder between vLLM's and it: ``--scheduler-cls modelled_seen.Seen``.

hoptrace must be importable in vLLM's environment (its plug-in is installed there, or a folder of links is on PYTHONPATH). The
recorder is inside, so that a step's results come, for it too, when the modelled time is over.
"""

from __future__ import annotations

from modelled_vllm import modelled
from vllm.v1.core.sched.scheduler import Scheduler

from hoptrace.collectors.inside.vllm_scheduler import recording

__all__ = ["Seen"]

Seen = modelled(recording(Scheduler))
