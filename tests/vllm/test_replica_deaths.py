"""A real vLLM is killed in every way, and what was asked of it is answered right all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from hosted_tinker.types import Sample, SampleOutput
from tests.integration.tiny_engine import PROMPT
from tests.vllm.tiny_replicas import (
    RESULT_TIMEOUT_S,
    Reference,
    Serving,
    count_running,
    find_engine,
    find_server,
    list_group,
)

COUNT = 60
"""Tokens that take long enough for a kill to come in between."""
NAMES: Sequence[str | None] = ("a0", None)
DEATH_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str | None, list[int]]:
    """Greedy."""
    return {name: reference.continue_greedily(name, PROMPT, COUNT) for name in (*NAMES, "b3")}


def make_samples(serving: Serving, names: Sequence[str | None]) -> list[Sample]:
    return [
        serving.make_sample(PROMPT, name, max_tokens=COUNT, temperature=0.0, stop=())
        for name in names
    ]


def start_samples(serving: Serving, names: Sequence[str | None]) -> list[Future[SampleOutput]]:
    """Of which at least one runs. They are short, and may end before that is seen."""
    for _ in range(20):
        samples = make_samples(serving, names)
        pending = [serving.loop.submit(serving.pool.sample(sample)) for sample in samples]
        while not all(future.done() for future in pending):
            if count_running(serving) > 0:
                return pending
    raise AssertionError("no sample was seen to run")


def sample_while_killing(
    serving: Serving, names: Sequence[str | None], pid: int
) -> list[list[int]]:
    """Kills the process once the requests are under way."""
    pending = start_samples(serving, names)
    os.kill(pid, signal.SIGKILL)
    outputs = [future.result(RESULT_TIMEOUT_S) for future in pending]
    return [output.sequences[0].tokens.tolist() for output in outputs]


def wait_group_empty(group: int) -> None:
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while list_group(group):
        assert time.monotonic() < deadline, f"still there: {list_group(group)}"
        time.sleep(0.1)


@pytest.mark.parametrize("find", [find_server, find_engine])
def test_a_killed_process_costs_time_and_nothing_else(
    serving: Serving,
    vllm_port: int,
    expected: dict[str | None, list[int]],
    find: Callable[[int], int],
) -> None:
    serving.loop.run(serving.pool.wait_ready())
    serving.sample_all(make_samples(serving, NAMES))
    group = os.getpgid(find_server(vllm_port))
    answers = sample_while_killing(serving, NAMES, find(vllm_port))
    assert answers == [expected[name] for name in NAMES]
    assert os.getpgid(find_server(vllm_port)) != group
    wait_group_empty(group)
    models = serving.loop.run(serving.replicas[0].client.fetch_models())
    assert set(models.adapters) >= {"a0", "nothing"}


def test_killing_server_and_guard_while_an_adapter_is_loaded_leaves_nothing_behind(
    serving: Serving, vllm_port: int, expected: dict[str | None, list[int]]
) -> None:
    serving.loop.run(serving.pool.wait_ready())
    server = find_server(vllm_port)
    group = os.getpgid(server)

    loading = serving.loop.submit(serving.pool.load_everywhere(serving.tiny.adapter("b3")))
    for pid in (group, server):
        os.kill(pid, signal.SIGKILL)
    loading.result(RESULT_TIMEOUT_S)
    (output,) = serving.sample_all(make_samples(serving, ["b3"]))
    assert output.sequences[0].tokens.tolist() == expected["b3"]
    wait_group_empty(group)
