"""Where the real vLLM is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Python of an environment with vLLM. `make test-vllm` makes one."""
    python = Path(os.environ.get("TEST_VLLM_PYTHON", DEFAULT))
    assert python.exists(), (
        f"{python} does not exist: run `make test-vllm`, or set TEST_VLLM_PYTHON"
    )
    return python.absolute()
