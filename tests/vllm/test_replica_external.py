"""A vLLM that runs already: what it can do is found out, and what an earlier life left is taken out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hosted_tinker.errors import SettingsError, UnservableError
from hosted_tinker.replicas.child import HOST, VllmChild
from hosted_tinker.replicas.vllm import VllmClient
from hosted_tinker.types import AdapterRef
from hosted_tinker.workers.group import GroupState
from tests.harness import free_port
from tests.integration.tiny_engine import PROMPT
from tests.vllm.tiny_replicas import (
    BackgroundLoop,
    Reference,
    Serving,
    TinyModel,
    make_spec,
)


@pytest.fixture(scope="module")
def external(
    loop: BackgroundLoop, tiny: TinyModel, vllm_python: Path, tmp_path_factory: Any
) -> Iterator[Serving]:
    """One with raw log-probabilities, as vLLM starts if it is not told, and two adapters in it."""
    spec = make_spec(tiny, vllm_python, free_port(), "--logprobs-mode raw_logprobs")
    url, api_key = f"http://{HOST}:{spec.port}", spec.environment["VLLM_API_KEY"]
    child = VllmChild(spec)
    one = Serving(loop, tiny)
    loop.run(child.start())
    try:
        client = VllmClient(url, api_key, one.http)
        while not loop.run(client.is_healthy()):
            assert not child.has_ended, child.describe_failure()
            time.sleep(0.5)
        another = tmp_path_factory.mktemp("another") / "b1"
        another.symlink_to(tiny.adapter("b1").directory)
        for adapter in (tiny.copy_adapter("b1", "left-over"), AdapterRef("of-another", another)):
            loop.run(client.load_adapter(adapter.name, adapter.directory))
        one.start([one.add_external(url, api_key)])
        loop.run(one.pool.wait_ready())
        yield one
    finally:
        one.stop()
        loop.run(child.stop())


def test_a_wrong_key_is_named(loop: BackgroundLoop, tiny: TinyModel, external: Serving) -> None:
    stranger = Serving(loop, tiny)
    stranger.start([stranger.add_external(external.pool.urls[0], "wrong")])
    try:
        with pytest.raises(SettingsError, match="does not accept the key; set vllm_api_key"):
            loop.run(stranger.pool.wait_ready())
        assert stranger.pool.state is GroupState.FAILED
    finally:
        stranger.stop()


def test_adapters_of_an_earlier_life_are_taken_out_and_no_others(external: Serving) -> None:
    models = external.loop.run(external.replicas[0].client.fetch_models())
    assert "left-over" not in models.adapters
    assert "of-another" in models.adapters


def test_raw_logprobs_are_noticed_and_served_at_temperature_1_only(
    external: Serving, reference: Reference
) -> None:
    with pytest.raises(UnservableError, match="--logprobs-mode processed_logprobs"):
        external.sample(PROMPT, max_tokens=1, temperature=0.5)
    for temperature in (0.0, 1.0):
        fields: dict[str, Any] = {"max_tokens": 6, "temperature": temperature, "stop": ()}
        (sequence,) = external.sample(PROMPT, "b0", **fields, seed=1).sequences
        tokens = [*PROMPT, *sequence.tokens.tolist()]
        logprobs = reference.compute_logprobs("b0", tokens)[len(PROMPT) - 1 : -1]
        np.testing.assert_allclose(
            sequence.logprobs, logprobs[np.arange(6), sequence.tokens], atol=1e-4
        )
