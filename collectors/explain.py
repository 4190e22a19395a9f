"""What can be recorded at a server, without recording it."""

from __future__ import annotations

from typing import Literal

from hoptrace.collectors.base import Collector, Finding
from hoptrace.collectors.engines import llamacpp
from hoptrace.collectors.engines.http import Api
from hoptrace.collectors.engines.identify import identify
from hoptrace.collectors.hardware.process import ProcessCollector, own_host
from hoptrace.collectors.session import finder
from hoptrace.manifest import Server

__all__ = ["explain"]


async def explain(
    url: str, *, pid: int | Literal["auto"] | None = "auto", key: str | None = None
) -> tuple[Server, dict[str, Finding]]:
    """What a session could record, without recording: the server as it describes itself, and each collector's finding."""
    api = Api(url, key)
    try:
        server = await identify(api)
        if server.engine == "llama.cpp":
            await llamacpp.describe(api, server, finder(pid, api.url) if pid is not None else None)
        host = own_host()
        collectors: list[Collector] = []
        if server.engine == "llama.cpp":
            collectors += [
                llamacpp.MetricsCollector(api, server.name, host, None), llamacpp.SlotsCollector(api, server.name, host, None),
            ]  # fmt: skip
        if pid is not None:
            collectors.append(ProcessCollector(finder(pid, api.url), host, None))
        return server, {c.name: await c.probe() for c in collectors}
    finally:
        await api.close()
