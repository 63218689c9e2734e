"""litellm, lm-evaluation-harness and inspect-ai, unchanged, against the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import running_server
from tests.integration.openai_programs import (
    Programs,
    check_inspect,
    check_litellm,
    check_lm_eval,
)
from tests.integration.plain_transformers import Reference

MODEL = "org/tiny"


@pytest.fixture(scope="module")
def base_url(chat_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--base-model", str(chat_model_dir), "--served-model-name", MODEL]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def programs(base_url: str, chat_model_dir: Path, tmp_path: Path) -> Programs:
    return Programs(base_url, MODEL, chat_model_dir, tmp_path)


def test_litellm_gets_what_transformers_generates(programs: Programs, reference: Reference) -> None:
    check_litellm(programs, reference)


def test_lm_eval_scores_and_generates_what_transformers_does(
    programs: Programs, reference: Reference
) -> None:
    check_lm_eval(programs, reference)


def test_inspect_gets_what_transformers_generates(programs: Programs, reference: Reference) -> None:
    check_inspect(programs, reference)
