"""What the embedded engine refuses to serve after it has tried it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hosted_tinker.errors import SettingsError
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.sampling import attention_check
from hosted_tinker.sampling.attention_check import check_paged_attention


@pytest.fixture
def base() -> BaseModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval()
    return BaseModel(model, 64, lambda logits: logits)


def test_parts_that_give_what_the_whole_gives_pass(base: BaseModel) -> None:
    check_paged_attention(base, "m")


@pytest.mark.parametrize("factor", [1.2, torch.nan, torch.inf])
def test_other_numbers_and_what_is_none_are_refused(
    base: BaseModel, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = attention_check._compute_in_parts

    def spoil(*arguments: object) -> list[Tensor]:
        first, *others = compute(*arguments)  # pyright: ignore[reportArgumentType]
        return [first, *(other * factor for other in others)]

    monkeypatch.setattr(attention_check, "_compute_in_parts", spoil)
    with pytest.raises(SettingsError, match="can't compute the attention of architecture Llama"):
        check_paged_attention(base, "m")
