"""What a forward_backward may hold: each refusal names the place, the value and what is accepted."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from hosted_tinker.errors import UserError
from hosted_tinker.loss_specs import check_forward_backward, resolve_config
from hosted_tinker.types import BaseModelInfo, Datum, ForwardBackward

BASE = BaseModelInfo(
    vocab_size=10, context_length=4, num_parameters=0, architecture="none", device="cpu"
)


def make_datum(tokens=(1, 2, 3), dtype=np.int64, **changes):
    """A cross-entropy datum; an input that is None is left out."""
    num_tokens = len(tokens)
    inputs = {
        "target_tokens": np.ones(num_tokens, dtype=np.int64),
        "weights": np.ones(num_tokens, dtype=np.float32),
    }
    inputs.update(changes)
    return Datum(
        np.array(tokens, dtype=dtype),
        {name: values for name, values in inputs.items() if values is not None},
    )


def make_policy_datum(**changes):
    floats = np.zeros(3, dtype=np.float32)
    return make_datum(**{"weights": None, "logprobs": floats, "advantages": floats, **changes})


def check(*data, loss_fn="cross_entropy", config=None):
    check_forward_backward(ForwardBackward("run", data, loss_fn, config or {}), BASE)


def floats(*values):
    return np.array(values, dtype=np.float32)


def ints(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_losses_accept_their_inputs(loss_fn):
    check(make_policy_datum(), loss_fn=loss_fn)


def test_cross_entropy_accepts_one_and_many_targets_for_a_position():
    many = make_datum(
        target_tokens=np.zeros((3, 2), dtype=np.int64), weights=np.ones((3, 2), dtype=np.float32)
    )
    check(make_datum(), many)


def test_the_limits_themselves_are_accepted():
    check(make_datum(tokens=(0, 9, 9, 0), target_tokens=ints(9, 0, 9, 0)))


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        ("nll", ["'nll'", "'cross_entropy'", "'dro'"]),
        ("gspo", ["'gspo'", "not supported here", "'ppo'"]),
        ("stable_reinforce", ["not supported here", "'importance_sampling'"]),
        ("custom", ["not supported here", "forward_backward_custom"]),
    ],
)
def test_other_losses_are_refused_with_what_to_use(loss_fn, words):
    with pytest.raises(UserError) as caught:
        check(make_datum(), loss_fn=loss_fn)
    assert all(word in str(caught.value) for word in words)


REFUSED = {
    "unknown input": (make_datum(mask=floats(1, 1, 1)), ["'mask'", "'weights'"]),
    "missing input": (make_datum(weights=None), ["lacks 'weights'"]),
    "no tokens": (make_datum(tokens=()), ["no tokens"]),
    "too long": (make_datum(tokens=(1,) * 5), ["5 tokens", "context length is 4"]),
    "token too high": (make_datum(tokens=(1, 10, 1)), ["model_input", "10", "0 to 9"]),
    "token below 0": (make_datum(tokens=(1, -1, 1)), ["model_input", "-1", "0 to 9"]),
    "target too high": (make_datum(target_tokens=ints(1, 1, 10)), ["target_tokens", "10"]),
    "target below 0": (make_datum(target_tokens=ints(1, 1, -100)), ["target_tokens", "-100"]),
    "targets too short": (make_datum(target_tokens=ints(1, 1)), ["[2]", "[3] or [3, K]"]),
    "targets of rank 3": (
        make_datum(target_tokens=np.zeros((3, 1, 1), dtype=np.int64)),
        ["[3, 1, 1]", "[3] or [3, K]"],
    ),
    "no target": (
        make_datum(
            target_tokens=np.zeros((3, 0), dtype=np.int64),
            weights=np.zeros((3, 0), dtype=np.float32),
        ),
        ["[3, 0]"],
    ),
    "weights of another shape": (make_datum(weights=floats(1, 1)), ["'weights'", "[2]", "[3]"]),
    "targets as floats": (
        make_datum(target_tokens=floats(1, 1, 1)),
        ["target_tokens", "float32", "int64"],
    ),
    "weights as integers": (make_datum(weights=ints(1, 1, 1)), ["weights", "int64", "float32"]),
    "weights NaN": (make_datum(weights=floats(1, math.nan, 1)), ["weights", "nan", "finite"]),
    "weights inf": (make_datum(weights=floats(1, -math.inf, 1)), ["weights", "-inf", "finite"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_datum_is_refused_by_its_index(case):
    datum, words = REFUSED[case]
    with pytest.raises(UserError) as caught:
        check(make_datum(), datum)
    assert all(word in str(caught.value) for word in ["data[1]", *words])


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_policy_inputs_must_be_finite(name):
    with pytest.raises(UserError, match=rf"data\[0\].*{name}.*nan"):
        check(make_policy_datum(**{name: floats(0, 0, math.nan)}), loss_fn="ppo")


def test_policy_losses_take_one_target_for_a_position():
    wide = {"target_tokens": np.zeros((3, 2), dtype=np.int64)}
    with pytest.raises(UserError, match=r"\[3, 2\]; accepted: \[3\],"):
        check(make_policy_datum(**wide), loss_fn="ppo")


def test_empty_data_is_refused():
    with pytest.raises(UserError, match="data is empty"):
        check()


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("ppo", {"beta": 0.1}, "'beta' is unknown to 'ppo'; accepted: 'clip_low_threshold'"),
        ("cross_entropy", {"beta": 0.1}, "accepted: none"),
        ("dro", {"beta": math.nan}, "'beta' is nan; it must be a finite number"),
        ("dro", {"beta": math.inf}, "'beta' is inf"),
        ("dro", {"beta": "0.1"}, "'beta' is '0.1'; it must be a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "1.3 is above clip_high_threshold 1.2"),
    ],
)
def test_malformed_config_is_refused(loss_fn, config, message):
    with pytest.raises(UserError, match=message):
        check(make_policy_datum(), loss_fn=loss_fn, config=config)


def test_defaults_fill_what_the_config_leaves_out():
    assert resolve_config("ppo", {}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert resolve_config("cispo", {"clip_high_threshold": 5}) == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 5.0,
    }
    assert resolve_config("dro", {}) == {"beta": 0.05}


@pytest.mark.parametrize("module", ["hosted_tinker.loss_specs", "hosted_tinker.training.fake"])
def test_torch_is_not_imported(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
