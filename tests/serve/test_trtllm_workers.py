"""The workers over TensorRT-LLM: streams, ends, hand-offs of both kinds, and nothing held afterwards."""

from __future__ import annotations

import queue
import threading

import pytest
from llm import FakeLlm, answer

from kvtool.errors import (
    Cancelled,
    DeadlinePassed,
    EngineFailed,
    Overloaded,
    RequestRefused,
    Unavailable,
)
from kvtool.serve.handoff import Handoff
from kvtool.serve.options import LlmOptions
from kvtool.serve.request import Finish, Request, Sampling
from kvtool.serve.trtllm import ENGINE, Facts
from kvtool.serve.trtllm_decode import LlmDecodeWorker
from kvtool.serve.trtllm_prefill import LlmPrefillWorker

EOS = 2
FACTS = Facts(vocab_size=200, context_tokens_max=1000, block_tokens=8, eos_token_ids=frozenset({EOS, 3}))
PROMPT = tuple(range(20, 60))
WAIT_S = 10.0


class Bytes:
    """A tokenizer of one character for each token."""

    def decode(self, ids):
        return "".join(chr(token) for token in ids)


class Pool:
    """Holds what it is told; `late` questions are answered as before."""

    def __init__(self, there=0, after=0, late=0):
        self.there, self.after, self.late, self.asked, self.closed = there, after, late, 0, False

    def blocks(self, tokens):
        self.asked += 1
        return self.after if self.asked > 1 + self.late else self.there

    def close(self):
        self.closed = True


class Ends(queue.Queue):
    """Collects one request's answers."""

    def __call__(self, said):
        self.put(said)

    def all(self):
        events = []
        while not events or events[-1].finish is None:
            events.append(self.get(timeout=WAIT_S))
        return events

    def one(self):
        return self.get(timeout=WAIT_S)


@pytest.fixture
def make():
    made = []

    def make(kind, llm, handoff="pool", **extra):
        if kind == "decode":
            worker = LlmDecodeWorker(llm, FACTS, LlmOptions(handoff=handoff), extra.get("tokenizer", Bytes()))
        else:
            options = LlmOptions(handoff=handoff, put_budget_s=extra.pop("put_budget_s", 5.0))
            worker = LlmPrefillWorker(llm, FACTS, options, **extra)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        assert worker.wait_idle(WAIT_S), worker.audit()
        worker.close()
        assert not worker._thread.is_alive()


def _request(name="a", tokens=PROMPT, max_tokens=6, **more):
    return Request(name, tuple(tokens), max_tokens, **more)


def _decode(worker, request, handoff=None):
    ends = Ends()
    worker.submit(request, ends, handoff)
    return ends.all()


def _prefill(worker, request):
    ends = Ends()
    worker.submit(request, ends)
    return ends.one()


def _tokens(events):
    return [token for event in events for token in event.tokens]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_every_token_is_sent_once_whatever_comes_at_a_time(make, step):
    events = _decode(make("decode", FakeLlm(step=step, cached=16)), _request())
    assert _tokens(events) == answer(PROMPT, 6)
    assert [event.index for event in events] == [sum(len(e.tokens) for e in events[:i]) for i in range(len(events))]
    last = events[-1]
    assert last.finish is Finish.LENGTH and last.usage.completion_tokens == 6
    assert last.usage.hit_tokens == {ENGINE: 16} and last.usage.computed_tokens == len(PROMPT) - 16


def test_greedy_names_no_sampling_and_sampling_names_top_p_always(make):
    llm = FakeLlm()
    worker = make("decode", llm)
    _decode(worker, _request())
    _decode(worker, _request("b", sampling=Sampling(0.7, 0, 1.0, 5), ignore_eos=True, salt="tenant"))
    _decode(worker, _request("c", sampling=Sampling(0.7, 40, 0.9, 5)))
    _decode(worker, _request("d", sampling=Sampling(0.7, 1, 0.9, 5)))
    greedy, plain, both, first = (asked["sampling"] for asked in llm.asked)
    fixed = {"max_tokens": 6, "end_id": 2, "pad_id": 2, "detokenize": False, "add_special_tokens": False}
    assert greedy == first == {**fixed, "stop_token_ids": [3]}
    assert plain == {**fixed, "ignore_eos": True, "temperature": 0.7, "top_p": 1.0, "seed": 5}
    assert both == {**fixed, "stop_token_ids": [3], "temperature": 0.7, "top_p": 0.9, "seed": 5, "top_k": 40}
    assert [asked["salt"] for asked in llm.asked] == ["", "tenant", "", ""]


