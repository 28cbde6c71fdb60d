"""prefill_engine: computes the KV of prompts and puts it into the pool (kvtool.serve.prefill)."""

from kvtool.serve.open import open_prefill
from kvtool.triton import bridge
from kvtool.triton.desk import PrefillDesk
from kvtool.triton.settings import Settings


class TritonPythonModel:
    def initialize(self, args):
        settings = Settings.of(args)
        worker = open_prefill(
            settings.engine,
            settings.pool_state,
            settings.prefill_options(),
            namespace=settings.text("namespace"),
            name=settings.instance,
        )
        self.desk, self.outbox = PrefillDesk(worker), bridge.Outbox()

    def execute(self, requests):
        for request in requests:
            tokens = bridge.ids(request, "INPUT_IDS")
            reply = bridge.PrefillReply(request.get_response_sender(), self.outbox, tokens)
            self.desk.take(bridge.text(request, "REQUEST"), tokens, reply)

    def finalize(self):
        self.desk.close()
        self.outbox.close()
