"""What an embedded sampling engine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hosted_tinker.types import (
    BaseModelInfo,
    NewToken,
    RenderChat,
    Sample,
    SampleOutput,
    TokenizerInfo,
)
from hosted_tinker.workers.messages import Failure

FinishSample = Callable[[str, SampleOutput | Failure], None]
"""Called with (request_id, result) when a request ends."""


ReportToken = Callable[[str, NewToken], None]
"""Called with (request_id, token) for each token of a streamed request, before the request ends."""


class SamplingEngine(Protocol):
    """Generates for many requests at once, one token for each running sequence per step.

    A worker process owns it and calls one method at a time: `add` whenever requests arrive, `step`
    while `has_work`.
    """

    def describe_base_model(self) -> BaseModelInfo:
        """What the API process needs to know of the model."""
        ...

    def describe_tokenizer(self) -> TokenizerInfo:
        """Raises UserError if the model comes without one."""
        ...

    def render_chat(self, chat: RenderChat) -> list[int]:
        """Token ids. Raises UserError for what the model's template does not take."""
        ...

    def add(self, sample: Sample) -> None:
        """Queues a request. What is wrong with it is reported through its result."""
        ...

    def cancel(self, request_id: str) -> None:
        """Drops a request, waiting or running, and ends it with a failure."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self, *, can_wait: bool = False) -> bool:
        """Admits waiting requests and advances every running sequence by one token.

        Args:
            can_wait: there will be more memory soon. A step that lacks it does nothing then and
                returns false; otherwise it makes room at the cost of a request.
        """
        ...