@pytest.mark.parametrize("end", [2, 3])
def test_an_end_token_ends_the_answer_and_is_not_part_of_it(make, end):
    llm = FakeLlm(script=[70, 71, end, 72], step=2)
    events = _decode(make("decode", llm), _request())
    assert _tokens(events) == [70, 71] and events[-1].finish is Finish.STOP


def test_end_tokens_are_ordinary_ones_when_they_are_to_be_ignored(make):
    events = _decode(make("decode", FakeLlm(script=[70, 3, 2, 72])), _request(max_tokens=4, ignore_eos=True))
    assert _tokens(events) == [70, 3, 2, 72] and events[-1].finish is Finish.LENGTH


def test_a_stop_string_cuts_the_text_and_aborts_what_would_follow(make):
    llm = FakeLlm(script=[ord(c) for c in "one two END three"])
    events = _decode(make("decode", llm), _request(max_tokens=17, stop=("END",)))
    assert events[-1].finish is Finish.STOP and events[-1].cut_chars == 3
    text = "".join(chr(token) for token in _tokens(events))
    assert text == "one two END" and len(llm.aborted) == 1


def test_an_answer_ends_with_the_context_window(make):
    tokens = [30] * 897
    events = _decode(make("decode", FakeLlm()), _request(tokens=tokens, max_tokens=500))
    assert len(_tokens(events)) == 1000 - 897 and events[-1].finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_request(tokens=()), "the prompt is empty"),
        (_request(tokens=[200]), "token 200 is outside the vocabulary of 200"),
        (_request(tokens=[30] * 1000), "the prompt has 1000 tokens"),
        (_request(tokens=[30] * 950), "TensorRT-LLM refuses the request: prompt length 901"),
        (_request(max_tokens=0), "max_tokens must be at least 1"),
        (_request(sampling=Sampling(top_p=2)), "top_p must lie above 0"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_its_numbers(make, request_, words):
    decoded = _decode(make("decode", FakeLlm()), request_)[-1].error
    prefilled = _prefill(make("prefill", FakeLlm()), request_).error
    for error in (decoded, prefilled):
        assert isinstance(error, RequestRefused) and words in str(error)


def test_a_cancelled_request_ends_at_once_and_is_aborted_in_the_engine(make):
    llm = FakeLlm(gate=threading.Event())
    worker, ends = make("decode", llm), Ends()
    worker.submit(_request(), ends)
    while not llm.asked:
        pass
    assert worker.cancel("a") and not worker.cancel("b")
    assert ends.all()[-1].finish is Finish.CANCELLED
    assert worker.wait_idle(WAIT_S) and [output.finished for output in llm.aborted] == [True]
    assert not worker.cancel("a")
    assert worker.status()["counts"]["cancelled"] == 1


def test_a_late_request_ends_with_its_deadline_and_is_aborted(make):
    llm = FakeLlm(gate=threading.Event())
    for kind in ("decode", "prefill"):
        worker = make(kind, llm)
        request = _request(deadline_s=0.05)
        error = (_decode(worker, request)[-1] if kind == "decode" else _prefill(worker, request)).error
        assert isinstance(error, DeadlinePassed) and f"deadline of 0.05 s (in {kind})" in str(error)
    assert len(llm.aborted) == 2


def test_an_engine_that_raises_fails_the_request_and_the_worker_goes_on(make):
    llm = FakeLlm(broken=True)
    worker = make("decode", llm)
    event = _decode(worker, _request())[-1]
    assert isinstance(event.error, EngineFailed) and "RuntimeError: the executor is gone" in str(event.error)
    llm.broken = False
    assert _tokens(_decode(worker, _request())) == answer(PROMPT, 6)


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "not_finished"])
def test_an_end_that_nobody_asked_for_is_an_error(make, reason):
    event = _decode(make("decode", FakeLlm(script=[50], reason=reason)), _request())[-1]
    assert event.finish is Finish.ERROR and isinstance(event.error, (EngineFailed, DeadlinePassed))


