"""Which training backend and which embedded engine a name stands for.

Only what is chosen is imported: torch and transformers take seconds, and the fakes do without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hosted_tinker.sampling.engine import SamplingEngine
from hosted_tinker.training.backend import ReportProgress, TrainBackend
from hosted_tinker.workers.messages import WorkerSpec
from hosted_tinker.workers.sampling_lane import SamplingResults
from hosted_tinker.workers.shared_device import DeviceQueue


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A backend and an engine on one base model, and the queue of their device."""

    backend: TrainBackend
    engine: SamplingEngine
    queue: DeviceQueue


def load_backend(spec: WorkerSpec, report_progress: ReportProgress) -> TrainBackend:
    """Loads the backend that `spec.backend` names; heavy imports happen here."""
    match spec.backend:
        case "pytorch":
            from hosted_tinker.training.pytorch import PytorchBackend

            return PytorchBackend.load(spec.base_model, spec.backend_config, report_progress)
        case "fake":
            from hosted_tinker.training.fake import FakeBackend

            return FakeBackend.load(spec.backend_config)
        case _:
            raise AssertionError(f"settings let backend {spec.backend!r} through")


def load_engine(
    spec: WorkerSpec, report_progress: ReportProgress, results: SamplingResults
) -> SamplingEngine:
    """Loads the embedded engine of `spec.backend`; heavy imports happen here."""
    match spec.backend:
        case "pytorch":
            from hosted_tinker.sampling.transformers_engine import TransformersEngine

            return TransformersEngine.load(
                spec.base_model,
                spec.backend_config,
                report_progress,
                results.finish,
                results.report,
            )
        case "fake":
            from hosted_tinker.sampling.fake import FakeEngine

            return FakeEngine(spec.backend_config, results.finish, results.report)
        case _:
            raise AssertionError(f"settings let backend {spec.backend!r} through")


def load_shared(
    spec: WorkerSpec,
    report_progress: ReportProgress,
    results: SamplingResults,
    turn: Callable[[], None],
) -> SharedModel:
    """Loads both of the `pytorch` backend.

    Args:
        turn: called between the layers of a training pass; it may step the engine.
    """
    from hosted_tinker.modeling.base_model import load_base_model, restrict_visible_gpus
    from hosted_tinker.modeling.device_queue import CpuQueue, CudaQueue
    from hosted_tinker.modeling.lora import LoraModel
    from hosted_tinker.modeling.turn_points import add_turn_points
    from hosted_tinker.sampling.attention_check import prepare_base_model
    from hosted_tinker.sampling.tokenizer import load_tokenizer
    from hosted_tinker.sampling.transformers_engine import TransformersEngine
    from hosted_tinker.training.pytorch import PytorchBackend

    config = spec.backend_config
    restrict_visible_gpus(config, "shared")
    report_progress(f"loading {spec.base_model}")
    base = load_base_model(spec.base_model, config, "shared")
    prepare_base_model(base, spec.base_model)
    add_turn_points(base, turn)
    lora = LoraModel(base.module)
    backend = PytorchBackend(spec.base_model, base, lora, config, turn)
    engine = TransformersEngine(
        base, lora, load_tokenizer(spec.base_model), config, results.finish, results.report
    )
    # Now that the engine has its cache.
    backend.fit_to_memory()
    queue = CudaQueue() if base.input_device.type == "cuda" else CpuQueue()
    return SharedModel(backend, engine, queue)
