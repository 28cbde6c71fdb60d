"""front: sends each request through a prefill and a decode server and streams the answer (kvtool.triton.front)."""

from kvtool.triton import bridge
from kvtool.triton.front import Front
from kvtool.triton.peers import PeersFile
from kvtool.triton.settings import Settings


class TritonPythonModel:
    def initialize(self, args):
        settings = Settings.of(args)
        self.outbox = bridge.Outbox()
        shared = settings.text("shared_cores") == "true"
        handoff = settings.text("handoff")
        self.front = Front(PeersFile(settings.peers), settings.limits(), handoff=handoff, shared_cores=shared)

    def execute(self, requests):
        for request in requests:
            sink = bridge.FrontSink(request.get_response_sender(), self.outbox)
            op = bridge.text(request, "op")
            if op:
                self.front.operate(op, bridge.text(request, "text_input"), sink)
            else:
                self.front.submit(bridge.asked(request), sink)

    def finalize(self):
        self.front.close()
        self.outbox.close()
