"""When float32 products may be TF32. The flag can be set without a GPU, and has no effect there."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from hosted_tinker.modeling.precision import products_with, tf32_products


class OnGpu:
    """What is asked of activations on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("activations", "is_tf32"),
    [
        (OnGpu(torch.bfloat16), True),
        (OnGpu(torch.float16), True),
        (OnGpu(torch.float32), False),
        (torch.zeros(1, dtype=torch.bfloat16), False),
    ],
)
def test_only_products_with_short_activations_on_a_gpu_are(activations: Any, is_tf32: bool) -> None:
    matmul = torch.backends.cuda.matmul
    with products_with(activations):
        assert cast(bool, matmul.allow_tf32) is is_tf32
    assert not matmul.allow_tf32


def test_what_was_set_is_there_again_after_an_error() -> None:
    matmul = torch.backends.cuda.matmul
    short = cast(Any, OnGpu(torch.bfloat16))
    with tf32_products():
        with pytest.raises(ZeroDivisionError), products_with(short):
            _ = 1 / 0
        assert matmul.allow_tf32
    with pytest.raises(ZeroDivisionError), products_with(short):
        _ = 1 / 0
    assert not matmul.allow_tf32
