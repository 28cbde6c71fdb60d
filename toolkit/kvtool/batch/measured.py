"""How fast a deployment has been, by what its servers measured at their own traffic; nothing is run for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from kvtool.batch.calibrate import Speed
from kvtool.errors import KvtoolError
from kvtool.triton.peers import FILE, Peer, PeersFile
from kvtool.triton.rpc import Links

_TIMEOUT_S = 3.0


def measured(run_dir: Path) -> Speed | None:
    """Tokens per second of all its prefill servers together, and of all its decode servers; None: not known yet, or
    nobody answers."""
    try:
        return speed_of(asyncio.run(_ask_all(PeersFile(run_dir / FILE).read().instances)))
    except KvtoolError:
        return None


def speed_of(said: list[dict[str, Any]]) -> Speed | None:
    """From what each server says of itself. One that has measured nothing yet counts as its equals do."""
    rates = {
        role: [one.get("rates", {}).get(rate) for one in said if one.get("role") == role]
        for role, rate in (("prefill", "compute_tokens_s"), ("decode", "decode_tokens_s"))
    }
    if not rates["prefill"]:  # decode servers compute prompts too
        rates["prefill"] = [one.get("rates", {}).get("compute_tokens_s") for one in said]
    sums = {}
    for role, found in rates.items():
        known = [rate for rate in found if rate]
        if not known:
            return None
        sums[role] = sum(known) * len(found) / len(known)
    return Speed(sums["prefill"], sums["decode"])


async def _ask_all(peers: tuple[Peer, ...]) -> list[dict[str, Any]]:
    links = Links()
    try:
        answers = await asyncio.gather(*(links.operate(peer, {"op": "status"}, _TIMEOUT_S) for peer in peers))
    finally:
        await links.close()
    return [json.loads(answer) for answer in answers]
