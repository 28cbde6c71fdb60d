"""decode_engine: takes each request through `context` and `generation` of the same server (kvtool.triton.bls)."""

from kvtool.serve.open import open_llm_over
from kvtool.triton import bridge
from kvtool.triton.bls import BlsGenerator
from kvtool.triton.desk import DecodeDesk
from kvtool.triton.settings import Settings


class TritonPythonModel:
    def initialize(self, args):
        settings = Settings.of(args)
        generator = BlsGenerator(
            bridge.Bls(),
            context=settings.text("context_model_name"),
            generation=settings.text("generation_model_name"),
            block_tokens=settings.count("block_tokens"),
            threads=settings.count("queue_max"),
        )
        worker = open_llm_over(generator, settings.engine, queue_max=settings.count("queue_max"))
        self.desk, self.outbox = DecodeDesk(worker), bridge.Outbox()

    def execute(self, requests):
        for request in requests:
            reply = bridge.DecodeReply(request.get_response_sender(), self.outbox)
            tokens = bridge.ids(request, "INPUT_IDS")
            self.desk.take(bridge.text(request, "REQUEST"), tokens, "", reply)

    def finalize(self):
        self.desk.close()
        self.outbox.close()
