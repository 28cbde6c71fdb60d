"""Requests of a job on a deployment: over real gRPC, to a front whose answers are a script."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kserve import KServe, Script
from made import Bytes, make_job, prompts, write_input

import kvtool.batch.live as live
import kvtool.triton.client as client
from kvtool.batch.calibrate import Speed
from kvtool.batch.job import INDEX, JOURNAL
from kvtool.batch.journal import Journal
from kvtool.batch.line import Line
from kvtool.batch.live import LiveTarget
from kvtool.batch.measured import measured, speed_of
from kvtool.batch.rules import Limits
from kvtool.batch.run import Runner
from kvtool.batch.store import Store
from kvtool.batch.target import Ended, Published, Ready
from kvtool.errors import (
    Cancelled,
    DeadlinePassed,
    EngineFailed,
    EngineRefused,
    KvtoolError,
    Overloaded,
    RequestRefused,
    Unavailable,
    Unreachable,
)
from kvtool.triton.peers import Peer, Peers
from kvtool.triton.process import look
from kvtool.triton.wire import Step

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "hit_tokens": {"dram": 4}}
SECONDS = {"prefill": {"prefill": 0.5, "queue": 3.0}, "decode": {"prefill": 0.25}}


def script(asked: dict[str, Any]) -> Iterator[Step]:
    yield Step((1,), "so ", "", {})
    yield Step((2,), f"much for {asked['text_input']}", "length", {**USAGE, "seconds": SECONDS})


def fails(error: Exception) -> Script:
    def run(asked: dict[str, Any]) -> Iterator[Step]:
        raise error
        yield

    return run


class Told:
    """What a target told, with bounded waits."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Published | Ended] = queue.SimpleQueue()

    def __call__(self, event: Published | Ended) -> None:
        self.events.put(event)

    def ended(self) -> Ended:
        while True:
            event = self.events.get(timeout=10)
            if isinstance(event, Ended):
                return event


