"""Token choice against hand-worked distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hosted_tinker.sampling.token_choice import (
    UniformStream,
    choose_tokens,
    draw_tokens,
    top_logprobs,
)
from hosted_tinker.types import SamplingParams

PROBS = [0.1, 0.5, 0.15, 0.25]
LOGITS = torch.tensor([[math.log(p) for p in PROBS]])


def choose(uniform: float, **params: float) -> tuple[int, float]:
    chosen = choose_tokens(LOGITS, [SamplingParams(**params)], [uniform])
    return chosen.tokens[0], chosen.logprobs[0]


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.59, 1), (0.61, 2), (0.76, 3)]
)
def test_the_cumulative_distribution_is_inverted_in_token_order(uniform: float, token: int) -> None:
    assert choose(uniform) == (token, pytest.approx(math.log(PROBS[token]), abs=1e-6))


def test_temperature_scales_choice_and_logprob() -> None:
    # Temperature 0.5 squares: 0.01, 0.25, 0.0225, 0.0625, in all 0.345.
    assert choose(0.02, temperature=0.5) == (0, pytest.approx(math.log(0.01 / 0.345), abs=1e-5))
    assert choose(0.04, temperature=0.5) == (1, pytest.approx(math.log(0.25 / 0.345), abs=1e-5))


def test_temperature_zero_is_argmax_with_the_logprob_of_temperature_one() -> None:
    assert choose(0.99, temperature=0.0) == (1, pytest.approx(math.log(0.5), abs=1e-6))


@pytest.mark.parametrize(
    ("params", "support"),
    [
        # Best first: 0.5 (token 1), 0.25 (3), 0.15 (2), 0.1 (0).
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 2 / 3, 3: 1 / 3}),
        ({"top_p": 0.5}, {1: 1.0}),
        ({"top_p": 0.51}, {1: 2 / 3, 3: 1 / 3}),
        ({"top_p": 0.8}, {1: 5 / 9, 3: 2.5 / 9, 2: 1.5 / 9}),
        ({"top_p": 0.0}, {1: 1.0}),
        # Of the three best, renormalised, the first two hold 0.833.
        ({"top_k": 3, "top_p": 0.8}, {1: 2 / 3, 3: 1 / 3}),
        ({"top_k": 99}, dict(enumerate(PROBS))),
        ({"top_k": 2**63}, dict(enumerate(PROBS))),
    ],
)
def test_top_k_then_top_p(params: dict[str, float], support: dict[int, float]) -> None:
    count = 3600
    uniforms = [(index + 0.5) / count for index in range(count)]
    chosen = choose_tokens(LOGITS.expand(count, -1), [SamplingParams(**params)] * count, uniforms)
    shares = {token: chosen.tokens.count(token) / count for token in set(chosen.tokens)}
    assert shares == pytest.approx(support, abs=1e-3)
    for token, logprob in zip(chosen.tokens, chosen.logprobs, strict=True):
        assert logprob == pytest.approx(math.log(PROBS[token]), abs=1e-6)


def test_rows_of_a_batch_are_chosen_as_if_alone() -> None:
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=2),
        SamplingParams(temperature=2.0, top_p=0.9),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    uniforms = [0.3, 0.3, 0.9, 0.6]
    together = choose_tokens(logits, params, uniforms)
    for row in range(4):
        alone = choose_tokens(logits[row : row + 1], [params[row]], [uniforms[row]])
        assert alone.tokens == [together.tokens[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]], abs=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logprobs = torch.tensor([[-math.inf, 0.0, -math.inf]])
    uniforms = torch.tensor([[0.0, 0.5, 1 - 2**-53]], dtype=torch.float64)
    assert draw_tokens(logprobs, uniforms).tolist() == [[1, 1, 1]]


def test_top_logprobs_are_best_first() -> None:
    best = top_logprobs(LOGITS, 3)
    assert best.token_ids.tolist() == [[1, 3, 2]]
    np.testing.assert_allclose(np.exp(best.logprobs), [[0.5, 0.25, 0.15]], rtol=1e-6)
    assert best.token_ids.dtype == np.int32


def test_uniform_streams_are_apart_by_seed_and_key() -> None:
    first = [UniformStream(1, (0, 0)).draw(), UniformStream(1, (0, 0)).draw()]
    others = [UniformStream(1, (0, 1)), UniformStream(1, (1,)), UniformStream(2, (0, 0))]
    assert first[0] == first[1]
    assert len({first[0], *(stream.draw() for stream in others)}) == 4
