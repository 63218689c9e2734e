"""Which adapters the engine holds: read on first use, the least recently used leaves first.

An adapter's name never stands for other weights, so a held adapter is never stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from torch import Tensor

from hosted_tinker.errors import UserError
from hosted_tinker.modeling.adapter_files import load_adapter_weights
from hosted_tinker.modeling.lora import LoraModel
from hosted_tinker.types import AdapterRef


def find_key(name: str) -> str:
    """Under which an adapter is on a `LoraModel`. Training may share it, with its runs' ids as keys."""
    return f"sampled:{name}"


class AdapterCache:
    """The adapters on a `LoraModel`."""

    def __init__(self, lora: LoraModel, max_adapters: int) -> None:
        self._lora = lora
        self._max_adapters = max_adapters
        self._held: OrderedDict[str, None] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """Names, the least recently used first."""
        return list(self._held)

    def ensure_loaded(self, ref: AdapterRef, in_use: Collection[str]) -> bool:
        """Makes the adapter ready, if there is room; false if all held adapters are in use.

        Raises:
            UserError: its files can't be read, or do not fit the base model.
        """
        if ref.name not in self._held:
            evicted = self._choose_evicted(in_use)
            if evicted is None and len(self._held) >= self._max_adapters:
                return False
            state = load_adapter_weights(ref.directory)
            check_fits(state, self._lora, ref.name)
            if evicted is not None:
                self._lora.remove_adapter(find_key(evicted))
                del self._held[evicted]
            self._lora.set_adapter(find_key(ref.name), state)
            self._held[ref.name] = None
        self._held.move_to_end(ref.name)
        return True

    def _choose_evicted(self, in_use: Collection[str]) -> str | None:
        """None if there is room for one more, or nothing that could leave."""
        if len(self._held) < self._max_adapters:
            return None
        return next((name for name in self._held if name not in in_use), None)


def check_fits(state: Mapping[str, Tensor], lora: LoraModel, name: str) -> None:
    """Raises UserError for weights that `LoraModel.set_adapter` has no layer for."""
    layers = {key.rsplit(".lora_", 1)[0] for key in state}
    for layer_name in sorted(layers):
        layer = lora.layers.get(layer_name)
        A = state.get(f"{layer_name}.lora_A.weight")
        B = state.get(f"{layer_name}.lora_B.weight")
        fits = (
            layer is not None
            and A is not None
            and B is not None
            and A.shape[0] == B.shape[1]
            and (B.shape[0], A.shape[1]) == tuple(layer.base.weight.shape)
        )
        if not fits:
            raise UserError(
                f"weights {name!r} do not fit the base model: layer {layer_name!r} of the adapter"
            )
