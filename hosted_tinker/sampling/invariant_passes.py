"""Passes whose numbers do not depend on what else is computed, bit for bit.

Kernels for products of other sizes may add in another order. So all passes have one of a few numbers
of rows, filled up with padding, and at load a check finds out which of these sizes give a row the same
bits, wherever it stands. What depends on the number of sequences or of adapters has a fixed shape of
its own (`tiled_attention`, `lora.multiply_in_tiles`). The idea is He and Thinking Machines'
(2025, "Defeating Nondeterminism in LLM Inference"), whose kernels have fixed tiles instead.

Shape letters: P positions of a pass, R rows of logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.sampling.adapters import find_key
from hosted_tinker.sampling.kv_cache import KvCache
from hosted_tinker.sampling.paged_passes import PagedPasses, Part
from hosted_tinker.sampling.spans import Span
from hosted_tinker.types import Int64Array, LoraConfig

logger = logging.getLogger(__name__)

SIZES_ON_CPU = (4, 8, 16, 32, 64, 128)
SIZES_ON_GPU = (64, 128, 256)
REFERENCE_ON_CPU = 16
REFERENCE_ON_GPU = 256
"""The size that is used in any case; on a GPU so many rows take hardly longer than one."""
NUM_TOGETHER = 3
"""Sequences that share passes in the check."""
TRIAL = "trial of passes"
TRIAL_RANK = 8
"""Name and rank of the check's adapter."""


class InvariantPasses:
    """The same calls as of `PagedPasses`."""

    def __init__(self, passes: PagedPasses, sizes: Sequence[int], tile: int) -> None:
        """`sizes` ascend, and give the same bits. `tile`, the rows of a low-rank product, divides them."""
        self._passes = passes
        self._sizes = sizes
        self._tile = tile

    def run(self, parts: Sequence[Part]) -> Tensor:
        """Last hidden states [P, D], by part."""
        hidden: list[Tensor] = []
        for group in cut_parts(parts, self._sizes[-1]):
            count = sum(part.span.count for part in group)
            hidden.append(self._passes.run(group, self._choose_size(count), self._tile)[:count])
        return torch.cat(hidden)

    def compute_logits(self, hidden_RD: Tensor, adapters: Sequence[str | None]) -> Tensor:
        """Float32 [R, V]. `adapters` are those of the rows."""
        largest = self._sizes[-1]
        if not len(hidden_RD):
            return self._passes.compute_logits(hidden_RD, adapters)
        logits: list[Tensor] = []
        for start in range(0, len(hidden_RD), largest):
            part_RD = hidden_RD[start : start + largest]
            padding = self._choose_size(len(part_RD)) - len(part_RD)
            padded = torch.nn.functional.pad(part_RD, (0, 0, 0, padding))
            own = adapters[start : start + largest]
            logits.append(self._passes.compute_logits(padded, own, self._tile)[: len(part_RD)])
        return torch.cat(logits)

    def _choose_size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)


def cut_parts(parts: Sequence[Part], max_rows: int) -> Iterator[list[Part]]:
    """Groups of parts of at most so many positions, in order."""
    group: list[Part] = []
    room = max_rows
    for part in parts:
        done = 0
        while done < part.span.count:
            count = min(room, part.span.count - done)
            span = Span(part.span.stored, count, part.span.offset + done)
            group.append(replace(part, span=span, tokens=part.tokens[done : done + count]))
            done += count
            room -= count
            if room == 0:
                yield group
                group, room = [], max_rows
    if group:
        yield group


@torch.inference_mode()
def make_invariant(
    base: BaseModel, lora: LoraModel, passes: PagedPasses, cache: KvCache
) -> InvariantPasses:
    """Finds the numbers of rows that give a position the same bits, by trying them on random tokens.

    Raises:
        SettingsError: the kernels of this machine do not even do so for one number of rows.
    """
    on_cpu = base.input_device.type == "cpu"
    sizes = SIZES_ON_CPU if on_cpu else SIZES_ON_GPU
    reference = REFERENCE_ON_CPU if on_cpu else REFERENCE_ON_GPU
    room = min(base.context_length, cache.num_positions // NUM_TOGETHER - cache.page_size)
    generator = torch.Generator().manual_seed(0)
    tokens_P = torch.randint(base.vocab_size, (max(room, 1),), generator=generator).numpy()
    config = LoraConfig(lora_rank=TRIAL_RANK, seed=0, train_mlp=not lora.has_experts)
    lora.add_fresh_adapter(find_key(TRIAL), config)
    for parameter in lora.named_parameters(find_key(TRIAL)).values():
        parameter.normal_(std=0.02)

    def compute(size: int, cuts: Sequence[int], together: int = 1) -> list[tuple[Tensor, Tensor]]:
        one_size = InvariantPasses(passes, [size], sizes[0])
        return compute_sequences(one_size, cache, tokens_P[: cuts[-1]], cuts, together)

    def agrees(size: int) -> bool:
        """A whole pass; one token alone, which moves the others' rows; several sequences in a pass."""
        trials = [
            compute(size, [size]),
            compute(size, [1, size]),
            compute(size, [1, max(2, size // 2)], NUM_TOGETHER),
        ]
        return all(
            torch.equal(found, expected[: len(found)])
            for trial in trials
            for results in trial
            for found, expected in zip(results, wanted, strict=True)
        )

    try:
        (wanted,) = compute(reference, [min(room, sizes[-1])])
        usable = [size for size in sizes if size <= room and agrees(size)]
    finally:
        lora.remove_adapter(find_key(TRIAL))
    if reference not in usable:
        raise SettingsError(
            "batch_invariant is true, but this machine's kernels compute the rows of one product in "
            "different ways, or max_context_length or sampling_cache_gib leave less than "
            f"{reference} tokens to find out; leave it false"
        )
    logger.info("batch-invariant passes have rows=%s", usable)
    return InvariantPasses(passes, usable, sizes[0])


def compute_sequences(
    passes: InvariantPasses,
    cache: KvCache,
    tokens_P: Int64Array,
    cuts: Sequence[int],
    together: int,
) -> list[tuple[Tensor, Tensor]]:
    """Last hidden states [P, D] and logits [P, V] of each of several equal sequences.

    Args:
        cuts: where the passes end, ascending; the last is the sequence's length.
        together: how many sequences there are.
    """
    stored = [cache.open(None, tokens_P, reuse=False) for _ in range(together)]
    for one in stored:
        cache.reserve(one, len(tokens_P))
    hidden: list[list[Tensor]] = [[] for _ in stored]
    logits: list[list[Tensor]] = [[] for _ in stored]
    for start, stop in pairwise([0, *cuts]):
        parts = [
            Part(TRIAL, Span(one, stop - start, start), tokens_P[start:stop]) for one in stored
        ]
        hidden_PD = passes.run(parts)
        logits_PV = passes.compute_logits(hidden_PD, [TRIAL] * len(hidden_PD))
        for results, found in ((hidden, hidden_PD), (logits, logits_PV)):
            for own, part in zip(results, found.split(stop - start), strict=True):
                own.append(part)
    for one in stored:
        cache.close(one)
    return [(torch.cat(own), torch.cat(other)) for own, other in zip(hidden, logits, strict=True)]
