"""What the sampler knows of its model's text: chat template and tokenizer."""

from __future__ import annotations

from typing import cast

import jinja2
from transformers import PreTrainedTokenizerBase

from hosted_tinker.errors import UserError
from hosted_tinker.types import RenderChat, TokenizerInfo

NO_TOKENIZER = (
    "the base model comes without a tokenizer, so there is no text: sample token ids with the "
    "tinker SDK"
)


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> TokenizerInfo:
    """Raises UserError if there is none that the tokenizers library can read."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(NO_TOKENIZER)
    return TokenizerInfo(backend.to_str())


def render_chat(tokenizer: PreTrainedTokenizerBase | None, chat: RenderChat) -> list[int]:
    """Token ids of the messages in the model's chat template.

    Raises:
        UserError: there is no template, or it does not take these messages.
    """
    if tokenizer is None:
        raise UserError(NO_TOKENIZER)
    if not tokenizer.chat_template:
        raise UserError("the base model has no chat template: use /v1/completions")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages], tokenize=False, **chat.template_kwargs
        )
    except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"the model's chat template does not take the messages: {error}") from error
    return cast("list[int]", tokenizer.encode(cast(str, text), add_special_tokens=False))