def test_too_many_requests_and_twice_the_same_are_refused_early(make):
    llm = FakeLlm(gate=threading.Event())
    worker = LlmDecodeWorker(llm, FACTS, LlmOptions(queue_max=2))
    ends = [Ends() for _ in range(4)]
    for name, end in zip("aabc", ends, strict=True):
        worker.submit(_request(name), end)
    assert isinstance(ends[1].all()[-1].error, RequestRefused)
    assert isinstance(ends[3].all()[-1].error, Overloaded)
    worker.close()
    for end in (ends[0], ends[2]):
        assert isinstance(end.all()[-1].error, Unavailable)
    assert llm.closed and not worker.audit()
    late = Ends()
    worker.submit(_request(), late)
    assert isinstance(late.all()[-1].error, Unavailable)
    worker.close()


def test_stop_strings_need_a_tokenizer(make):
    event = _decode(make("decode", FakeLlm(), tokenizer=None), _request(stop=("x",)))[-1]
    assert "stop strings need a tokenizer" in str(event.error)


# Hand-off by TensorRT-LLM's transceiver.


def test_what_a_context_request_left_reaches_the_generation_request_through_json(make):
    context, generation = FakeLlm(cached=8), FakeLlm(cached=40)
    done = _prefill(make("prefill", context, "transceiver"), _request())
    assert context.asked[0]["handoff"] == {"request_type": "context_only"}
    assert context.asked[0]["sampling"]["max_tokens"] == 1 and not context.asked[0]["streaming"]
    handoff = Handoff.from_json(done.handoff.to_json())
    events = _decode(make("decode", generation, "transceiver"), _request(), handoff)
    assert generation.asked[0]["handoff"] == {
        "request_type": "generation_only",
        "first_gen_tokens": answer(PROMPT, 1),
        "ctx_request_id": 17,
        "opaque_state": b"\x00where\xff",
    }
    assert _tokens(events) == answer(PROMPT, 6)
    usage = events[-1].usage
    assert (usage.hit_tokens, usage.computed_tokens) == ({ENGINE: 8}, 32), "hits are what was there before prefill"


def test_context_requests_get_ids_of_their_own_where_the_version_wants_them(make):
    llm = FakeLlm()
    worker = make("prefill", llm, "transceiver", own_ids=True)
    for name in "ab":
        done = _prefill(worker, _request(name))
        assert done.handoff.transfer["ctx_request_id"] == llm.asked[-1]["handoff"]["disagg_request_id"]
    ids = {asked["handoff"]["disagg_request_id"] for asked in llm.asked}
    assert len(ids) == 2 and all(1 << 42 < each < 1 << 63 for each in ids)


@pytest.mark.parametrize("handoff", [None, Handoff(4)])
def test_a_generation_server_refuses_a_prompt_without_a_hand_off(make, handoff):
    llm = FakeLlm()
    error = _decode(make("decode", llm, "transceiver"), _request(), handoff)[-1].error
    assert isinstance(error, RequestRefused) and "wanted the hand-off of a context request, found none" in str(error)
    assert not llm.asked


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"first_gen_tokens": [1], "colour": 3}, "unknown colour"),
        ({"ctx_request_id": 3}, "no first_gen_tokens"),
        ({"first_gen_tokens": [1], "opaque_state": "%%%"}, "wanted base64 in the hand-off's opaque_state"),
    ],
)
def test_a_hand_off_that_nobody_wrote_is_refused(make, transfer, words):
    event = _decode(make("decode", FakeLlm(), "transceiver"), _request(), Handoff(0, transfer=transfer))[-1]
    assert isinstance(event.error, RequestRefused) and words in str(event.error)


