"""Attention over pages against plain softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hosted_tinker.sampling import (
    attention_kernels,
    gathered_attention,
    paged_attention,
    tiled_attention,
)
from hosted_tinker.sampling.kv_cache import KvCache, LayerShape, StoredSequence
from hosted_tinker.sampling.paged_attention import lay_out
from hosted_tinker.sampling.spans import Span
from tests.unit.varlen_reference import attend_varlen_plainly

HEADS, GROUPS, SIZE = 6, 2, 16
SHAPE = LayerShape((GROUPS, SIZE), (GROUPS, SIZE), torch.float32, torch.device("cpu"))


def store(cache: KvCache, length: int, seed: int) -> StoredSequence:
    stored = cache.open(None, np.zeros(length + 1, np.int64), reuse=False)
    assert cache.reserve(stored, length)
    generator = torch.Generator().manual_seed(seed)
    slots = cache.find_slots(stored, 0, length)
    for buffer in (cache.keys[0], cache.values[0]):
        buffer[slots] = torch.randn(length, GROUPS, SIZE, generator=generator)
    stored.length = length
    return stored


def attend_plainly(cache: KvCache, span: Span, query_HPE: Tensor, scale: float) -> Tensor:
    """[P, H, E] of one span, in float64."""
    length = span.stored.length + span.count
    slots = cache.find_slots(span.stored, 0, length)
    key_HLE, value_HLE = (
        buffer[slots].double().transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0)
        for buffer in (cache.keys[0], cache.values[0])
    )
    scores = query_HPE.double() @ key_HLE.transpose(1, 2) * scale
    visible = torch.ones(span.count, length).tril(span.stored.length).bool()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ value_HLE).transpose(0, 1)


SPANS = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 17])), min_size=1, max_size=8
)


@pytest.mark.parametrize("min_shared", [1, 512])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("through", ["cpu kernel", "plain operations", "table"])
@settings(max_examples=25)
@given(lengths=SPANS, branches=st.lists(st.integers(1, 90), max_size=2), seed=st.integers(0, 99))
def test_every_span_sees_its_own_past_and_itself(
    min_shared: int, through: str, invariant: bool, lengths: list, branches: list[int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered_attention, "MIN_SHARED", min_shared)
        if through == "table":
            patch.setattr(paged_attention, "can_use_varlen", lambda *_: True)
            patch.setattr(paged_attention, "varlen_attn", attend_varlen_plainly)
        if through == "plain operations":
            for module in (gathered_attention, tiled_attention):
                patch.setattr(module, "attend", attention_kernels.attend_plainly)
        check_spans(lengths, branches, seed, invariant)


def check_spans(
    lengths: list[tuple[int, int]], branches: list[int], seed: int, invariant: bool
) -> None:
    cache = KvCache([SHAPE], 200, 8)
    # What others have left behind must not be seen.
    for buffer in (cache.keys[0], cache.values[0]):
        buffer[8:] = torch.nan
    spans = [
        Span(store(cache, length, seed + number), count)
        for number, (length, count) in enumerate(lengths)
    ]
    for branch in branches:
        parent = store(cache, branch, seed)
        children = [cache.fork(parent) for _ in range(3)]
        spans += [Span(child, 1) for child in children if child is not None]
        grandchild = cache.fork(parent)
        assert grandchild is not None
        spans.append(Span(grandchild, 3))
    for span in spans:
        assert cache.reserve(span.stored, span.stored.length + span.count)
    total = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(seed)
    padding = 5 if invariant else 0
    query, key, value = (
        torch.randn(heads, total + padding, SIZE, generator=generator)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    layout = lay_out(cache, spans, invariant=invariant)
    found = layout.attend(0, query, key, value, 0.3, None)
    assert found.shape == (total + padding, HEADS, SIZE)
    assert not found[total:].any()
    start = 0
    for span in spans:
        rows = slice(start, start + span.count)
        expected = attend_plainly(cache, span, query[:, rows], 0.3)
        torch.testing.assert_close(found[rows].double(), expected, rtol=1e-4, atol=1e-5)
        start += span.count


def test_a_window_over_pages_is_not_computed() -> None:
    cache = KvCache([SHAPE], 20, 8)
    span = Span(store(cache, 10, 0), 1)
    assert cache.reserve(span.stored, 11)
    query, key, value = (torch.zeros(heads, 1, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    with pytest.raises(NotImplementedError, match="window"):
        lay_out(cache, [span]).attend(0, query, key, value, None, 5)
    lay_out(cache, [span]).attend(0, query, key, value, None, 11)
