"""What the embedded engine takes of OpenAI's requests, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hosted_tinker.errors import UnservableError, UserError
from hosted_tinker.types import SamplingParams

MAX_CHOICES = 1024
MAX_LOGPROBS = 1000

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Parameters that would change the answer -> values that do not."""
IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
    "verbosity",
}
"""Parameters that do not change what is generated."""


RESERVED_TEMPLATE_KWARGS = {
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Arguments of transformers' `apply_chat_template` that are not variables of a template."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common. Defaults are OpenAI's."""

    model_config = ConfigDict(extra="allow")

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises UserError for what the engine can't combine."""
        stops = (*self.stop_strings, *(self.stop_token_ids or ()))
        if self.ignore_eos and stops:
            raise UnservableError(
                "ignore_eos together with stop or stop_token_ids needs a vLLM sampler"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k in (None, 0) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=() if self.ignore_eos else stops or None,
            seed=None if self.seed is None else self.seed % 2**64,
        )


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int | None, Field(ge=0)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    echo: bool | None = False
    add_special_tokens: bool = True

    @property
    def wants_tokens(self) -> bool:
        """Whether the answer describes each token, beside the text."""
        return bool(self.return_token_ids) or self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Raises UserError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise UserError("prompt is empty; accepted: text, token ids, or a list of either")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class ContentPart(BaseModel):
    type: Literal["text", "input_text"]
    text: str


class Message(BaseModel):
    """Other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def to_template(self) -> dict[str, Any]:
        """Templates of text models take strings, so parts become lines, as with vLLM; and they
        take arguments of tool calls as objects, where OpenAI has JSON in a string."""
        fields = self.model_dump(exclude_unset=True, exclude_none=True)
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        # Templates ask whether there are tool calls by the field alone.
        fields.pop("tool_calls", None)
        if self.tool_calls:
            fields["tool_calls"] = [parse_arguments(call) for call in self.tool_calls]
        return {**fields, "content": content or ""}


def parse_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object; what is not the JSON of one stays as it is."""
    function = call.get("function")
    if not isinstance(function, dict):
        return dict(call)
    fields = cast("dict[str, Any]", function)
    try:
        arguments: object = orjson.loads(fields.get("arguments") or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**fields, "arguments": arguments}}


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_tokens(self) -> bool:
        """Whether the answer describes each token, beside the text."""
        return bool(self.return_token_ids) or bool(self.logprobs)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            **(self.chat_template_kwargs or {}),
        }


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises UserError, or UnservableError for what only vLLM has."""
    request = _parse(CompletionRequest, body)
    if request.echo and request.stream:
        raise UnservableError("echo together with stream needs a vLLM sampler")
    if request.max_tokens == 0 and not request.echo:
        raise UserError("max_tokens = 0; accepted: at least 1, or 0 together with echo")
    return request


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises UserError, or UnservableError for what only vLLM has."""
    request = _parse(ChatRequest, body)
    if request.top_logprobs and not request.logprobs:
        raise UserError(f"top_logprobs = {request.top_logprobs} needs logprobs = true")
    for name in sorted(RESERVED_TEMPLATE_KWARGS & set(request.chat_template_kwargs or ())):
        raise UserError(f"chat_template_kwargs has {name!r}, which is not the template's")
    return request


Request = TypeVar("Request", bound=GenerationRequest)


def _parse(model: type[Request], body: Mapping[str, Any]) -> Request:
    fields = {name: value for name, value in body.items() if name != "model"}
    try:
        request = model.model_validate(fields)
    except ValidationError as error:
        raise UserError("; ".join(describe(item) for item in error.errors()[:5])) from error
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise UnservableError("stream_options.continuous_usage_stats needs a vLLM sampler")
    for name, value in (request.model_extra or {}).items():
        if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL:
            raise UnservableError(f"{name} = {value!r} needs a vLLM sampler; this one is embedded")
        raise UserError(
            f"{name} is not a known parameter; accepted: {', '.join(list_known(model))}"
        )
    return request


def list_known(model: type[GenerationRequest]) -> list[str]:
    return sorted({*model.model_fields, *IGNORED, "model"})


def describe(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    return f"{place} = {item['input']!r}: {item['msg']}"[:300]
