"""decode_engine: generates with TensorRT-LLM (kvtool.serve.trtllm_decode)."""

from kvtool.serve.open import open_llm_decode
from kvtool.triton import bridge
from kvtool.triton.desk import DecodeDesk
from kvtool.triton.settings import Settings


class TritonPythonModel:
    def initialize(self, args):
        settings = Settings.of(args)
        worker = open_llm_decode(settings.llm_place(), settings.llm_options())
        self.desk, self.outbox = DecodeDesk(worker), bridge.Outbox()

    def execute(self, requests):
        for request in requests:
            reply = bridge.DecodeReply(request.get_response_sender(), self.outbox)
            tokens, handoff = bridge.ids(request, "INPUT_IDS"), bridge.text(request, "HANDOFF")
            self.desk.take(bridge.text(request, "REQUEST"), tokens, handoff, reply)

    def finalize(self):
        self.desk.close()
        self.outbox.close()
