"""Losses and their gradients by each log-probability, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hosted_tinker.loss_specs import LOSS_SPECS, resolve_config
from hosted_tinker.training.losses import LOSSES


def run_loss(name, trained_logprobs, config=None, /, **inputs):
    """(loss, gradient by each log-probability), with the loss's defaults filled in."""
    logprobs_Q = torch.tensor(trained_logprobs, dtype=torch.float32, requires_grad=True)
    tensors = {key: torch.tensor(values, dtype=torch.float32) for key, values in inputs.items()}
    loss = LOSSES[name](logprobs_Q, tensors, resolve_config(name, config or {}))
    loss.backward()
    return loss.item(), logprobs_Q.grad.tolist()


def run_at_ratio(name, ratio, advantage, config=None, logprob=-1.0):
    loss, gradient = run_loss(
        name, [logprob], config, logprobs=[logprob - math.log(ratio)], advantages=[advantage]
    )
    return loss, gradient[0]


def test_every_loss_has_a_spec_and_every_spec_a_loss():
    assert LOSSES.keys() == LOSS_SPECS.keys()


def test_cross_entropy_is_the_negated_weighted_sum_and_weights_may_be_negative():
    loss, gradient = run_loss("cross_entropy", [-1.0, -2.0, -4.0], weights=[1.0, 0.0, -0.5])
    assert loss == pytest.approx(-1.0)  # -(1 * -1 + 0 * -2 + -0.5 * -4)
    assert gradient == [-1.0, 0.0, 0.5]


def test_importance_sampling_weighs_the_advantage_by_the_ratio():
    loss, gradient = run_at_ratio("importance_sampling", 1.5, 2.0)
    assert loss == pytest.approx(-3.0)
    assert gradient == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_ppo_stops_the_gradient_past_the_clip_in_the_advantages_direction(
    ratio, advantage, loss, gradient
):
    found_loss, found_gradient = run_at_ratio("ppo", ratio, advantage)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found_gradient == pytest.approx(gradient, rel=1e-6)


def test_ppo_thresholds_bound_the_ratio_itself():
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    assert run_at_ratio("ppo", 4.0, 1.0, config)[0] == pytest.approx(-3.0)
    assert run_at_ratio("ppo", 0.25, -1.0, config)[0] == pytest.approx(0.5)


def test_cispo_keeps_the_gradient_at_small_ratios_by_default():
    loss, gradient = run_at_ratio("cispo", 0.1, 2.0, logprob=-3.0)
    assert loss == pytest.approx(0.6)  # -(0.1 * -3 * 2)
    assert gradient == pytest.approx(-0.2)  # through logprobs only, not through the ratio


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    assert run_at_ratio("cispo", 8.0, 2.0, logprob=-3.0) == pytest.approx((24.0, -8.0))
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert run_at_ratio("cispo", 0.1, 2.0, config, logprob=-3.0) == pytest.approx((4.8, -1.6))


def test_dro_penalises_the_squared_distance_on_every_token():
    # -( -1 * 2 - 0.5 * 0.1 * 0.5^2 ) = 2.0125; derivative -2 + 0.1 * 0.5
    loss, gradient = run_loss("dro", [-1.0], {"beta": 0.1}, logprobs=[-1.5], advantages=[2.0])
    assert loss == pytest.approx(2.0125)
    assert gradient == pytest.approx([-1.95])
    # A prompt token: 0.5 * 0.05 * 3^2 = 0.225 and 0.05 * -3, at the default beta.
    loss, gradient = run_loss("dro", [-3.0], logprobs=[0.0], advantages=[0.0])
    assert loss == pytest.approx(0.225)
    assert gradient == pytest.approx([-0.15])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_an_overflowing_ratio_adds_nothing_where_the_advantage_is_0(name):
    loss, gradient = run_loss(name, [-1.0, -1.0], logprobs=[-1000.0, -1.0], advantages=[0.0, 1.0])
    assert loss == pytest.approx(1.0 if name == "cispo" else -1.0)
    assert gradient == pytest.approx([0.0, -1.0])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_sampling_logprob_of_0_counts_where_the_advantage_is_not_0(name):
    # r = exp(log 0.9 - 0) = 0.9, inside all thresholds.
    assert run_at_ratio(name, 0.9, 1.0, logprob=math.log(0.9))[1] == pytest.approx(-0.9)


def test_a_clipped_ratio_that_overflows_has_gradient_0():
    loss, gradient = run_loss("ppo", [-1.0], logprobs=[-1000.0], advantages=[2.0])
    assert loss == pytest.approx(-2.4)
    assert gradient == [0.0]
