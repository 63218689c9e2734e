"""The embedded sampling engine: continuous batching on a Hugging Face model.

Each step is one pass over the next position of every running sequence and, as far as the step's
budget goes, over chunks of prompts, whatever their adapters. Keys and values are in pages under one
budget (`kv_cache`); what is there already of a prompt is not computed again, be it of other samples,
of other requests or of an earlier turn. Requests that wait with one prompt share its computation.
When the pages run out, the youngest sequences give theirs up and are computed again later.

A sequence's tokens depend on its own seed only, up to the rounding of the model's arithmetic: the
kernels of a larger batch may add in another order.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
from hosted_tinker.sampling.prompt_scoring import score_prompt, scores_prompt
from hosted_tinker.sampling.sequences import (
    ALTERNATIVES_STREAM,
    SAMPLE_STREAM,
    PendingSample,
    Prompt,
    RunningSequence,
    StopReason,
    open_request,
)
from hosted_tinker.sampling.spans import Span
from hosted_tinker.sampling.step_plan import plan_step
from hosted_tinker.sampling.stopping import Decode, StopWatch, watch_for_stop
from hosted_tinker.sampling.token_choice import (
    ChosenTokens,
    UniformStream,
    choose_tokens,
    top_logprobs,
)
from hosted_tinker.types import BaseModelInfo, RenderChat, Sample, TokenizerInfo
from hosted_tinker.workers.messages import Failure

logger = logging.getLogger(__name__)

CHUNK_TOKENS_ON_CPU = 256
CHUNK_TOKENS_ON_GPU = 4096
"""Positions of a step beyond which it takes longer and computes no faster."""

PromptKey = tuple[str | None, bytes, bool]
"""Adapter name, prompt bytes, and whether the prompt is scored."""

Owner = Prompt | RunningSequence
"""What has keys and values."""


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
        self._adapters = AdapterCache(lora, config.max_sampling_adapters)
        self._num_requests = 0
        self._waiting: deque[PendingSample] = deque()
        self._prompts: dict[PromptKey, Prompt] = {}
        self._running: list[RunningSequence] = []

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
            self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Frees what the request holds at once. Unknown ids are ignored."""
        opened = (request for prompt in self._prompts.values() for request in prompt.requests)
        running = (sequence.request for sequence in self._running)
        for request in (*self._waiting, *opened, *running):
            if request.sample.request_id == request_id:
                self._fail(request, Failure("cancelled", "user"))
                return

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prompts or self._running)

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
            self._fail_all(Failure(f"{type(error).__name__}: {error}", "server"))
            return True

    def _step(self, *, can_wait: bool) -> bool:
        self._admit(can_wait=can_wait)
        work = self._plan()
        ready: list[tuple[RunningSequence, Tensor]] = []
        if work:
            try:
                ready = self._compute(work)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if not can_wait:
                    self._relieve([owner for owner, _ in work])
                return not can_wait
        ready += self._start_samples()
        self._advance(ready)
        return True

    # --- what a step computes ---

    def _admit(self, *, can_wait: bool) -> None:
        """Opens waiting requests, first come first served: those of a prompt that is open, and
        others while this step could finish what is open and start its samples."""
        while self._waiting:
            request = self._waiting[0]
            try:
                if not self._ensure_adapter(request.sample):
                    return
            except HostedTinkerError as error:
                self._fail(request, Failure(str(error), error.category))
                continue
            except torch.OutOfMemoryError:
                if can_wait:
                    return
                message = "out of memory for one more adapter; have max_sampling_adapters lowered"
                self._fail(request, Failure(message, "user"))
                continue
            keeps_hidden = scores_prompt(request.sample)
            key = (request.adapter_name, request.sample.prompt.tobytes(), keeps_hidden)
            if prompt := self._prompts.get(key):
                request.num_reused = len(prompt.tokens)
                prompt.requests.append(request)
            elif self._has_room_for_prompt:
                tokens = request.sample.prompt
                stored = self._cache.open(request.adapter_name, tokens, reuse=not keeps_hidden)
                request.num_reused = stored.num_reused
                self._prompts[key] = Prompt(
                    request.adapter_name, tokens, [request], keeps_hidden, stored
                )
            else:
                return
            self._waiting.popleft()

    def _ensure_adapter(self, sample: Sample) -> bool:
        """False while the adapters of what is open fill the memory for adapters."""
        if sample.adapter is None:
            return True
        in_use = {owner.adapter for owner in self._owners if owner.adapter is not None}
        return self._adapters.ensure_loaded(sample.adapter, in_use)

    @property
    def _owners(self) -> list[Owner]:
        return [*self._running, *self._prompts.values()]

    @property
    def _has_room_for_prompt(self) -> bool:
        unstarted = sum(prompt.num_unstarted for prompt in self._prompts.values())
        pending = sum(prompt.num_pending for prompt in self._prompts.values())
        return self._num_free > unstarted and self._chunk_tokens > pending

    @property
    def _num_free(self) -> int:
        return self._config.max_sampling_sequences - len(self._running)

    @property
    def _chunk_tokens(self) -> int:
        if self._config.prefill_chunk_tokens is not None:
            return self._config.prefill_chunk_tokens
        on_cpu = self._base.input_device.type == "cpu"
        return CHUNK_TOKENS_ON_CPU if on_cpu else CHUNK_TOKENS_ON_GPU

    def _plan(self) -> list[tuple[Owner, int]]:
        """Who computes how many positions. There is room for them."""
        owners = sorted(filter(self._may_compute, self._owners), key=lambda owner: owner.number)
        for owner in owners:
            if not owner.stored.pages:
                self._reopen(owner)
        counts = plan_step([owner.num_pending for owner in owners], self._chunk_tokens)
        starts = [owner.stored.length for owner in owners]
        work: list[tuple[Owner, int]] = []
        for owner, start, count in zip(owners, starts, counts, strict=True):
            # One that has made room for others since is planned anew in the next step.
            made_room = owner.stored.length != start
            if count and not made_room and self._reserve(owner, start + count):
                work.append((owner, count))
        return [(owner, count) for owner, count in work if owner.stored.pages]

    def _may_compute(self, owner: Owner) -> bool:
        """A prompt that gave up its pages waits until one of its samples could have a row: the
        sequences that have the rows need the pages."""
        if isinstance(owner, Prompt) and not owner.stored.pages and self._num_free <= 0:
            return False
        return owner.num_pending > 0

    def _reopen(self, owner: Owner) -> None:
        """Finds again what is left of a sequence that gave up its pages."""
        tokens = owner.read_tokens(0, owner.num_pending)
        reuse = not (isinstance(owner, Prompt) and owner.keeps_hidden)
        owner.stored = self._cache.open(owner.adapter, tokens, reuse=reuse)

    def _reserve(self, owner: Owner, length: int) -> bool:
        """Makes room, at the cost of younger ones. One that finds none gives up what it has."""
        while not self._cache.reserve(owner.stored, length):
            if not self._pause_another(owner):
                self._pause(owner)
                return False
        return True

    def _pause_another(self, asker: Owner) -> bool:
        """Takes the pages of the youngest that came after the asker. False if there is none.

        A sequence takes them of its own prompt too, which can begin no sample without pages to
        spare, and of any prompt while no row is free to begin one in.
        """

        def may_be_paused(owner: Owner) -> bool:
            if not owner.stored.pages or owner is asker:
                return False
            if isinstance(asker, RunningSequence) and isinstance(owner, Prompt):
                return owner.number >= asker.number or self._num_free <= 0
            return owner.number > asker.number

        holders = list(filter(may_be_paused, self._owners))
        if holders:
            self._pause(max(holders, key=lambda owner: owner.number))
        return bool(holders)

    def _pause(self, owner: Owner) -> None:
        """Its positions are computed again once there is room."""
        self._cache.close(owner.stored)
        if isinstance(owner, Prompt):
            owner.hidden_PD.clear()
            owner.logits_V = None

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

    def _relieve(self, owners: Sequence[Owner]) -> None:
        """After a pass for which the device had no memory: the youngest prompt fails, or the
        youngest sequence waits."""
        youngest = max(owners, key=lambda owner: owner.number)
        prompts = [owner for owner in owners if isinstance(owner, Prompt)]
        if not prompts and len(owners) > 1:
            logger.warning("out of memory with %d sequences; one waits", len(owners))
            self._pause(youngest)
            return
        if prompts:
            youngest = max(prompts, key=lambda owner: owner.number)
        length = len(youngest.read_tokens(0, youngest.stored.length + youngest.num_pending))
        message = (
            f"out of memory on a sequence of {length} tokens beside {len(owners) - 1} others; have "
            "the server's prefill_chunk_tokens, sampling_cache_gib or max_sampling_sequences lowered"
        )
        requests = (
            [youngest.request] if isinstance(youngest, RunningSequence) else youngest.requests
        )
        for request in [*requests]:
            self._fail(request, Failure(message, "user"))

    # --- tokens ---

    def _start_samples(self) -> list[tuple[RunningSequence, Tensor]]:
        """New sequences of prompts that are computed, first come first served, while there is a
        free row and a page."""
        started: list[tuple[RunningSequence, Tensor]] = []
        for key, prompt in [*self._prompts.items()]:
            if prompt.logits_V is None:
                continue
            for request in [*prompt.requests]:
                if not self._score_prompt(request, prompt):
                    continue
                while request.num_unstarted and self._num_free > 0:
                    stored = self._branch(prompt)
                    if stored is None:
                        return started
                    sequence = self._make_sequence(request, stored)
                    self._running.append(sequence)
                    started.append((sequence, prompt.logits_V))
                if request.num_unstarted:
                    return started
                prompt.requests.remove(request)
            self._prompts.pop(key, None)
        return started

    def _branch(self, prompt: Prompt) -> StoredSequence | None:
        """The prompt's positions for one more sample; the last one takes the prompt's own."""
        if prompt.num_unstarted == 1:
            return prompt.stored
        while (stored := self._cache.fork(prompt.stored)) is None:
            if not self._pause_another(prompt):
                return None
        return stored

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
            self._fail(request, Failure(message, "user"))
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
            self._fail(sequences[0].request, Failure(message, "user"))
            return
        half = len(rows) // 2
        self._choose(rows[:half])
        self._choose(rows[half:])

    def _take(self, sequences: Sequence[RunningSequence], chosen: ChosenTokens) -> None:
        for sequence, token, logprob in zip(sequences, chosen.tokens, chosen.logprobs, strict=True):
            if sequence not in self._running:
                continue  # Its request failed with another of its sequences.
            if math.isnan(logprob):
                name = sequence.adapter or "the base model"
                message = f"weights {name!r} give logits that are not numbers; they have diverged"
                self._fail(sequence.request, Failure(message, "user"))
                continue
            reason = sequence.append(token, logprob)
            if sequence.request.sample.stream:
                self._report(
                    sequence.request.sample.request_id, sequence.describe_last_token(reason)
                )
            if reason is not None:
                self._end(sequence, reason)

    def _end(self, sequence: RunningSequence, reason: StopReason) -> None:
        self._running.remove(sequence)
        self._cache.close(sequence.stored)
        sequence.end(reason)
        output = sequence.request.output
        if output is not None:
            self._finish(sequence.request.sample.request_id, output)

    def _fail_all(self, failure: Failure) -> None:
        """Ends every request. Keys and values that were counted are as good as before."""
        requests = [
            *(sequence.request for sequence in self._running),
            *(request for prompt in self._prompts.values() for request in prompt.requests),
            *self._waiting,
        ]
        for request in dict.fromkeys(requests):
            self._fail(request, failure)

    def _fail(self, request: PendingSample, failure: Failure) -> None:
        """Drops a request, whatever has become of it."""
        if request in self._waiting:
            self._waiting.remove(request)
        for key, prompt in [*self._prompts.items()]:
            if request in prompt.requests:
                prompt.requests.remove(request)
                if not prompt.requests:
                    self._cache.close(prompt.stored)
                    del self._prompts[key]
        for sequence in [one for one in self._running if one.request is request]:
            self._running.remove(sequence)
            self._cache.close(sequence.stored)
        self._finish(request.sample.request_id, failure)


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
