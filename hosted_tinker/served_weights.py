"""Which weights a request under `/v1` is answered from."""

from __future__ import annotations

from dataclasses import dataclass

from hosted_tinker.types import AdapterRef


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a model id stands for at the moment of a request.

    Attributes:
        model: the id that the client asked for.
        adapter: None for the base model; its directory is absolute.
        run: the training run that the adapter is of.
        step: the run's optimizer steps when it was taken; None where that is not known.
    """

    model: str
    adapter: AdapterRef | None
    run: str | None = None
    step: int | None = None
