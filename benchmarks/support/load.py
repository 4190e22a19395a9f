"""An open-loop load of streaming completions for a server without a tokenizer: Poisson arrivals, prompts of token ids, lengths
drawn with a seed. The client reads and forgets: who measures is in between.

Run: ``python benchmarks/support/load.py URL REQUESTS RATE_PER_S [SEED] [MEAN_OUTPUT] [MOST_PROMPT] [MEDIAN_PROMPT]``.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from urllib.parse import urlsplit


async def _one(host: str, port: int, name: str, prompt: int, output: int) -> None:
    body = json.dumps(
        {
            "model": "toy", "prompt": [5] * prompt, "max_tokens": output, "stream": True, "ignore_eos": True,
            "return_token_ids": True, "cache_salt": name, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nX-Request-Id: {name}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{name}: {status!r} {await reader.read(2000)!r}")
    while await reader.read(1 << 16):
        pass
    writer.close()


async def load(
    url: str, requests: int, rate: float, seed: int = 0, mean_output: int = 50, most_prompt: int = 1500, median_prompt: int = 200
) -> None:
    """Send ``requests`` requests at ``rate`` a second and wait for their answers. Outputs are geometric (mean, 4 to 5 × mean),
    prompts log-normal (8 to ``most_prompt`` tokens)."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    rng = random.Random(seed)
    at, loop = 0.0, asyncio.get_running_loop()
    began, tasks = loop.time(), []
    for i in range(requests):
        at += rng.expovariate(rate)
        prompt = min(max(int(rng.lognormvariate(math.log(median_prompt), 1.2)), 8), most_prompt)
        output = min(4 + int(rng.expovariate(1 / max(mean_output - 4, 1))), 5 * mean_output)
        if (left := began + at - loop.time()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(_one(parts.hostname, parts.port, f"q{seed}x{i}", prompt, output)))
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    _, url, n, rate, *more = sys.argv
    asyncio.run(load(url, int(n), float(rate), *map(int, more)))
