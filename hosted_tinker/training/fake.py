"""A deterministic backend over numpy, for tests of everything around a backend.

Its model has one adapted layer: the log-probability of target t at token x is
log sigmoid(B . (A * features(x, t))), where features are cosines of a hash, A is drawn by the seed
and only B [R] is trained. A fresh adapter has B = 0. Gradients are exact, so losses fall, restored
runs continue exactly, and batches add up. Files have the names that the real backend gives them.

Shape letters: R LoRA rank, N tokens of a datum, Q cells (a position and a target).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hosted_tinker.adapter_layout import (
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    read_lora_config,
    write_configs,
)
from hosted_tinker.backend_configs import FakeConfig
from hosted_tinker.errors import HostedTinkerError, NotFoundError, UserError
from hosted_tinker.loss_specs import resolve_config
from hosted_tinker.training.lora_checks import check_lora, check_same_shape
from hosted_tinker.types import (
    AdamParams,
    BaseModelInfo,
    Datum,
    Float32Array,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepOutput,
)

Float64Array = NDArray[np.float64]

FakeSnapshot = tuple[LoraConfig, dict[str, dict[str, Float64Array]]]
"""A run's shape, and file name -> tensors."""

LAYER = "base_model.model.fake"


@dataclass(slots=True)
class FakeRun:
    """A, B, the gradient of B, and Adam's state: float64 [R] all."""

    lora: LoraConfig
    A: Float64Array
    B: Float64Array
    gradient: Float64Array
    exp_avg: Float64Array
    exp_avg_sq: Float64Array
    num_steps: int = 0

    @classmethod
    def create(cls, lora: LoraConfig) -> Self:
        A = np.random.default_rng(lora.seed).uniform(-1, 1, lora.lora_rank)
        B, gradient, exp_avg, exp_avg_sq = np.zeros((4, lora.lora_rank))
        return cls(lora, A, B, gradient, exp_avg, exp_avg_sq)


