"""The `pytorch` backend: a Hugging Face model in one process, LoRA adapters of many runs on it.

The gradients of a pass are added to the runs' only once all of them are there, so that a call that
fails leaves the runs as they were.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hosted_tinker.adapter_layout import OPTIMIZER_FILE, read_lora_config
from hosted_tinker.backend_configs import PytorchConfig
from hosted_tinker.errors import (
    HostedTinkerError,
    NotFoundError,
    SettingsError,
    UserError,
    WorkerFailedError,
)
from hosted_tinker.modeling.adapter_files import (
    load_adapter_weights,
    save_adapter,
)
from hosted_tinker.modeling.base_model import BaseModel, load_base_model, restrict_visible_gpus
from hosted_tinker.modeling.decoder_pass import DecoderPass
from hosted_tinker.modeling.determinism import deterministic_kernels
from hosted_tinker.modeling.lora import LoraModel, clone_to_cpu
from hosted_tinker.modeling.recomputation import enable_gradient_checkpointing
from hosted_tinker.modeling.turn_points import TurnPoint, never_turn
from hosted_tinker.training.backend import ReportProgress
from hosted_tinker.training.joint_pass import JointPass
from hosted_tinker.training.lora_checks import check_lora, check_same_shape
from hosted_tinker.training.optim import AdamOptimizer, check_optimizer_state
from hosted_tinker.training.token_probe import probe_token_budget
from hosted_tinker.types import (
    AdamParams,
    BaseModelInfo,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStepOutput,
)

logger = logging.getLogger(__name__)

MICRO_BATCH_TOKENS_ON_CPU = 1024
MICRO_BATCH_TOKENS_ON_GPU = 8192
"""More compute no faster, and take more memory."""
PROBE_RANK = 32
"""Of the adapter with which it is measured what memory a token takes."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run's state. Its parameters, with their gradients, are those of the optimizer."""

    lora: LoraConfig
    optimizer: AdamOptimizer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A captured state, on the CPU."""

    lora: LoraConfig
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] | None


class PytorchBackend:
    """Implements `TrainBackend`."""

    def __init__(
        self,
        base_model: str,
        base: BaseModel,
        lora: LoraModel,
        config: PytorchConfig,
        turn: TurnPoint = never_turn,
    ) -> None:
        """`lora` are the layers of `base`; `turn` is called between the layers of a pass."""
        self._base_model = base_model
        self._base = base
        self._config = config
        self._lora = lora
        decoder = DecoderPass(base, lora.routing, pack=config.attn_implementation == "auto")
        self._passes = JointPass(
            base,
            decoder,
            lora,
            logits_chunk_tokens=config.logits_chunk_tokens,
            one_by_one=config.batch_invariant,
            turn=turn,
        )
        on_gpu = base.input_device.type == "cuda"
        if config.batch_invariant and lora.has_experts and on_gpu:
            raise SettingsError(
                "batch_invariant is true, but how tokens are counted for the experts of this model has "
                "no deterministic kernel on a GPU; leave it false"
            )
        most = MICRO_BATCH_TOKENS_ON_GPU if on_gpu else MICRO_BATCH_TOKENS_ON_CPU
        self._max_tokens = config.micro_batch_tokens or most
        self._runs: dict[str, Run] = {}
        self._snapshots: dict[str, Snapshot] = {}
        every = on_gpu if config.gradient_checkpointing is None else config.gradient_checkpointing
        if every:
            enable_gradient_checkpointing(base, int(every))

    @classmethod
    def load(cls, base_model: str, config: PytorchConfig, report_progress: ReportProgress) -> Self:
        """Raises SettingsError if the model can't be loaded or trained."""
        restrict_visible_gpus(config, "trainer")
        report_progress(f"loading {base_model}")
        base = load_base_model(base_model, config, "trainer")
        backend = cls(base_model, base, LoraModel(base.module), config)
        backend.fit_to_memory()
        return backend

    def fit_to_memory(self) -> None:
        """Makes micro-batches smaller where the memory that is free now asks for it.

        Called once all else that is to stay in memory is there, and before the first run.
        """
        if self._config.micro_batch_tokens is None and not self._config.batch_invariant:
            rank = min(PROBE_RANK, self._config.max_lora_rank)
            budget = probe_token_budget(self._base, self._lora, self._passes, rank)
            self._max_tokens = min(self._max_tokens, budget or self._max_tokens)

    def describe_base_model(self) -> BaseModelInfo:
        return self._base.describe()

    def create_model(self, model_id: str, lora: LoraConfig) -> None:
        self._check_is_new(model_id)
        check_lora(lora, self._config.max_lora_rank)
        if lora.train_mlp and self._lora.has_experts:
            raise UserError(
                f"train_mlp is true, but the experts of {self._base_model!r} can't be adapted by "
                "this server; create the run with train_mlp=False"
            )
        self._lora.add_fresh_adapter(model_id, lora)
        self._add_run(model_id, lora)

    def unload_model(self, model_id: str) -> None:
        self._runs.pop(model_id, None)
        self._lora.remove_adapter(model_id)

    def forward_backward(
        self, operations: Sequence[ForwardBackward]
    ) -> list[ForwardBackwardOutput | HostedTinkerError]:
        """Runs them together. If that fails, each runs alone, so that one fails for itself only.

        In batch-invariant mode each runs alone in any case: a gradient is summed in one order then.
        """
        results: dict[int, ForwardBackwardOutput | HostedTinkerError] = {}
        known = [i for i, one in enumerate(operations) if one.model_id in self._runs]
        for forward_only in (False, True):
            together = [i for i in known if operations[i].forward_only == forward_only]
            if not together:
                continue
            for group in [[i] for i in together] if self._config.batch_invariant else [together]:
                outputs = self._try_together([operations[i] for i in group])
                results |= dict(zip(group, outputs, strict=True))
        return [
            results[i] if i in results else NotFoundError(f"no run {one.model_id!r} is loaded")
            for i, one in enumerate(operations)
        ]

    def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepOutput:
        norm = self._find_run(model_id).optimizer.step(adam)
        return OptimStepOutput({"grad_norm": norm})

    def clear_gradients(self, model_id: str) -> None:
        self._find_run(model_id).optimizer.clear_gradients()

    def capture_state(self, model_id: str, snapshot_id: str, *, with_optimizer: bool) -> None:
        run = self._find_run(model_id)
        self._snapshots[snapshot_id] = Snapshot(
            lora=run.lora,
            adapter=clone_to_cpu(run.optimizer.parameters),
            optimizer=clone_to_cpu(run.optimizer.state_dict()) if with_optimizer else None,
        )

    def persist_state(self, snapshot_id: str, directory: Path) -> None:
        snapshot = self._snapshots.pop(snapshot_id, None)
        if snapshot is None:
            raise NotFoundError(f"no captured state {snapshot_id!r}")
        save_adapter(directory, snapshot.adapter, snapshot.lora, self._base_model)
        if snapshot.optimizer is not None:
            save_file(dict(snapshot.optimizer), directory / OPTIMIZER_FILE)
        for path in (*directory.iterdir(), directory):
            sync_to_disk(path)

    def load_state(
        self, model_id: str, directory: Path, *, with_optimizer: bool, create: bool
    ) -> None:
        lora = read_lora_config(directory)
        if create:
            self._check_is_new(model_id)
        else:
            check_same_shape(lora, self._find_run(model_id).lora)
        check_lora(lora, self._config.max_lora_rank)
        adapter = load_adapter_weights(directory)
        shapes = self._check_adapter(adapter, lora)
        optimizer_state = load_optimizer_state(directory, shapes) if with_optimizer else None
        self._lora.set_adapter(model_id, adapter)
        self._add_run(model_id, lora)
        if optimizer_state is not None:
            self._runs[model_id].optimizer.load_state_dict(optimizer_state)

    def _check_is_new(self, model_id: str) -> None:
        if model_id in self._runs:
            raise UserError(f"run {model_id!r} exists already")

    def _find_run(self, model_id: str) -> Run:
        if model_id not in self._runs:
            raise NotFoundError(f"no run {model_id!r} is loaded")
        return self._runs[model_id]

    def _add_run(self, model_id: str, lora: LoraConfig) -> None:
        self._runs[model_id] = Run(lora, AdamOptimizer(self._lora.named_parameters(model_id)))

    def _try_together(
        self, operations: Sequence[ForwardBackward]
    ) -> Sequence[ForwardBackwardOutput | HostedTinkerError]:
        try:
            return self._run_together(operations)
        except UserError as error:
            if len(operations) == 1:
                return [error]
        except torch.AcceleratorError as error:
            logger.exception("the device is lost to this process, which ends")
            raise SystemExit(1) from error
        except RuntimeError as error:
            # Here too: what has been added to other runs' gradients must not fail with it.
            if len(operations) == 1:
                logger.exception("forward_backward failed model_id=%s", operations[0].model_id)
                return [WorkerFailedError(f"{type(error).__name__}: {error}")]
        return [result for one in operations for result in self._try_together([one])]

    def _run_together(self, operations: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput]:
        """Touches the runs' gradients only once all of them are there. Raises UserError."""
        parameters = {
            one.model_id: list(self._runs[one.model_id].optimizer.parameters.values())
            for one in operations
        }
        longest = max(len(datum.tokens) for one in operations for datum in one.data)
        while True:
            # What follows comes after the block, where the failed pass's tensors are free again.
            invariant = self._config.batch_invariant
            with suppress(torch.OutOfMemoryError), deterministic_kernels(invariant):
                outputs, gradients = self._passes.run(operations, parameters, self._max_tokens)
                break
            # Passes of one sequence each can't be smaller.
            if invariant or self._max_tokens <= longest:
                raise UserError(
                    f"out of memory on {sum(one.num_tokens for one in operations)} tokens, the "
                    f"longest sequence {longest}; nothing was accumulated. Send shorter sequences"
                )
            self._max_tokens = max(longest, self._max_tokens // 2)
            torch.cuda.empty_cache()
            logger.warning("out of memory; micro-batches of %d tokens from now", self._max_tokens)
        for run, own in gradients.items():
            accumulate(parameters[run], own)
        return outputs

    def _check_adapter(
        self, adapter: Mapping[str, Tensor], lora: LoraConfig
    ) -> dict[str, torch.Size]:
        """The adapter's shapes. Raises UserError if it has other tensors than `lora` asks for."""
        wanted: dict[str, torch.Size] = {}
        for name in self._lora.select_layers(lora):
            linear = self._lora.layers[name].base
            wanted[f"{name}.lora_A.weight"] = torch.Size((lora.lora_rank, linear.in_features))
            wanted[f"{name}.lora_B.weight"] = torch.Size((linear.out_features, lora.lora_rank))
        for key in sorted(wanted.keys() | adapter.keys()):
            if key not in adapter:
                raise UserError(f"checkpoint lacks {key!r}, which a run of its shape trains")
            if key not in wanted:
                raise UserError(
                    f"checkpoint has {key!r}, which {self._base_model!r} does not train"
                )
            if adapter[key].shape != wanted[key]:
                raise UserError(
                    f"checkpoint has {key!r} of shape {list(adapter[key].shape)}; "
                    f"{self._base_model!r} needs {list(wanted[key])}"
                )
        return wanted


def accumulate(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    """Adds to the parameters' gradients, without allocating: it can't fail halfway."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)


def load_optimizer_state(directory: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Raises UserError if the checkpoint has none, or one of another adapter."""
    path = directory / OPTIMIZER_FILE
    if not path.exists():
        raise UserError(
            "the checkpoint has no optimizer state; load it without, or save it with save_state"
        )
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"optimizer state of the checkpoint cannot be read: {error}") from error
    check_optimizer_state(state, shapes)
    return state


def sync_to_disk(path: Path) -> None:
    """Makes a file, or a directory's list of files, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
