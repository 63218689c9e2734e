"""Tensors of the wire, dense or sparse, protobuf or JSON, to numpy and back.

A sparse tensor (CSR) becomes dense: cells that are not listed are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from hosted_tinker.errors import UserError
from hosted_tinker.types import CsrPattern, Int64Array, LossFnInput
from hosted_tinker.wire import tinker_pb2 as pb

MAX_DENSE_CELLS = 100_000_000
"""Cells of one sparse tensor, once dense: a bound against a small body that asks for much memory."""

MAX_DIMS = 8

DTYPE_BY_PROTO: dict[int, np.dtype[np.int64 | np.float32 | np.int32]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}
PROTO_BY_DTYPE = {np.dtype(np.float32): pb.DTYPE_FLOAT32, np.dtype(np.int64): pb.DTYPE_INT64}


class TensorJson(BaseModel):
    """The SDK's `TensorData`."""

    data: list[float | int]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    @property
    def csr_pattern(self) -> CsrPattern | None:
        """The listed cells, where the tensor is sparse."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return None
        return CsrPattern(
            to_array(self.sparse_crow_indices, "int64", "sparse_crow_indices"),
            to_array(self.sparse_col_indices, "int64", "sparse_col_indices"),
        )

    def to_numpy(self, name: str, *, fill: int = 0) -> LossFnInput:
        """Dense; cells that a sparse tensor does not list are `fill`.

        Raises:
            UserError: the parts do not fit together; names the tensor.
        """
        values = to_array(self.data, self.dtype, name)
        csr = self.csr_pattern
        if csr is None:
            return reshape(values, self.shape or [len(values)], name)
        return densify(values, csr, self.shape or [], name, fill=fill)


def to_array(values: Sequence[float | int], dtype: str, name: str) -> NDArray[Any]:
    """Raises UserError, naming the tensor, for numbers that the dtype can't hold."""
    try:
        return np.asarray(values, dtype=dtype)
    except (OverflowError, ValueError) as error:
        raise UserError(f"{name} has a number that {dtype} can't hold: {error}") from error


def decode_tensor(message: pb.Tensor, name: str) -> LossFnInput:
    """int64 or float32, of the message's shape. Raises UserError, naming the tensor, if malformed."""
    dtype = DTYPE_BY_PROTO.get(message.dtype)
    if dtype is None:
        accepted = ", ".join(pb.DType.Name(number) for number in DTYPE_BY_PROTO)
        raise UserError(f"{name} has dtype number {message.dtype}; accepted: {accepted}")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        values = widen(read_array(csr.values, dtype, name))
        crow = read_array(csr.crow_indices, np.dtype("<i8"), name).astype(np.int64)
        col = read_array(csr.col_indices, np.dtype("<i8"), name).astype(np.int64)
        return densify(values, CsrPattern(crow, col), shape, name)
    values = widen(read_array(message.dense, dtype, name))
    return reshape(values, shape or [len(values)], name)


def encode_tensor(array: LossFnInput, csr: CsrPattern | None = None) -> pb.Tensor:
    """A message, dense, or sparse with the cells that `csr` lists."""
    message = pb.Tensor(dtype=PROTO_BY_DTYPE[array.dtype], shape=array.shape)
    if csr is None:
        message.dense = np.ascontiguousarray(array).tobytes()
        return message
    rows = np.repeat(np.arange(len(csr.crow_indices) - 1), np.diff(csr.crow_indices))
    message.sparse_csr.values = array[rows, csr.col_indices].tobytes()
    message.sparse_csr.crow_indices = csr.crow_indices.tobytes()
    message.sparse_csr.col_indices = csr.col_indices.tobytes()
    return message


def read_array(data: bytes, dtype: np.dtype[np.generic], name: str) -> NDArray[np.generic]:
    """A read-only view of the bytes. Raises UserError if they are no whole number of elements."""
    if len(data) % dtype.itemsize:
        raise UserError(
            f"{name} has {len(data)} bytes, which is no multiple of the {dtype.itemsize} bytes of "
            f"one {dtype.name}"
        )
    return np.frombuffer(data, dtype=dtype)


def widen(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """int32 becomes int64, as the SDK itself does."""
    return values.astype(np.int64) if values.dtype == np.int32 else values


def reshape(values: NDArray[np.generic], shape: Sequence[int], name: str) -> LossFnInput:
    if any(size < 0 for size in shape) or math.prod(shape) != len(values) or len(shape) > MAX_DIMS:
        raise UserError(
            f"{name} has {len(values)} values, which do not fill its shape {list(shape)}"
        )
    # An empty tensor's other sizes may be beyond what numpy takes.
    return values.reshape(shape if len(values) else (0,) * max(1, len(shape)))  # pyright: ignore[reportReturnType]


def densify(
    values: NDArray[np.generic],
    csr: CsrPattern,
    shape: Sequence[int],
    name: str,
    *,
    fill: int = 0,
) -> LossFnInput:
    """A CSR matrix, dense. Raises UserError if its parts do not fit together."""
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_DENSE_CELLS:
        raise UserError(
            f"{name} is sparse with shape {list(shape)}; accepted: two dimensions and at most "
            f"{MAX_DENSE_CELLS} cells"
        )
    rows, columns = shape
    crow, col = csr.crow_indices, csr.col_indices
    # Bounded and ascending before anything is subtracted: differences may overflow.
    fits = (
        len(crow) == rows + 1
        and int(crow[0]) == 0
        and bool((crow[1:] >= crow[:-1]).all())
        and int(crow[-1]) == len(values) == len(col)
        and (len(col) == 0 or 0 <= int(col.min()) <= int(col.max()) < columns)
    )
    if not fits:
        raise UserError(f"{name} is not a valid CSR matrix of shape {list(shape)}")
    dense = np.full((rows, columns), fill, dtype=values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(crow)), col] = values
    return dense  # pyright: ignore[reportReturnType]


def concatenate_tokens(chunks: Sequence[Int64Array]) -> Int64Array:
    """int64 [N] of all chunks; empty where there are none."""
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int64)
