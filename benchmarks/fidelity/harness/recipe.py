"""Recipes: which servers run under which policies, on which work, how often, and how quiet the machine has to be meanwhile."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hoptrace.errors import InputError

__all__ = ["Bounds", "Cell", "Lengths", "Machine", "Policy", "Prefixes", "Recipe", "Work", "read"]

Engine = Literal["vllm", "modelled", "llamacpp"]
Nice = Annotated[int, Field(ge=-20, le=19)] | Literal["realtime"]
Flag = bool | int | float | str | dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,60}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bounds(_Part):
    """What makes a run void; it is then repeated, ``attempts`` times in all.

    ``foreign_at_most``: share of the servers' cores that processes of others took; ``steal_at_most``: that the hypervisor took;
    ``probe_apart_at_most``: |after ÷ before − 1| of the CPU time of a fixed piece of work.
    """

    foreign_at_most: float = Field(default=0.10, gt=0)
    steal_at_most: float = Field(default=0.05, gt=0)
    probe_apart_at_most: float = Field(default=0.15, gt=0)
    attempts: int = Field(default=2, ge=1)


class Machine(_Part):
    """Cores and priorities. The k-th server of a policy runs on the k-th of ``server_cpus`` (again from the first after the
    last); client and proxy on ``client_cpus``. ``servers_at_most`` processes trees stay up at once (memory). A priority is a nice
    value, or ``realtime`` (SCHED_FIFO: ahead of all that is not; takes root): only for what sleeps and ends by itself, since a
    server that ends so can starve the kernel's own threads of the core."""

    server_cpus: tuple[int, ...] = Field(default=(1,), min_length=1)
    client_cpus: tuple[int, ...] = Field(default=(0,), min_length=1)
    server_nice: Nice = -15
    client_nice: Nice = -10
    servers_at_most: int = Field(default=4, ge=1)
    start_s: float = Field(default=400, gt=0)


class Lengths(_Part):
    """Log-normal lengths in tokens: ``median``, ``sigma`` of the logarithm, cut to ``least`` … ``most``."""

    median: float = Field(gt=0)
    sigma: float = Field(default=0.0, ge=0)
    least: int = Field(default=1, ge=1)
    most: int = Field(ge=1)


class Prefixes(_Part):
    """A ``share`` of the requests begins with one of ``groups`` texts of ``tokens`` tokens, before its own prompt."""

    groups: int = Field(ge=1)
    tokens: int = Field(ge=16)
    share: float = Field(default=1.0, gt=0, le=1)


class Work(_Part):
    """Requests: drawn with ``seed`` (Poisson arrivals), or those of a ``trace`` (a folder beside the recipe, or a sample's name).

    ``priorities``: each request gets one of them, by turns of a seeded draw. ``prompts``: of token *ids*, of exactly the wanted
    lengths; or of *words*, about as long: of ids drawn at random a small model makes text that is not whole letters, and a server
    that sends none for such a token hides a step.
    """

    seed: int = 0
    requests: int | None = Field(default=None, ge=2)
    rate_per_s: float | None = Field(default=None, gt=0)
    prompt: Lengths | None = None
    output: Lengths | None = None
    prefixes: Prefixes | None = None
    priorities: tuple[int, ...] = ()
    prompts: Literal["ids", "words"] = "ids"
    trace: str | None = None
    limit: int | None = Field(default=None, ge=2)
    rate: float = Field(default=1.0, gt=0)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)


class Policy(_Part):
    """How one or several servers are set.

    Attributes:
        layout: *one* server; *router*: ``servers`` alike ones, requests by turns; *split*: a prefill and a decode server, KV over
            NIXL (vLLM).
        flags: of the engine's command line: true is ``--flag``, false ``--no-flag``, a table is JSON.
        env: more of the environment.
        times: of modelled steps, in ms (modelled only).
        body: more fields of each request.
    """

    engine: Engine
    layout: Literal["one", "router", "split"] = "one"
    servers: int = Field(default=2, ge=2, le=8)
    flags: dict[str, Flag] = {}
    env: dict[str, str] = {}
    times: dict[str, float] = {}
    body: dict[str, Any] = {}

    @property
    def processes(self) -> int:
        """How many servers it takes."""
        return {"one": 1, "router": self.servers, "split": 2}[self.layout]