def test_a_canary_is_an_ordinary_request_on_both_sides(make):
    """Nobody would pull the KV of a context request that a canary made."""
    llm = FakeLlm()
    done = _prefill(make("prefill", llm, "transceiver", residence=Pool()), _request(publish=False, tokens=(5, 6)))
    events = _decode(make("decode", llm, "transceiver"), _request(publish=False, tokens=(5,), max_tokens=1))
    assert done.error is None and events[-1].finish is Finish.LENGTH
    assert [asked["handoff"] for asked in llm.asked] == [None, None]


def test_an_answer_of_one_token_ends_there_and_the_context_server_is_still_relieved(make):
    generation = FakeLlm()
    done = _prefill(make("prefill", FakeLlm(), "transceiver"), _request())
    events = _decode(make("decode", generation, "transceiver"), _request(max_tokens=1), done.handoff)
    assert _tokens(events) == answer(PROMPT, 1) and len(generation.asked) == 1


def test_an_answer_that_ended_with_its_first_token_needs_no_generation(make):
    generation = FakeLlm()
    done = _prefill(make("prefill", FakeLlm(script=[EOS]), "transceiver"), _request())
    assert done.handoff.transfer["finished"] is True
    events = _decode(make("decode", generation, "transceiver"), _request(), done.handoff)
    assert _tokens(events) == [] and events[-1].finish is Finish.STOP and not generation.asked


def test_a_context_request_that_hands_nothing_over_is_an_error(make):
    done = _prefill(make("prefill", FakeLlm(hands_off=False), "transceiver"), _request())
    assert isinstance(done.error, EngineFailed) and "cache_transceiver_config" in str(done.error)


# Hand-off by the pool.


def test_prefill_answers_when_the_pool_has_what_the_connector_saved(make):
    llm, pool = FakeLlm(cached=16), Pool(there=2, after=5, late=3)
    done = _prefill(make("prefill", llm, residence=pool), _request())
    assert (done.handoff.blocks, done.handoff.hit_blocks, done.usage.put_blocks) == (5, 2, 3)
    assert pool.asked == 5 and len(llm.asked) == 1 and llm.asked[0]["handoff"] is None


def test_prefill_waits_no_longer_than_a_put_may_take(make):
    worker = make("prefill", FakeLlm(), residence=Pool(there=1, after=1), put_budget_s=0.05)
    done = _prefill(worker, _request())
    assert done.error is None and done.handoff.blocks == 1 and worker.status()["counts"]["saves_late"] == 1


def test_what_is_resident_as_a_whole_is_answered_without_the_engine(make):
    llm = FakeLlm()
    done = _prefill(make("prefill", llm, residence=Pool(there=5)), _request())
    assert not llm.asked and done.handoff.blocks == 5 and done.usage.hit_tokens == {ENGINE: 40}
    assert done.usage.computed_tokens == 0


def test_a_prompt_without_a_whole_block_is_left_to_decode(make):
    llm = FakeLlm()
    done = _prefill(make("prefill", llm, residence=Pool()), _request(tokens=PROMPT[:7]))
    assert not llm.asked and done.handoff == Handoff(0)


def test_nobody_waits_for_blocks_whose_keys_cannot_be_told(make):
    pool = Pool(there=0, after=0)
    done = _prefill(make("prefill", FakeLlm(), residence=pool), _request(salt="tenant"))
    assert done.error is None and not pool.asked


def test_without_a_pool_prefill_still_answers(make):
    done = _prefill(make("prefill", FakeLlm()), _request())
    assert done.error is None and done.handoff.blocks == 0


def test_a_cancelled_prefill_says_so(make):
    llm = FakeLlm(gate=threading.Event())
    worker, ends = make("prefill", llm), Ends()
    worker.submit(_request(), ends)
    while not llm.asked:
        pass
    worker.cancel("a")
    assert isinstance(ends.one().error, Cancelled)


def test_closing_closes_the_pool_too():
    pool = Pool()
    worker = LlmPrefillWorker(FakeLlm(), FACTS, LlmOptions(), pool)
    worker.close()
    assert pool.closed
