"""How far the trainer's log-probabilities are from those that a policy's data were sampled with.

On data of the weights in training this is the mismatch of the two engines, sampler and trainer; on
older data the policy's own change is in it too.

Shape letter: Q cells, each a position and a target token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SamplingMismatch:
    """Sums over the micro-batches of one request, tokens of advantage 0 (prompts) left out."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sum = 0.0
        self._sum_abs = 0.0
        self._max_abs = 0.0

    def add(self, logprobs_Q: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """`inputs` are a loss's; those of a loss on other data than samples are ignored."""
        if not {"logprobs", "advantages"} <= inputs.keys():
            return
        difference_Q = (logprobs_Q.detach() - inputs["logprobs"])[inputs["advantages"] != 0]
        if len(difference_Q) == 0:
            return
        self._num_tokens += len(difference_Q)
        self._sum += float(difference_Q.sum(dtype=torch.float64))
        self._sum_abs += float(difference_Q.abs().sum(dtype=torch.float64))
        self._max_abs = max(self._max_abs, float(difference_Q.abs().max()))

    @property
    def metrics(self) -> dict[str, float]:
        """Nothing where there were no sampled tokens.

        `kl_sample_train` estimates KL(sampler || trainer) in nats per token by the mean of
        log q - log p over the tokens sampled from q (estimator k1 of
        http://joschu.net/blog/kl-approx.html); the other two are of |log q - log p|.
        """
        if self._num_tokens == 0:
            return {}
        return {
            "kl_sample_train:mean": -self._sum / self._num_tokens,
            "sampling_logprobs_diff:mean": self._sum_abs / self._num_tokens,
            "sampling_logprobs_diff:max": self._max_abs,
        }