@dataclass(frozen=True, slots=True)
class FakeBackend:
    """Implements `TrainBackend`."""

    config: FakeConfig
    runs: dict[str, FakeRun] = field(default_factory=dict[str, FakeRun])
    snapshots: dict[str, FakeSnapshot] = field(default_factory=dict[str, "FakeSnapshot"])

    @classmethod
    def load(cls, config: FakeConfig) -> Self:
        time.sleep(config.load_s)
        return cls(config)

    def describe_base_model(self) -> BaseModelInfo:
        return BaseModelInfo(
            self.config.vocab_size, self.config.context_length, 0, "FakeForCausalLM", "cpu"
        )

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        self._check_is_new(model_id)
        check_lora(lora, self.config.max_lora_rank)
        self.runs[model_id] = FakeRun.create(lora)

    def unload_model(self, model_id: str) -> None:
        self.runs.pop(model_id, None)

    def forward_backward(
        self, operations: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardOutput | HostedTinkerError]:
        time.sleep(self.config.forward_backward_s)
        results: list[ForwardBackwardOutput | HostedTinkerError] = []
        for operation in operations:
            try:
                results.append(self._compute(operation))
            except UserError as error:
                results.append(error)
        return results

    def _compute(self, operation: ForwardBackward) -> ForwardBackwardOutput:
        run = self._find_run(operation.model_id)
        config = resolve_config(operation.loss_fn, operation.loss_fn_config)
        logprobs: list[Float32Array] = []
        loss_sum, gradient = 0.0, np.zeros_like(run.B)
        for datum in operation.data:
            features_QR = run.A * compute_features(datum, run.lora.lora_rank)
            logits_Q = features_QR @ run.B
            logprobs_Q = -np.logaddexp(0.0, -logits_Q)
            inputs = {
                name: values.reshape(-1).astype(np.float64)
                for name, values in datum.loss_fn_inputs.items()
            }
            loss, slope_Q = compute_loss(operation.loss_fn, logprobs_Q, inputs, config)
            loss_sum += loss
            gradient += (slope_Q * -np.expm1(logprobs_Q)) @ features_QR
            shape = datum.loss_fn_inputs["target_tokens"].shape
            logprobs.append(logprobs_Q.astype(np.float32).reshape(shape))
        if not np.isfinite(loss_sum):
            raise UserError(f"loss:sum is {loss_sum}: nothing was accumulated")
        if not operation.forward_only:
            run.gradient += gradient
        return ForwardBackwardOutput(logprobs, {"loss:sum": float(loss_sum)})

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepOutput:
        run = self._find_run(model_id)
        norm = float(np.linalg.norm(run.gradient))
        gradient = run.gradient * (
            adam.grad_clip_norm / norm if 0 < adam.grad_clip_norm < norm else 1.0
        )
        run.num_steps += 1
        run.exp_avg += (1 - adam.beta1) * (gradient - run.exp_avg)
        run.exp_avg_sq += (1 - adam.beta2) * (gradient**2 - run.exp_avg_sq)
        mean = run.exp_avg / (1 - adam.beta1**run.num_steps)
        deviation = np.sqrt(run.exp_avg_sq / (1 - adam.beta2**run.num_steps))
        run.B *= 1 - adam.learning_rate * adam.weight_decay
        run.B -= adam.learning_rate * mean / (deviation + adam.eps)
        self.clear_gradients(model_id)
        return OptimStepOutput({"grad_norm": norm})

    def clear_gradients(self, model_id: str) -> None:
        self._find_run(model_id).gradient[:] = 0

    def capture_state(self, model_id: str, snapshot_id: str, *, with_optimizer: bool) -> None:
        run = self._find_run(model_id)
        files = {
            WEIGHTS_FILE: {
                f"{LAYER}.lora_A.weight": run.A[:, None].copy(),
                f"{LAYER}.lora_B.weight": run.B[None].copy(),
            },
        }
        if with_optimizer:
            files[OPTIMIZER_FILE] = {
                "exp_avg": run.exp_avg.copy(),
                "exp_avg_sq": run.exp_avg_sq.copy(),
                "step": np.array(run.num_steps, dtype=np.float64),
            }
        self.snapshots[snapshot_id] = (run.lora, files)

    def persist_state(self, snapshot_id: str, directory: Path) -> None:
        if snapshot_id not in self.snapshots:
            raise NotFoundError(f"no captured state {snapshot_id!r}")
        lora, files = self.snapshots.pop(snapshot_id)
        write_configs(directory, lora, "fake", {LAYER.rsplit(".", 1)[-1]})
        for name, tensors in files.items():
            save_file(tensors, directory / name)

    def load_state(
        self, model_id: str, directory: Path, *, with_optimizer: bool, create: bool
    ) -> None:
        run = FakeRun.create(read_lora_config(directory))
        if create:
            self._check_is_new(model_id)
        else:
            check_same_shape(run.lora, self._find_run(model_id).lora)
        weights = load_file(directory / WEIGHTS_FILE)
        run.A = weights[f"{LAYER}.lora_A.weight"][:, 0].copy()
        run.B = weights[f"{LAYER}.lora_B.weight"][0].copy()
        if with_optimizer:
            if not (directory / OPTIMIZER_FILE).exists():
                raise UserError("the checkpoint has no optimizer state; load it without")
            state = load_file(directory / OPTIMIZER_FILE)
            run.exp_avg, run.exp_avg_sq = state["exp_avg"].copy(), state["exp_avg_sq"].copy()
            run.num_steps = int(state["step"])
        self.runs[model_id] = run

    def _check_is_new(self, model_id: str) -> None:
        if model_id in self.runs:
            raise UserError(f"run {model_id!r} exists already")

    def _find_run(self, model_id: str) -> FakeRun:
        if model_id not in self.runs:
            raise NotFoundError(f"no run {model_id!r} is loaded")
        return self.runs[model_id]


def compute_features(datum: Datum, lora_rank: int) -> Float64Array:
    """[Q, R] in -1..1, by each cell's token and target."""
    targets = datum.loss_fn_inputs["target_tokens"]
    tokens_Q = np.repeat(datum.tokens, targets[0].size)
    return np.cos(
        np.outer(
            tokens_Q * 12.9898 + targets.reshape(-1) * 78.233 + 1.0, np.arange(1, lora_rank + 1)
        )
    )


def compute_loss(
    loss_fn: str,
    logprobs_Q: Float64Array,
    inputs: Mapping[str, Float64Array],
    config: Mapping[str, float],
) -> tuple[float, Float64Array]:
    """The loss of `training.losses` of this name, and its derivative by each log-probability."""
    if loss_fn == "cross_entropy":
        return -float(inputs["weights"] @ logprobs_Q), -inputs["weights"]
    advantages_Q = inputs["advantages"]
    distance_Q = logprobs_Q - inputs["logprobs"]
    if loss_fn == "dro":
        beta = config["beta"]
        loss = -(logprobs_Q @ advantages_Q) + 0.5 * beta * (distance_Q @ distance_Q)
        return float(loss), -advantages_Q + beta * distance_Q
    ratio_Q = np.exp(np.where(advantages_Q == 0, 0.0, distance_Q))
    if loss_fn == "importance_sampling":
        return -float(ratio_Q @ advantages_Q), -ratio_Q * advantages_Q
    clipped_Q = ratio_Q.clip(config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        slope_Q = -clipped_Q * advantages_Q
        return float(slope_Q @ logprobs_Q), slope_Q
    lesser_Q = np.minimum(ratio_Q * advantages_Q, clipped_Q * advantages_Q)
    slope_Q = np.where(lesser_Q == ratio_Q * advantages_Q, -lesser_Q, 0.0)
    return -float(lesser_Q.sum()), slope_Q
