"""Which weights a base model may have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import check_weights_are_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_model_that_is_not_quantised_pass(dtype: torch.dtype) -> None:
    check_weights_are_plain(nn.Linear(4, 4, dtype=dtype), "m")


def test_quantised_weights_are_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model = nn.Sequential(nn.LayerNorm(4), layer)
    with pytest.raises(SettingsError, match=r"'1' is torch.float8_e4m3fn; accepted: .*bfloat16"):
        check_weights_are_plain(model, "m")


def test_weights_that_were_left_out_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(SettingsError, match=r"does not fit .* '1' .*train_gpus"):
        check_weights_are_plain(model, "m")
