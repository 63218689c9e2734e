"""Which requests run, what a step of the engine computes, and who has pages of the cache.

Requests are served in the order in which they came. Those that wait with one prompt share its
computation. When the pages run out, the youngest sequences give theirs up and are computed again
later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.sampling.adapters import AdapterCache
from hosted_tinker.sampling.engine import FinishSample
from hosted_tinker.sampling.kv_cache import KvCache, StoredSequence
from hosted_tinker.sampling.prompt_scoring import scores_prompt
from hosted_tinker.sampling.sequences import (
    PendingSample,
    Prompt,
    RunningSequence,
    StopReason,
)
from hosted_tinker.sampling.step_plan import plan_step
from hosted_tinker.types import Sample
from hosted_tinker.workers.messages import Failure

logger = logging.getLogger(__name__)

PromptKey = tuple[str | None, bytes, bool]
"""Adapter name, prompt bytes, and whether the prompt is scored."""

Owner = Prompt | RunningSequence
"""What has keys and values."""


class StepScheduler:
    """Owns the requests from their arrival to their end, and calls `finish` there."""

    def __init__(
        self,
        cache: KvCache,
        adapters: AdapterCache,
        finish: FinishSample,
        *,
        max_sequences: int,
        chunk_tokens: int,
    ) -> None:
        """`max_sequences` is the most rows, `chunk_tokens` the positions of a step beyond which prompts
        wait."""
        self._cache = cache
        self._adapters = adapters
        self._finish = finish
        self._max_sequences = max_sequences
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[PendingSample] = deque()
        self._prompts: dict[PromptKey, Prompt] = {}
        self._running: list[RunningSequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prompts or self._running)

    def add(self, request: PendingSample) -> None:
        self._waiting.append(request)

    def cancel(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        for request in self._requests:
            if request.sample.request_id == request_id:
                self.fail(request, Failure("cancelled", "user"))
                return

    def is_running(self, sequence: RunningSequence) -> bool:
        """False once its request has failed, with another of its sequences."""
        return sequence in self._running

    def end(self, sequence: RunningSequence, reason: StopReason) -> None:
        """The sequence is complete."""
        self._running.remove(sequence)
        self._cache.close(sequence.stored)
        sequence.end(reason)
        output = sequence.request.output
        if output is not None:
            self._finish(sequence.request.sample.request_id, output)

    def fail_all(self, failure: Failure) -> None:
        """Ends every request. Keys and values that were counted are as good as before."""
        for request in self._requests:
            self.fail(request, failure)

    def fail(self, request: PendingSample, failure: Failure) -> None:
        """Drops a request, whatever has become of it, and frees what it holds."""
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

    @property
    def _requests(self) -> list[PendingSample]:
        opened = (request for prompt in self._prompts.values() for request in prompt.requests)
        running = (sequence.request for sequence in self._running)
        return list(dict.fromkeys((*running, *opened, *self._waiting)))

    # --- before a pass ---

    def admit(self, *, can_wait: bool) -> None:
        """Opens waiting requests, first come first served: those of a prompt that is open, and
        others while this step could finish what is open and start its samples."""
        while self._waiting:
            request = self._waiting[0]
            try:
                if not self._ensure_adapter(request.sample):
                    return
            except HostedTinkerError as error:
                self.fail(request, Failure(str(error), error.category))
                continue
            except torch.OutOfMemoryError:
                if can_wait:
                    return
                message = "out of memory for one more adapter; have max_sampling_adapters lowered"
                self.fail(request, Failure(message, "user"))
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
        return self._max_sequences - len(self._running)

    def plan(self) -> list[tuple[Owner, int]]:
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

    # --- after a pass ---

    def relieve(self, owners: Sequence[Owner]) -> None:
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
            self.fail(request, Failure(message, "user"))

    def start_samples(
        self,
        score: Callable[[PendingSample, Prompt], bool],
        make: Callable[[PendingSample, StoredSequence], RunningSequence],
    ) -> list[tuple[RunningSequence, Tensor]]:
        """New sequences of prompts that are computed, first come first served, while there is a
        free row and a page; each with the logits [V] of its first token.

        Args:
            score: called before a request's first sequence. False if it has failed.
            make: of a request, and of the keys and values that the sequence begins with.
        """
        started: list[tuple[RunningSequence, Tensor]] = []
        for key, prompt in [*self._prompts.items()]:
            if prompt.logits_V is None:
                continue
            for request in [*prompt.requests]:
                if not score(request, prompt):
                    continue
                while request.num_unstarted and self._num_free > 0:
                    stored = self._branch(prompt)
                    if stored is None:
                        return started
                    sequence = make(request, stored)
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
