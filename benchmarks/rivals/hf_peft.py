"""The plain loop: transformers, PEFT, padded batches, AdamW.

python -m benchmarks.rivals.hf_peft WORK.json
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor

from benchmarks.rivals.work import Work, answer, load_model, make_lora_config, now, read_work

IGNORED = -100
Batch = dict[str, Tensor]


def main() -> None:
    work = read_work()
    module = load_model(work)
    if work.gradient_checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
        module.enable_input_require_grads()
    lora = make_lora_config(module, work, train_unembed=work.train_unembed)
    model = get_peft_model(module, lora)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=work.learning_rate)
    steps = [make_batches(sequences, work, module.device) for sequences in work.steps]
    seconds: dict[str, float] = defaultdict(float)
    losses: list[float] = []
    for index, batches in enumerate(steps):
        begin = now()
        with torch.no_grad():
            losses.extend(float(model(**batch).loss) for batch in batches)
        forward = now()
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        backward = now()
        optimizer.step()
        optimizer.zero_grad()
        end = now()
        if index > 0:
            seconds["forward"] += forward - begin
            seconds["forward_backward"] += backward - forward
            seconds["optim_step"] += end - backward
    timed = [batch for batches in steps[1:] for batch in batches]
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in timed)
    num_cells = sum(batch["input_ids"].numel() for batch in timed)
    result: dict[str, Any] = {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "padding": 1 - num_tokens / num_cells,
        "first_loss": weigh(losses, steps[0]),
    }
    answer(result, "transformers", "peft")


def make_batches(
    sequences: Sequence[Sequence[int]], work: Work, device: torch.device
) -> list[Batch]:
    """Each padded to its own longest sequence."""
    ordered = sorted(sequences, key=len) if work.sort else sequences
    return [
        collate(ordered[start : start + work.batch_size], device)
        for start in range(0, len(ordered), work.batch_size)
    ]


def collate(sequences: Sequence[Sequence[int]], device: torch.device) -> Batch:
    rows = [torch.tensor(sequence) for sequence in sequences]
    ones = [torch.ones_like(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True).to(device),
        "attention_mask": pad(ones, batch_first=True).to(device),
        "labels": pad(rows, batch_first=True, padding_value=IGNORED).to(device),
    }


def weigh(losses: Sequence[float], batches: Sequence[Batch]) -> float:
    """The mean over targets, of the batches' means."""
    counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches]
    pairs = zip(losses, counts, strict=False)
    return sum(loss * count for loss, count in pairs) / sum(counts)


if __name__ == "__main__":
    main()
