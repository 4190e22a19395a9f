"""The servers of policies: started when they are first needed, kept up while there is room, ended with the command.

An idle server takes no CPU, so several policies stay up at once and can be run by turns.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import Popen

from harness.children import end, pin, spawn, tree, wait_until
from harness.engines import Place, command
from harness.recipe import Recipe

from hoptrace.errors import EnvironmentProblem

__all__ = ["Fleet", "Up", "answers", "free_ports"]


@dataclass
class Up:
    """A policy's servers while they are up, the prefill server of a split first."""

    policy: str
    places: list[Place]
    processes: list[Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    granted: bool = True

    @property
    def roots(self) -> list[int]:
        """The first process of each server."""
        return [p.pid for p in self.processes]

    @property
    def cpus(self) -> list[int]:
        """The cores that they compute on."""
        return sorted({p.cpu for p in self.places})

    def alive(self) -> bool:
        """Whether all of them still run."""
        return all(p.poll() is None for p in self.processes)


class Fleet:
    """Servers of a recipe's policies; a context: on leaving all are ended. ``say`` is told what takes long."""

    def __init__(self, recipe: Recipe, folder: Path, say: Callable[[str], None]) -> None:
        self.recipe, self.folder, self.say = recipe, folder, say
        self._up: dict[str, Up] = {}

    def __enter__(self) -> Fleet:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._up):
            self.stop(name)

    def get(self, name: str, also: tuple[str, ...] = ()) -> Up:
        """The servers of a policy, started if they are not up. ``also``: policies that are needed by turns with it: if there is
        room they are started with it, and they are the last to be ended when there is none.

        Raises:
            EnvironmentProblem: it cannot be started; quotes the end of its log.
        """
        if name in self._up and not self._up[name].alive():
            self.stop(name)
        if name in self._up:
            self._up[name] = self._up.pop(name)  # the last one used is the last to go
            return self._up[name]
        self._room(name, also)
        up = self._up[name] = self._begin(name)
        try:
            self._ready(up)
        except BaseException:
            self.stop(name)
            raise
        return up

    def stop(self, name: str) -> None:
        """End a policy's servers, if they are up."""
        up = self._up.pop(name, None)
        for process in up.processes if up else ():
            end(process)

    def _room(self, name: str, also: tuple[str, ...]) -> None:
        most = self.recipe.machine.servers_at_most - self.recipe.policies[name].processes
        for other in sorted(self._up, key=lambda n: n in also):  # stable: of equals the one used longest ago
            if sum(len(u.processes) for u in self._up.values()) <= most:
                return
            self.stop(other)

    def _begin(self, name: str) -> Up:
        policy, machine = self.recipe.policies[name], self.recipe.machine
        roles = ["prefill", "decode"] if policy.layout == "split" else [None] * policy.processes
        ports = free_ports(2 * len(roles))
        up = Up(name, [])
        for k, role in enumerate(roles):
            cpu = machine.server_cpus[k % len(machine.server_cpus)]
            place = Place(self.folder / name / str(k), ports[2 * k], cpu, role, ports[2 * k + 1])
            place.folder.mkdir(parents=True, exist_ok=True)
            words, env = command(policy, self.recipe.flags(name), place, self.folder)
            log = place.folder / "server.log"
            log.unlink(missing_ok=True)
            up.places.append(place)
            up.logs.append(log)
            up.processes.append(spawn(words, log, env=env))
        return up

    def _ready(self, up: Up) -> None:
        """Starting takes all cores, as long as it likes; what runs then is pinned."""
        self.say(f"starting {up.policy} …")
        for place, process, log in zip(up.places, up.processes, up.logs, strict=True):
            ready = partial(answers, f"{place.url}/health")
            wait_until(ready, process, log, f"The server of {up.policy}", self.recipe.machine.start_s)
            answer(place.url)
            up.granted &= pin(process.pid, [place.cpu], self.recipe.machine.client_cpus, self.recipe.machine.server_nice)
        if not up.granted:
            self.say(f"{up.policy}: the priority {self.recipe.machine.server_nice} was not granted (it takes root)")
        for root, log in zip(up.roots, up.logs, strict=True):
            if not tree(root):
                raise EnvironmentProblem(f"The server of {up.policy} ended.", hint=f"Its log is {log}.")


def answer(url: str) -> None:
    """Have a server compute once, so that it shows which of its threads does."""
    body = {"model": "smol", "prompt": list(range(100, 164)), "max_tokens": 16, "ignore_eos": True, "cache_salt": "first"}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", "Connection": "close"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            reply.read()
    except (OSError, urllib.error.URLError) as e:
        raise EnvironmentProblem(f"The server at {url} does not compute: {e}.") from None


def answers(url: str) -> bool:
    """Whether there is a 200 from ``url``."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def free_ports(n: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now, ``n`` in a row of numbers."""
    for _ in range(100):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            first = int(s.getsockname()[1])
        try:
            for port in range(first, first + n):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return list(range(first, first + n))
    raise EnvironmentProblem("No free ports in a row were found on 127.0.0.1.")
