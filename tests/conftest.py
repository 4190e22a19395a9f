"""Set-up of all tests: helpers in tests/support are plain modules, and no test is judged by the clock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# With --import-mode=importlib nothing puts this folder there: `from support.x import …` must work.
sys.path.insert(0, str(Path(__file__).parent))

# deadline=None: the machine may be busy, and a slow example is no failure. derandomize: the same examples on each run, so that a
# red run is about the change and not about luck; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("default")


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo's model, fetched once into the user's cache; the test is skipped where it can't be had."""
    pytest.importorskip("xllamacpp", reason="needs the extra `demo`")
    from hoptrace.demo_model import fetch_model
    from hoptrace.errors import EnvironmentProblem

    try:
        return fetch_model()
    except EnvironmentProblem as e:
        pytest.skip(f"needs the demo's model: {e}")
