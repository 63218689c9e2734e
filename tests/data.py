"""Training data for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker


def datum(tokens: Sequence[int], **loss_fn_inputs: Any) -> tinker.Datum:
    """A datum; arrays of floats become float32 and arrays of ints int64."""
    inputs = {
        name: tinker.TensorData.from_numpy(np.asarray(value))
        if np.asarray(value).dtype in (np.int64, np.float32)
        else tinker.TensorData.from_numpy(np.asarray(value, dtype=np.float32))
        for name, value in loss_fn_inputs.items()
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs
    )


def next_token_datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> tinker.Datum:
    """Predicts every token from those before it."""
    length = len(tokens) - 1
    return datum(
        tokens[:-1],
        target_tokens=np.asarray(tokens[1:], dtype=np.int64),
        weights=np.asarray([1.0] * length if weights is None else weights, dtype=np.float32),
    )
