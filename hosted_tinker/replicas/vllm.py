"""All that is particular to vLLM's HTTP API (seen with 0.32)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson

from hosted_tinker.errors import SettingsError, UnservableError, UserError, WorkerFailedError
from hosted_tinker.replicas.engine_client import AdapterLostError, EngineModels, ReplicaGoneError

logger = logging.getLogger(__name__)

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=60)
"""A dead server refuses the connection, or says so; one that only takes its time is busy."""
LOAD_TIMEOUT = aiohttp.ClientTimeout(total=300)
JSON_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
"""Answers are passed on as they come: not compressed."""


class VllmClient:
    """Implements `EngineClient`."""

    def __init__(self, url: str, api_key: str | None, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.url}/health", timeout=PROBE_TIMEOUT) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def fetch_models(self) -> EngineModels:
        """Raises SettingsError for a server that is not vLLM, or takes another key."""
        status, models = await self._get("/v1/models")
        if status == 401:
            raise SettingsError(f"vLLM at {self.url} does not accept the key; set vllm_api_key")
        try:
            cards = models["data"]
            base = next(card for card in cards if card.get("parent") is None)
            return EngineModels(
                base_model=base["id"],
                base_model_source=base["root"],
                max_model_len=base["max_model_len"],
                adapters={card["id"]: Path(card["root"]) for card in cards if card.get("parent")},
            )
        except (ValueError, KeyError, TypeError, StopIteration) as error:
            raise SettingsError(f"{self.url} answers as no vLLM does: {error!r}") from error

    async def load_adapter(self, name: str, directory: Path) -> None:
        status, answer = await self._post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}, LOAD_TIMEOUT
        )
        message = read_message(answer)
        if status == 200 or "already been loaded" in message:
            return
        if status >= 500 and not await self.is_healthy():
            raise ReplicaGoneError(f"vLLM at {self.url} died while it loaded adapter {name!r}")
        if status in {404, 405} and "detail" in answer:
            message = (
                "it has no route to load adapters; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        raise UnservableError(f"vLLM at {self.url} can't load adapter {name!r}: {message}")

    async def unload_adapter(self, name: str) -> None:
        status, answer = await self._post(
            "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_TIMEOUT
        )
        if status not in {200, 404}:
            message = read_message(answer)
            logger.warning("vLLM at %s keeps adapter name=%s: %s", self.url, name, message)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        status, answer = await self._post("/v1/completions", body, None)
        if status == 200:
            if any(choice["finish_reason"] == "abort" for choice in answer["choices"]):
                raise ReplicaGoneError(f"vLLM at {self.url} dropped the request")
            return answer
        message = read_message(answer)
        if status == 404:
            raise AdapterLostError(message)
        if status < 500:
            raise UserError(f"the sampler (vLLM) refuses the request: {message}")
        if not await self.is_healthy():
            raise ReplicaGoneError(f"vLLM at {self.url} died: {message}")
        raise WorkerFailedError(f"the sampler (vLLM) failed: {message}")

    def open(
        self, path: str, payload: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.post(
            f"{self.url}{path}", data=payload, headers={**self._headers, **JSON_HEADERS}
        )

    async def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            async with self._session.get(
                f"{self.url}{path}", headers=self._headers, timeout=PROBE_TIMEOUT
            ) as answer:
                return answer.status, parse_object(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ReplicaGoneError(f"vLLM at {self.url} does not answer: {error!r}") from error

    async def _post(
        self, path: str, body: Mapping[str, Any], limit: aiohttp.ClientTimeout | None
    ) -> tuple[int, dict[str, Any]]:
        try:
            async with self._session.post(
                f"{self.url}{path}",
                data=orjson.dumps(body),
                headers={**self._headers, **JSON_HEADERS},
                timeout=limit or self._session.timeout,
            ) as answer:
                return answer.status, parse_object(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ReplicaGoneError(f"vLLM at {self.url} does not answer: {error!r}") from error


def parse_object(content: bytes) -> dict[str, Any]:
    """vLLM answers some successes with bare text."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    return {"message": content.decode(errors="replace")}


def read_message(answer: Mapping[str, Any]) -> str:
    """The text of an error, wherever in the answer it stands."""
    error = answer.get("error")
    if isinstance(error, Mapping):
        return str(cast("Mapping[str, Any]", error).get("message", error))
    return str(error or answer.get("message") or answer.get("detail") or answer)
