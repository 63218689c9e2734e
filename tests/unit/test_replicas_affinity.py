"""Which replica a prompt goes to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.replicas.affinity import BALANCE_ABS, BLOCK_BYTES, PrefixAffinity

IDLE = {0: 0, 1: 0, 2: 0}


def test_samples_of_one_prompt_and_turns_of_one_talk_go_to_one_replica() -> None:
    affinity = PrefixAffinity()
    prompt = b"system prompt, " * BLOCK_BYTES
    first = affinity.choose("a", prompt, {0: 3, 1: 1, 2: 2})
    assert first == 1
    assert affinity.choose("a", prompt, {0: 0, 1: 5, 2: 0}) == 1
    assert affinity.choose("a", prompt + b"a second turn" * BLOCK_BYTES, {0: 0, 1: 5, 2: 0}) == 1


def test_the_longest_known_prefix_wins() -> None:
    affinity = PrefixAffinity()
    shared, own = b"s" * BLOCK_BYTES, b"t" * BLOCK_BYTES
    affinity.choose("a", shared, {0: 0, 1: 1})
    affinity.choose("a", shared + own, {1: 0})
    assert affinity.choose("a", shared + own + own, {0: 0, 1: 0}) == 1
    assert affinity.choose("a", shared + b"u" * BLOCK_BYTES, {0: 5, 1: 5, 2: 0}) == 1


def test_other_weights_share_no_prefix() -> None:
    affinity = PrefixAffinity()
    prompt = b"p" * BLOCK_BYTES
    assert affinity.choose("a", prompt, {0: 0, 1: 1}) == 0
    assert affinity.choose("b", prompt, {0: 1, 1: 0}) == 1


def test_a_much_busier_replica_is_passed_over_and_the_prefix_moves() -> None:
    affinity = PrefixAffinity()
    prompt = b"popular" * BLOCK_BYTES
    affinity.choose("a", prompt, {0: 0, 1: 1})
    assert affinity.choose("a", prompt, {0: BALANCE_ABS, 1: 0}) == 0
    assert affinity.choose("a", prompt, {0: BALANCE_ABS + 1, 1: 0}) == 1
    assert affinity.choose("a", prompt, IDLE) == 1


def test_a_replica_that_is_down_gets_nothing() -> None:
    affinity = PrefixAffinity()
    prompt = b"p" * BLOCK_BYTES
    affinity.choose("a", prompt, {2: 0})
    assert affinity.choose("a", prompt, {0: 0, 1: 0}) == 0


@given(st.lists(st.tuples(st.binary(max_size=2000), st.lists(st.integers(0, 40), min_size=1))))
def test_the_choice_is_always_one_that_is_up(requests: list[tuple[bytes, list[int]]]) -> None:
    affinity = PrefixAffinity()
    for prompt, loads in requests:
        assert affinity.choose("a", prompt, dict(enumerate(loads))) in range(len(loads))
