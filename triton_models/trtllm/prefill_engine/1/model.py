"""prefill_engine: computes prompts with TensorRT-LLM and hands their KV over (kvtool.serve.trtllm_prefill)."""

from kvtool.serve.open import open_llm_prefill
from kvtool.triton import bridge
from kvtool.triton.desk import PrefillDesk
from kvtool.triton.settings import Settings


class TritonPythonModel:
    def initialize(self, args):
        settings = Settings.of(args)
        worker = open_llm_prefill(settings.llm_place(), settings.llm_options())
        self.desk, self.outbox = PrefillDesk(worker), bridge.Outbox()

    def execute(self, requests):
        for request in requests:
            tokens = bridge.ids(request, "INPUT_IDS")
            reply = bridge.PrefillReply(request.get_response_sender(), self.outbox, tokens)
            self.desk.take(bridge.text(request, "REQUEST"), tokens, reply)

    def finalize(self):
        self.desk.close()
        self.outbox.close()
