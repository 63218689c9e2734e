"""A deterministic engine over numpy, for tests of everything around an engine.

Its model is a hash: the logits after some tokens are normal numbers drawn by the adapter's name and
the last tokens. So all that a client can check of a model holds: scoring sampled tokens gives the
log-probabilities that sampling reported, and temperatures and top-k lists agree. Its tokens are
bytes, and beyond 255 nothing; no token ends a sequence.

Shape letters: P prompt tokens, V vocabulary, K tokens asked of a position.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hosted_tinker.backend_configs import FakeConfig
from hosted_tinker.byte_characters import BYTE_OF_CHARACTER
from hosted_tinker.errors import HostedTinkerError, UserError
from hosted_tinker.sampling.engine import FinishSample, ReportToken
from hosted_tinker.types import (
    EMPTY_TOPK_LOGPROB,
    BaseModelInfo,
    NewToken,
    RenderChat,
    Sample,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    TokenizerInfo,
    TopkLogprobs,
)
from hosted_tinker.workers.messages import Failure

CONTEXT_TOKENS = 4
"""How many tokens the logits depend on."""

Float64Array = NDArray[np.float64]


@dataclass(slots=True)
class _Completion:
    """One sequence in the making."""

    uniforms: np.random.Generator
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    distributions: list[Float64Array] = field(default_factory=list[Float64Array])
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(slots=True)
class _Request:
    sample: Sample
    max_tokens: int
    seed: int
    completions: list[_Completion]


class FakeEngine:
    """Implements `SamplingEngine`. Every request runs at once."""

    def __init__(self, config: FakeConfig, finish: FinishSample, report: ReportToken) -> None:
        self._config = config
        self._finish = finish
        self._report = report
        self._tokenizer = make_tokenizer()
        self._requests: dict[str, _Request] = {}

    def describe_base_model(self) -> BaseModelInfo:
        return BaseModelInfo(
            vocab_size=self._config.vocab_size,
            context_length=self._config.context_length,
            num_parameters=0,
            architecture="Fake",
            device="none",
        )

    def describe_tokenizer(self) -> TokenizerInfo:
        return TokenizerInfo(self._tokenizer.to_str())

    def render_chat(self, chat: RenderChat) -> list[int]:
        """`role: content` lines, and the assistant's role at the end."""
        lines = [f"{message['role']}: {message['content']}\n" for message in chat.messages]
        return self._tokenizer.encode("".join([*lines, "assistant: "])).ids

    def add(self, sample: Sample) -> None:
        try:
            self._requests[sample.request_id] = open_request(sample, self._config)
        except HostedTinkerError as error:
            self._finish(sample.request_id, Failure(str(error), error.category))

    def cancel(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        if self._requests.pop(request_id, None) is not None:
            self._finish(request_id, Failure("cancelled", "user"))

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self, *, can_wait: bool = False) -> bool:
        for request_id, request in list(self._requests.items()):
            for index, completion in enumerate(request.completions):
                if completion.stop_reason is None:
                    advance(completion, request, self._config.vocab_size)
                    self._end_at_strings(completion, request.sample)
                    if request.sample.stream:
                        self._report(request_id, last_token(index, completion, request))
            if all(completion.stop_reason for completion in request.completions):
                del self._requests[request_id]
                self._finish(request_id, make_output(request, self._config.vocab_size))
        return True

    def _end_at_strings(self, completion: _Completion, sample: Sample) -> None:
        strings = [stop for stop in sample.params.stop or () if isinstance(stop, str)]
        if strings:
            text: str = self._tokenizer.decode(completion.tokens)
            if any(string in text for string in strings):
                completion.stop_reason = "stop"


