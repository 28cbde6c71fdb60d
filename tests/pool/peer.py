"""A client in a process of its own, for tests that need one to be elsewhere, or to die."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from random import Random

from blocks import KEYS, LAYOUT, payload, puts

from kvtool.kv.record import Grant, Want
from kvtool.pool import wire
from kvtool.pool.client import PoolClient
from kvtool.pool.state import read_state


def over_ucx(state_file: Path) -> dict:
    """Read what is there, write more, read that back: all by UCX."""
    pool = PoolClient(state_file, LAYOUT, path="ucx", client_name="ucx peer")
    with pool.read(KEYS[:12], budget_s=20) as read:
        first = [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        whole = read.whole()
    outcomes = [result.outcome.value for result in pool.write(puts(KEYS[200:240]), budget_s=20)]
    with pool.read(KEYS[200:240], budget_s=20) as read:
        second = [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[200:240]]
    again = {result.outcome.value for result in pool.write(puts(KEYS[:4]), budget_s=20)}
    counts = pool.counts()
    pool.close()
    return {
        "first": first,
        "whole": whole,
        "outcomes": sorted(set(outcomes)),
        "second": second,
        "again": sorted(again),
        "read": counts.blocks_read,
        "put": counts.blocks_put,
    }


def hung_write(state_file: Path) -> dict:
    """A write by UCX during which every rank stops for a while; goes on reading until somebody kills us."""
    pool = PoolClient(state_file, LAYOUT, path="ucx", client_name="hung writer")
    pool.read(KEYS[:12], budget_s=20).release()
    reader, pids = pool._ranks.door.reader, [rank.pid for rank in read_state(state_file).ranks]
    write = reader.write

    def stop_and_write(*arguments) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        write(*arguments)

    reader.write = stop_and_write
    outcomes = {
        result.outcome.value for result in pool.write(puts([b"late" + key[4:] for key in KEYS[:8]]), budget_s=0.5)
    }
    reader.write = write
    held = reader.staging.held
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    print(json.dumps({"outcomes": sorted(outcomes), "held": held}), flush=True)
    while not threading.Event().wait(0.05):
        pool.read(KEYS[:1], budget_s=0.2).release()
    return {}


def holding(state_file: Path) -> dict:
    """Leases and reservations, held until somebody kills us."""
    pool = PoolClient(state_file, LAYOUT, client_name="holder")
    read = pool.read(KEYS[:12])
    reserved = 0
    deadline_s = time.monotonic() + 5
    for access in pool._ranks.all():
        for number in range(3):  # one by one: a full rank has each wait for its room
            wants = wire.pack_wants(2, [Want(bytes([access.state.rank, number]) + bytes(30), 100)])
            answers, _ = wire.unpack_grants(access.link.call(wire.Op.RESERVE, wants, deadline_s))
            reserved += sum(answer.grant is Grant.GRANTED for answer in answers)
    print(json.dumps({"read": len(read.blocks), "reserved": reserved}), flush=True)
    threading.Event().wait(60)
    return {}


def churning(state_file: Path) -> dict:
    """Put and read at random until killed; a wrong byte ends it with an error."""
    rng, pool = Random(time.time_ns()), PoolClient(state_file, LAYOUT, client_name="churner")
    print(json.dumps({"begun": True}), flush=True)
    while True:
        start = rng.randrange(380)
        keys = KEYS[start : start + rng.randrange(1, 16)]
        pool.write(puts(keys, KEYS[start - 1] if start else None), budget_s=2)
        with pool.read(keys, budget_s=1) as read:
            copies = [bytes(block.data) for block in read.blocks]
            whole = read.whole()
        if copies[:whole] != [payload(key) for key in keys[:whole]]:
            sys.exit("read the bytes of another block")


if __name__ == "__main__":
    print(
        json.dumps(
            {"ucx": over_ucx, "hold": holding, "hung_write": hung_write, "churn": churning}[sys.argv[1]](
                Path(sys.argv[2])
            )
        ),
        flush=True,
    )
