"""The values that travel through the server: operations and their outputs.

Frozen dataclasses over numpy. `wire` builds them from bytes, the scheduler queues them, `workers`
carries them to the processes that own the model, and `training` and `sampling` consume them. There
is one form of each: nothing between the wire and the tensors converts them again.

Shape letters: N tokens of a datum, K targets per position, P prompt tokens, S sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
LossFnInput = Int64Array | Float32Array
LossFnConfig = Mapping[str, float | str]

LORA_ALPHA = 32
"""LoRA's alpha of every adapter; the scale is `LORA_ALPHA / lora_rank`. Tinker's own choice:
https://thinkingmachines.ai/blog/lora/ (alpha = 32, so that the best learning rate hardly depends
on the rank)."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence.

    Attributes:
        tokens: int64 [N], the model's input. Position i predicts the target at i.
        loss_fn_inputs: name -> int64 or float32, [N] or [N, K]. Sparse wire tensors arrive dense.
    """

    tokens: Int64Array
    loss_fn_inputs: Mapping[str, LossFnInput]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The shape of an adapter. `seed` decides the initial A matrices; B starts at zero."""

    lora_rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Parameters of one AdamW step. Defaults are those of the SDK's `AdamParams`.

    `weight_decay` is decoupled. `grad_clip_norm` bounds the global gradient norm, 0 switches it
    off.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


# --- operations of a training backend, run one at a time per run in seq_id order ---


@dataclass(frozen=True, slots=True)
class CreateModel:
    """Adds a run with a fresh adapter, an exact no-op until its first optimizer step."""

    model_id: str
    lora: LoraConfig


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Frees a run's adapter, gradients and optimizer state."""

    model_id: str


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Computes a loss and, unless `forward_only`, adds its gradient to the run's."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: LossFnConfig = field(default_factory=dict[str, float | str])
    forward_only: bool = False

    @property
    def num_tokens(self) -> int:
        """Input tokens of all data."""
        return sum(len(datum.tokens) for datum in self.data)


@dataclass(frozen=True, slots=True)
class JointForwardBackward:
    """Requests that are computed in shared passes, in the order in which they take effect."""

    operations: Sequence[ForwardBackward]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Applies the accumulated gradient with AdamW and clears it.

    Attributes:
        unless_pass_failed: sent before the pass before it had ended. If that failed for this run, the
            gradient misses a part: it is dropped, and no step taken.
    """

    model_id: str
    adam: AdamParams
    unless_pass_failed: bool = False


@dataclass(frozen=True, slots=True)
class ClearGradients:
    """Drops the accumulated gradient without a step."""

    model_id: str


@dataclass(frozen=True, slots=True)
class CaptureState:
    """Copies a run's state to host memory, under `snapshot_id`, for `PersistState` to write."""

    model_id: str
    snapshot_id: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True)
class PersistState:
    """Writes a captured state into `directory`, which exists and is empty, and forgets it.

    Runs beside the device's work, in a thread of its own.
    """

    snapshot_id: str
    directory: Path


@dataclass(frozen=True, slots=True)
class LoadState:
    """Sets a run's adapter, and its optimizer if asked, from a checkpoint's directory.

    With `create` the run is new and takes its LoRA shape from the checkpoint; without, it exists
    and its shape must match. Accumulated gradients are dropped.
    """

    model_id: str
    directory: Path
    with_optimizer: bool
    create: bool