def make_tokenizer() -> Tokenizer:
    """A token for each byte, under the byte's number."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def last_token(index: int, completion: _Completion, request: _Request) -> NewToken:
    topk: tuple[tuple[int, float], ...] = ()
    best = topk_of(completion.distributions[-1:], request.sample.topk_sample_logprobs)
    if best is not None:
        pairs = zip(best.token_ids[0].tolist(), best.logprobs[0].tolist(), strict=True)
        topk = tuple(pairs)
    return NewToken(
        index, completion.tokens[-1], completion.logprobs[-1], topk, completion.stop_reason
    )


def open_request(sample: Sample, config: FakeConfig) -> _Request:
    """Raises UserError for a missing adapter and for what does not fit the context."""
    if sample.adapter is not None and not sample.adapter.directory.is_dir():
        raise UserError(f"checkpoint weights {sample.adapter.directory.name!r} cannot be read")
    room = config.context_length - len(sample.prompt)
    max_tokens = room if sample.params.max_tokens is None else sample.params.max_tokens
    if not 1 <= max_tokens <= room:
        raise UserError(
            f"a prompt of {len(sample.prompt)} tokens leaves room for {max(room, 0)} of the "
            f"context's {config.context_length}; max_tokens is {sample.params.max_tokens}"
        )
    seed = secrets.randbits(63) if sample.params.seed is None else sample.params.seed
    completions = [_Completion(draw_stream(seed, index)) for index in range(sample.num_samples)]
    return _Request(sample, max_tokens, seed, completions)


def draw_stream(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed & 0xFFFF_FFFF_FFFF_FFFF, index]))


def compute_logprobs(
    sample: Sample, tokens: Sequence[int], vocab_size: int, temperature: float = 1.0
) -> Float64Array:
    """Float64 [V]: the fake model's log-probabilities after `tokens`."""
    adapter = "" if sample.adapter is None else sample.adapter.name
    context = ",".join(str(int(token)) for token in tokens[-CONTEXT_TOKENS:])
    digest = hashlib.blake2b(f"{adapter}|{context}".encode(), digest_size=8).digest()
    logits_V = np.random.default_rng(int.from_bytes(digest)).standard_normal(vocab_size)
    scaled_V = 2.0 * logits_V / (temperature or 1.0)
    shifted_V = scaled_V - scaled_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def choose_token(logprobs_V: Float64Array, params: SamplingParams, uniform: float) -> int:
    """Cuts the distribution by top-k and top-p, and inverts what is left at `uniform`."""
    order_V = np.argsort(-logprobs_V, kind="stable")
    if params.temperature == 0:
        return int(order_V[0])
    kept = order_V[: params.top_k] if params.top_k > 0 else order_V
    mass = np.exp(logprobs_V[kept])
    mass /= mass.sum()
    kept_p = mass[np.cumsum(mass) - mass < max(params.top_p, 1e-12)]
    chosen = np.searchsorted(np.cumsum(kept_p), uniform * kept_p.sum(), side="right")
    return int(kept[min(int(chosen), len(kept_p) - 1)])


def advance(completion: _Completion, request: _Request, vocab_size: int) -> None:
    """Appends one token."""
    sample, params = request.sample, request.sample.params
    context = [*sample.prompt[-CONTEXT_TOKENS:].tolist(), *completion.tokens[-CONTEXT_TOKENS:]]
    logprobs_V = compute_logprobs(sample, context, vocab_size, params.temperature)
    token = choose_token(logprobs_V, params, completion.uniforms.random())
    completion.tokens.append(token)
    completion.logprobs.append(float(logprobs_V[token]))
    if sample.topk_sample_logprobs:
        completion.distributions.append(logprobs_V)
    if token in (params.stop or ()):
        completion.stop_reason = "stop"
    elif len(completion.tokens) >= request.max_tokens:
        completion.stop_reason = "length"


def make_output(request: _Request, vocab_size: int) -> SampleOutput:
    sequences = [
        SampledSequence(
            np.array(completion.tokens, np.int32),
            np.array(completion.logprobs, np.float32),
            completion.stop_reason or "length",
            topk_of(completion.distributions, request.sample.topk_sample_logprobs),
        )
        for completion in request.completions
    ]
    return replace(score_prompt(request, vocab_size), sequences=sequences)


