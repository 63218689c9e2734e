"""A tiny model for chats, and what plain transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.plain_transformers import Reference, open_reference, save_chat_model


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_chat_model(directory)
    return directory


@pytest.fixture(scope="session")
def reference(chat_model_dir: Path) -> Reference:
    return open_reference(chat_model_dir, torch.float32)
