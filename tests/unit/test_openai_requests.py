"""What the embedded engine takes of OpenAI's requests."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from hosted_tinker.errors import UnservableError
from hosted_tinker.openai_api.requests import (
    IGNORED,
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    parse_chat,
)

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("request_type", "params"), [(ChatRequest, ChatParams), (CompletionRequest, CompletionParams)]
)
def test_every_parameter_of_openais_client_is_known(request_type: Any, params: Any) -> None:
    known = {*request_type.model_fields, *IGNORED, *NEUTRAL, "model"}
    assert set(params.__annotations__) <= known


@pytest.mark.parametrize("tool_calls", [None, []])
def test_a_message_as_clients_dump_it_has_only_what_it_says(tool_calls: Any) -> None:
    dumped = {
        "role": "assistant",
        "content": "yes",
        "tool_calls": tool_calls,
        "function_call": None,
        "refusal": None,
    }
    (message,) = parse_chat({"model": "m", "messages": [dumped]}).messages
    assert message.to_template() == {"role": "assistant", "content": "yes"}


def test_what_is_unset_in_other_words_is_accepted() -> None:
    request = parse_chat(
        {"messages": MESSAGES, "top_logprobs": 0, "stream_options": {"include_usage": None}}
    )
    assert not request.include_usage


def test_usage_in_each_chunk_is_refused_by_name() -> None:
    with pytest.raises(UnservableError, match="continuous_usage_stats"):
        parse_chat(
            {"messages": MESSAGES, "stream_options": {"continuous_usage_stats": True}},
        )
