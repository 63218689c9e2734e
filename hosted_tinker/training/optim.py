"""AdamW on one run's adapter, with its state as named tensors.

torch.optim.AdamW does the arithmetic. Parameters of a step come with the step, as the API sends
them; gradients are accumulated in `Parameter.grad` by the backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hosted_tinker.errors import UserError
from hosted_tinker.types import AdamParams

STEP_KEY = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamOptimizer:
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Every parameter has its state from the start, zeros at step 0, so that saved states have one
    form.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._adamw = torch.optim.AdamW(list(parameters.values()))
        self._set_state(0.0, {key: torch.zeros_like(p) for p, key in self._moment_keys()})

    def step(self, adam: AdamParams) -> float:
        """Applies the accumulated gradient and clears it. No gradient counts as zero.

        Returns:
            The gradient's global 2-norm before clipping, computed in float32.

        Raises:
            UserError: the norm is not finite. Weights and moments stay as they are, and the
                gradient is cleared.
        """
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = compute_global_norm(gradients)
        if not math.isfinite(norm):
            self.clear_gradients()
            raise UserError(
                f"gradient norm is {norm}: no step was taken, the gradient was cleared. Look for "
                "very large weights, advantages or importance ratios in the data"
            )
        if 0 < adam.grad_clip_norm < norm:
            for gradient in gradients:
                gradient.mul_(adam.grad_clip_norm / norm)
        self._adamw.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._adamw.step()
        self.clear_gradients()
        return norm

    def clear_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The live state: `{parameter}.exp_avg`, `{parameter}.exp_avg_sq` and `step`, float32."""
        state = {key: self._adamw.state[p][key.rsplit(".", 1)[1]] for p, key in self._moment_keys()}
        first = next(iter(self.parameters.values()))
        return {**state, STEP_KEY: self._adamw.state[first]["step"]}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copies what `state_dict` gave, from any device. `check_optimizer_state` comes before."""
        moments = {
            key: state[key].to(p.device, torch.float32, copy=True) for p, key in self._moment_keys()
        }
        self._set_state(float(state[STEP_KEY]), moments)

    def _moment_keys(self) -> Iterable[tuple[nn.Parameter, str]]:
        for name, parameter in self.parameters.items():
            for moment in MOMENTS:
                yield parameter, f"{name}.{moment}"

    def _set_state(self, step: float, moments: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            self._adamw.state[parameter] = {
                # torch counts in float32 on the CPU, a tensor for each parameter.
                "step": torch.tensor(step, dtype=torch.float32),
                **{moment: moments[f"{name}.{moment}"] for moment in MOMENTS},
            }


def check_optimizer_state(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises UserError unless `state` belongs to an adapter of these parameter shapes."""
    wanted = {f"{name}.{moment}": shape for name, shape in shapes.items() for moment in MOMENTS}
    wanted[STEP_KEY] = torch.Size([])
    for key in sorted(wanted.keys() | state.keys()):
        found = tuple(state[key].shape) if key in state else "none"
        accepted = tuple(wanted[key]) if key in wanted else "none"
        if found != accepted:
            raise UserError(
                f"optimizer state of the checkpoint does not fit its adapter: {key!r} has shape "
                f"{found}, expected {accepted}"
            )


def compute_global_norm(tensors: Iterable[Tensor]) -> float:
    """2-norm over all elements; tensors may be on several devices."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
    return float(
        torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    )
