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
    requests = [
        [make_datum([1], [2], [0.0]), make_datum([7, 8, 9], [7, 8, 9], [0.7, 0.8, 0.9])],
        [make_datum([5, 6], [[1, 2, 3], [4, 5, 6]], [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])],
    ]
    batch = collate(requests, [(1, 0), (0, 1)])
    assert batch.tokens_P.tolist() == [7, 8, 9, 5, 6]
    assert batch.lengths == [3, 2]
    assert batch.requests == [0, 1]
    assert batch.position_Q.tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4]
    assert batch.target_Q.tolist() == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    first, second = batch.parts
    assert (first.request, first.data, first.cells) == (0, [1], slice(0, 3))
    assert (second.request, second.data, second.cells) == (1, [0], slice(3, 9))
    np.testing.assert_allclose(first.inputs["weights"], [0.7, 0.8, 0.9], rtol=1e-6)
    np.testing.assert_allclose(second.inputs["weights"], np.arange(1, 7) / 10, rtol=1e-6)
    (values,) = split_by_shape(np.arange(6, dtype=np.float32), second.shapes)
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]]


SIZES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=8
)


@given(SIZES, st.randoms(use_true_random=False))
def test_every_cell_finds_its_own_token_and_comes_back_in_its_shape(sizes, random):
    rng = np.random.default_rng(0)
    requests = [[], [], []]
    for request, length, width in sizes:
        shape = (length, width) if width else (length,)
        requests[request].append(
            make_datum(
                rng.integers(1, 99, length), rng.integers(1, 99, shape), rng.normal(size=shape)
            )
        )
    members = [(i, j) for i, data in enumerate(requests) for j in range(len(data))]
    random.shuffle(members)
    batch = collate(requests, members)
    tokens_Q = batch.tokens_P[batch.position_Q].numpy().astype(np.float32)
    found = {}
    for part in batch.parts:
        values = split_by_shape(tokens_Q[part.cells], part.shapes)
        found |= {(part.request, index): one for index, one in zip(part.data, values, strict=True)}
    assert found.keys() == set(members)
    for (request, index), values in found.items():
        datum = requests[request][index]
        targets = datum.loss_fn_inputs["target_tokens"]
        rows = datum.tokens.reshape(-1, *[1] * (targets.ndim - 1))
        np.testing.assert_array_equal(values, np.broadcast_to(rows, targets.shape))
