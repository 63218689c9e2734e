"""The sampling side of a worker: hands calls to the engine, and its results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hosted_tinker.sampling.engine import SamplingEngine
from hosted_tinker.types import (
    CancelSample,
    DescribeTokenizer,
    NewToken,
    RenderChat,
    Sample,
    SampleOutput,
)
from hosted_tinker.workers.messages import (
    Call,
    Failure,
    FromWorker,
    Partial,
    Reply,
    SamplerOperation,
)
from hosted_tinker.workers.replies import describe_failure


class SamplingResults:
    """What an engine reports, as messages to the parent."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        self._send = send
        self._call_ids: dict[str, int] = {}
        self._new_tokens: dict[str, list[NewToken]] = {}

    def expect(self, request_id: str, call_id: int) -> None:
        self._call_ids[request_id] = call_id

    def finish(self, request_id: str, result: SampleOutput | Failure) -> None:
        """Implements `FinishSample`."""
        self._new_tokens.pop(request_id, None)
        self._send(Reply(self._call_ids.pop(request_id), result))

    def report(self, request_id: str, token: NewToken) -> None:
        """Implements `ReportToken`."""
        self._new_tokens.setdefault(request_id, []).append(token)

    def send_tokens(self) -> None:
        """Those of requests that have not ended, whose reply will have them all."""
        for request_id, tokens in self._new_tokens.items():
            self._send(Partial(self._call_ids[request_id], tokens))
        self._new_tokens.clear()


class SamplingLane:
    """One at a time: `accept` whenever calls arrive, `step` while there is work."""

    def __init__(
        self, engine: SamplingEngine, results: SamplingResults, send: Callable[[FromWorker], None]
    ) -> None:
        """`results` is what the engine reports to."""
        self._engine = engine
        self._results = results
        self._send = send

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def step(self, *, can_wait: bool = False) -> bool:
        """See `SamplingEngine.step`."""
        done = self._engine.step(can_wait=can_wait)
        self._results.send_tokens()
        return done

    def accept(self, call: Call) -> None:
        match call.operation:
            case Sample(request_id):
                self._results.expect(request_id, call.call_id)
                self._engine.add(call.operation)
            case CancelSample(request_id):
                self._engine.cancel(request_id)
                self._send(Reply(call.call_id, None))
            case DescribeTokenizer() | RenderChat():
                self._send(Reply(call.call_id, self._answer_about_text(call.operation)))
            case _:
                raise AssertionError(f"a sampler got {call.operation}")

    def _answer_about_text(self, operation: SamplerOperation) -> Any:
        try:
            if isinstance(operation, RenderChat):
                return self._engine.render_chat(operation)
            return self._engine.describe_tokenizer()
        except Exception as error:  # noqa: BLE001 - becomes the call's Failure
            return describe_failure(error)
