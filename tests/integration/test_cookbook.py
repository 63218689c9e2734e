"""The cookbook's recipes, unmodified, against a server with the default model and local data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosted_tinker.default_model import ensure_default_model
from tests.harness import API_KEY, RunningServer, running_server

pytestmark = pytest.mark.slow

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows. The server serves the default model under it."""

CHATS = [
    ("Name an animal that can fly.", "A bat can fly."),
    ("What do bees make?", "Bees make honey."),
    ("Write one line about the sea.", "The sea keeps no footprints."),
    ("How many days are in a week?", "A week has seven days."),
    ("What color is snow?", "Snow is white."),
    ("Who sleeps all winter?", "Bears sleep all winter."),
    ("What is ice?", "Ice is frozen water."),
    ("Name a round thing.", "A wheel is round."),
    ("What falls in autumn?", "Leaves fall in autumn."),
    ("What barks at night?", "A dog barks at night."),
    ("What is bread made of?", "Bread is made of flour."),
    ("Where do fish live?", "Fish live in water."),
]
GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
---
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--served-model-name", MODEL]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local data sets under their hub names, and a hub cache that holds the tokenizer."""
    directory = tmp_path_factory.mktemp("cookbook")
    chats = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in CHATS
    ]
    write_jsonl(directory / "HuggingFaceH4" / "no_robots" / "train.jsonl", chats)
    # The model copies such a question about one time in ten (5 of 48 samples), so rewards differ.
    problem = {"question": r"\boxed{3} " * 20, "answer": "It is three.\n#### 3"}
    write_jsonl(directory / "openai" / "gsm8k" / "train.jsonl", [problem] * 4)
    (directory / "openai" / "gsm8k" / "README.md").write_text(GSM8K_CARD)

    cache = directory / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = cache / "snapshots" / ("0" * 40)
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(ensure_default_model(lambda _phase: None), snapshot, ignore=ignore)
    return directory


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(
    recipe: str, server: RunningServer, workplace: Path, log_dir: Path, **settings: Any
) -> list[dict[str, Any]]:
    """Runs a recipe to its end and returns what it logged, a row for each step."""
    values = {
        "base_url": server.url,
        "model_name": MODEL,
        "log_path": log_dir,
        "lora_rank": 8,
        **settings,
    }
    result = subprocess.run(
        [
            *(sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}"),
            *(f"{name}={value}" for name, value in values.items()),
        ],
        cwd=workplace,
        env={
            **os.environ,
            "HF_HOME": str(workplace / "hf"),
            "HF_HUB_OFFLINE": "1",
            "TINKER_API_KEY": API_KEY,
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return read_jsonl(log_dir / "metrics.jsonl")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_resumed_sl_loop_repeats_its_losses(
    server: RunningServer, workplace: Path, tmp_path: Path
) -> None:
    """The second run finds what a run killed after its checkpoint of step 3 leaves behind."""
    settings = {"batch_size": 2, "max_length": 64, "save_every": 3, "learning_rate": 1e-3}
    whole = run_recipe("sl_loop", server, workplace, tmp_path / "whole", **settings)
    losses = {row["step"]: row["train_mean_nll"] for row in whole}
    assert sorted(losses) == [0, 1, 2, 3, 4, 5]

    checkpoints = read_jsonl(tmp_path / "whole" / "checkpoints.jsonl")
    (middle,) = [row for row in checkpoints if row["name"] == "000003"]
    (tmp_path / "resumed").mkdir()
    (tmp_path / "resumed" / "checkpoints.jsonl").write_text(json.dumps(middle) + "\n")
    resumed = run_recipe("sl_loop", server, workplace, tmp_path / "resumed", **settings)
    assert {row["step"]: row["train_mean_nll"] for row in resumed} == {
        step: loss for step, loss in losses.items() if step >= 3
    }


def test_rl_loop_trains_on_its_rewards(
    server: RunningServer, workplace: Path, tmp_path: Path
) -> None:
    settings = {"batch_size": 2, "group_size": 16, "max_tokens": 16, "save_every": 1}
    passes_before = server.log.count("ForwardBackward")
    rows = run_recipe("rl_loop", server, workplace, tmp_path, **settings)
    assert len(rows) == 2
    # All 64 samples miss the reward about one time in a thousand.
    assert any(row["reward/total"] > 0 for row in rows)
    assert server.log.count("ForwardBackward") > passes_before
    names = {row["name"] for row in read_jsonl(tmp_path / "checkpoints.jsonl")}
    assert "final" in names
