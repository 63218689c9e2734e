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
from hosted_tinker.sampling.kv_cache import KvCache
from hosted_tinker.sampling.paged_passes import PagedPasses, Part
from hosted_tinker.sampling.spans import Span
from hosted_tinker.types import Int64Array

logger = logging.getLogger(__name__)

SIZES_ON_CPU = (4, 8, 16, 32, 64, 128, 256)
SIZES_ON_GPU = (64, 128, 256, 512, 1024)
REFERENCE_ON_CPU = 16
REFERENCE_ON_GPU = 256
"""The size that is used in any case; on a GPU so many rows take hardly longer than one."""
SHIFT = 3
"""By which rows are moved to see whether their place matters."""
SCORED = 64
"""Positions whose logits are compared too."""


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
def make_invariant(base: BaseModel, passes: PagedPasses, cache: KvCache) -> InvariantPasses:
    """Finds the numbers of rows that give a position the same bits, by trying them on random tokens.

    Raises:
        SettingsError: the kernels of this machine do not even do so for one number of rows.
    """
    on_cpu = base.input_device.type == "cpu"
    sizes = SIZES_ON_CPU if on_cpu else SIZES_ON_GPU
    reference = REFERENCE_ON_CPU if on_cpu else REFERENCE_ON_GPU
    room = min(base.context_length, cache.num_positions)
    generator = torch.Generator().manual_seed(0)
    tokens_P = torch.randint(base.vocab_size, (room,), generator=generator).numpy()

    def compute(size: int, num_tokens: int, shift: int) -> tuple[Tensor, Tensor]:
        one_size = InvariantPasses(passes, [size], sizes[0])
        return compute_sequence(one_size, cache, tokens_P[:num_tokens], shift)

    wanted = compute(reference, sizes[-1] + SHIFT, shift=0)

    def agrees(size: int) -> bool:
        return all(
            torch.equal(found, expected[: len(found)])
            for shift in (0, SHIFT)
            for found, expected in zip(compute(size, size + shift, shift), wanted, strict=True)
        )

    if not agrees(reference):
        raise SettingsError(
            "batch_invariant is true, but this machine's kernels compute the rows of one product in "
            "different ways; leave it false"
        )
    usable = [size for size in sizes if size == reference or agrees(size)]
    logger.info("batch-invariant passes have rows=%s", usable)
    return InvariantPasses(passes, usable, sizes[0])


def compute_sequence(
    passes: InvariantPasses, cache: KvCache, tokens_P: Int64Array, shift: int
) -> tuple[Tensor, Tensor]:
    """Last hidden states [P, D] of a sequence, and logits [R, V] of its first tokens.

    Args:
        shift: tokens of the first pass, if not as many as it has room for.
    """
    stored = cache.open(None, tokens_P, reuse=False)
    cache.reserve(stored, len(tokens_P))
    bounds = sorted({0, shift, len(tokens_P)})
    hidden_PD = torch.cat(
        [
            passes.run([Part(None, Span(stored, stop - start, start), tokens_P[start:stop])])
            for start, stop in pairwise(bounds)
        ]
    )
    cache.close(stored)
    hidden_RD = hidden_PD[:SCORED]
    bounds = sorted({0, shift, len(hidden_RD)})
    logits_RV = torch.cat(
        [
            passes.compute_logits(hidden_RD[start:stop], [None] * (stop - start))
            for start, stop in pairwise(bounds)
        ]
    )
    return hidden_PD, logits_RV
