"""JSON request bodies, under the SDK's names.

Unknown fields are ignored and every optional field may be missing or null, because releases of the
SDK differ in what they send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, Field, model_validator

from hosted_tinker.errors import UserError
from hosted_tinker.types import (
    AdamParams,
    AdapterRef,
    Int64Array,
    Sample,
    SamplingParams,
)
from hosted_tinker.wire.tensors import TensorJson, concatenate_tokens, to_array

JsonObject = dict[str, Any]

MAX_NUM_SAMPLES = 4096


class Body(BaseModel):
    """A field that is null counts as one that is missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cast("Mapping[str, Any]", values)
        return {name: value for name, value in fields.items() if value is not None}


class CreateSessionRequest(Body):
    tags: list[str] | None = None
    user_metadata: JsonObject = {}
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(Body):
    session_id: str


class FinishReason(Body):
    type: str = "success"


class FinishSessionRequest(Body):
    reason: FinishReason = FinishReason()
    detail: str | None = None


class LoraConfigJson(Body):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigJson(Body):
    type: str = "adamw"


class CreateModelRequest(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: JsonObject = {}
    lora_config: LoraConfigJson | None = None
    optimizer_config: OptimizerConfigJson | None = None


class ModelIdRequest(Body):
    model_id: str


DEFAULT_ADAM = AdamParams()


class AdamParamsJson(Body):
    learning_rate: float = DEFAULT_ADAM.learning_rate
    beta1: float = DEFAULT_ADAM.beta1
    beta2: float = DEFAULT_ADAM.beta2
    eps: float = DEFAULT_ADAM.eps
    weight_decay: float | None = None
    grad_clip_norm: float | None = None

    def to_adam_params(self) -> AdamParams:
        """Raises UserError, naming the parameter, for a value outside its range."""
        params = AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay or 0.0,
            grad_clip_norm=self.grad_clip_norm or 0.0,
        )
        if not (np.isfinite(params.eps) and params.eps > 0):
            raise UserError(f"adam_params.eps = {params.eps}; accepted: a finite number > 0")
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            value = getattr(params, name)
            if not (np.isfinite(value) and value >= 0):
                raise UserError(f"adam_params.{name} = {value}; accepted: a finite number >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(params, name)
            if not 0 <= value < 1:
                raise UserError(f"adam_params.{name} = {value}; accepted: 0 <= {name} < 1")
        return params


class OptimStepRequest(Body):
    model_id: str
    seq_id: int | None = None
    adam_params: AdamParamsJson | None = None
    optimizer_params: JsonObject | None = None


class SaveWeightsRequest(Body):
    """`save_weights`, and `save_weights_for_sampler` in its named and ephemeral forms."""

    model_id: str
    seq_id: int | None = None
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool | None = None
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] | None = None


class LoadWeightsRequest(Body):
    """Onto an existing model (`model_id`), or creating one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool | None = None
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: JsonObject = {}
    optimizer_config: OptimizerConfigJson | None = None


class WeightsInfoRequest(Body):
    tinker_path: str


class TtlRequest(Body):
    ttl_seconds: int | None = None


class CreateSamplingSessionRequest(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class RetrieveFutureRequest(Body):
    request_id: str


class ChunkJson(Body):
    """Old releases send no `type`; a chunk of text is the one that has tokens."""

    type: str | None = None
    tokens: list[int] | None = None


class ModelInputJson(Body):
    chunks: list[ChunkJson]

    def to_tokens(self) -> Int64Array:
        """int64 [P]. Raises UserError for chunks that are not text."""
        for position, chunk in enumerate(self.chunks):
            if chunk.tokens is None:
                raise UserError(
                    f"prompt.chunks[{position}] is of type {chunk.type!r}; this server accepts "
                    "encoded_text only"
                )
        return concatenate_tokens(
            [
                to_array(chunk.tokens or [], "int64", f"prompt.chunks[{position}].tokens")
                for position, chunk in enumerate(self.chunks)
            ]
        )


class SamplingParamsJson(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def to_sampling_params(self) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=-1 if self.top_k is None else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=None if stop is None else tuple(stop),  # pyright: ignore[reportArgumentType]
            seed=self.seed,
        )


class SampleRequest(Body):
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: Annotated[int, Field(ge=1, le=MAX_NUM_SAMPLES)] = 1
    prompt: ModelInputJson
    sampling_params: SamplingParamsJson = SamplingParamsJson()
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    target_prompt_logprobs: TensorJson | None = None
    prompt_alt_tokens_k: int | None = None

    def to_operation(self, request_id: str, adapter: AdapterRef | None) -> Sample:
        """Raises UserError for chunks or targets that can't be read."""
        targets = self.target_prompt_logprobs
        return Sample(
            request_id=request_id,
            adapter=adapter,
            prompt=self.prompt.to_tokens(),
            params=self.sampling_params.to_sampling_params(),
            num_samples=self.num_samples,
            prompt_logprobs=bool(self.prompt_logprobs),
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
            topk_prompt_logprobs=self.topk_prompt_logprobs or 0,
            target_prompt_logprobs=targets
            and targets.to_numpy("target_prompt_logprobs", fill=-1).astype(np.int64),
            prompt_alt_tokens_k=self.prompt_alt_tokens_k or 0,
            topk_sample_logprobs=self.topk_sample_logprobs or 0,
            target_csr=targets and targets.csr_pattern,
        )
