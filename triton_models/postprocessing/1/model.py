"""postprocessing: the tokens of one decode step to the text that they add (kvtool.triton.words)."""

from kvtool.triton import bridge
from kvtool.triton.settings import Settings
from kvtool.triton.words import Words


class TritonPythonModel:
    def initialize(self, args):
        self.words = Words(Settings.of(args).engine)

    def execute(self, requests):
        return [bridge.answer(lambda request=request: self.tensors(request)) for request in requests]

    def tensors(self, request):
        tokens, context = bridge.ids(request, "TOKEN_IDS"), bridge.ids(request, "CONTEXT_IDS")
        return [bridge.tensor_text("TEXT", self.words.text(tokens, context, bridge.text(request, "EVENT")))]
