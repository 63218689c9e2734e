"""Packed sequences against each of them alone, with transformers' own attention."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from hosted_tinker.modeling import packed_attention
from hosted_tinker.modeling.base_model import BaseModel
from hosted_tinker.modeling.decoder_pass import DecoderPass
from hosted_tinker.modeling.lora import Routing
from hosted_tinker.modeling.packed_attention import PACKED
from tests.unit.varlen_reference import attend_varlen_plainly

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS: dict[str, Any] = {
    "full": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=4)),
}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return cast(PreTrainedModel, MODELS[name]().double().eval())


@pytest.fixture(scope="module", params=["full", "window"])
def models(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel, DecoderPass]:
    """The model alone, and another copy of it with the pass that is tested."""
    base = BaseModel(make_model(request.param), 64, lambda logits: logits)
    return make_model(request.param), base.module, DecoderPass(base, Routing(), pack=True)


@pytest.mark.parametrize("through", ["calls by length", "bounds"])
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_values_and_gradients_are_those_of_each_sequence_alone(
    models: tuple[PreTrainedModel, PreTrainedModel, DecoderPass],
    through: str,
    lengths: list[int],
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if through == "bounds":
            patch.setattr(packed_attention, "can_use_varlen", lambda *_: True)
            patch.setattr(packed_attention, "varlen_attn", attend_varlen_plainly)
        check_against_each_alone(*models, lengths, seed)


def check_against_each_alone(
    alone: PreTrainedModel,
    module: PreTrainedModel,
    packed: DecoderPass,
    lengths: list[int],
    seed: int,
) -> None:
    assert packed.packs
    generator = torch.Generator().manual_seed(seed)
    tokens_P = torch.randint(90, (sum(lengths),), generator=generator)
    weights_PD = torch.randn(sum(lengths), 32, generator=generator, dtype=torch.float64)
    parts = tokens_P.split(lengths)
    expected_PD = torch.cat(
        [alone.get_decoder()(part[None], use_cache=False).last_hidden_state[0] for part in parts]
    )
    found_PD = packed.run(tokens_P, lengths, [None] * len(lengths))
    torch.testing.assert_close(found_PD, expected_PD, rtol=1e-9, atol=1e-9)
    gradients = [
        torch.autograd.grad((hidden * weights_PD).sum(), model.get_input_embeddings().weight)[0]
        for hidden, model in ((found_PD, module), (expected_PD, alone))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_what_packed_attention_does_not_compute_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("softcap")
    model.set_attn_implementation("eager")
    padded = DecoderPass(BaseModel(model, 64, lambda logits: logits), Routing(), pack=True)
    assert not padded.packs
    assert "softcap" in caplog.text
    alone = make_model("softcap")
    alone.set_attn_implementation("eager")
    tokens_P = torch.arange(12)
    expected = [
        alone.get_decoder()(part[None], use_cache=False).last_hidden_state[0]
        for part in tokens_P.split([9, 3])
    ]
    torch.testing.assert_close(
        padded.run(tokens_P, [9, 3], [None, None]), torch.cat(expected), rtol=1e-9, atol=1e-9
    )


def test_without_lengths_it_is_causal_attention() -> None:
    plain, packed = make_model("full"), make_model("full")
    packed.set_attn_implementation(PACKED)
    tokens_BT = torch.arange(20).view(2, 10)
    logits = [model(tokens_BT, use_cache=False).logits for model in (plain, packed)]
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
