"""Published results against ours, with the setting: ``python benchmarks/published.py [ID ...]``.

Where a setting is published in full the ratio must agree within 25 %, else the direction (which policy wins). What misses is
said to miss, with the reason as far as it is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from support.published import Check
from support.published_moving import host_tier, layers_overlap, prefix_routing, speculation_crosses, split_signs
from support.published_scheduling import chunks_and_stalls, host_share, kv_cliff, stale_routing

CHECKS: dict[str, Callable[[], Check]] = {
    "P2": layers_overlap,
    "P7": split_signs,
    "P12": chunks_and_stalls,
    "P14": speculation_crosses,
    "P17": host_share,
    "P18": host_tier,
    "P25": prefix_routing,
    "P26": stale_routing,
    "P27": kv_cliff,
}


def main(wanted: list[str]) -> int:
    """Print the checks asked for, or all; 1 if any misses."""
    missed = 0
    for name in wanted or CHECKS:
        c = CHECKS[name]()
        print(f"{c.id}  {c.setting}")
        for row in c.rows:
            print(f"  {row.what}: published {row.published}; ours {row.ours}")
        print(f"  {'met' if c.met else 'MISSED'}{': ' + c.why if c.why else ''}")
        missed += not c.met
    print(f"published checks missed: {missed} of {len(wanted or CHECKS)}")
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
