"""Who computes next: shares over long times, and no credit for idle times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.workers.turns import Turns

LONGEST_S = 2.0
seconds = st.floats(0.01, LONGEST_S)


@given(
    share=st.floats(0.05, 0.95),
    slices=st.lists(st.tuples(seconds, seconds), min_size=100, max_size=100),
)
def test_both_busy_get_their_shares(share: float, slices: list[tuple[float, float]]) -> None:
    """At every moment, up to one slice of each."""
    turns = Turns(share)
    used = {"training": 0.0, "sampling": 0.0}
    for step_s, layer_s in slices:
        side, taken = ("sampling", step_s) if turns.sampling_is_due else ("training", layer_s)
        turns.charge(side, taken)
        used[side] += taken
        ahead = used["sampling"] / share - used["training"] / (1 - share)
        assert -LONGEST_S / (1 - share) <= ahead <= LONGEST_S / share


@pytest.mark.parametrize("idle", ["training", "sampling"])
def test_idle_time_is_no_credit(idle: str) -> None:
    turns = Turns(0.5)
    busy = "sampling" if idle == "training" else "training"
    for _ in range(100):
        turns.charge(busy, 1.0)
    turns.begin(idle)
    turns.charge(idle, 1.5)
    assert turns.sampling_is_due == (busy == "sampling")


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_sample_that_comes_to_a_busy_trainer_is_next(share: float) -> None:
    turns = Turns(share)
    for _ in range(10):
        turns.charge("training", 0.5)
    turns.begin("sampling")
    assert turns.sampling_is_due


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_batch_that_comes_to_a_busy_engine_is_next(share: float) -> None:
    turns = Turns(share)
    for _ in range(10):
        turns.charge("sampling", 0.5)
    turns.begin("training")
    assert not turns.sampling_is_due
