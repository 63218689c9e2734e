"""Metrics of the distance between sampler and trainer, against values worked by hand."""

import pytest
import torch

from hosted_tinker.training.mismatch import SamplingMismatch


def add(mismatch: SamplingMismatch, trainer: list[float], sampler: list[float], advantages) -> None:
    inputs = {"logprobs": torch.tensor(sampler), "advantages": torch.tensor(advantages)}
    mismatch.add(torch.tensor(trainer), inputs)


def test_prompt_tokens_are_left_out_and_batches_add_up() -> None:
    mismatch = SamplingMismatch()
    add(mismatch, [-9.0, -1.0, -2.0], [0.0, -1.5, -1.0], [0.0, 1.0, -1.0])
    add(mismatch, [-3.0], [-2.5], [0.5])
    # Differences trainer - sampler: 0.5, -1.0, -0.5.
    assert mismatch.metrics == pytest.approx(
        {
            "kl_sample_train:mean": 1.0 / 3,
            "sampling_logprobs_diff:mean": 2.0 / 3,
            "sampling_logprobs_diff:max": 1.0,
        }
    )


def test_there_are_no_metrics_without_sampled_tokens() -> None:
    mismatch = SamplingMismatch()
    mismatch.add(torch.tensor([-1.0]), {"weights": torch.tensor([1.0])})
    add(mismatch, [-1.0], [0.0], [0.0])
    assert mismatch.metrics == {}
