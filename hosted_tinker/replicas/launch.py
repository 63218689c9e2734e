"""Makes the replicas that the settings ask for."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import aiohttp
from aiohttp import AddrInfoType

from hosted_tinker.replicas.child import HOST, make_child_spec
from hosted_tinker.replicas.gpus import split_gpus
from hosted_tinker.replicas.held_adapters import EngineDir
from hosted_tinker.replicas.replica import MakeBaseAdapter, Replica
from hosted_tinker.replicas.vllm import VllmClient
from hosted_tinker.settings import Settings

PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds of silence before the first, seconds between them, and how many may stay unanswered."""


def make_replicas(
    settings: Settings,
    base_model: str,
    names: Sequence[str],
    session: aiohttp.ClientSession,
    make_base_adapter: MakeBaseAdapter,
) -> list[Replica]:
    """Not started yet. `names` are those that the base model is served under."""
    state_dir = settings.state_dir.resolve()
    known = [base_model, *names]
    replicas: list[Replica] = []
    for url in settings.vllm_url:
        client = VllmClient(url, settings.vllm_api_key, session)
        engine_dir = EngineDir(state_dir, settings.vllm_state_dir or state_dir)
        replicas.append(Replica(client, engine_dir, settings, known, None, make_base_adapter))
    for index, gpus in enumerate(split_gpus(settings) if settings.vllm_gpus else []):
        spec = make_child_spec(settings, base_model, names, gpus, settings.vllm_port + index)
        url = f"http://{HOST}:{spec.port}"
        client = VllmClient(url, spec.environment["VLLM_API_KEY"], session)
        engine_dir = EngineDir(state_dir, state_dir)
        replicas.append(Replica(client, engine_dir, settings, known, spec, make_base_adapter))
    return replicas


def open_http_session() -> aiohttp.ClientSession:
    """For all replicas: any number of connections, and generations may take their time. A machine
    that is gone without a word is noticed by probes of the connection, in about a minute."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=open_probed_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )


def open_probed_socket(address: AddrInfoType) -> socket.socket:  # pyright: ignore[reportUnknownParameterType]
    """For a connection that ends with an error when the other side stays silent on probes."""
    family, kind, protocol = address[:3]
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
