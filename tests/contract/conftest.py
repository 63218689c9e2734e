"""One server with the fake backend for all contract tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.harness import RunningServer, running_server

MODEL = "fake/model"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("server")
    flags = ["--backend", "fake", "--base-model", MODEL, "--served-model-name", "org/alias"]
    with running_server(directory, *flags, "--max-request-bytes", "1000000") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with server.client() as service_client:
        yield service_client


@pytest.fixture
def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