TrainingOperation = (
    CreateModel
    | UnloadModel
    | JointForwardBackward
    | OptimStep
    | ClearGradients
    | CaptureState
    | PersistState
    | LoadState
)


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Log-probabilities of the targets, in the order and shape of the data, and metrics.

    Attributes:
        logprobs: one float32 array per datum, in nats, of the shape of its `target_tokens`.
        metrics: `name:reduction` -> value; always has `loss:sum`.
    """

    logprobs: Sequence[Float32Array]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepOutput:
    """Metrics of an optimizer step, such as the gradient's norm before clipping."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """What a backend knows of the base model once it is loaded.

    Attributes:
        context_length: the most tokens of one sequence, prompt and completion together.
        num_parameters: of the base model, adapters not counted.
        device: where it lives, for people to read.
    """

    vocab_size: int
    context_length: int
    num_parameters: int
    architecture: str
    device: str


# --- sampling ---


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Adapter weights that an engine can load.

    `name` is `{model_id}@{version}` and never stands for other weights; `directory` holds them in
    PEFT's layout.
    """

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens.

    Attributes:
        max_tokens: None samples up to the end of the context.
        temperature: 0 takes the most likely token.
        top_k: -1 switches it off.
        stop: None stops at the end-of-sequence token; an empty tuple stops at nothing; strings or
            token ids stop there and at the end-of-sequence token. What stops stays in the tokens.
        seed: None draws one.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: tuple[str | int, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class CsrPattern:
    """Which cells a sparse matrix lists: int64 [rows + 1] and int64 [cells]. The wire's layout."""

    crow_indices: Int64Array
    col_indices: Int64Array


@dataclass(frozen=True, slots=True)
class Sample:
    """Draws `num_samples` completions of one prompt, and scores the prompt where asked.

    Attributes:
        adapter: None samples the base model.
        prompt: int64 [P], P >= 1.
        prompt_logprobs: score every prompt token under the model.
        prompt_logprobs_last_n: score only that many tokens at the prompt's end.
        topk_prompt_logprobs: the K most likely tokens at every prompt position, 0 for none.
        target_prompt_logprobs: int64 [P - 1, K] token ids to score; row i is scored at prompt
            position i + 1; -1 is not scored.
        prompt_alt_tokens_k: draw that many tokens at every prompt position, 0 for none.
        topk_sample_logprobs: the K most likely tokens at every sampled position, 0 for none.
        target_csr: set where the targets came sparse, for the answer to have the same layout.
        stream: report tokens as they are drawn.
    """

    request_id: str
    adapter: AdapterRef | None
    prompt: Int64Array
    params: SamplingParams
    num_samples: int = 1
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    target_prompt_logprobs: Int64Array | None = None
    prompt_alt_tokens_k: int = 0
    topk_sample_logprobs: int = 0
    target_csr: CsrPattern | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token of a running sample.

    Attributes:
        index: of its sequence in the request.
        topk: the most likely tokens in its place and their log-probabilities, best first.
        stop_reason: set if the sequence ends with it.
    """

    index: int
    token: int
    logprob: float
    topk: tuple[tuple[int, float], ...] = ()
    stop_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True, slots=True)
class DescribeTokenizer:
    """Asks the sampler for its model's `TokenizerInfo`."""


@dataclass(frozen=True, slots=True)
class RenderChat:
    """Turns messages into the token ids of a prompt by the model's chat template.

    Attributes:
        messages: role, content and what else the template reads.
        template_kwargs: variables of the template, `add_generation_prompt` among them.
    """

    messages: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What it takes to turn tokens into text elsewhere.

    Attributes:
        tokenizer_json: as the tokenizers library reads it.
    """

    tokenizer_json: str


@dataclass(frozen=True, slots=True)
class CancelSample:
    """Drops a request, waiting or running. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TopkLogprobs:
    """The most likely tokens of each position, best first.

    Attributes:
        token_ids: int32 [length, K].
        logprobs: float32 [length, K]. A position without a value holds token 0 at -99999.0.
    """

    token_ids: NDArray[np.int32]
    logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion: int32 [S] tokens and the float32 [S] log-probability of each."""

    tokens: NDArray[np.int32]
    logprobs: Float32Array
    stop_reason: Literal["stop", "length"]
    topk_logprobs: TopkLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Completions in order, and what was asked of the prompt.

    Attributes:
        prompt_logprobs: float32 [P], NaN where not computed; the first always is.
        topk_prompt_logprobs: length P, the first position without a value.
        target_prompt_logprobs: float32 [P - 1, K], 0 where the target was -1.
        prompt_alt_tokens: int64 [P - 1, k] tokens and float32 [P - 1, k] log-probabilities.
        target_csr: the request's, for the wire.
        prompt_cache_hit_tokens: how many prompt tokens were not computed again for it.
    """

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Float32Array | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: Float32Array | None = None
    prompt_alt_tokens: tuple[Int64Array, Float32Array] | None = None
    target_csr: CsrPattern | None = None
    prompt_cache_hit_tokens: int = 0


EMPTY_TOPK_LOGPROB = -99999.0
"""Marks an empty cell of `TopkLogprobs`; the SDK drops it (tinker/lib response conversion)."""


# --- results of operations that answer with names ---


@dataclass(frozen=True, slots=True)
class NamedResult:
    """The fields of a JSON result: `path`, `model_id` or `sampling_session_id`."""

    fields: Mapping[str, str]


FutureResult = ForwardBackwardOutput | OptimStepOutput | SampleOutput | NamedResult
