"""/v1 when there is more than the server takes, and when clients go away."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import MODEL
from tests.harness import running_server

FLAGS = ("--backend", "fake", "--base-model", MODEL, "--max-queued-samples", "1")
SHORT = {"model": MODEL, "prompt": [1], "max_tokens": 1}
LONG = {"model": MODEL, "prompt": [1], "max_tokens": 4000, "n": 1024}


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    with running_server(tmp_path, *FLAGS) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as first:
            chunks = first.iter_bytes()
            next(chunks)
            second = httpx.post(url, json=LONG, timeout=60)
        assert second.status_code == 429
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert second.headers["retry-after"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_stops_cuts_generations_off_without_a_traceback(
    tmp_path: Path, stream: bool
) -> None:
    with running_server(tmp_path, *FLAGS) as server, ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/completions"
        both = [
            pool.submit(httpx.post, url, json={**LONG, "stream": stream}, timeout=60)
            for _ in range(2)
        ]
        # One is refused because the other is under way.
        refused, (pending,) = wait(both, return_when=FIRST_COMPLETED)
        assert refused.pop().result().status_code == 429
        server.process.terminate()
        assert server.process.wait(20) == 0
        if stream:
            with pytest.raises(httpx.TransportError):
                pending.result()
        else:
            assert pending.result().status_code == 503
            assert "send the request again" in pending.result().json()["error"]["message"]
        assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_the_generation(tmp_path: Path, stream: bool) -> None:
    """The generation takes minutes; the one request that may run at a time does not wait for it."""
    with running_server(tmp_path, *FLAGS) as server:
        url = f"{server.url}/v1/completions"
        if stream:
            with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=LONG, timeout=0.5)
        deadline = time.monotonic() + 30
        while (again := httpx.post(url, json=SHORT, timeout=30)).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert again.status_code == 200
