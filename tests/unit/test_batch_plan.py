"""The micro-batch plan, collation, and the way back to the data's shapes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.training.batch import collate, plan_micro_batches, split_by_shape
from hosted_tinker.types import Datum

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=50)


@given(LENGTHS, st.integers(1, 400))
def test_every_index_is_planned_once(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 400), st.booleans())
def test_a_batch_is_within_the_budget_or_a_sequence_is_alone(lengths, max_tokens, padded):
    for batch in plan_micro_batches(lengths, max_tokens, padded=padded):
        sizes = [lengths[index] for index in batch]
        cost = len(sizes) * max(sizes) if padded else sum(sizes)
        assert cost <= max_tokens or len(batch) == 1


@given(LENGTHS, st.integers(1, 400))
def test_at_most_one_batch_is_less_than_half_full(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens)
    sizes = [sum(lengths[index] for index in batch) for batch in plan]
    assert sum(2 * size <= max_tokens for size in sizes) <= 1


@given(LENGTHS, st.integers(1, 400))
def test_a_batch_goes_from_the_longest_to_the_shortest(lengths, max_tokens):
    for batch in plan_micro_batches(lengths, max_tokens):
        sizes = [lengths[index] for index in batch]
        assert sizes == sorted(sizes, reverse=True)


def test_plans_worked_by_hand():
    lengths = [3, 10, 4, 1, 25]
    assert plan_micro_batches(lengths, 12) == [[4], [1, 3], [2, 0]]
    assert plan_micro_batches(lengths, 12, padded=True) == [[4], [1], [2, 0, 3]]


def make_datum(tokens, targets, weights):
    return Datum(
        np.array(tokens, dtype=np.int64),
        {
            "target_tokens": np.array(targets, dtype=np.int64),
            "weights": np.array(weights, dtype=np.float32),
        },
    )


def test_collation_worked_by_hand_with_ragged_numbers_of_targets():
    batch = collate(
        [
            make_datum([5, 6], [[1, 2, 3], [4, 5, 6]], [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
            make_datum([7, 8, 9], [7, 8, 9], [0.7, 0.8, 0.9]),
        ]
    )
    assert batch.tokens_P.tolist() == [5, 6, 7, 8, 9]
    assert batch.lengths == [2, 3]
    assert batch.position_Q.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    assert batch.target_Q.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.inputs.keys() == {"weights"}
    np.testing.assert_allclose(batch.inputs["weights"], np.arange(1, 10) / 10, rtol=1e-6)
    first, second = split_by_shape(np.arange(9, dtype=np.float32), batch.shapes)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [6, 7, 8]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=8))
def test_every_cell_finds_its_own_token_and_comes_back_in_its_shape(sizes):
    rng = np.random.default_rng(0)
    shapes = [(length, width) if width else (length,) for length, width in sizes]
    data = [
        make_datum(
            rng.integers(1, 99, shape[0]), rng.integers(1, 99, shape), rng.normal(size=shape)
        )
        for shape in shapes
    ]
    batch = collate(data)
    tokens_Q = batch.tokens_P[batch.position_Q]
    values = split_by_shape(tokens_Q.numpy().astype(np.float32), batch.shapes)
    for datum, found in zip(data, values, strict=True):
        targets = datum.loss_fn_inputs["target_tokens"]
        rows = datum.tokens.reshape(-1, *[1] * (targets.ndim - 1))
        np.testing.assert_array_equal(found, np.broadcast_to(rows, targets.shape))