@pytest.fixture
def serve() -> Iterator[Callable[..., KServe]]:
    made: list[KServe] = []

    def start(script: Script = script, port: int = 0) -> KServe:
        made.append(KServe(script, port))
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def target() -> Iterator[Callable[..., LiveTarget]]:
    made: list[LiveTarget] = []

    def start(url: str | None, run_dir: Path | None = None, **options: Any) -> LiveTarget:
        made.append(LiveTarget(url, run_dir, slots=4, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def ready(number: int = 0, prompt: Any = "it", name: str = "", deadline_s: float = 20.0, **fields: Any) -> Ready:
    line = Line(f"r{number}", "/v1/completions", prompt, **fields)
    return Ready(number, name or f"job-{number}-1", line, (1, 2, 3), 2, deadline_s)


def ask(target: LiveTarget, one: Ready) -> Ended:
    told = Told()
    target.start(one, told)
    return told.ended()


def write_deployment(run_dir: Path, url: str, digest: str = "", deadline_s: float = 600.0) -> None:
    """As a supervisor does: this process stands for it."""
    run_dir.mkdir(exist_ok=True)
    host, _, port = url.partition(":")
    mine = look(os.getpid())
    assert mine is not None
    supervisor = {"pid": mine.pid, "started_ticks": mine.started_ticks}
    servers = [{"role": "front", "grpc_port": int(port)}]
    state = {"supervisor": supervisor, "host": host, "servers": servers, "phase": "running"}
    (run_dir / "deploy.json").write_text(json.dumps(state))
    (run_dir / "spec.json").write_text(json.dumps({"engine": "engine", "limits": {"deadline": deadline_s}}))


def test_an_answer_comes_whole_with_its_usage_after_its_prompt_was_published(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    front, told = serve(), Told()
    one = ready(5, "it", temperature=0.5, top_k=3, top_p=0.25, seed=9, stop=("x", "y"), ignore_eos=True)
    target(front.url).start(one, told)
    assert told.events.get(timeout=10) == Published(5, "job-5-1")
    assert told.events.get(timeout=10) == Ended(5, "job-5-1", "so much for it", "length", {**USAGE, "prefill_s": 0.75})
    asked = front.asked[0]
    assert asked.pop("request_id").startswith("batch-")
    assert asked == {
        "text_input": "it", "max_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 9,
        "priority": 0, "deadline_ms": 20000, "ignore_eos": True, "stop": ["x", "y"],
    }  # fmt: skip


def test_messages_go_as_messages_for_the_deployments_own_template(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    front = serve()
    messages = [{"role": "user", "content": "Grüße"}]
    ask(target(front.url), ready(0, messages))
    assert front.asked[0]["chat"] is True and json.loads(front.asked[0]["text_input"]) == messages


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestRefused("max_tokens must lie in 1 to 4096, found 5000"), RequestRefused),
        (DeadlinePassed("not done within its deadline"), DeadlinePassed),
        (EngineFailed("logits are no numbers"), EngineFailed),
        (Unavailable("3 decode servers were lost with this request"), Unavailable),
        (Overloaded("256 requests are in flight", 2.5), Overloaded),
    ],
)
def test_errors_keep_their_kind(
    error: KvtoolError, kind: type[KvtoolError], serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    found = ask(target(serve(fails(error)).url), ready()).error
    assert type(found) is kind and str(error) in str(found)
    if isinstance(found, Overloaded):
        assert found.retry_after_s == 2.5


def test_a_front_whose_process_died_is_no_requests_fault(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    """See `rules.parts_of` for what it counts."""
    found = ask(target(serve(fails(RuntimeError("Stub process 'kvtool_0_0' is not healthy."))).url), ready()).error
    assert isinstance(found, Unreachable) and "is not healthy" in str(found)


def test_a_cancelled_request_ends_on_the_server_too(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    hold, told = threading.Event(), Told()

    def held(asked: dict[str, Any]) -> Iterator[Step]:
        yield Step((1,), "so ", "", {})
        hold.wait(10)

    front = serve(held)
    running = target(front.url)
    running.start(ready(), told)
    assert isinstance(told.events.get(timeout=10), Published)
    running.cancel("job-0-1")
    assert isinstance(told.ended().error, Cancelled)
    front.until(lambda: front.gone == [front.asked[0]["request_id"]])
    hold.set()


def test_a_request_cancelled_at_once_is_told_all_the_same(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    told, running = Told(), target(serve().url)
    entered, go = threading.Event(), threading.Event()
    running._loop.call_soon_threadsafe(lambda: (entered.set(), go.wait(10)))
    assert entered.wait(10)
    running.start(ready(), told)  # both arrive in one turn of the loop
    running.cancel("job-0-1")
    go.set()
    assert isinstance(told.ended().error, Cancelled)


def test_a_deadline_is_cut_to_what_the_deployment_allows(
    tmp_path: Path, serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    front = serve()
    write_deployment(tmp_path / "state", front.url, deadline_s=7.0)
    ask(target(None, tmp_path / "state"), ready(deadline_s=20.0))
    assert front.asked[0]["deadline_ms"] == 7000


def test_a_front_that_never_answers_is_left_after_the_deadline(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_GRACE_S", 0.2)
    hold = threading.Event()

    def held(asked: dict[str, Any]) -> Iterator[Step]:
        hold.wait(10)
        yield from ()

    found = ask(target(serve(held).url), ready(deadline_s=0.1)).error
    hold.set()
    assert isinstance(found, DeadlinePassed)


def test_a_deployment_is_found_again_at_another_address_and_at_the_same_one(
    tmp_path: Path, serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    first, run_dir = serve(), tmp_path / "state"
    write_deployment(run_dir, first.url)
    running = target(None, run_dir)
    assert ask(running, ready(0)).finish == "length"
    first.stop()
    assert isinstance(ask(running, ready(1)).error, Unreachable)
    second = serve()
    write_deployment(run_dir, second.url)
    assert ask(running, ready(2)).finish == "length" and len(second.asked) == 1
    (run_dir / "deploy.json").unlink()
    lost = ask(running, ready(3)).error
    assert isinstance(lost, Unreachable) and "no deployment runs" in str(lost)
    second.stop()
    third = serve(port=int(second.url.rpartition(":")[2]))
    write_deployment(run_dir, third.url)
    ends = (ask(running, ready(number)) for number in range(4, 400))  # until the channel has dialled again
    assert any(end.finish == "length" for end in ends)
    assert running.trouble() == ""


def test_nobody_answering_for_long_stops_the_job(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    front = serve()
    running = target(front.url)
    front.stop()
    ask(running, ready())
    assert running.trouble() == ""
    monkeypatch.setattr(live, "PATIENCE_S", 0.0)
    assert "has not answered for" in running.trouble() and front.url in running.trouble()


def test_a_deployment_of_another_model_is_refused_at_the_start_and_stops_the_job_later(
    tmp_path: Path, serve: Callable[..., KServe], target: Callable[..., LiveTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(["a" * 64, "b" * 64, "b" * 64])
    monkeypatch.setattr(live, "read_manifest", lambda path: type("Manifest", (), {"model_digest": next(digests)}))
    first, run_dir = serve(), tmp_path / "state"
    write_deployment(run_dir, first.url)
    running = target(None, run_dir, model_digest="a" * 64)
    assert isinstance(ask(running, ready()).error, Unreachable)
    assert "the deployment serves bbbbbbbbbbbb" in running.trouble() and not first.asked
    with pytest.raises(EngineRefused, match="deploy that engine again"):
        target(None, run_dir, model_digest="a" * 64)


def test_no_deployment_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no deployment runs in"):
        LiveTarget(None, tmp_path, slots=1)


def test_one_channel_carries_all_requests_and_close_leaves_nothing(
    serve: Callable[..., KServe], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closed = [], []

    class Client(client.triton_aio.InferenceServerClient):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(args)
            super().__init__(*args, **options)

        async def close(self) -> None:
            closed.append(self)
            await super().close()

    monkeypatch.setattr(client.triton_aio, "InferenceServerClient", Client)
    front, told, before = serve(), Told(), set(threading.enumerate())
    running = LiveTarget(front.url, None, slots=4)
    for number in range(12):
        running.start(ready(number), told)
    assert {told.ended().number for _ in range(12)} == set(range(12))
    assert len(made) == 1 and len({one["request_id"] for one in front.asked}) == 12
    front.script = silent(hold := threading.Event())
    running.start(ready(12), told)
    front.until(lambda: len(front.asked) == 13)
    running.close()
    assert isinstance(told.ended().error, Cancelled) and len(closed) == 1
    front.until(lambda: len(front.gone) == 1)
    hold.set()
    running.close()  # again is harmless
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "kvtool-batch"]
    assert not left and not running._tasks and running._loop.is_closed()


def silent(hold: threading.Event) -> Script:
    def run(asked: dict[str, Any]) -> Iterator[Step]:
        hold.wait(10)
        yield from ()

    return run


def test_two_jobs_of_one_name_do_not_share_request_ids(
    serve: Callable[..., KServe], target: Callable[..., LiveTarget]
) -> None:
    """Nor a job that was killed and resumed: its old request may be on its way out there, and ids must differ."""
    front = serve()
    for _ in range(2):
        assert ask(target(front.url), ready(1, name="out~1.jsonl.job-1-1")).finish
    ids = [one["request_id"] for one in front.asked]
    assert len(set(ids)) == 2 and all("~" not in each and len(each) <= 128 for each in ids)


def run_job(tmp_path: Path, running: LiveTarget, count: int) -> Runner:
    told = make_job(tmp_path / "job", write_input(tmp_path / "in.jsonl", prompts(count)), concurrent=8)
    with (
        closing(Store(tmp_path / "job" / INDEX)) as store,
        closing(Journal(tmp_path / "job" / JOURNAL, told.requests)) as journal,
        (tmp_path / "in.jsonl").open("rb") as source,
    ):
        limits = Limits(attempts=1)
        runner = Runner(tmp_path / "job", source, store, journal, Bytes(), running, limits, max_tokens=8, concurrent=8)
        assert runner.run() == ""
    return runner


def test_a_deployment_that_is_full_lowers_how_many_run_and_loses_none(
    tmp_path: Path, serve: Callable[..., KServe]
) -> None:
    lock, busy, refused, most = threading.Lock(), [0], [0], 2

    def full(asked: dict[str, Any]) -> Iterator[Step]:
        with lock:
            if busy[0] == most:
                refused[0] += 1
                raise Overloaded(f"{most} requests are in flight", 0.1)
            busy[0] += 1
        try:
            threading.Event().wait(0.01)  # a computation
        finally:
            with lock:
                busy[0] -= 1
        yield from script(asked)

    front = serve(full)
    running = LiveTarget(front.url, None, slots=8)
    try:
        runner = run_job(tmp_path, running, 40)
    finally:
        running.close()
    assert runner.counts.done == 40 and runner.counts.failed == 0
    assert 0 < refused[0] == runner.counts.retries < 40, refused


def test_a_job_outlives_a_deployment_that_restarts_elsewhere(tmp_path: Path, serve: Callable[..., KServe]) -> None:
    """With one attempt for each request: what nobody answered is no attempt."""
    run_dir, fronts, moving = tmp_path / "state", [serve()], threading.Lock()
    write_deployment(run_dir, fronts[0].url)

    def moves(asked: dict[str, Any]) -> Iterator[Step]:
        if len(fronts[0].asked) >= 20 and moving.acquire(blocking=False):
            fronts.append(serve())
            write_deployment(run_dir, fronts[1].url)
            threading.Thread(target=fronts[0].stop).start()
            threading.Event().wait(1)  # until the channel is torn down
        yield from script(asked)

    fronts[0].script = moves
    running = LiveTarget(None, run_dir, slots=8)
    try:
        runner = run_job(tmp_path, running, 60)
    finally:
        running.close()
    assert runner.counts.done == 60 and runner.counts.failed == 0 and runner.counts.retries > 0
    assert len(fronts[1].asked) > 20


def test_the_time_of_a_live_job_is_told_by_the_rates_of_its_servers() -> None:
    def said(role: str, compute: float | None, decode: float | None = None) -> dict[str, Any]:
        return {"role": role, "rates": {"compute_tokens_s": compute, "decode_tokens_s": decode}}

    one = said("decode", None, 20.0)
    assert speed_of([said("prefill", 100.0), one]) == Speed(100.0, 20.0)
    assert speed_of([said("prefill", 100.0), said("prefill", None), one, one]) == Speed(200.0, 40.0)
    assert speed_of([said("decode", 50.0, 20.0)]) == Speed(50.0, 20.0)  # no prefill servers
    assert speed_of([said("prefill", 100.0), said("decode", None)]) is None
    assert speed_of([{"role": "prefill"}, one]) is None  # of another kind of worker


def test_a_deployment_that_is_not_there_has_no_speed(tmp_path: Path) -> None:
    assert measured(tmp_path) is None
    Peers((Peer("prefill-0", "prefill", "127.0.0.1:1", 1),), True).write(tmp_path / "peers.json")
    assert measured(tmp_path) is None
