"""The embedded sampling engine: continuous batching on a Hugging Face model.

Each step is one pass over the next position of every running sequence and, as far as the step's
budget goes, over chunks of prompts, whatever their adapters (`step_scheduler`). Keys and values are in
pages under one budget (`kv_cache`); what is there already of a prompt is not computed again, be it of
other samples, of other requests or of an earlier turn.

A sequence's tokens depend on its own seed only, up to the rounding of the model's arithmetic: the
kernels of a larger batch may add in another order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import HostedTinkerError, SettingsError
from hosted_tinker.modeling.base_model import BaseModel, load_base_model, restrict_visible_gpus
from hosted_tinker.modeling.determinism import deterministic_kernels
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.sampling.adapters import AdapterCache
from hosted_tinker.sampling.attention_check import prepare_base_model
from hosted_tinker.sampling.chat_text import describe_tokenizer, render_chat
from hosted_tinker.sampling.engine import FinishSample, ReportToken
from hosted_tinker.sampling.invariant_passes import InvariantPasses, make_invariant
from hosted_tinker.sampling.kv_cache import KvCache, StoredSequence
from hosted_tinker.sampling.paged_passes import PagedPasses, Part, allocate_cache, measure_layers
from hosted_tinker.sampling.prompt_scoring import score_prompt
from hosted_tinker.sampling.sequences import (
    ALTERNATIVES_STREAM,
    SAMPLE_STREAM,
    PendingSample,
    Prompt,
    RunningSequence,
    open_request,
)
from hosted_tinker.sampling.spans import Span
from hosted_tinker.sampling.step_scheduler import Owner, StepScheduler
from hosted_tinker.sampling.stopping import StopWatch, watch_for_stop
from hosted_tinker.sampling.token_choice import (
    ChosenTokens,
    UniformStream,
    choose_tokens,
    top_logprobs,
)
from hosted_tinker.sampling.tokenizer import find_eos_ids, load_tokenizer, make_decode
from hosted_tinker.types import BaseModelInfo, RenderChat, Sample, TokenizerInfo
from hosted_tinker.workers.messages import Failure

logger = logging.getLogger(__name__)

CHUNK_TOKENS_ON_CPU = 256
CHUNK_TOKENS_ON_GPU = 4096
"""Positions of a step beyond which it takes longer and computes no faster."""


class TransformersEngine:
    """Implements `SamplingEngine`."""

    def __init__(
        self,
        base: BaseModel,
        lora: LoraModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: PytorchConfig,
        finish: FinishSample,
        report: ReportToken,
    ) -> None:
        """`lora` are the layers of `base`, which `prepare_base_model` has let through."""
        self._base = base
        self._tokenizer = tokenizer
        self._decode_text = None if tokenizer is None else make_decode(tokenizer)
        self._eos_ids = find_eos_ids(base, tokenizer)
        self._config = config
        self._finish = finish
        self._report = report
        self._cache = allocate_cache(base, measure_layers(base), config)
        self._passes = make_passes(base, lora, self._cache, config)
        on_cpu = base.input_device.type == "cpu"
        self._scheduler = StepScheduler(
            self._cache,
            AdapterCache(lora, config.max_sampling_adapters),
            finish,
            max_sequences=config.max_sampling_sequences,
            chunk_tokens=config.prefill_chunk_tokens
            or (CHUNK_TOKENS_ON_CPU if on_cpu else CHUNK_TOKENS_ON_GPU),
        )
        self._num_requests = 0

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
        prepare_base_model(base, base_model)
        lora = LoraModel(base.module)
        return cls(base, lora, load_tokenizer(base_model), config, finish, report)

    def describe_base_model(self) -> BaseModelInfo:
        return self._base.describe()

    def describe_tokenizer(self) -> TokenizerInfo:
        return describe_tokenizer(self._tokenizer)

    def render_chat(self, chat: RenderChat) -> list[int]:
        return render_chat(self._tokenizer, chat)

    def add(self, sample: Sample) -> None:
        # A prompt whose last page is copied for a sample needs a page more than its positions.
        room = self._cache.num_positions - self._cache.page_size
        try:
            request = open_request(sample, self._num_requests, self._base.context_length, room)
            self._watch(request)
        except HostedTinkerError as error:
            self._finish(sample.request_id, Failure(str(error), error.category))
        else:
            self._num_requests += 1
            self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @torch.inference_mode()
    def step(self, *, can_wait: bool = False) -> bool:
        """A step that fails takes the requests with it, and nothing else that the process holds."""
        try:
            # A pass of training that this step interrupts may want others.
            with deterministic_kernels(False):
                return self._step(can_wait=can_wait)
        except torch.AcceleratorError:
            raise  # The device is lost to this process.
        except RuntimeError as error:
            logger.exception("a step of the sampling engine failed")
            self._scheduler.fail_all(Failure(f"{type(error).__name__}: {error}", "server"))
            return True

    def _step(self, *, can_wait: bool) -> bool:
        self._scheduler.admit(can_wait=can_wait)
        work = self._scheduler.plan()
        ready: list[tuple[RunningSequence, Tensor]] | None = None
        # What follows comes after the block, where the failed pass's tensors are free again.
        with suppress(torch.OutOfMemoryError):
            ready = self._compute(work) if work else []
        if ready is None:
            torch.cuda.empty_cache()
            if not can_wait:
                self._scheduler.relieve([owner for owner, _ in work])
            return not can_wait
        ready += self._scheduler.start_samples(self._score_prompt, self._make_sequence)
        self._advance(ready)
        return True

    # --- the pass ---

    def _compute(self, work: Sequence[tuple[Owner, int]]) -> list[tuple[RunningSequence, Tensor]]:
        """Returns the sequences that have a next token to choose, and its logits [V]."""
        work = group_by_adapter(work)
        parts = [
            Part(
                owner.adapter,
                Span(owner.stored, count),
                owner.read_tokens(owner.stored.length, owner.stored.length + count),
            )
            for owner, count in work
        ]
        hidden_PD = self._passes.run(parts)
        stops = list(accumulate(count for _, count in work))
        finished = [
            (owner, stop)
            for (owner, count), stop in zip(work, stops, strict=True)
            if owner.num_pending == count
        ]
        logits_RV = self._passes.compute_logits(
            hidden_PD[[stop - 1 for _, stop in finished]], [owner.adapter for owner, _ in finished]
        )
        kept = [
            (owner, hidden_PD[stop - count : stop].clone())
            for (owner, count), stop in zip(work, stops, strict=True)
            if isinstance(owner, Prompt) and owner.keeps_hidden
        ]
        # From here on nothing can fail: what ran out of memory before is computed again.
        for owner, count in work:
            self._cache.advance(owner.stored, owner.stored.length + count, owner.read_tokens)
        for prompt, hidden_CD in kept:
            prompt.hidden_PD.append(hidden_CD)
        ready: list[tuple[RunningSequence, Tensor]] = []
        for (owner, _), logits_V in zip(finished, logits_RV, strict=True):
            if isinstance(owner, Prompt):
                owner.logits_V = logits_V
            else:
                ready.append((owner, logits_V))
        return ready

    # --- tokens ---

    def _make_sequence(self, request: PendingSample, stored: StoredSequence) -> RunningSequence:
        index = request.num_started
        request.num_started += 1
        uniforms = UniformStream(request.seed, (SAMPLE_STREAM, index))
        return RunningSequence(request, index, self._watch(request), uniforms, stored)

    def _watch(self, request: PendingSample) -> StopWatch:
        """Raises UserError for what can't be watched for without a tokenizer."""
        sample = request.sample
        return watch_for_stop(
            sample.params, self._eos_ids, self._decode_text, sample.prompt.tolist()
        )

    def _score_prompt(self, request: PendingSample, prompt: Prompt) -> bool:
        """Once for each request that asks for it. False if there was no memory, and it failed."""
        if not prompt.keeps_hidden or request.prompt_scores is not None:
            return True
        try:
            request.prompt_scores = score_prompt(
                lambda hidden_CD: self._passes.compute_logits(
                    hidden_CD, [prompt.adapter] * len(hidden_CD)
                ),
                torch.cat(prompt.hidden_PD),
                request.sample,
                UniformStream(request.seed, (ALTERNATIVES_STREAM,)),
                vocab_size=self._base.vocab_size,
                chunk_tokens=self._config.logits_chunk_tokens,
            )
        except torch.OutOfMemoryError:
            length = len(prompt.tokens)
            message = f"out of memory scoring {length} tokens; have logits_chunk_tokens lowered"
            self._scheduler.fail(request, Failure(message, "user"))
            return False
        return True

    def _advance(self, ready: Sequence[tuple[RunningSequence, Tensor]]) -> None:
        """Gives each sequence its next token, and ends those that stop with it."""
        rows = [(sequence, logits_V, sequence.uniforms.draw()) for sequence, logits_V in ready]
        for batch in [[row] for row in rows] if self._config.batch_invariant else [rows]:
            self._choose(batch)

    def _choose(self, rows: Sequence[tuple[RunningSequence, Tensor, float]]) -> None:
        """All at once, or in halves for which the memory suffices."""
        if not rows:
            return
        sequences = [sequence for sequence, _, _ in rows]
        # What follows comes after the block, where the failed attempt's tensors are free again.
        with suppress(torch.OutOfMemoryError):
            chosen = choose_tokens(
                torch.stack([logits_V for _, logits_V, _ in rows]),
                [sequence.params for sequence in sequences],
                [uniform for _, _, uniform in rows],
            )
            record_topk(sequences, chosen)
            self._take(sequences, chosen)
            return
        torch.cuda.empty_cache()
        if len(rows) == 1:
            message = "out of memory choosing a token; have the server's sampling_cache_gib lowered"
            self._scheduler.fail(sequences[0].request, Failure(message, "user"))
            return
        half = len(rows) // 2
        self._choose(rows[:half])
        self._choose(rows[half:])

    def _take(self, sequences: Sequence[RunningSequence], chosen: ChosenTokens) -> None:
        for sequence, token, logprob in zip(sequences, chosen.tokens, chosen.logprobs, strict=True):
            if not self._scheduler.is_running(sequence):
                continue  # Its request failed with another of its sequences.
            if math.isnan(logprob):
                name = sequence.adapter or "the base model"
                message = f"weights {name!r} give logits that are not numbers; they have diverged"
                self._scheduler.fail(sequence.request, Failure(message, "user"))
                continue
            reason = sequence.append(token, logprob)
            if sequence.request.sample.stream:
                self._report(
                    sequence.request.sample.request_id, sequence.describe_last_token(reason)
                )
            if reason is not None:
                self._scheduler.end(sequence, reason)


def make_passes(
    base: BaseModel, lora: LoraModel, cache: KvCache, config: PytorchConfig
) -> PagedPasses | InvariantPasses:
    """Raises SettingsError if batch invariance is asked for, and can't be."""
    passes = PagedPasses(base, lora.routing, lora.head_routing, cache)
    if not config.batch_invariant:
        return passes
    if lora.has_experts:
        raise SettingsError(
            "batch_invariant is true, but the experts of this model compute as many rows as are "
            "routed to them; leave it false"
        )
    return make_invariant(base, lora, passes, cache)


def group_by_adapter(work: Iterable[tuple[Owner, int]]) -> list[tuple[Owner, int]]:
    """In the order in which the adapters first come."""
    groups: dict[str | None, list[tuple[Owner, int]]] = {}
    for owner, count in work:
        groups.setdefault(owner.adapter, []).append((owner, count))
    return [item for group in groups.values() for item in group]


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
