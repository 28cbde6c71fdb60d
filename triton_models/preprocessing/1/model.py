"""preprocessing: text, or the chat messages in it, to prompt tokens (kvtool.triton.words)."""

from kvtool.triton import bridge
from kvtool.triton.settings import Settings
from kvtool.triton.words import Words


class TritonPythonModel:
    def initialize(self, args):
        self.words = Words(Settings.of(args).engine)

    def execute(self, requests):
        return [bridge.answer(lambda request=request: self.tensors(request)) for request in requests]

    def tensors(self, request):
        tokens = self.words.tokens(bridge.raw(request, "TEXT"), bridge.text(request, "REQUEST"))
        return [bridge.tensor_ids("INPUT_IDS", tokens)]
