"""The other processes of the transfer benchmark: `python -m kvtool.measure.transfer_peer ROLE ...`.

`owner SIZE` shares memory over UCX, `reader METADATA SLOT_SIZE SLOTS` reads it, `sender SIZE` serves a plain loopback
socket; `rank` and `plain` are those of `by_socket`. Each prints one line when it is up, and ends when its stdin closes.
A reader of its own, because UCX takes its transports from the environment once per process.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from pathlib import Path

import numpy as np

from kvtool.measure import by_socket

PATIENCE_S = 60.0


def owner(size: int) -> None:
    from kvtool.transfer.ucx import UcxOwner

    shared = UcxOwner("bench-owner", memoryview(bytearray(np.random.default_rng(0).bytes(size))))
    print(shared.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        shared.progress()
    shared.close()


def reader(metadata: bytes, slot_size: int, slots: int) -> None:
    """Each line "first count" reads that many blocks from block `first` on and prints the seconds it took."""
    from kvtool.transfer.ucx import UcxReader

    made = UcxReader("bench-reader", slot_size * slots, slot_size)
    made.connect("owner", metadata, time.monotonic() + PATIENCE_S)
    print("up", flush=True)
    for line in sys.stdin:
        first, count = map(int, line.split())
        began_s = time.perf_counter()
        ranges = [((first + n) * slot_size, slot_size) for n in range(count)]
        made.read("owner", ranges, time.monotonic() + PATIENCE_S).release()
        print(time.perf_counter() - began_s, flush=True)
    made.close()


def sender(size: int) -> None:
    """To each 16 bytes (offset, length) on the one connection it answers with those bytes of its memory."""
    memory = memoryview(np.random.default_rng(0).bytes(size))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
        with link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(wanted := link.recv(16, socket.MSG_WAITALL)) == 16:
                at, length = int.from_bytes(wanted[:8], "little"), int.from_bytes(wanted[8:], "little")
                link.sendall(memory[at : at + length])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["owner", size]:
            owner(int(size))
        case ["reader", metadata, slot_size, slots]:
            reader(bytes.fromhex(metadata), int(slot_size), int(slots))
        case ["sender", size]:
            sender(int(size))
        case ["rank", directory, block_size, slots]:
            by_socket.rank(Path(directory), int(block_size), int(slots))
        case ["plain", block_size, blocks]:
            by_socket.plain(int(block_size), int(blocks))
