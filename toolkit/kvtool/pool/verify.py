"""Everything that a pool holds, checked: by its ranks while it runs, from its files when it does not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import BlockCorrupt, KvtoolError
from kvtool.pool.link import Link
from kvtool.pool.state import FILE, read_state
from kvtool.pool.wire import Op, pack_map, unpack_map
from kvtool.transfer.files import BlockFile
from kvtool.transfer.opening import open_as_found

CALL_S = 2.0
_POLL_S = 0.05
AHEAD = 8


@dataclass
class Verified:
    """One rank, or one file of a pool that is not running. `found` has the fields of `pool.scrub.Checked`."""

    name: str
    found: dict[str, int] = field(default_factory=dict)
    why: str = ""
    """Why it could not be checked to the end."""

    @property
    def damaged(self) -> int:
        return self.found.get("dram_damaged", 0) + self.found.get("file_damaged", 0)


def verify_ranks(run_dir: Path, timeout_s: float) -> list[Verified]:
    """Have every live rank check all that it holds, side by side. What is damaged is forgotten there.

    Raises:
        PoolUnavailable: no pool runs in `run_dir`.
    """
    state = read_state(run_dir.absolute() / FILE)
    until_s = time.monotonic() + timeout_s
    ranks = [rank for rank in state.ranks if rank.alive]
    links = [
        Link(rank, bytes.fromhex(state.key), state.kv_layout, "verify", False, lambda epoch: None) for rank in ranks
    ]
    results = [Verified(f"rank {rank.rank}") for rank in ranks]
    going, start = dict(zip(range(len(ranks)), links, strict=True)), True
    try:
        while going:
            for at, link in list(going.items()):
                if not _ask(link, start, results[at]):
                    del going[at]
            start = False
            if going and time.monotonic() >= until_s:
                for at in going:
                    results[at].why = f"not done in {timeout_s:g} s; allow more with --timeout"
                break
            if going:
                time.sleep(_POLL_S)
    finally:
        for link in links:
            link.close()
    return results


def _ask(link: Link, start: bool, result: Verified) -> bool:
    """Whether there is more to come."""
    try:
        answer: dict[str, Any] = unpack_map(link.call(Op.VERIFY, pack_map({"start": start}), time.monotonic() + CALL_S))
    except KvtoolError as error:
        result.why = str(error)
        return False
    running = bool(answer.pop("running"))
    result.found = {name: int(value) for name, value in answer.items()}
    return running


def verify_file(path: Path) -> Verified:
    """Check every record of a file that no rank has open; damaged ones are erased. A key is not needed.

    Raises:
        Refused: it is in use, or no block file.
    """
    result = Verified(str(path), {"file": 0, "file_damaged": 0, "bytes": 0})
    with open_as_found(path) as file:
        headers = list(file.headers())
        for first in range(0, len(headers), AHEAD):
            _check_some(file, headers[first : first + AHEAD], result)
        file.sync().result()
    return result


def _check_some(file: BlockFile, headers: list[Any], result: Verified) -> None:
    checks = [(slot, header, file.check(slot, header.key, header.size)) for slot, header in headers]
    for slot, header, check in checks:
        result.found["file"] += 1
        result.found["bytes"] += header.size
        try:
            check.result()
        except BlockCorrupt:
            result.found["file_damaged"] += 1
            file.erase(slot).result()
        except KvtoolError as error:  # the disk gives an error
            result.found["file_damaged"] += 1
            result.why = str(error)
