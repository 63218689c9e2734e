"""Protobuf bodies of `forward_backward`, zstd-compressed or not, to `types.ForwardBackward`.

Decoding has two steps, because they fail differently. `read_envelope` finds out whose request it is;
without that nothing can be answered but an HTTP error. Whatever is wrong after it fails the
request's future, which is all that a client survives (a refused chunk wedges the SDK's queue).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from hosted_tinker.errors import TooLargeError, UserError
from hosted_tinker.types import Datum, ForwardBackward, Int64Array
from hosted_tinker.wire import tinker_pb2 as pb
from hosted_tinker.wire.tensors import concatenate_tokens, decode_tensor, read_array, widen

PREFIX_BYTES = 4096
"""More than enough for the model id and the seq_id, which protobuf writes first."""

ZSTD_STEP_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Envelope:
    """Whose request it is, and what is in it."""

    model_id: str
    seq_id: int
    message: pb.ForwardBackwardRequest


def read_envelope(body: bytes) -> Envelope:
    """Raises UserError for bytes that are no ForwardBackwardRequest with a model id."""
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(
            f"body of {len(body)} bytes is not a protobuf ForwardBackwardRequest: {error}"
        ) from error
    if not message.model_id:
        raise UserError("ForwardBackwardRequest has no model_id")
    return Envelope(message.model_id, message.seq_id, message)


def read_envelope_of_prefix(prefix: bytes) -> Envelope | None:
    """The envelope of a body that is too large to read whole; None where it can't be told.

    A message cut inside its third field still parses up to there when that field is left out, so
    only the first two fields, model id and seq_id, are kept.
    """
    length = len_of_leading_fields(prefix)
    if length is None:
        return None
    try:
        message = pb.ForwardBackwardRequest.FromString(prefix[:length])
    except DecodeError:
        return None
    return Envelope(message.model_id, message.seq_id, message) if message.model_id else None


def len_of_leading_fields(prefix: bytes) -> int | None:
    """Bytes of field 1 (a string, tag 0x0A) and field 2 (a varint, tag 0x10), or None."""
    if len(prefix) < 2 or prefix[0] != 0x0A or prefix[1] >= 0x80:
        return None
    position = 2 + prefix[1]
    if position >= len(prefix) or prefix[position] != 0x10:
        return None
    position += 1
    while position < len(prefix) and prefix[position] >= 0x80:
        position += 1
    return position + 1 if position < len(prefix) else None


def decompress(body: bytes, *, max_bytes: int) -> bytes:
    """A zstd frame's content. Raises UserError if it is broken, TooLargeError if over `max_bytes`.

    Fed in small steps: 4 bytes of zstd can stand for 128 KiB (RFC 8878, section 3.1.1.2).
    """
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    parts: list[bytes] = []
    size = 0
    try:
        for start in range(0, len(body), ZSTD_STEP_BYTES):
            if decompressor.eof:
                break
            parts.append(decompressor.decompress(body[start : start + ZSTD_STEP_BYTES]))
            size += len(parts[-1])
            if size > max_bytes:
                raise TooLargeError(f"decompressed body is over the limit of {max_bytes} bytes")
    except zstandard.ZstdError as error:
        raise UserError(f"zstd body of {len(body)} bytes is broken: {error}") from error
    if not decompressor.eof:
        raise UserError(f"zstd body of {len(body)} bytes ends before its frame does")
    return b"".join(parts)


def decode_forward_backward(envelope: Envelope) -> ForwardBackward:
    """Raises UserError, naming the datum, for content that can't be read."""
    message = envelope.message
    config = {
        key: value.number if value.HasField("number") else value.text
        for key, value in message.loss_fn_config_v2.items()
    }
    return ForwardBackward(
        model_id=envelope.model_id,
        data=[decode_datum(datum, index) for index, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_fn_config=config or dict(message.loss_fn_config),
        forward_only=message.forward_only,
    )


def decode_datum(message: pb.Datum, index: int) -> Datum:
    chunks = [
        decode_chunk(chunk, f"data[{index}].model_input[{position}]")
        for position, chunk in enumerate(message.model_input)
    ]
    inputs = {
        name: decode_tensor(tensor, f"data[{index}].loss_fn_inputs[{name!r}]")
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum(concatenate_tokens(chunks), inputs)


def decode_chunk(message: pb.Chunk, name: str) -> Int64Array:
    kind = message.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UserError(f"{name} is a chunk of kind {kind!r}; this server accepts text only")
    tokens = widen(read_array(message.encoded_text.tokens, np.dtype("<i4"), name))
    return tokens  # pyright: ignore[reportReturnType]