def score_prompt(request: _Request, vocab_size: int) -> SampleOutput:
    """The prompt's part of the output."""
    sample = request.sample
    num_scored = len(sample.prompt) - 1
    asked = (
        sample.prompt_logprobs
        or sample.prompt_logprobs_last_n is not None
        or sample.topk_prompt_logprobs
        or sample.target_prompt_logprobs is not None
        or sample.prompt_alt_tokens_k
    )
    if not asked:
        return SampleOutput(())
    rows = [
        compute_logprobs(sample, sample.prompt[: position + 1].tolist(), vocab_size)
        for position in range(num_scored)
    ]
    logprobs_PV = np.array(rows).reshape(num_scored, vocab_size)
    return SampleOutput(
        (),
        prompt_logprobs=_token_logprobs(sample, logprobs_PV),
        topk_prompt_logprobs=_prompt_topk(rows, sample.topk_prompt_logprobs),
        target_prompt_logprobs=_target_logprobs(sample, logprobs_PV),
        prompt_alt_tokens=_alternatives(request, logprobs_PV),
    )


def topk_of(distributions: Sequence[Float64Array], count: int) -> TopkLogprobs | None:
    """None if not asked for or without a position."""
    if not count or not distributions:
        return None
    logprobs_PV = np.array(distributions)
    ids_PK = np.argsort(-logprobs_PV, axis=1, kind="stable")[:, :count]
    best_PK = np.take_along_axis(logprobs_PV, ids_PK, axis=1)
    return TopkLogprobs(ids_PK.astype(np.int32), best_PK.astype(np.float32))


def _token_logprobs(sample: Sample, logprobs_PV: Float64Array) -> NDArray[np.float32] | None:
    last_n = sample.prompt_logprobs_last_n
    if not sample.prompt_logprobs and last_n is None:
        return None
    scores_P = np.full(len(sample.prompt), np.nan, np.float32)
    scores_P[1:] = np.take_along_axis(logprobs_PV, sample.prompt[1:, None], axis=1)[:, 0]
    if last_n is not None:
        scores_P[: max(1, len(sample.prompt) - last_n)] = np.nan
    return scores_P


def _prompt_topk(rows: Sequence[Float64Array], count: int) -> TopkLogprobs | None:
    if not count:
        return None
    width = min(count, len(rows[0])) if rows else count
    ids_1K = np.zeros((1, width), np.int32)
    empty_1K = np.full((1, width), EMPTY_TOPK_LOGPROB, np.float32)
    best = topk_of(rows, count)
    if best is None:
        return TopkLogprobs(ids_1K, empty_1K)
    return TopkLogprobs(
        np.concatenate([ids_1K, best.token_ids]), np.concatenate([empty_1K, best.logprobs])
    )


def _target_logprobs(sample: Sample, logprobs_PV: Float64Array) -> NDArray[np.float32] | None:
    targets_PK = sample.target_prompt_logprobs
    if targets_PK is None:
        return None
    found_PK = np.take_along_axis(logprobs_PV, np.maximum(targets_PK, 0), axis=1)
    return np.where(targets_PK < 0, 0.0, found_PK).astype(np.float32)


def _alternatives(
    request: _Request, logprobs_PV: Float64Array
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    count = request.sample.prompt_alt_tokens_k
    if not count:
        return None
    uniforms = draw_stream(request.seed, request.sample.num_samples)
    plain = SamplingParams()
    drawn = [
        [choose_token(row, plain, uniforms.random()) for _ in range(count)] for row in logprobs_PV
    ]
    tokens_PK = np.array(drawn, np.int64).reshape(-1, count)
    scores_PK = np.take_along_axis(logprobs_PV, tokens_PK, axis=1)
    return tokens_PK, scores_PK.astype(np.float32)
