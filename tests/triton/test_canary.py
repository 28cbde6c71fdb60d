"""When a late canary means a hung engine, and when a busy one."""

import asyncio
import json

import pytest

from kvtool.errors import DeadlinePassed, KvtoolError
from kvtool.triton.canary import canary as send_canary
from kvtool.triton.peers import Peer


class Links:
    """`canary` is its answer, or an error to raise; `counts` are the worker's, one after the other."""

    def __init__(self, canary, counts=()):
        self.canary, self.counts = canary, list(counts)

    async def operate(self, peer, op, timeout_s):
        if op["op"] == "status":
            return json.dumps({"counts": self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]})
        if isinstance(self.canary, Exception):
            raise self.canary
        return json.dumps(self.canary)


def canary(links):
    return asyncio.run(send_canary(links, Peer("decode-0", "decode", "127.0.0.1:1", 1), timeout_s=0.05))


def test_an_answer_in_time_is_health():
    assert canary(Links({"ok": True})) < 1


@pytest.mark.parametrize("canary_says", [{"ok": False, "error": {"message": "the engine failed"}}, KvtoolError("x")])
def test_a_failed_canary_is_not(canary_says):
    with pytest.raises(KvtoolError):
        canary(Links(canary_says))


def test_a_late_canary_of_an_engine_that_computes_is_health():
    counts = [{"computed_tokens": 512}, {"computed_tokens": 512}, {"computed_tokens": 1024}]
    canary(Links(DeadlinePassed("late"), counts))


@pytest.mark.parametrize("counts", [[{"computed_tokens": 512}], [{"accepted": 1}, {"accepted": 2}], [{}]])
def test_a_late_canary_of_an_engine_that_does_not_is_not_whatever_still_arrives(counts):
    with pytest.raises(DeadlinePassed):
        canary(Links(DeadlinePassed("late"), counts))
