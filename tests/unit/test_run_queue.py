"""Order, gaps and late arrivals. The clock is a number that the test sets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.errors import UserError
from hosted_tinker.futures import Future
from hosted_tinker.run_queue import Job, RunQueue
from hosted_tinker.types import AdamParams, ForwardBackward, NamedResult, OptimStep


async def finish(_output: Any) -> NamedResult:
    return NamedResult({})


def make_pass(seq_id: int) -> Job:
    work = ForwardBackward("m", [], "cross_entropy")
    return Job("m", seq_id, work, Future("r", seq_id, 0), finish, may_follow_later_ids=True)


def make_step(seq_id: int) -> Job:
    return Job("m", seq_id, OptimStep("m", AdamParams()), Future("r", seq_id, 0), finish)


def started_queue(gap_s: float = 10) -> RunQueue:
    queue = RunQueue(gap_s)
    queue.push(make_step(0), now=0)
    assert queue.pop_ready(now=0)
    return queue


def pop_all(queue: RunQueue, now: float) -> list[int]:
    return [job.seq_id for job in iter(lambda: queue.pop_ready(now), None)]


@given(st.permutations(range(1, 7)))
def test_any_order_of_arrival_runs_in_order(order: list[int]) -> None:
    queue = started_queue()
    ran: list[int] = []
    for seq_id in order:
        queue.push(make_pass(seq_id), now=0)
        ran += pop_all(queue, now=0)
    assert ran == [1, 2, 3, 4, 5, 6]


def test_first_chunk_sent_last_holds_the_others_back() -> None:
    queue = started_queue()
    for seq_id in (2, 3, 4):
        queue.push(make_pass(seq_id), now=0)
        assert queue.pop_ready(now=9) is None
    assert queue.missing_seq_id == 1
    queue.push(make_pass(1), now=9)
    assert pop_all(queue, now=9) == [1, 2, 3, 4]


def test_step_after_a_gap_shows_that_the_gap_is_permanent() -> None:
    queue = started_queue()
    queue.push(make_pass(2), now=0)
    assert queue.pop_ready(now=0) is None
    queue.push(make_step(3), now=0)
    assert pop_all(queue, now=0) == [2, 3]


def test_gap_among_passes_closes_after_its_time() -> None:
    queue = started_queue(gap_s=10)
    queue.push(make_pass(2), now=5)
    assert queue.wait_s(now=8) == 7
    assert queue.pop_ready(now=14.9) is None
    assert pop_all(queue, now=15) == [2]
    assert queue.wait_s(now=15) is None


def test_second_gap_has_its_own_time() -> None:
    queue = started_queue(gap_s=10)
    queue.push(make_pass(2), now=0)
    queue.push(make_pass(4), now=0)
    assert pop_all(queue, now=10) == [2]
    assert pop_all(queue, now=19) == []
    assert pop_all(queue, now=20) == [4]


def test_number_whose_turn_is_over_is_refused() -> None:
    queue = started_queue()
    queue.push(make_step(3), now=0)
    assert pop_all(queue, now=0) == [3]
    with pytest.raises(UserError, match="seq_id 2 came after seq_id 3"):
        queue.push(make_pass(2), now=0)


def test_requests_without_numbers_come_after_all_others() -> None:
    queue = started_queue()
    for _ in range(2):
        queue.push(make_pass(queue.last_seq_id + 1), now=0)
    assert pop_all(queue, now=0) == [1, 2]
