"""Data to the tensors of micro-batches, and log-probabilities back to the shapes of the data.

The sequences of a micro-batch lie one after another, with nothing between them.

Shape letters: P positions of all sequences, B sequences, N tokens of a datum, K targets per position,
Q cells (a position and a target; K may differ between data).
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
        tokens_P: int64, by datum.
        lengths: of the B sequences; they sum to P.
        position_Q: int64, ascending, the row of `tokens_P` that a cell is scored at.
        target_Q: int64 token id.
        inputs: name -> float32 [Q], the loss inputs other than the targets.
        shapes: of each datum's targets, [N] or [N, K].
    """

    tokens_P: Tensor
    lengths: Sequence[int]
    position_Q: Tensor
    target_Q: Tensor
    inputs: Mapping[str, Tensor]
    shapes: Sequence[tuple[int, ...]]


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, *, padded: bool = False
) -> list[list[int]]:
    """Groups sequences so that each group costs at most `max_tokens`. A longer sequence goes alone.

    The longest go first: what does not fit in memory fails early. Each goes into the first group
    that has room (first-fit decreasing, at most 11/9 of the fewest groups), so that a group is in
    descending order of length, and equal lengths stand together.

    Args:
        padded: a group costs rows * longest, and not the sum of its lengths.

    Returns:
        Indices into `lengths`, each once.
    """
    plan: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        for group, free in enumerate(room):
            cost = lengths[plan[group][0]] if padded else length
            if cost <= free:
                plan[group].append(index)
                room[group] -= cost
                break
        else:
            plan.append([index])
            room.append(max_tokens - length)
    return plan


def collate(data: Sequence[Datum]) -> MicroBatch:
    """One micro-batch of all data, in order."""
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    cells_per_position_P = np.concatenate(
        [np.full(len(target), target[0].size) for target in targets]
    )
    position_Q = np.repeat(np.arange(len(cells_per_position_P)), cells_per_position_P)
    names = data[0].loss_fn_inputs.keys() - {"target_tokens"}
    return MicroBatch(
        tokens_P=torch.from_numpy(np.concatenate([datum.tokens for datum in data])),
        lengths=[len(datum.tokens) for datum in data],
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
