"""Products with frozen weights, fast for few positions on the CPU too.

MKL hands a product with few rows to one thread or splits it badly. Cut into as many products as there
are threads, each thread reads its own part of the weights: on two cores a product of one row takes
half the time, one of 32 rows three quarters (`benchmarks/few_rows.py`).

Shape letters: P positions, D input features, O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 256
"""With more, nothing is gained."""


def multiply(x_PD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, [P, O]."""
    parts = count_parts(x_PD, weight_OD, weight_OD.shape[0])
    if parts == 1:
        return torch.nn.functional.linear(x_PD, weight_OD, bias_O)
    columns, features = weight_OD.shape
    weights = weight_OD.view(parts, columns // parts, features).transpose(1, 2)
    out = torch.bmm(x_PD.expand(parts, *x_PD.shape), weights)
    out_PO = out.transpose(0, 1).reshape(-1, columns)
    return out_PO if bias_O is None else out_PO.add_(bias_O)


def multiply_transposed(g_PO: Tensor, weight_OD: Tensor) -> Tensor:
    """g W, [P, D]: the gradient of `multiply` with respect to x, where g is that of the result."""
    parts = count_parts(g_PO, weight_OD, weight_OD.shape[1])
    if parts == 1:
        return g_PO @ weight_OD
    columns, features = weight_OD.shape
    weights = weight_OD.view(columns, parts, features // parts).transpose(0, 1)
    out = torch.bmm(g_PO.expand(parts, *g_PO.shape), weights)
    return out.transpose(0, 1).reshape(-1, features)


def count_parts(rows: Tensor, weight: Tensor, num_columns: int) -> int:
    """Into how many products of equal width to cut one with `num_columns` columns."""
    if rows.is_cuda or not 0 < rows.shape[0] <= MAX_ROWS or not weight.is_contiguous():
        return 1
    threads = torch.get_num_threads()
    return threads if num_columns % threads == 0 else 1
