"""Loss functions: pure functions of the targets' log-probabilities, one cell for each target token.

The caller flattens the cells of a micro-batch and leaves padding out. Every loss is a sum over
cells and is not divided by their number: gradients of successive `forward_backward` calls must add
up, so normalisation is left to the caller's weights and advantages. Inputs and configurations were
checked by `loss_specs`, which also has the defaults.

r stands for p(target) under the module in training over q(target) under the policy that sampled it,
r = exp(logprobs - sampling logprobs). Where the advantage is 0, r is not computed: it may overflow
there, since prompt tokens come with a sampling log-probability of 0, and inf * 0 is NaN.

Shape letters: Q cells, each a position and a target token to score there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hosted_tinker.modeling.target_logprobs import LossGradient

LossFn = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(logprobs_Q, inputs, config) -> scalar loss. logprobs_Q: float32, nats, carries grad. inputs:
name -> float32 [Q], the `loss_fn_inputs` without `target_tokens`. config: all keys of the loss."""


def cross_entropy(
    logprobs_Q: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    """-sum(weights * logprobs). Weights may be negative and of any size.

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses
    """
    return -(inputs["weights"] * logprobs_Q).sum()


def importance_sampling(
    logprobs_Q: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    """-sum(r * A): the policy gradient, corrected for sampling under another policy.

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses
    """
    advantages_Q = inputs["advantages"]
    log_ratio_Q = compute_log_ratio(logprobs_Q, inputs["logprobs"], advantages_Q)
    return -(log_ratio_Q.exp() * advantages_Q).sum()


def ppo(logprobs_Q: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum(min(r * A, clip(r, low, high) * A)).

    That minimum is A * min(r, high) where A > 0 and A * max(r, low) where A < 0. It is computed in
    this form so that a clipped ratio that overflows has gradient 0 and not NaN.

    Args:
        config: `clip_low_threshold` and `clip_high_threshold` bound r itself, not its distance
            from 1.

    Source: Schulman et al. 2017, arXiv:1707.06347 eq. 7.
    """
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    advantages_Q = inputs["advantages"]
    log_ratio_Q = compute_log_ratio(logprobs_Q, inputs["logprobs"], advantages_Q)
    fixed_ratio_Q = log_ratio_Q.detach().exp()
    is_clipped_Q = torch.where(advantages_Q > 0, fixed_ratio_Q > high, fixed_ratio_Q < low)
    ratio_Q = log_ratio_Q.masked_fill(is_clipped_Q, 0.0).exp()
    bounded_Q = torch.where(is_clipped_Q, fixed_ratio_Q.clamp(low, high), ratio_Q)
    return -(bounded_Q * advantages_Q).sum()


def cispo(logprobs_Q: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum(stopgrad(clip(r, low, high)) * logprobs * A): clipping bounds the weight, keeps the gradient.

    Args:
        config: `clip_low_threshold` and `clip_high_threshold` bound r itself.

    Source: MiniMax 2025, arXiv:2506.13585 eq. 4, without its normalisation;
    https://tinker-docs.thinkingmachines.ai/tinker/losses/cispo
    """
    advantages_Q = inputs["advantages"]
    log_ratio_Q = compute_log_ratio(logprobs_Q.detach(), inputs["logprobs"], advantages_Q)
    weights_Q = log_ratio_Q.exp().clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -(weights_Q * logprobs_Q * advantages_Q).sum()


def dro(logprobs_Q: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum(logprobs * A - beta / 2 * (logprobs - sampling_logprobs)^2), on every token as sent.

    The quadratic term acts on prompt tokens too, whatever their advantage is.

    Source: https://tinker-docs.thinkingmachines.ai/tinker/losses/dro, after Richemond et al. 2024,
    arXiv:2405.19107.
    """
    distance_Q = logprobs_Q - inputs["logprobs"]
    return -(logprobs_Q * inputs["advantages"] - 0.5 * config["beta"] * distance_Q**2).sum()


LOSSES: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}


def describe_gradient(loss_fn: str, inputs: Mapping[str, Tensor]) -> LossGradient:
    """What the inputs alone say of the gradient with respect to the log-probabilities."""
    match loss_fn:
        case "cross_entropy":
            return LossGradient(inputs["weights"] != 0, -inputs["weights"])
        case "dro":
            return LossGradient(torch.ones_like(inputs["advantages"], dtype=torch.bool))
        case _:
            return LossGradient(inputs["advantages"] != 0)


def compute_log_ratio(
    logprobs_Q: Tensor, sampling_logprobs_Q: Tensor, advantages_Q: Tensor
) -> Tensor:
    """log r, and 0 where the advantage is 0."""
    return torch.where(advantages_Q == 0, 0.0, logprobs_Q - sampling_logprobs_Q)
