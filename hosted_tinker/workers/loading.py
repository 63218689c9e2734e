"""Which training backend and which embedded engine a name stands for.

Only what is chosen is imported: torch and transformers take seconds, and the fakes do without them.
"""

from __future__ import annotations

from hosted_tinker.sampling.engine import FinishSample, ReportToken, SamplingEngine
from hosted_tinker.training.backend import ReportProgress, TrainBackend
from hosted_tinker.workers.messages import WorkerSpec


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
    spec: WorkerSpec,
    report_progress: ReportProgress,
    finish: FinishSample,
    report: ReportToken,
) -> SamplingEngine:
    """Loads the embedded engine of `spec.backend`; heavy imports happen here."""
    match spec.backend:
        case "pytorch":
            from hosted_tinker.sampling.transformers_engine import TransformersEngine

            return TransformersEngine.load(
                spec.base_model, spec.backend_config, report_progress, finish, report
            )
        case "fake":
            from hosted_tinker.sampling.fake import FakeEngine

            return FakeEngine(spec.backend_config, finish, report)
        case _:
            raise AssertionError(f"settings let backend {spec.backend!r} through")
