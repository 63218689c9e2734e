"""The state of requests, of their prompts, and of the sequences that they run.

Shape letters: P prompt tokens, S sampled tokens, K most likely tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import Tensor

from hosted_tinker.errors import UserError
from hosted_tinker.sampling.kv_cache import StoredSequence
from hosted_tinker.sampling.stopping import StopWatch
from hosted_tinker.sampling.token_choice import UniformStream
from hosted_tinker.types import (
    Float32Array,
    Int64Array,
    NewToken,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TopkLogprobs,
)

StopReason = Literal["stop", "length"]
SAMPLE_STREAM, ALTERNATIVES_STREAM = 0, 1
"""First number of the `UniformStream` keys of a request."""


@dataclass(slots=True, eq=False)
class PendingSample:
    """A request from `add` to its end.

    Attributes:
        number: in the order of arrival.
        seed: the request's, or drawn.
        max_tokens: of each sequence.
        num_started: sequences started; they start in the order of their index.
        num_reused: prompt positions that were not computed for it.
        prompt_scores: set before the first sequence starts, if asked for.
        ended: index -> sequence.
    """

    sample: Sample
    number: int
    seed: int
    max_tokens: int
    num_started: int = 0
    num_reused: int = 0
    prompt_scores: SampleOutput | None = None
    ended: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])

    @property
    def adapter_name(self) -> str | None:
        return None if self.sample.adapter is None else self.sample.adapter.name

    @property
    def num_unstarted(self) -> int:
        return self.sample.num_samples - self.num_started

    @property
    def output(self) -> SampleOutput | None:
        """None while a sequence has not ended."""
        if len(self.ended) < self.sample.num_samples:
            return None
        sequences = [self.ended[index] for index in range(self.sample.num_samples)]
        return replace(
            self.prompt_scores or SampleOutput(()),
            sequences=sequences,
            prompt_cache_hit_tokens=self.num_reused,
        )


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt whose keys and values are computed once for all requests that have it.

    Attributes:
        requests: those with sequences to start, the first come first.
        keeps_hidden: the last hidden states of all positions are wanted, to score the prompt.
        hidden_PD: of the chunks so far, if they are kept.
        logits_V: of the token after it, float32, once all of it is computed.
    """

    adapter: str | None
    tokens: Int64Array
    requests: list[PendingSample]
    keeps_hidden: bool
    stored: StoredSequence
    hidden_PD: list[Tensor] = field(default_factory=list[Tensor])
    logits_V: Tensor | None = None

    @property
    def number(self) -> int:
        """Its place in the order of arrival."""
        return self.requests[0].number

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.stored.length

    @property
    def num_unstarted(self) -> int:
        return sum(request.num_unstarted for request in self.requests)

    def read_tokens(self, start: int, stop: int) -> Int64Array:
        return self.tokens[start:stop]


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One completion in the making.

    `stored` has the keys and values of all its tokens but the last, or of fewer after they had to
    make room for others.
    """

    request: PendingSample
    index: int
    watch: StopWatch
    uniforms: UniformStream
    stored: StoredSequence
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    topk_token_ids: list[Int64Array] = field(default_factory=list[Int64Array])
    topk_logprobs: list[Float32Array] = field(default_factory=list[Float32Array])

    @property
    def adapter(self) -> str | None:
        return self.request.adapter_name

    @property
    def number(self) -> int:
        """Its place in the order of arrival."""
        return self.request.number

    @property
    def params(self) -> SamplingParams:
        return self.request.sample.params

    @property
    def topk(self) -> int:
        return self.request.sample.topk_sample_logprobs

    @property
    def num_pending(self) -> int:
        return len(self.request.sample.prompt) + len(self.tokens) - self.stored.length

    def read_tokens(self, start: int, stop: int) -> Int64Array:
        """Of the prompt and the completion."""
        prompt = self.request.sample.prompt
        begin, end = (max(0, position - len(prompt)) for position in (start, stop))
        completed = np.array(self.tokens[begin:end], np.int64)
        return np.concatenate([prompt[start:stop], completed])

    def describe_last_token(self, reason: StopReason | None) -> NewToken:
        """`reason` is why the sequence ends with it, if it does."""
        topk: tuple[tuple[int, float], ...] = ()
        if self.topk:
            pairs = zip(self.topk_token_ids[-1], self.topk_logprobs[-1], strict=True)
            topk = tuple((int(token), float(logprob)) for token, logprob in pairs)
        return NewToken(self.index, self.tokens[-1], self.logprobs[-1], topk, reason)

    def append(self, token: int, logprob: float) -> StopReason | None:
        """Takes the next token; says why the sequence ends, if it does."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.watch.push(token):
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else None

    def end(self, reason: StopReason) -> None:
        """Hands the completion to its request."""
        self.request.ended[self.index] = SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason=reason,
            topk_logprobs=TopkLogprobs(
                np.array(self.topk_token_ids, np.int32).reshape(len(self.tokens), -1),
                np.array(self.topk_logprobs, np.float32).reshape(len(self.tokens), -1),
            )
            if self.topk
            else None,
        )


def open_request(
    sample: Sample, number: int, context_length: int, cache_positions: int
) -> PendingSample:
    """Raises UserError for a sequence longer than the context, which would be computed wrongly, or
    than the key-value cache."""
    room = min(context_length, cache_positions) - len(sample.prompt)
    max_tokens = room if sample.params.max_tokens is None else sample.params.max_tokens
    if 1 <= max_tokens <= room:
        seed = secrets.randbits(63) if sample.params.seed is None else sample.params.seed
        return PendingSample(sample, number, seed, max_tokens)
    limit = f"context's {context_length}"
    if cache_positions < context_length:
        limit = f"{cache_positions} that the server's sampling_cache_gib has room for"
    raise UserError(
        f"a prompt of {len(sample.prompt)} tokens leaves room for {max(room, 0)} of the "
        f"{limit}; max_tokens is {sample.params.max_tokens}"
    )