class Cell(_Part):
    """One comparison: the first of ``policies`` is the base that a replay is calibrated on, the others are what-ifs.

    ``use``: *develop* cells may be looked at while the model is worked on, *report* cells only after. ``record``: *all* that the
    server tells, or what its *proxy* sees alone.
    """

    use: Literal["develop", "report"]
    workload: str
    policies: tuple[str, ...] = Field(min_length=1)
    rounds: int | None = Field(default=None, ge=1)
    record: Literal["all", "proxy"] = "all"
    about: str = ""


class Recipe(_Part):
    """A whole file. ``warm_up``: requests to each server before each run; ``timeout_s``: of one request."""

    tier: Literal[1, 2]
    rounds: int = Field(default=5, ge=1)
    warm_up: int = Field(default=4, ge=0)
    timeout_s: float = Field(default=180, gt=0)
    bounds: Bounds = Bounds()
    machine: Machine = Machine()
    engines: dict[Engine, dict[str, Flag]] = {}
    workloads: dict[str, Work]
    policies: dict[str, Policy]
    cells: dict[str, Cell] = Field(min_length=1)

    def engine(self, cell: str) -> str:
        """The engine of a cell's servers."""
        return self.policies[self.cells[cell].policies[0]].engine

    def rounds_of(self, cell: str) -> int:
        """How often each policy of a cell runs."""
        return self.cells[cell].rounds or self.rounds

    def flags(self, policy: str) -> dict[str, Flag]:
        """A policy's flags over those of its engine."""
        p = self.policies[policy]
        return {**self.engines.get(p.engine, {}), **p.flags}

    def told(self, cell: str, policy: str) -> dict[str, Any]:
        """All that decides what one run of the cell does; runs of another answer to it are other runs."""
        c, p = self.cells[cell], self.policies[policy]
        return {
            "workload": self.workloads[c.workload].model_dump(mode="json"), "record": c.record, "warm_up": self.warm_up,
            "policy": p.model_dump(mode="json") | {"flags": self.flags(policy)},
        }  # fmt: skip


def read(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        InputError: it is no TOML, a key is unknown or has a value that is not possible, or a name leads nowhere.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"{path} is not TOML: {e}.") from None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"] if x not in ("bool", "int", "float", "str")) or "the file"
        raise InputError(f"{path.name}: {where}: {first['msg']}.", hint="See benchmarks/fidelity/README.md.") from None
    _check(path.name, recipe)
    return recipe


def _check(file: str, recipe: Recipe) -> None:
    def no(where: str, what: str, hint: str | None = None) -> InputError:
        return InputError(f"{file}: {where}: {what}", hint=hint)

    for table in ("workloads", "policies", "cells"):
        for name in getattr(recipe, table):
            if not _NAME.fullmatch(name):
                raise no(f"{table}.{name}", "this name cannot be part of a file's.", "Use letters, digits, - and a dot.")
    for name, work in recipe.workloads.items():
        drawn = (work.requests, work.rate_per_s, work.prompt, work.output)
        if work.trace is None and None in drawn:
            raise no(f"workloads.{name}", "requests, rate_per_s, prompt and output are needed, or a trace.")
        if work.trace is not None and any(x is not None for x in (*drawn, work.prefixes)):
            raise no(f"workloads.{name}", "a trace's requests have their own number, rate and lengths.", "Leave those keys out.")
    for name, policy in recipe.policies.items():
        if policy.times and policy.engine != "modelled":
            raise no(f"policies.{name}.times", f"{policy.engine} computes: its steps cannot be given times.")
        if policy.layout == "split" and policy.engine == "llamacpp":
            raise no(f"policies.{name}.layout", "llama.cpp hands no KV over.", "one, router")
        if policy.processes > recipe.machine.servers_at_most:
            raise no(f"policies.{name}", f"it takes {policy.processes} servers, and machine.servers_at_most is less.")
    for name, cell in recipe.cells.items():
        if cell.workload not in recipe.workloads:
            raise no(
                f"cells.{name}.workload", f"there is no workload {cell.workload!r}.", f"There are: {_list(recipe.workloads)}."
            )
        for p in cell.policies:
            if p not in recipe.policies:
                raise no(f"cells.{name}.policies", f"there is no policy {p!r}.", f"There are: {_list(recipe.policies)}.")
        if len(set(cell.policies)) < len(cell.policies):
            raise no(f"cells.{name}.policies", "a policy is named twice.")
        if len({recipe.policies[p].engine for p in cell.policies}) > 1:
            raise no(f"cells.{name}.policies", "they are of different engines.")


def _list(names: dict[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"
