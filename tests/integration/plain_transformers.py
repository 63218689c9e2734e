"""What plain transformers makes of the weights that a server has, and a tiny model for chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.tiny_engine import save_model

TEMPLATE = """
{%- for message in messages %}
{%- if message.role not in ['system', 'developer', 'user', 'assistant', 'tool'] %}
{{- raise_exception('no role is called ' + message.role) }}
{%- endif %}
{{- '[' + message.role + '] ' + message.content }}
{%- for call in message.tool_calls or [] %}{{ ' ' + call.function.arguments.city }}{% endfor %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[' + (name or 'assistant') + '] ' }}{% endif %}
"""


def save_chat_model(directory: Path) -> None:
    """The tiny model with a chat template."""
    save_model(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


@dataclass
class Reference:
    """The same weights in plain transformers."""

    tokenizer: Any
    model: Any

    def render(self, messages: Any, **kwargs: Any) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": True, **kwargs}
        )
        return list(rendered["input_ids"])

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The most likely tokens."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        return out[0, len(prompt) :].tolist()

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> torch.Tensor:
        """Float32 [P - 1, V]: log-probabilities of what comes after each token but the last."""
        return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0, :-1], dim=-1)


def open_reference(model_dir: Path, dtype: torch.dtype) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    return Reference(AutoTokenizer.from_pretrained(model_dir), model)
