"""Pages and the prefix cache against a plain model of them: texts, and who holds what."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hosted_tinker.sampling.kv_cache import KvCache, LayerShape, StoredSequence
from hosted_tinker.sampling.step_plan import plan_step

PAGE_SIZE = 4
NUM_PAGES = 12
SHAPE = LayerShape((1, 2), (1, 3), torch.float32, torch.device("cpu"))


class Sequences(RuleBasedStateMachine):
    """Sequences begin, grow, branch and end. What is stored for a token is a hash of its past, as
    keys and values are a function of it: a page found for another text would show."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache([SHAPE], NUM_PAGES, PAGE_SIZE)
        self.held: list[tuple[str, list[int], StoredSequence]] = []

    @rule(
        adapter=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18)
    )
    def begin(self, adapter: str, tokens: list[int]) -> None:
        text = np.array(tokens, np.int64)
        stored = self.cache.open(adapter, text, reuse=True)
        assert stored.length % PAGE_SIZE == 0
        assert stored.num_reused == stored.length < len(tokens)
        assert self.read(stored) == [
            fingerprint(adapter, tokens[: i + 1]) for i in range(stored.length)
        ]
        self.held.append((adapter, tokens[: stored.length], stored))
        self.compute(len(self.held) - 1, tokens[stored.length :])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        self.compute(data.draw(st.integers(0, len(self.held) - 1)), tokens)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def branch(self, data: st.DataObject) -> None:
        adapter, tokens, stored = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        if (copy := self.cache.fork(stored)) is not None:
            self.held.append((adapter, list(tokens), copy))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, _, stored = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.close(stored)

    @rule(count=st.integers(1, NUM_PAGES))
    def evict(self, count: int) -> None:
        self.cache.prefixes.evict(count)

    def compute(self, index: int, tokens: list[int]) -> None:
        adapter, before, stored = self.held[index]
        after = before + tokens
        if not self.cache.reserve(stored, len(after)):
            return
        slots = self.cache.find_slots(stored, len(before), len(after))
        marks = [fingerprint(adapter, after[: i + 1]) for i in range(len(before), len(after))]
        self.cache.keys[0][slots, 0, 0] = torch.tensor(marks)
        text = np.array(after, np.int64)
        self.cache.advance(stored, len(after), lambda start, stop: text[start:stop])
        self.held[index] = (adapter, after, stored)

    def read(self, stored: StoredSequence) -> list[float]:
        slots = self.cache.find_slots(stored, 0, stored.length)
        return self.cache.keys[0][slots, 0, 0].tolist()

    @invariant()
    def nothing_is_overwritten(self) -> None:
        for adapter, tokens, stored in self.held:
            assert stored.length == len(tokens)
            expected = [fingerprint(adapter, tokens[: i + 1]) for i in range(len(tokens))]
            assert self.read(stored) == expected

    @invariant()
    def page_0_stays_empty(self) -> None:
        assert not self.cache.keys[0][:PAGE_SIZE].any()

    def teardown(self) -> None:
        for _, _, stored in self.held:
            self.cache.close(stored)
        self.cache.prefixes.evict(NUM_PAGES)
        assert self.cache.allocator.num_free == NUM_PAGES - 1


def fingerprint(adapter: str, tokens: list[int]) -> float:
    """Exact in float32, and never 0."""
    return float(int("1" + str(ord(adapter) % 2) + "".join(map(str, tokens)), 2) % 2**24 or 1)


Sequences.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestSequences = Sequences.TestCase


def test_the_least_recently_used_leave_first_and_ends_before_beginnings() -> None:
    cache = KvCache([SHAPE], 8, PAGE_SIZE)
    texts = [np.arange(9) + 10 * number for number in range(3)]
    for text in texts:
        store(cache, text)
    cache.close(cache.open("a", texts[0], reuse=True))
    cache.prefixes.evict(3)
    found = [len(cache.prefixes.find("a", text)) for text in texts]
    assert found == [2, 0, 1]


def store(cache: KvCache, text: np.ndarray) -> None:
    stored = cache.open("a", text, reuse=True)
    assert cache.reserve(stored, len(text))
    cache.advance(stored, len(text), lambda start, stop: text[start:stop])
    cache.close(stored)


@given(
    pending=st.lists(st.integers(1, 300), min_size=1, max_size=40), max_tokens=st.integers(1, 256)
)
def test_a_step_moves_all_that_decode_and_the_first_prompts(
    pending: list[int], max_tokens: int
) -> None:
    plan = plan_step(pending, max_tokens)
    decoding = [taken for count, taken in zip(pending, plan, strict=True) if count == 1]
    prompts = [(count, taken) for count, taken in zip(pending, plan, strict=True) if count > 1]
    assert all(taken == 1 for taken in decoding)
    total = sum(taken for _, taken in prompts)
    assert total <= max(1, max_tokens - len(decoding))
    if prompts:
        assert total >= 1
    unfinished = [index for index, (count, taken) in enumerate(prompts) if taken < count]
    if unfinished:
        assert all(taken == 0 for _, taken in prompts[unfinished[0] + 1 :])
        assert total == max(1, max_tokens - len(decoding))
