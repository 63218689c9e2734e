"""Where the real vLLM is, and one that serves a tiny model to all tests that do not need their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import free_port
from tests.vllm.tiny_replicas import (
    BackgroundLoop,
    Reference,
    Serving,
    TinyModel,
    make_spec,
    save_tiny_model,
)

DEFAULT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Python of an environment with vLLM. `make test-vllm` makes one."""
    python = Path(os.environ.get("TEST_VLLM_PYTHON", DEFAULT))
    assert python.exists(), (
        f"{python} does not exist: run `make test-vllm`, or set TEST_VLLM_PYTHON"
    )
    return python.absolute()


@pytest.fixture(scope="session")
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as running:
        yield running


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(tiny: TinyModel) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
def vllm_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def serving(
    loop: BackgroundLoop, tiny: TinyModel, vllm_python: Path, vllm_port: int
) -> Iterator[Serving]:
    """A vLLM of our own."""
    one = Serving(loop, tiny)
    one.start([one.add_child(make_spec(tiny, vllm_python, vllm_port))])
    try:
        yield one
    finally:
        one.stop()
