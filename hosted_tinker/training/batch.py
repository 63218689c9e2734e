"""Data to the tensors of micro-batches, and log-probabilities back to the shapes of the data.

Sequences are padded on the right. A causal decoder needs no attention mask for that: every pad comes
after every real token of its row, so no real position can see one, and the hidden states of pads
are never read. The losses see real cells only.

Shape letters: B sequences, T longest of them, P real positions, N tokens of a datum, K targets per
position, Q cells (a position and a target; K may differ between data).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hosted_tinker.types import Datum, Float32Array


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one pass needs, on the CPU.

    Attributes:
        input_ids_BT: int64, right-padded with token 0.
        real_P: int64, indices of the real positions in the flattened `input_ids_BT`, by datum.
        position_Q: int64, ascending, the row of `real_P` that a cell is scored at.
        target_Q: int64 token id.
        inputs: name -> float32 [Q], the loss inputs other than the targets.
        shapes: of each datum's targets, [N] or [N, K].
    """

    input_ids_BT: Tensor
    real_P: Tensor
    position_Q: Tensor
    target_Q: Tensor
    inputs: Mapping[str, Tensor]
    shapes: Sequence[tuple[int, ...]]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups sequences by length so that rows * longest is at most `max_tokens`.

    A longer sequence goes alone. The longest go first: what does not fit in memory fails early.

    Returns:
        Indices into `lengths`, each once.
    """
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def collate(data: Sequence[Datum]) -> MicroBatch:
    """One micro-batch of all data, in order."""
    lengths_B = np.array([len(datum.tokens) for datum in data])
    is_real_BT = np.arange(lengths_B.max()) < lengths_B[:, None]
    input_ids_BT = np.zeros(is_real_BT.shape, dtype=np.int64)
    input_ids_BT[is_real_BT] = np.concatenate([datum.tokens for datum in data])
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    cells_per_position_P = np.concatenate(
        [np.full(len(target), target[0].size) for target in targets]
    )
    position_Q = np.repeat(np.arange(len(cells_per_position_P)), cells_per_position_P)
    names = data[0].loss_fn_inputs.keys() - {"target_tokens"}
    return MicroBatch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        real_P=torch.from_numpy(np.flatnonzero(is_real_BT)),
        position_Q=torch.from_numpy(position_Q),
        target_Q=torch.from_numpy(flatten(targets)),
        inputs={
            name: torch.from_numpy(flatten([datum.loss_fn_inputs[name] for datum in data]))
            for name in names
        },
        shapes=[target.shape for target in targets],
    )


def flatten(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.concatenate([array.reshape(-1) for array in arrays])


def split_by_shape(
    values_Q: Float32Array, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Float32Array]:
    """The inverse of flattening: one array for each shape, in order."""
    bounds = np.cumsum([np.prod(shape, dtype=np.int64) for shape in shapes])
    for values, shape in zip(np.split(values_Q, bounds[:-1]), shapes, strict=True):
        yield values.reshape(shape)
