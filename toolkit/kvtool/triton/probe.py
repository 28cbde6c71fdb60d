"""A probe for container runtimes: a real inference through one server, since readiness outlives a dead stub.

    python3 -m kvtool.triton.probe ROLE HOST:PORT [SECONDS]

Exits 0 after a sign of life; else 1, with the reason on stderr.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from kvtool.errors import KvtoolError
from kvtool.triton.canary import canary
from kvtool.triton.peers import Peer
from kvtool.triton.rpc import Links

ROLES = ("front", "prefill", "decode")
TIMEOUT_S = 10.0


async def probe(role: str, address: str, timeout_s: float) -> float:
    """Seconds until the server gave a sign of life. Raises KvtoolError: it gave none."""
    links = Links()
    try:
        return await canary(links, Peer(f"{role} at {address}", role, address, 1), timeout_s)
    finally:
        await links.close()


def main(words: Sequence[str]) -> int:
    if len(words) not in (2, 3) or words[0] not in ROLES:
        print(f"wanted ROLE ({', '.join(ROLES)}) HOST:PORT [SECONDS], found {' '.join(words)}", file=sys.stderr)
        return 2
    try:
        asyncio.run(probe(words[0], words[1], float(words[2]) if len(words) == 3 else TIMEOUT_S))
    except (KvtoolError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
