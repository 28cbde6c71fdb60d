"""One request in the decode worker, from submit to its last token."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.serve.backlog import FinishedJob
from kvtool.serve.handoff import Handoff
from kvtool.serve.keys import PromptKeys
from kvtool.serve.request import OnEvent, Request, Usage
from kvtool.serve.text import TextStream
from kvtool.serve.turns import is_batch


class DecodeJob(FinishedJob):
    """Stages: waiting -> pulling -> filling -> running -> over."""

    def __init__(
        self,
        request: Request,
        on_event: OnEvent,
        handoff: Handoff | None,
        keys: PromptKeys,
        text: TextStream,
        now_s: float,
    ) -> None:
        super().__init__(request, keys, now_s)
        self.on_event, self.handoff, self.text = on_event, handoff, text
        self.on_prompt_put: Callable[[], None] | None = None
        self.prompt_from: int | None = None  # the next block of the prompt to stage; None: nothing (more) to stage
        self.stage = "waiting"
        self.end = len(request.tokens) - 1  # [0, end) must be there before the first step
        self.generated: list[int] = []
        self.sent = 0
        self.usage = Usage(prompt_tokens=len(request.tokens))

    @property
    def urgent(self) -> bool:
        """An online request that has no token yet."""
        return not is_batch(self) and self.stage != "over" and not self.generated

    @property
    def position(self) -> int:
        """Where the next step feeds `last_token`."""
        return len(self.request.tokens) - 1 + len(self.generated)

    @property
    def last_token(self) -> int:
        return self.generated[-1] if self.generated else self.request.tokens[-1]


def hits_of(handoff: Handoff | None, tiers: list[str], block_tokens: int) -> dict[str, int]:
    """Prompt tokens by tier that came from the pool and were there before the request: `tiers` of the blocks pulled,
    less those that the request's own prefill had put there just before."""
    if handoff is not None:
        if handoff.hit_tokens and handoff.hit_blocks <= len(tiers):
            return dict(handoff.hit_tokens)  # where prefill read them, before that moved them
        tiers = tiers[: handoff.hit_blocks]
    return {tier: tiers.count(tier) * block_tokens for tier in dict.fromkeys(tiers)}
