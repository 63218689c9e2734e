"""What each loss takes, and the check of a `forward_backward` against it.

The API process checks every request here once, before it reaches a backend, so that the formulas in
`training.losses` can trust their inputs. Numpy only: that process never imports torch.

Defaults are those of https://tinker-docs.thinkingmachines.ai/tinker/losses and of the cookbook's
tutorials/202_loss_functions.py.

Shape letters: N tokens of a datum, K targets per position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hosted_tinker.errors import UserError
from hosted_tinker.types import BaseModelInfo, Datum, ForwardBackward, Int64Array, LossFnInput


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss takes.

    Attributes:
        inputs: names of the `loss_fn_inputs`, all of them required.
        many_targets: whether inputs may be [N, K]; otherwise they are [N].
        config: key -> default of the `loss_fn_config`.
    """

    inputs: tuple[str, ...]
    many_targets: bool = False
    config: Mapping[str, float] = field(default_factory=dict[str, float])


POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
LOSS_SPECS: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("target_tokens", "weights"), many_targets=True),
    "importance_sampling": LossSpec(POLICY_INPUTS),
    "ppo": LossSpec(POLICY_INPUTS, config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    # One-sided by default: https://tinker-docs.thinkingmachines.ai/tinker/losses/cispo
    "cispo": LossSpec(
        POLICY_INPUTS, config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    ),
    # The docs' example: https://tinker-docs.thinkingmachines.ai/tinker/losses/dro
    "dro": LossSpec(POLICY_INPUTS, config={"beta": 0.05}),
}

INSTEAD_OF: Mapping[str, str] = {
    "gspo": "'ppo' and 'cispo' clip the ratio of each token instead of the sequence's",
    "stable_reinforce": "use 'importance_sampling', 'ppo' or 'cispo'",
    "custom": "forward_backward_custom computes any loss on the client",
}
"""Losses of the SDK that are not served, and what to use in their place."""

DTYPES: Mapping[str, type[np.generic]] = {"target_tokens": np.int64}
"""Of the loss inputs; float32 where a name is not listed."""


def resolve_config(loss_fn: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The loss's configuration with defaults filled in.

    Raises:
        UserError: unknown key, value that is not a finite number, or thresholds out of order.
    """
    defaults = LOSS_SPECS[loss_fn].config
    for key, value in config.items():
        if key not in defaults:
            raise UserError(
                f"loss_fn_config key {key!r} is unknown to {loss_fn!r}; accepted: {quote(defaults)}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config {key!r} is {value!r}; it must be a finite number")
    resolved = {key: float(config.get(key, default)) for key, default in defaults.items()}
    if "clip_low_threshold" in resolved:
        low, high = resolved["clip_low_threshold"], resolved["clip_high_threshold"]
        if low > high:
            raise UserError(
                f"loss_fn_config clip_low_threshold {low:g} is above clip_high_threshold {high:g}"
            )
    return resolved


def check_forward_backward(operation: ForwardBackward, base: BaseModelInfo) -> None:
    """Raises UserError, naming the datum, the value and what is accepted."""
    spec = LOSS_SPECS.get(operation.loss_fn)
    if spec is None:
        raise UserError(describe_unknown_loss(operation.loss_fn))
    resolve_config(operation.loss_fn, operation.loss_fn_config)
    if not operation.data:
        raise UserError("data is empty; send at least one datum")
    for index, datum in enumerate(operation.data):
        where = f"data[{index}]"
        check_tokens(datum.tokens, where, base)
        check_input_names(datum, where, operation.loss_fn)
        check_shapes(datum, where, many_targets=spec.many_targets)
        for name in spec.inputs:
            check_values(datum.loss_fn_inputs[name], f"{where}.loss_fn_inputs[{name!r}]", name)
        targets = f"{where}.loss_fn_inputs['target_tokens']"
        check_vocabulary(datum.loss_fn_inputs["target_tokens"], targets, base.vocab_size)


def describe_unknown_loss(loss_fn: str) -> str:
    if loss_fn in INSTEAD_OF:
        return (
            f"loss_fn {loss_fn!r} is not supported here: {INSTEAD_OF[loss_fn]}. "
            f"Accepted: {quote(LOSS_SPECS)}"
        )
    return f"loss_fn {loss_fn!r} is unknown; accepted: {quote(LOSS_SPECS)}"


def check_tokens(tokens: Int64Array, where: str, base: BaseModelInfo) -> None:
    if len(tokens) == 0:
        raise UserError(f"{where}.model_input has no tokens; send at least one")
    if len(tokens) > base.context_length:
        raise UserError(
            f"{where}.model_input has {len(tokens)} tokens; the context length is "
            f"{base.context_length}"
        )
    check_vocabulary(tokens, f"{where}.model_input", base.vocab_size)


def check_vocabulary(token_ids: LossFnInput, where: str, vocab_size: int) -> None:
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        raise UserError(
            f"{where} holds token id {int(outside[0])}; ids are from 0 to {vocab_size - 1}"
        )


def check_input_names(datum: Datum, where: str, loss_fn: str) -> None:
    accepted = LOSS_SPECS[loss_fn].inputs
    for name in datum.loss_fn_inputs:
        if name not in accepted:
            raise UserError(
                f"{where}.loss_fn_inputs has {name!r}; {loss_fn!r} takes {quote(accepted)}"
            )
    for name in accepted:
        if name not in datum.loss_fn_inputs:
            raise UserError(
                f"{where}.loss_fn_inputs lacks {name!r}; {loss_fn!r} takes {quote(accepted)}"
            )


def check_shapes(datum: Datum, where: str, *, many_targets: bool) -> None:
    """Targets are [N] or, where the loss allows it, [N, K >= 1]; all inputs have their shape."""
    num_tokens = len(datum.tokens)
    shape = datum.loss_fn_inputs["target_tokens"].shape
    ranks = (1, 2) if many_targets else (1,)
    if len(shape) not in ranks or shape[0] != num_tokens or 0 in shape:
        accepted = f"[{num_tokens}] or [{num_tokens}, K]" if many_targets else f"[{num_tokens}]"
        raise UserError(
            f"{where}.loss_fn_inputs['target_tokens'] has shape {list(shape)}; accepted: "
            f"{accepted}, one row for each token of model_input"
        )
    for name, values in datum.loss_fn_inputs.items():
        if values.shape != shape:
            raise UserError(
                f"{where}.loss_fn_inputs[{name!r}] has shape {list(values.shape)}; it must be "
                f"{list(shape)}, as target_tokens is"
            )


def check_values(values: LossFnInput, where: str, name: str) -> None:
    wanted = np.dtype(DTYPES.get(name, np.float32))
    if values.dtype != wanted:
        raise UserError(f"{where} has dtype {values.dtype}; it must be {wanted}")
    bad = values[~np.isfinite(values)]
    if bad.size:
        raise UserError(f"{where} holds {float(bad[0])}; values must be finite")


def quote(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
