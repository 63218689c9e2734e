"""TRL's `SFTTrainer`, with its own padding, packing and output head.

    .venv-rivals/bin/python -m benchmarks.rivals.trl_sft WORK.json

It refuses an adapter on the output head, so it trains none, whatever the work asks for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.rivals.work import Work, answer, load_model, make_lora_config, now, read_work

Collate = Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]


class StepEnds(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(now())


class CountingCollator:
    """Counts each batch's tokens, and its cells with the padding."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self.tokens: list[int] = []
        self.cells: list[int] = []

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = self._collate(examples)
        self.tokens.append(sum(len(example["input_ids"]) for example in examples))
        self.cells.append(batch["input_ids"].numel())
        return batch


def main() -> None:
    work = read_work()
    module = load_model(work)
    accumulation = count_passes(work)
    ends = StepEnds()
    with tempfile.TemporaryDirectory() as directory:
        trainer = SFTTrainer(
            model=module,
            args=make_config(work, accumulation, directory),
            train_dataset=Dataset.from_dict(
                {"input_ids": [sequence for step in work.steps for sequence in step]}
            ),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            peft_config=make_lora_config(module, work, train_unembed=False),
            callbacks=[ends],
        )
        counts = CountingCollator(trainer.data_collator)
        trainer.data_collator = counts
        trainer.train()
    timed = slice(accumulation, accumulation * len(work.steps))
    result = {
        "num_tokens": sum(counts.tokens[timed]),
        "seconds": {"step": ends.times[-1] - ends.times[0]},
        "padding": 1 - sum(counts.tokens[timed]) / sum(counts.cells[timed]),
        "first_loss": trainer.state.log_history[0]["loss"],
    }
    answer(result, "transformers", "peft", "trl")


def count_passes(work: Work) -> int:
    """Passes of one step."""
    num_sequences = len(work.steps[0])
    if not work.pack_tokens:
        return num_sequences // work.batch_size
    num_tokens = sum(len(sequence) for step in work.steps for sequence in step)
    return max(1, round(num_tokens / len(work.steps) / work.pack_tokens))


def make_config(work: Work, accumulation: int, directory: str) -> SFTConfig:
    packing = work.pack_tokens > 0
    return SFTConfig(
        output_dir=directory,
        max_steps=len(work.steps),
        per_device_train_batch_size=1 if packing else work.batch_size,
        gradient_accumulation_steps=accumulation,
        max_length=work.pack_tokens if packing else None,
        packing=packing,
        train_sampling_strategy="group_by_length" if work.sort else "random",
        learning_rate=work.learning_rate,
        bf16=work.dtype == "bfloat16",
        gradient_checkpointing=work.gradient_checkpointing,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
