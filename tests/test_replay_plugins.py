"""Parts of the user's own in the replay: the documented example, the built-in kinds as parts, and parts that misbehave."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.replay_laws import Said, first_difference, said_by
from support.workloads import make

from hoptrace.cli import main
from hoptrace.errors import InputError
from hoptrace.reader import open_trace
from hoptrace.replay import compiled, plain
from hoptrace.replay.plain import builtin
from hoptrace.replay.plain.parts import Parts, load
from hoptrace.replay.plan import EngineSpec, Order, Plan, Routing, TierSpec, Way
from hoptrace.replay.workload import Workload
from hoptrace.stepcost import fixed

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "replay-plugins.md").read_text()
SAMPLE = ROOT / "sample_traces" / "llamacpp-four-slots.trace"
COST = fixed(step_ns=1000, prefill_token_ns=10, decode_request_ns=5)


def busy() -> Workload:
    """Sixty requests of three families, three of which come at once, each family a session."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(60):
        n, family = int(rng.integers(4, 30)), i % 4
        rows.append((i // 3 * 2500, n, int(rng.integers(1, 20)), [int(b) for b in np.arange(n // 4) + 10 * family]))
    return make(*rows, session_id=np.array([i % 4 - 1 for i in range(60)], dtype=np.int64))


def plan(routing: Routing | None = None, order: Order | None = None, **engine: Any) -> Plan:
    """Three engines with little KV."""
    spec = {"max_sequences": 4, "max_batched_tokens": 48, "capacity_tokens": 64, "block_size_tokens": 4, "cache": "pool"} | engine
    engines = tuple(EngineSpec(f"e-{i}", **spec) for i in range(3))  # type: ignore[arg-type]
    return Plan(engines, (COST,), routing=routing or Routing(), order=order or Order(), seed=5)


def same(work: Workload, planned: Plan, parts: Parts) -> Said:
    """The compiled engine as planned and the plain one with ``parts`` say the same; what they say."""
    theirs = said_by(compiled.simulate, work, planned)
    assert first_difference(theirs, said_by(plain.simulate, work, planned, parts=parts)) is None
    return theirs


@pytest.mark.parametrize("kind", builtin.ROUTERS)
def test_a_built_in_router_as_a_part(kind: str) -> None:
    routing = Routing(kind, 4000 if kind == "kv_use" else 0, 2 if kind == "prefix_aware" else 0)  # type: ignore[arg-type]
    work = busy()
    said = same(work, plan(routing), Parts(router=builtin.ROUTERS[kind]))
    assert said.requests["engine"].n_unique() == 3
    # It makes a difference: the same work under another router has other rows.
    other = "random" if kind != "random" else "round_robin"
    assert first_difference(said, said_by(plain.simulate, work, plan(Routing(other)))) is not None  # type: ignore[arg-type]


def test_built_in_orders_and_victims_as_parts() -> None:
    work = busy()
    tight = {"max_sequences": 2, "capacity_tokens": 56}
    same(work, plan(**tight), Parts(order=builtin.Fcfs(), victim=builtin.LastAdmitted()))
    shortest = Order(work.prompt_tokens, from_arrival=False)
    said = same(work, plan(order=shortest, **tight), Parts(order=builtin.Shortest()))
    assert first_difference(said, said_by(plain.simulate, work, plan(**tight))) is not None
    urgent = make(
        *((0, 6, 20) for _ in range(9)), priority=np.array([3, 1, 2, 0, 4, 0, 1, 5, 2], dtype=np.int64)
    )  # fmt: skip
    assert urgent.priority is not None
    first = Order(urgent.priority, from_arrival=False, requeue=True)
    worst = Parts(order=builtin.Priority(), victim=builtin.WorstRank())
    said = same(urgent, plan(order=first, capacity_tokens=40), worst)
    assert said.requests["preemptions"].sum() > 0


def test_a_built_in_eviction_as_a_part() -> None:
    said = same(busy(), plan(), Parts(eviction=builtin.Lru))
    assert said.requests["cached_tokens"].sum() > 0
    tier = TierSpec("host", "host", 40, False, (0,) * 3, (0,) * 3, (-1,) * 3, "back")
    tiered = Plan(plan().engines, (COST,), ways=(Way(base_ns=50),), tiers=(tier,), kv_token_bytes=1)
    said = same(busy(), tiered, Parts(eviction=builtin.Lru, tier_eviction=builtin.Lru))
    assert said.requests["cached_tier0_tokens"].sum() > 0


class Youngest(builtin.Lru):
    """Drops the youngest: another result, and so a proof that the part is asked."""

    def oldest(self, kept: Any) -> Any:
        return next(b for b in reversed(self._blocks) if b not in kept)


def test_another_eviction_gives_another_result() -> None:
    ours = said_by(plain.simulate, busy(), plan(), parts=Parts(eviction=Youngest))
    assert first_difference(ours, said_by(plain.simulate, busy(), plan())) is not None


# --- the example of the page, as a user would do it


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.S)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a module and its entry points, as pip would."""

    def install(module: str, points: str) -> None:
        site = tmp_path / "site"
        info = site / "my_policies-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[hoptrace.policies]\n{points}")
        (site / "my_policies.py").write_text(module)
        monkeypatch.syspath_prepend(str(site))

    yield install  # type: ignore[misc]
    sys.modules.pop("my_policies", None)


def test_the_example_of_the_page(tmp_path: Path, installed: Callable[[str, str], None]) -> None:
    (module,), (points, policy) = blocks("python"), blocks("toml")
    given = tomllib.loads(points)["project"]["entry-points"]["hoptrace.policies"]
    installed(module, "".join(f"{k} = {v}\n" for k, v in given.items()))
    (tmp_path / "near.toml").write_text(policy)
    out = tmp_path / "out.trace"
    said = io.StringIO()
    command = ["hoptrace", "replay", str(SAMPLE), "--policy", str(tmp_path / "near.toml"), "-o", str(out), "--json"]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main()
    json.loads(said.getvalue())
    assert open_trace(out).table("stages").select("server").collect()["server"].n_unique() == 2
    # And through the parts: the order is used, the last of equal arrivals with the longest answer goes first.
    work = make((0, 4, 2), (0, 4, 9), (0, 4, 5))
    one = Plan((EngineSpec("one", max_sequences=1),), (COST,))
    rows = said_by(plain.simulate, work, one, parts=Parts(order=load("python:longest")())).requests
    assert np.argsort(rows["scheduled_ns"].to_numpy()).tolist() == [1, 2, 0]
    two = Plan((EngineSpec("a", cache="pool"), EngineSpec("b", cache="pool")), (COST,))
    near = make((0, 8, 1, [0, 1]), (1, 8, 1, [2, 3]), (9000, 8, 1, [2, 3]), (18_000, 8, 1, [0, 1]))
    rows = said_by(plain.simulate, near, two, parts=Parts(router=load("python:near"))).requests
    assert rows["engine"].to_list() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("module", "point", "message"),
    [
        ("class A:\n def __init__(self, r): pass\n def choose(self, *a): return 7\n", "my_policies:A", "python:mine answered 7"),
        ("class A:\n def __init__(self, r): pass\n def choose(self, *a): return -1\n", "my_policies:A", "answered -1"),
        ("class A:\n def __init__(self, r): pass\n def choose(self, *a): return 'e-0'\n", "my_policies:A", "answered 'e-0'"),
        ("class A:\n def __init__(self, r): pass\n def choose(self, *a): return [][0]\n", "my_policies:A",
         "python:mine failed in choose: IndexError: list index out of range"),
        ("class A:\n def __init__(self): pass\n", "my_policies:A", "python:mine failed in being made: TypeError"),
        ("class A:\n def __init__(self, r): pass\n", "my_policies:A", "python:mine has no choose()"),
        ("A = 3\n", "my_policies:A", "python:mine' is nothing that can be called"),
        ("import nothing_of_that_name\n", "my_policies:A", "cannot be loaded: ModuleNotFoundError"),
        ("", "my_policies:A", "cannot be loaded: AttributeError"),
        ("def A(r): raise SystemError('no')\n", "my_policies:A", "python:mine failed in being made: SystemError: no"),
    ],
)  # fmt: skip
def test_a_router_that_misbehaves_is_named(module: str, point: str, message: str, installed: Callable[[str, str], None]) -> None:
    installed(module, f"mine = {point}\n")
    with pytest.raises(InputError, match=re.escape(message)):
        said_by(plain.simulate, busy(), plan(Routing("python:mine")))  # type: ignore[arg-type]


def test_a_part_that_nobody_has_installed() -> None:
    with pytest.raises(InputError, match=r"no plug-in 'python:nobody'"):
        load("python:nobody")


class Wrong:
    def key(self, request: Any) -> Any:
        return 1.5

    def victim(self, running: Any) -> Any:
        return len(running)

    def add(self, block: Any) -> None:
        pass

    def remove(self, block: Any) -> None:
        pass

    def oldest(self, kept: Any) -> Any:
        return 123456


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (Parts(order=Wrong()), "Wrong answered 1.5"),
        (Parts(victim=Wrong()), "Wrong answered "),
        (Parts(eviction=Wrong), "Wrong answered 123456"),
        (Parts(order=object()), "object has no key()"),  # type: ignore[arg-type]
    ],
)
def test_other_parts_that_misbehave_are_named(parts: Parts, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        said_by(plain.simulate, busy(), plan(), parts=parts)


def test_built_in_parts_are_entry_points() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["hoptrace.policies"]
    made = {name: EntryPoint(name, value, "hoptrace.policies").load() for name, value in given.items()}
    assert {k: made[k] for k in builtin.ROUTERS} == builtin.ROUTERS
    assert set(made) - set(builtin.ROUTERS) == {"fcfs", "shortest", "priority", "last", "worst", "lru"}
