"""The embedded sampling engine: continuous batching on a Hugging Face model.

Each step admits waiting requests in their order, prefills their prompts one by one, and then
computes the next token of every running sequence in one pass, whatever its adapter. Requests with
one prompt and adapter that follow one another share a prefill: an RL group is one prompt many
times. A request with more samples than there are free rows starts in parts.

A sequence's tokens depend on its own seed only, up to the rounding of the model's arithmetic: the
kernels of a larger batch may add in another order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hosted_tinker.config import PytorchConfig
from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.modeling.base_model import BaseModel, load_base_model, restrict_visible_gpus
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.sampling.adapters import AdapterCache
from hosted_tinker.sampling.attention_check import check_batched_decoding, require_full_attention
from hosted_tinker.sampling.chat_text import describe_tokenizer, render_chat
from hosted_tinker.sampling.decoder_passes import DecoderPasses, Prefill
from hosted_tinker.sampling.engine import FinishSample, ReportToken
from hosted_tinker.sampling.prompt_scoring import score_prompt, scores_prompt
from hosted_tinker.sampling.sequences import (
    ALTERNATIVES_STREAM,
    SAMPLE_STREAM,
    PendingSample,
    RunningSequence,
    StopReason,
    open_request,
)
from hosted_tinker.sampling.stopping import Decode, watch_for_stop
from hosted_tinker.sampling.token_choice import (
    ChosenTokens,
    UniformStream,
    choose_tokens,
    top_logprobs,
)
from hosted_tinker.types import BaseModelInfo, RenderChat, Sample, TokenizerInfo
from hosted_tinker.workers.messages import Failure

logger = logging.getLogger(__name__)

PromptKey = tuple[str | None, bytes]
"""Adapter name and prompt bytes."""


class TransformersEngine:
    """Implements `SamplingEngine`. Row i of the passes is `_running[i]`."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: PytorchConfig,
        finish: FinishSample,
        report: ReportToken,
    ) -> None:
        self._base = base
        self._tokenizer = tokenizer
        self._decode_text = None if tokenizer is None else make_decode(tokenizer)
        self._eos_ids = find_eos_ids(base, tokenizer)
        self._config = config
        self._finish = finish
        self._report = report
        self._passes = DecoderPasses(base, lora.routing, config.max_sampling_sequences)
        self._adapters = AdapterCache(lora, config.max_sampling_adapters)
        self._waiting: deque[PendingSample] = deque()
        self._running: list[RunningSequence] = []
        self._last_prefill: tuple[PromptKey, Prefill] | None = None

    @classmethod
    def load(
        cls,
        base_model: str,
        config: PytorchConfig,
        report_progress: Callable[[str], None],
        finish: FinishSample,
        report: ReportToken,
    ) -> TransformersEngine:
        """Raises SettingsError for a model that can't be loaded or served."""
        restrict_visible_gpus(config, "sampler")
        report_progress("loading the base model for sampling")
        base = load_base_model(base_model, config, "sampler")
        require_full_attention(base, base_model)
        check_batched_decoding(base, base_model)
        tokenizer = load_tokenizer(base_model)
        return cls(base, LoraModel(base.module), tokenizer, config, finish, report)

    def describe_base_model(self) -> BaseModelInfo:
        return self._base.describe()

    def describe_tokenizer(self) -> TokenizerInfo:
        return describe_tokenizer(self._tokenizer)

    def render_chat(self, chat: RenderChat) -> list[int]:
        return render_chat(self._tokenizer, chat)

    def add(self, sample: Sample) -> None:
        try:
            request = open_request(sample, self._base.context_length)
        except HostedTinkerError as error:
            self._finish(sample.request_id, Failure(str(error), error.category))
        else:
            self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> None:
        """Frees the request's rows at once. Unknown ids are ignored."""
        requests = [*self._waiting, *(sequence.request for sequence in self._running)]
        for request in requests:
            if request.sample.request_id == request_id:
                self._fail(request, Failure("cancelled", "user"))
                return

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self) -> None:
        self._admit()
        if self._running:
            self._decode()
        if not self.has_work:
            self._last_prefill = None

    def _admit(self) -> None:
        """Starts waiting requests, first come first served, while there is a free row."""
        while self._waiting and self._num_free > 0:
            request = self._waiting[0]
            try:
                if not self._start(request):
                    return
            except HostedTinkerError as error:
                self._fail(request, Failure(str(error), error.category))
            except torch.OutOfMemoryError:
                self._last_prefill = None
                self._fail(
                    request,
                    Failure(
                        f"out of memory on a prompt of {len(request.sample.prompt)} tokens beside "
                        f"{len(self._running)} running sequences; send a shorter prompt, or have "
                        "the server's max_sampling_sequences lowered",
                        "user",
                    ),
                )

    @property
    def _num_free(self) -> int:
        return self._config.max_sampling_sequences - len(self._running)

    def _start(self, request: PendingSample) -> bool:
        """Starts as many of the request's sequences as there are free rows.

        Returns False, and starts none, while the adapters of running sequences fill the memory for
        adapters.
        """
        sample = request.sample
        if sample.adapter is not None:
            names = (sequence.request.adapter_name for sequence in self._running)
            in_use = {name for name in names if name is not None}
            if not self._adapters.ensure_loaded(sample.adapter, in_use):
                return False
        starting = self._make_sequences(request)
        prefill = self._ensure_prefilled(request)
        self._passes.use_adapter(request.adapter_name)
        self._score_prompt(request, prefill)
        request.num_started += len(starting)
        if request.num_unstarted == 0:
            self._waiting.popleft()
        logits_1V = self._base.compute_logits(prefill.hidden_PD[-1:])
        going_on = self._advance(starting, logits_1V.expand(len(starting), -1))
        self._passes.add_rows(prefill, len(going_on))
        self._running.extend(going_on)
        return True

    def _make_sequences(self, request: PendingSample) -> list[RunningSequence]:
        first = request.num_started
        sample, prompt = request.sample, request.sample.prompt.tolist()
        count = min(self._num_free, request.num_unstarted)
        return [
            RunningSequence(
                request,
                index,
                watch_for_stop(sample.params, self._eos_ids, self._decode_text, prompt),
                UniformStream(request.seed, (SAMPLE_STREAM, index)),
            )
            for index in range(first, first + count)
        ]

    def _ensure_prefilled(self, request: PendingSample) -> Prefill:
        key = (request.adapter_name, request.sample.prompt.tobytes())
        if self._last_prefill is None or self._last_prefill[0] != key:
            self._last_prefill = None
            prefill = self._passes.prefill(request.sample.prompt, request.adapter_name)
            self._last_prefill = (key, prefill)
        return self._last_prefill[1]

    def _score_prompt(self, request: PendingSample, prefill: Prefill) -> None:
        """Once for each request, under the adapter that the passes are set to."""
        if request.num_started == 0 and scores_prompt(request.sample):
            request.prompt_scores = score_prompt(
                self._base,
                prefill.hidden_PD,
                request.sample,
                UniformStream(request.seed, (ALTERNATIVES_STREAM,)),
                chunk_tokens=self._config.logits_chunk_tokens,
            )

    def _decode(self) -> None:
        logits_BV = self._passes.decode(
            [sequence.tokens[-1] for sequence in self._running],
            [sequence.request.adapter_name for sequence in self._running],
        )
        self._keep_rows(self._advance(self._running, logits_BV))

    def _advance(
        self, sequences: Sequence[RunningSequence], logits_BV: Tensor
    ) -> list[RunningSequence]:
        """Gives each sequence its next token. Returns those that go on."""
        params = [sequence.params for sequence in sequences]
        chosen = choose_tokens(logits_BV, params, [one.uniforms.draw() for one in sequences])
        record_topk(sequences, chosen)
        going_on: list[RunningSequence] = []
        for sequence, token, logprob in zip(sequences, chosen.tokens, chosen.logprobs, strict=True):
            reason = sequence.append(token, logprob)
            if sequence.request.sample.stream:
                self._report(
                    sequence.request.sample.request_id, sequence.describe_last_token(reason)
                )
            if reason is None:
                going_on.append(sequence)
            else:
                self._end(sequence, reason)
        return going_on

    def _end(self, sequence: RunningSequence, reason: StopReason) -> None:
        sequence.end(reason)
        output = sequence.request.output
        if output is not None:
            self._finish(sequence.request.sample.request_id, output)

    def _fail(self, request: PendingSample, failure: Failure) -> None:
        """Drops a request, waiting or running."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._keep_rows([one for one in self._running if one.request is not request])
        self._finish(request.sample.request_id, failure)

    def _keep_rows(self, kept: Sequence[RunningSequence]) -> None:
        """Frees all other rows, from the last to the first: the row that takes a freed row's index
        is then one that is kept."""
        kept_ids = {id(sequence) for sequence in kept}
        for row in reversed(range(len(self._running))):
            if id(self._running[row]) not in kept_ids:
                self._passes.remove_row(row)
                self._running[row] = self._running[-1]
                self._running.pop()


def record_topk(sequences: Sequence[RunningSequence], chosen: ChosenTokens) -> None:
    """Notes the most likely tokens of the rows that ask for them."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.topk]
    if not rows:
        return
    vocab_size = chosen.logprobs_BV.shape[1]
    widest = min(vocab_size, max(sequences[row].topk for row in rows))
    best = top_logprobs(chosen.logprobs_BV[rows], widest)
    for row, token_ids_K, logprobs_K in zip(rows, best.token_ids, best.logprobs, strict=True):
        topk = sequences[row].topk
        sequences[row].topk_token_ids.append(token_ids_K[:topk])
        sequences[row].topk_logprobs.append(logprobs_K[:topk])


def load_tokenizer(base_model: str) -> PreTrainedTokenizerBase | None:
    """None if the model comes without one; stop strings are refused then."""
    try:
        return AutoTokenizer.from_pretrained(base_model)
    except (OSError, ValueError, ImportError) as error:
        logger.warning(
            "no tokenizer, stop strings are refused base_model=%s: %s", base_model, error
        )
        return None


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Text as the tokens spell it, for stop strings."""

    def decode(tokens: list[int]) -> str:
        return cast(
            str,
            tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    return decode


def find_eos_ids(base: BaseModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What ends a sequence by default: the generation configuration's ids and the tokenizer's."""
    generation_config = base.module.generation_config
    configured = None if generation_config is None else generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(token for token in [*ids, own] if token is not None)
