"""Requests through the models of the C++ backend: tensors as its configs say, streams, stops, faults."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtool.errors import EngineFailed, RequestRefused
from kvtool.serve.options import LlmOptions
from kvtool.serve.request import Finish, Request, Sampling
from kvtool.serve.trtllm import ENGINE, Facts
from kvtool.serve.trtllm_decode import LlmDecodeWorker
from kvtool.triton.bls import BlsGenerator, new_tokens, request_tensors

FACTS = Facts(vocab_size=500, context_tokens_max=100, block_tokens=8, eos_token_ids=frozenset({2, 3}))
PROMPT = tuple(range(20, 40))
ANSWER = [101, 102, 103, 104, 105, 106]
WAIT_S = 10


class Server:
    """Both models. `gate`: generation waits for it after one answer; `fault`: this model's error."""

    def __init__(self):
        self.asked, self.stopped = [], threading.Event()
        self.gate, self.fault, self.answer, self.contexts = None, "", ANSWER, 1

    def call(self, model, request_id, inputs, parameters, timeout_s):
        self.asked.append((model, request_id, dict(inputs), dict(parameters)))
        if "stop" in inputs:
            self.stopped.set()
            if self.gate is not None:
                self.gate.set()
            raise EngineFailed(f"{model}: request was stopped")
        if model == self.fault:
            raise EngineFailed(f"{model}: out of blocks")
        limit = int(inputs["request_output_len"][0, 0])
        if model == "context":
            state = np.arange(5, dtype=np.uint8)
            for _ in range(self.contexts):
                yield {"context_phase_params": state, "kv_cache_reused_blocks": np.array([[2]], dtype=np.int32)}
            return
        assert inputs["context_phase_params"].tolist() == [0, 1, 2, 3, 4]
        for at, token in enumerate(self.answer[:limit]):
            if self.gate is not None and at == 1:
                assert self.gate.wait(WAIT_S)
                if self.stopped.is_set():
                    return
            yield {"output_ids": np.array([[[token]]], dtype=np.int32), "sequence_length": np.array([[1]])}


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def decode(server):
    generator = BlsGenerator(server, context="context", generation="generation", block_tokens=8, threads=4)
    worker = LlmDecodeWorker(generator, FACTS, LlmOptions())

    def start(**more):
        events, ended = [], threading.Event()

        def on_event(event):
            events.append(event)
            if event.finish is not None:
                ended.set()

        worker.submit(Request(**{"request_id": "a", "tokens": PROMPT, "max_tokens": 4, **more}), on_event)
        return events, ended

    def decode(**more):
        events, ended = start(**more)
        assert ended.wait(WAIT_S)
        return events

    decode.start, decode.worker = start, worker
    yield decode
    assert worker.wait_idle(WAIT_S), worker.audit()
    worker.close()


def _tokens(events):
    return [token for event in events for token in event.tokens]


def test_context_hands_over_to_generation_and_the_answer_streams(server, decode):
    events = decode()
    assert _tokens(events) == ANSWER[:4] and events[-1].finish is Finish.LENGTH
    assert events[-1].usage.hit_tokens == {ENGINE: 16} and len(events) == 4
    (context, first, asked, given), (generation, second, follow, goes) = server.asked
    assert (context, generation) == ("context", "generation") and first == second
    assert (given, goes) == ({"request_type": "context_only"}, {"request_type": "generation_only"})
    assert asked["input_ids"].tolist() == [list(PROMPT)] and asked["return_perf_metrics"].tolist() == [[True]]
    assert follow["context_phase_params"].dtype == np.uint8 and follow["streaming"].tolist() == [[True]]
    assert not any("stop" in inputs for _, _, inputs, _ in server.asked), "an answer that ended needs no stop"


def test_a_short_answer_ended_by_itself(server, decode):
    server.answer = ANSWER[:2]
    assert decode()[-1].finish is Finish.STOP


def test_a_cancel_stops_the_request_in_both_models(server, decode):
    server.gate = threading.Event()
    events, ended = decode.start()
    while not events:
        pass
    decode.worker.cancel("a")
    assert ended.wait(WAIT_S) and events[-1].finish is Finish.CANCELLED
    assert server.stopped.wait(WAIT_S) and decode.worker.wait_idle(WAIT_S)
    stops = [(model, name) for model, name, inputs, _ in server.asked if "stop" in inputs]
    assert [model for model, _ in stops] == ["context", "generation"] and len({name for _, name in stops}) == 1


@pytest.mark.parametrize("model", ["context", "generation"])
def test_a_model_that_fails_fails_the_request_with_its_words(server, decode, model):
    server.fault = model
    error = decode()[-1].error
    assert isinstance(error, EngineFailed) and str(error) == f"{model}: out of blocks"


@pytest.mark.parametrize("count", [0, 2])
def test_context_must_answer_once(server, decode, count):
    server.contexts = count
    assert f"wanted one answer with context_phase_params, found {count}" in str(decode()[-1].error)


def test_a_tenants_salt_is_refused_since_the_backend_has_none(decode):
    error = decode(salt="tenant")[-1].error
    assert isinstance(error, RequestRefused) and "no cache_salt" in str(error)


def test_sampling_and_ends_as_tensors():
    sampling = {"max_tokens": 7, "end_id": 2, "pad_id": 2, "stop_token_ids": [3, 9], "temperature": 0.5, "top_p": 0.9}
    tensors = request_tensors([5, 6], {**sampling, "top_k": 40, "seed": 1 << 40})
    said = {name: (array.dtype.name, array.tolist()) for name, array in tensors.items()}
    assert said == {
        "input_ids": ("int32", [[5, 6]]),
        "input_lengths": ("int32", [[2]]),
        "request_output_len": ("int32", [[7]]),
        "streaming": ("bool", [[True]]),
        "end_id": ("int32", [[2]]),
        "pad_id": ("int32", [[2]]),
        "stop_words_list": ("int32", [[[3, 9], [1, 2]]]),
        "temperature": ("float32", [[0.5]]),
        "runtime_top_k": ("int32", [[40]]),
        "runtime_top_p": ("float32", [[pytest.approx(0.9)]]),
        "seed": ("uint64", [[1 << 40]]),
    }
    assert "end_id" not in request_tensors([5], {**sampling, "ignore_eos": True})


def test_only_what_counts_of_a_row_is_taken():
    ids = np.array([[[7, 8, 0, 0]]], dtype=np.int32)
    assert new_tokens({"output_ids": ids, "sequence_length": np.array([[2]])}) == [7, 8]
    assert new_tokens({"output_ids": ids}) == [7, 8, 0, 0]
    assert new_tokens({}) == new_tokens({"output_ids": np.zeros((1, 1, 0), dtype=np.int32)}) == []


def test_sampling_of_the_worker_reaches_the_models(server, decode):
    decode(sampling=Sampling(0.5, 0, 1.0, 3))
    asked = server.asked[0][2]
    assert asked["temperature"].tolist() == [[0.5]] and asked["runtime_top_p"].tolist() == [[1.0]]
