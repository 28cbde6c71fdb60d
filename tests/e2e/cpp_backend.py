"""Stands in for Triton's C++ backend `tensorrtllm`: a backend that is a Python file, as Triton allows.

Speaks as the C++ one does: context_only requests answer with context_phase_params, generation_only requests take them
and stream new tokens, `stop` under the same request id ends one. Tokens are a function of the prompt.
"""

import json
import os
import threading

import numpy as np
import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def answer(tokens, count):
    state, made = 7, []
    for token in tokens:
        state = (state * 31 + token) % 65_537
    for _ in range(count):
        state = (state * 31 + 11) % 65_537
        made.append(state % 250)
    return made


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        assert os.environ["TRTLLM_ORCHESTRATOR"] == "1" and os.environ["TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES"] == "0"
        self.name = args["model_name"]
        told = json.loads(args["model_config"])["parameters"]
        assert told["participant_ids"]["string_value"] and told["xgrammar_tokenizer_info_path"] is not None
        self.stopped = set()

    def execute(self, requests):
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            sender, request_id = request.get_response_sender(), request.request_id()
            if "stop" in inputs:
                self.stopped.add(request_id)
                sender.send(flags=FINAL)
                continue
            kind = json.loads(request.parameters() or "{}").get("request_type")
            threading.Thread(target=self.run, args=(sender, request_id, kind, inputs), daemon=True).start()

    def run(self, sender, request_id, kind, inputs):
        tokens = inputs["input_ids"].reshape(-1).tolist()
        limit = int(inputs["request_output_len"].reshape(-1)[0])
        if kind == "context_only" and self.name == "context":
            state = np.frombuffer(json.dumps(answer(tokens, 1)).encode(), dtype=np.uint8)
            sender.send(self.response(answer(tokens, 1), state), flags=FINAL)
        elif kind == "generation_only" and self.name == "generation":
            first = json.loads(inputs["context_phase_params"].tobytes())
            self.stream(sender, request_id, [*first, *answer(tokens, limit)[1:]])
        else:
            error = pb.TritonError(f"{self.name}: request_type {kind}")
            sender.send(pb.InferenceResponse(error=error), flags=FINAL)

    def stream(self, sender, request_id, tokens):
        wait = threading.Event()
        for token in tokens:
            if request_id in self.stopped:
                break
            wait.wait(0.005)
            sender.send(self.response([token]))
        sender.send(flags=FINAL)

    @staticmethod
    def response(tokens, state=None):
        made = [
            pb.Tensor("output_ids", np.array([[tokens]], dtype=np.int32)),
            pb.Tensor("sequence_length", np.array([[len(tokens)]], dtype=np.int32)),
            pb.Tensor("kv_cache_reused_blocks", np.array([[2]], dtype=np.int32)),
        ]
        if state is not None:
            made.append(pb.Tensor("context_phase_params", state.reshape(1, -1)))
        return pb.InferenceResponse(made)
