"""How exactly float32 products are computed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


def products_with(activations: Tensor) -> AbstractContextManager[None]:
    """For float32 products of adapters with activations of a 16-bit model on CUDA: TF32 until the block
    ends. It holds 16-bit activations exactly, and adapters and what is between their products to 11
    bits; it adds in float32, and is many times as fast. Products of a float32 model stay as they are.
    """
    is_short = activations.is_cuda and activations.dtype in (torch.bfloat16, torch.float16)
    return tf32_products() if is_short else nullcontext()


@contextmanager
def tf32_products() -> Generator[None]:
    """Only for these: elsewhere float32 is asked for because it is needed, as for rotary angles."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
