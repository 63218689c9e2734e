"""Starting, loading, stopping, and settings that can't work."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tinker

from tests.contract.conftest import MODEL
from tests.data import next_token_datum
from tests.harness import running_server, to_json_flag, wait_healthy

FAKE = ["--backend", "fake", "--base-model", MODEL]


def run_command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hosted_tinker.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "99999"], "port = '99999'"),
        (["serve", "--backend", "jax"], "backend = 'jax'.*pytorch"),
        (["serve", "--backend-config", '{"train_gpu": "0"}'], "train_gpu.*accepted.*train_gpus"),
        (["serve", "--backend-config", "{nope"], "not valid JSON"),
        (["serve", "--config", "no-such.toml"], "no-such.toml cannot be read"),
        (["serve", "--host", "0.0.0.0"], "api_key"),
        (["serve", "--base-model", "./no-such-model", "--port", "0"], "no such directory"),
        (["serve", "--vllm-max-lora-rank", "513"], "vllm_max_lora_rank = '513'"),
        (["serve", "--vllm-gpus", "cpu", "--vllm-tp", "2"], "vllm_tp = 2; accepted .* 1"),
        (["serve", "--vllm-gpus", "cpu", "--vllm-args=--port=1"], "--port is set by vllm_port"),
        (["serve", "--vllm-url", "http://a:1 http://a:1/v1"], "is not an address"),
        (["serve", "--vllm-url", "http://a:1", "http://a:1/v1"], "twice"),
        (["serve", "--embedded-fallback"], "embedded_fallback: no vLLM is used"),
    ],
)
def test_setting_that_can_not_work_is_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run_command(*arguments, HOSTED_TINKER_STATE_DIR=str(tmp_path / "state"))
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("hosted-tinker:")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    assert re.search(message, lines[0]), lines[0]


def test_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run_command("serve", *FAKE, "--port", port, "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert f"port {port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_state_dir_of_another_server_is_one_sentence(tmp_path: Path) -> None:
    with running_server(tmp_path, *FAKE) as server:
        result = run_command("serve", *FAKE, "--port", "0", "--state-dir", str(server.state_dir))
    assert result.returncode == 1
    assert "in use by another server" in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_key_is_not_shown() -> None:
    result = run_command("serve", *FAKE, HOSTED_TINKER_API_KEY="secret-of-mine")
    assert result.returncode == 1
    assert "api_key" in result.stderr
    assert "secret-of-mine" not in result.stderr


def test_config_says_where_each_setting_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'port = 1234\nlog_level = "error"\nbackend = "fake"\n[backend_config]\nload_s = 2\n'
    )
    result = run_command(
        "config", "--config", str(file), "--port", "4321", HOSTED_TINKER_HOST="localhost"
    )
    rows = {
        cells[1].strip(): (cells[2].strip(), cells[3].strip())
        for line in result.stdout.splitlines()
        if len(cells := line.split("│")) > 4 and cells[1].strip()
    }
    assert rows["port"] == ("4321", "flag")
    assert rows["host"] == ("localhost", "environment")
    assert rows["log_level"][0] == "error"
    assert rows["log_level"][1].startswith("file")
    assert rows["poll_hold_s"] == ("25.0", "default")
    assert rows["backend_config.load_s"][0] == "2.0"


def test_health_answers_while_the_model_loads(tmp_path: Path) -> None:
    flags = [*FAKE, *to_json_flag(load_s=2)]
    with running_server(tmp_path, *flags, wait=False) as server:
        wait_healthy(server, "loading")
        with server.client() as client:
            run = client.create_lora_training_client(base_model=MODEL, rank=2).result()
            assert run.get_info().lora_rank == 2
        assert server.get("healthz").json() == {"status": "ok"}


def test_sigterm_ends_cleanly_while_polls_are_held(tmp_path: Path) -> None:
    with running_server(tmp_path, *FAKE, *to_json_flag(forward_backward_s=60)) as server:
        client = server.client()
        run = client.create_lora_training_client(base_model=MODEL, rank=2).result()
        run.forward_backward([next_token_datum(range(5))], "cross_entropy")
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert "Traceback" not in server.log


def test_long_pass_delays_neither_health_nor_polls(tmp_path: Path) -> None:
    """A pass of many seconds, 1,000 polls held for what comes after it, and health checks."""
    flags = [*FAKE, *to_json_flag(forward_backward_s=10)]
    with running_server(tmp_path, *flags) as server, server.client() as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=2).result()
        passed = run.forward_backward([next_token_datum(range(5))], "cross_entropy")
        body = {"model_id": run.model_id, "seq_id": 2, "adam_params": {}}
        step = server.post("optim_step", body).json()["request_id"]
        limits = httpx.Limits(max_connections=1000)
        with httpx.Client(limits=limits, timeout=60) as http, ThreadPoolExecutor(1000) as pool:
            polls = [
                pool.submit(
                    http.post, f"{server.url}/api/v1/retrieve_future", json={"request_id": step}
                )
                for _ in range(1000)
            ]
            for _ in range(20):
                assert server.get("healthz").json() == {"status": "ok"}
            # All of that was answered while the pass still runs.
            waiting = server.post(
                "retrieve_future",
                {"request_id": step},
                headers={"x-stainless-read-timeout": "10.1"},
            )
            assert waiting.status_code == 408
            assert {poll.result().status_code for poll in polls} == {200}
        assert passed.result().metrics["loss:sum"] > 0


def test_key_is_asked_for_where_one_is_set(tmp_path: Path) -> None:
    with running_server(tmp_path, *FAKE, env={"HOSTED_TINKER_API_KEY": "tml-secret"}) as server:
        assert server.get("training_runs").status_code == 401
        good = tinker.ServiceClient(base_url=server.url, api_key="tml-secret")
        assert good.get_server_capabilities().supported_models
        assert "tml-secret" not in server.log


def test_trainer_that_dies_is_started_anew(tmp_path: Path) -> None:
    """Its runs say what to do; their checkpoints work."""
    with running_server(tmp_path, *FAKE) as server, server.client() as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=2, seed=1).result()
        path = run.save_state("safe").result().path
        for pid in children(server.process.pid):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(tinker.RequestFailedError, match=r"last checkpoint|died"):
            run.forward_backward([next_token_datum(range(5))], "cross_entropy").result()
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        passed = resumed.forward_backward([next_token_datum(range(5))], "cross_entropy")
        assert passed.result().metrics["loss:sum"] > 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
