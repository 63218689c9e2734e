"""`transformers` `generate` on padded batches: whatever has arrived when the last batch has ended.

python -m benchmarks.rivals.generate MODEL BATCH_SIZE RANK

An adapter of that rank is on every linear layer; 0 is none. Reads a load as a line of JSON, answers with the time of each request, until its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main() -> None:
    model_dir, batch_size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    model = module.to(device)
    if rank:
        targets = [name for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)]
        lora = LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, lora)
    model.eval()
    for line in sys.stdin:
        print(json.dumps(serve(model, json.loads(line), batch_size)), flush=True)


def serve(model: Any, load: dict[str, Any], batch_size: int) -> list[list[float]]:
    """Of each request: when its batch ended after it had arrived, seconds, and its tokens.

    Without `starts` requests come one after another, `concurrency` at once.
    """
    prompts, max_tokens, starts = load["prompts"], load["max_tokens"], load["starts"]
    batch_size = min(batch_size, load["concurrency"])
    begin = time.perf_counter()
    waiting = list(range(len(prompts)))
    ended: dict[int, list[float]] = {}
    while waiting:
        now = time.perf_counter() - begin
        arrived = [index for index in waiting if starts is None or starts[index] <= now]
        if not arrived:
            time.sleep(0.001)
            continue
        batch = arrived[:batch_size]
        generate(model, [prompts[i] for i in batch], max(max_tokens[i] for i in batch))
        end = time.perf_counter() - begin
        for index in batch:
            waiting.remove(index)
            ended[index] = [end - (now if starts is None else starts[index]), max_tokens[index]]
    return [ended[index] for index in range(len(prompts))]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Padded on the left; the shorter completions are cut off, not ended early."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model.generate(
        input_ids=torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
