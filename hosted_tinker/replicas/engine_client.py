"""What a replica needs of the engine behind it. `vllm` implements it; another engine would be another file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from hosted_tinker.errors import SamplerDownError, UserError


class ReplicaGoneError(SamplerDownError):
    """The engine's process died, or can't be reached, while it had the request."""


class AdapterLostError(UserError):
    """The engine does not know an adapter that it was given: it has been started anew."""


@dataclass(frozen=True, slots=True)
class EngineModels:
    """What an engine serves.

    Attributes:
        base_model: the name of the base model there.
        base_model_source: where the engine loaded it from.
        max_model_len: the most tokens of one sequence, prompt and completion together.
        adapters: name -> directory, as the engine sees it.
    """

    base_model: str
    base_model_source: str
    max_model_len: int
    adapters: Mapping[str, Path]


class EngineClient(Protocol):
    """The HTTP API of one engine."""

    @property
    def url(self) -> str: ...

    async def is_healthy(self) -> bool: ...

    async def fetch_models(self) -> EngineModels:
        """Raises ReplicaGoneError."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Raises UnservableError if the engine refuses it, ReplicaGoneError if it died."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """An adapter that is not loaded is fine. Raises ReplicaGoneError."""
        ...

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of `/v1/completions`.

        Raises:
            UserError: the engine refuses the request.
            AdapterLostError: it does not know the model.
            ReplicaGoneError: it died.
            WorkerFailedError: it failed, and lives.
        """
        ...

    def open(
        self, path: str, payload: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Posts JSON to a path and gives the answer as it comes. Raises aiohttp's errors."""
        ...
