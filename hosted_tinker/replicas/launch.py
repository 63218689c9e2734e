"""Makes the replicas that the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from hosted_tinker.config import Settings
from hosted_tinker.replicas.child import HOST, make_child_spec
from hosted_tinker.replicas.gpus import split_gpus
from hosted_tinker.replicas.held_adapters import EngineDir
from hosted_tinker.replicas.replica import MakeBaseAdapter, Replica
from hosted_tinker.replicas.vllm import VllmClient


def make_replicas(
    settings: Settings,
    base_model: str,
    names: Sequence[str],
    session: aiohttp.ClientSession,
    make_base_adapter: MakeBaseAdapter,
) -> list[Replica]:
    """Not started yet. `names` are those that the base model is served under."""
    state_dir = settings.state_dir.resolve()
    replicas: list[Replica] = []
    for url in settings.vllm_url:
        client = VllmClient(url, settings.vllm_api_key, session)
        engine_dir = EngineDir(state_dir, settings.vllm_state_dir or state_dir)
        replicas.append(Replica(client, engine_dir, settings, None, make_base_adapter))
    for index, gpus in enumerate(split_gpus(settings) if settings.vllm_gpus else []):
        spec = make_child_spec(settings, base_model, names, gpus, settings.vllm_port + index)
        url = f"http://{HOST}:{spec.port}"
        client = VllmClient(url, spec.environment["VLLM_API_KEY"], session)
        engine_dir = EngineDir(state_dir, state_dir)
        replicas.append(Replica(client, engine_dir, settings, spec, make_base_adapter))
    return replicas


def open_http_session() -> aiohttp.ClientSession:
    """For all replicas: any number of connections, and generations may take their time."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )
