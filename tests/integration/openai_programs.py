"""Runs programs that know nothing of this server against an address of its OpenAI API.

They stand in an environment of their own (`make test` fills it), see requirements-programs.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.plain_transformers import Reference

TASKS = Path(__file__).parent / "programs"
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-programs" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they run and whom they ask.

    Attributes:
        base_url: ends with /v1.
        model: an id that is served there.
        model_dir: holds the model's tokenizer.
        workplace: an empty directory for what they write.
    """

    base_url: str
    model: str
    model_dir: Path
    workplace: Path
    api_key: str = "tml-any"

    @property
    def python(self) -> Path:
        python = Path(os.environ.get("TEST_PROGRAMS_PYTHON", DEFAULT_PYTHON))
        assert python.exists(), f"{python} does not exist: run `make test`"
        return python

    def run(self, *arguments: str) -> str:
        """Standard output of a program of their environment. Nothing is fetched from a hub."""
        ended = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.workplace,
            env={
                **os.environ,
                "HF_HOME": str(self.workplace / "hub"),
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "NO_COLOR": "1",
                "OPENAI_API_KEY": self.api_key,
                "HOSTED_API_KEY": self.api_key,
                "HOSTED_BASE_URL": self.base_url,
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{arguments}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def run_litellm(self) -> dict[str, Any]:
        """The answers that programs/litellm_calls.py prints."""
        printed = self.run(str(TASKS / "litellm_calls.py"), self.base_url, self.model)
        return json.loads(printed.splitlines()[-1])

    def run_lm_eval(self, task: str) -> list[dict[str, Any]]:
        """A task of programs/lm_eval, and of each document what the harness asked and got.

        The task's documents are `{task}.jsonl` beside it.
        """
        tasks = self.workplace / "lm_eval"
        tasks.mkdir(exist_ok=True)
        documents = TASKS / "lm_eval" / f"{task}.jsonl"
        description = (TASKS / "lm_eval" / f"{task}.yaml").read_text()
        (tasks / f"{task}.yaml").write_text(description.replace("DOCUMENTS", str(documents)))
        model_args = {
            "model": self.model,
            "base_url": f"{self.base_url}/completions",
            "tokenizer": str(self.model_dir),
            "tokenizer_backend": "huggingface",
            "num_concurrent": "4",
            "max_retries": "1",
            "max_length": "512",
        }
        self.run(
            *("-m", "lm_eval", "run", "--model", "local-completions", "--log_samples"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
            *("--include_path", str(tasks), "--tasks", task),
            *("--output_path", str(self.workplace / "results")),
        )
        (samples,) = (self.workplace / "results").rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in samples.read_text().splitlines()]

    def run_inspect(self) -> dict[str, Any]:
        """The log of programs/inspect_task.py."""
        # It finds tasks below the current directory only.
        shutil.copy(TASKS / "inspect_task.py", self.workplace)
        self.run(
            *("-m", "inspect_ai", "eval", "inspect_task.py"),
            *("--model", f"openai-api/hosted/{self.model}"),
            *("--temperature", "0", "--max-tokens", "12", "--seed", "1"),
            *("--logprobs", "--top-logprobs", "2", "--max-retries", "0"),
            *("--display", "plain", "--log-format", "json", "--log-dir", "logs"),
        )
        (log,) = (self.workplace / "logs").glob("*.json")
        return json.loads(log.read_text())


def check_litellm(programs: Programs, reference: Reference) -> None:
    answers = programs.run_litellm()
    prompt = reference.render(make_chat("the quick brown fox"))
    tokens = reference.generate(prompt, 16)
    scores = reference.score([*prompt, *tokens])[len(prompt) - 1 :]
    expected = [scores[row, token].item() for row, token in enumerate(tokens)]
    assert answers["whole"] == answers["streamed"] == reference.decode(tokens)
    assert answers["logprobs"] == pytest.approx(expected, abs=1e-3)
    assert answers["usage"] == len(tokens)
    assert len(set(answers["several"])) == 2
    prompt = reference.tokenizer.encode("the quick")
    assert answers["text"] == reference.decode(reference.generate(prompt, 8))
    assert "nobody" in answers["refused"]


def check_lm_eval(programs: Programs, reference: Reference) -> None:
    """Log-likelihoods and greediness of every choice, and texts that end at a stop string."""
    for document in programs.run_lm_eval("choices"):
        for arguments, answer in zip(
            document["arguments"].values(), document["filtered_resps"], strict=True
        ):
            question, choice = arguments["arg_0"], arguments["arg_1"]
            tokens = reference.tokenizer.encode(question + choice)
            count = len(tokens) - len(reference.tokenizer.encode(question))
            scores = reference.score(tokens)[-count:]
            picked = [scores[row, token].item() for row, token in enumerate(tokens[-count:])]
            assert float(answer[0]) == pytest.approx(sum(picked), abs=1e-3)
            assert answer[1] == str(picked == scores.max(dim=-1).values.tolist())
    for document in programs.run_lm_eval("words"):
        prompt = reference.tokenizer.encode(document["arguments"]["gen_args_0"]["arg_0"])
        text = reference.decode(reference.generate(prompt, 24))
        assert document["filtered_resps"] == [text.partition("\n")[0].partition("o")[0]]


def check_inspect(programs: Programs, reference: Reference) -> None:
    log = programs.run_inspect()
    assert log["status"] == "success"
    for sample in log["samples"]:
        prompt = reference.render(make_chat(sample["input"]))
        tokens = reference.generate(prompt, 12)
        (choice,) = sample["output"]["choices"]
        assert choice["message"]["content"] == reference.decode(tokens)
        assert len(choice["logprobs"]["content"]) == len(tokens)


def make_chat(question: str) -> list[dict[str, str]]:
    """The messages that each of the programs sends."""
    system = {"role": "system", "content": "Answer in a word."}
    return [system, {"role": "user", "content": question}]
