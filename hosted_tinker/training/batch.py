"""Data to the tensors of micro-batches, and log-probabilities back to the shapes of the data.

A micro-batch holds data of one or many requests. Its sequences lie one after another, with nothing
between them, those of a request together.

Shape letters: P positions of all sequences, N tokens of a datum, K targets per position, Q cells (a
position and a target; K may differ between data).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hosted_tinker.types import Datum, Float32Array

DatumIndex = tuple[int, int]
"""Which request, and which of its data."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a micro-batch holds of one request.

    Attributes:
        data: their places in the request.
        cells: their place among the micro-batch's.
        inputs: name -> float32 [Q] of these cells, the loss inputs other than the targets.
        shapes: of each datum's targets, [N] or [N, K].
    """

    request: int
    data: Sequence[int]
    cells: slice
    inputs: Mapping[str, Tensor]
    shapes: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one pass needs, on the CPU.

    Attributes:
        tokens_P: int64, by datum.
        lengths: of the sequences; they sum to P.
        requests: of the sequences.
        position_Q: int64, ascending, the row of `tokens_P` that a cell is scored at.
        target_Q: int64 token id.
    """

    tokens_P: Tensor
    lengths: Sequence[int]
    requests: Sequence[int]
    position_Q: Tensor
    target_Q: Tensor
    parts: Sequence[Part]


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


def collate(requests: Sequence[Sequence[Datum]], members: Sequence[DatumIndex]) -> MicroBatch:
    """One micro-batch of these data, those of one request together, else in the order given."""
    members = sorted(members, key=itemgetter(0))
    data = [requests[request][index] for request, index in members]
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data]
    cells_per_position_P = np.concatenate(
        [np.full(len(target), target[0].size) for target in targets]
    )
    position_Q = np.repeat(np.arange(len(cells_per_position_P)), cells_per_position_P)
    return MicroBatch(
        tokens_P=torch.from_numpy(np.concatenate([datum.tokens for datum in data])),
        lengths=[len(datum.tokens) for datum in data],
        requests=[request for request, _ in members],
        position_Q=torch.from_numpy(position_Q),
        target_Q=torch.from_numpy(flatten(targets)),
        parts=list(make_parts(requests, members)),
    )


def make_parts(
    requests: Sequence[Sequence[Datum]], members: Sequence[DatumIndex]
) -> Iterator[Part]:
    start = 0
    for request, group in groupby(members, key=itemgetter(0)):
        places = [index for _, index in group]
        inputs = [requests[request][index].loss_fn_inputs for index in places]
        shapes = [one["target_tokens"].shape for one in inputs]
        stop = start + sum(one["target_tokens"].size for one in inputs)
        tensors = {
            name: torch.from_numpy(flatten([one[name] for one in inputs]))
            for name in inputs[0].keys() - {"target_tokens"}
        }
        yield Part(request, places, slice(start, stop), tensors, shapes)
        start = stop


def flatten(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    return np.concatenate([array.reshape(-1) for array in arrays])


def split_by_shape(
    values_Q: Float32Array, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Float32Array]:
    """The inverse of flattening: one array for each shape, in order."""
    bounds = np.cumsum([np.prod(shape, dtype=np.int64) for shape in shapes])
    for values, shape in zip(np.split(values_Q, bounds[:-1]), shapes, strict=True):
        yield values.reshape(shape)
