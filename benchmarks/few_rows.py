"""Products of few rows with frozen weights on the CPU: ours beside `torch.nn.functional.linear`.

    python -m benchmarks.few_rows

For the shapes of SmolLM2-135M's layers, median time of PyTorch's product over ours, of the forward
pass and of the gradient of the input. The weights do not fit in the processor's caches, as in a model.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.servers import describe_machine
from hosted_tinker.modeling.matmul import multiply, multiply_transposed

SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576))
ROWS = (1, 2, 8, 32, 128, 256)
TOTAL_BYTES = 150_000_000
ROUNDS = 7


def main() -> None:
    with torch.inference_mode():
        for out_features, in_features in SHAPES:
            count = max(1, TOTAL_BYTES // (4 * out_features * in_features))
            weights = [torch.randn(out_features, in_features) for _ in range(count)]
            for rows in ROWS:
                x, g = torch.randn(rows, in_features), torch.randn(rows, out_features)
                ratios = {
                    "forward": compare(
                        lambda w, x=x: torch.nn.functional.linear(x, w),
                        lambda w, x=x: multiply(x, w),
                        weights,
                    ),
                    "backward": compare(
                        lambda w, g=g: g @ w, lambda w, g=g: multiply_transposed(g, w), weights
                    ),
                }
                row = {"out": out_features, "in": in_features, "rows": rows, **ratios}
                print(json.dumps(row), flush=True)
    print(json.dumps({"threads": torch.get_num_threads(), **describe_machine()}))


def compare(
    theirs: Callable[[Tensor], Tensor],
    ours: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
) -> float:
    """Their time over ours, rounds in turn."""
    ratios = [measure(theirs, weights) / measure(ours, weights) for _ in range(ROUNDS)]
    return round(statistics.median(ratios), 2)


def measure(product: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> float:
    begin = time.perf_counter()
    for weight in weights:
        product(weight)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
