"""Results of futures to the bytes that the SDK expects.

Results of `forward_backward` and `asample` are protobuf; the rest is JSON.
Inverse of the SDK's `tinker/proto/response_conv.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from hosted_tinker.types import (
    Float32Array,
    ForwardBackwardOutput,
    FutureResult,
    NamedResult,
    OptimStepOutput,
    SampledSequence,
    SampleOutput,
    TopkLogprobs,
)
from hosted_tinker.wire import tinker_pb2 as pb
from hosted_tinker.wire.tensors import encode_tensor

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def encode_result(result: FutureResult) -> tuple[bytes, str]:
    """The body and its content type."""
    match result:
        case ForwardBackwardOutput():
            return encode_forward_backward_output(result), PROTOBUF
        case SampleOutput():
            return encode_sample_output(result), PROTOBUF
        case OptimStepOutput():
            return orjson.dumps({"metrics": drop_non_finite(result.metrics)}), JSON
        case NamedResult():
            return orjson.dumps(dict(result.fields)), JSON


def drop_non_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no NaN, and the SDK parses it strictly."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(output.metrics)
    for logprobs in group_by_trailing_shape(output.logprobs):
        message.loss_fn_outputs.append(encode_array_record(logprobs))
    return message.SerializeToString()


def group_by_trailing_shape(arrays: Sequence[Float32Array]) -> list[list[Float32Array]]:
    """Consecutive arrays whose shape agrees after the first dimension: one record each."""
    groups: list[list[Float32Array]] = []
    for array in arrays:
        if groups and groups[-1][0].shape[1:] == array.shape[1:]:
            groups[-1].append(array)
        else:
            groups.append([array])
    return groups


def encode_array_record(logprobs: Sequence[Float32Array]) -> pb.ArrayRecord:
    sizes = [array.nbytes for array in logprobs]
    tensor = pb.BatchedTensor(
        data=b"".join(np.ascontiguousarray(array).tobytes() for array in logprobs),
        offsets=np.cumsum([0, *sizes], dtype=np.int64).tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=logprobs[0].shape[1:],
    )
    return pb.ArrayRecord(
        type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(sizes)
    )


def encode_sample_output(output: SampleOutput) -> bytes:
    message = pb.SampleResponse(
        sequences=[encode_sequence(sequence) for sequence in output.sequences],
        prompt_cache_hit_tokens=output.prompt_cache_hit_tokens,
    )
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = output.prompt_logprobs.tobytes()
    if output.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(encode_topk(output.topk_prompt_logprobs))
    if output.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(
            encode_tensor(output.target_prompt_logprobs, output.target_csr)
        )
    if output.prompt_alt_tokens is not None:
        tokens, logprobs = output.prompt_alt_tokens
        message.prompt_alt_tokens.tokens.CopyFrom(encode_tensor(tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(encode_tensor(logprobs))
    return message.SerializeToString()


def encode_sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=STOP_REASONS[sequence.stop_reason],
        tokens=sequence.tokens.tobytes(),
        logprobs=sequence.logprobs.tobytes(),
    )
    if sequence.topk_logprobs is not None:
        message.topk_sampled_logprobs.CopyFrom(encode_topk(sequence.topk_logprobs))
    return message


def encode_topk(topk: TopkLogprobs) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=topk.token_ids.tobytes(), logprobs=topk.logprobs.tobytes(), k=k, length=length
    )
