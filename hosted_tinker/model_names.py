"""Under which names clients may ask for the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hosted_tinker.errors import UserError


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`names[0]` is the one that the server uses where it names the model itself.

    `tokenizer_id` is what a client on this machine can load the tokenizer from: a hub id or a
    directory.
    """

    names: Sequence[str]
    tokenizer_id: str

    def __contains__(self, name: str) -> bool:
        """Whether it is one of the names, with or without a suffix."""
        return name in self.names or name.split(":", 1)[0] in self.names

    def check(self, name: str) -> str:
        """Returns `name`. Raises UserError if it is none of the names."""
        if name in self:
            return name
        raise UserError(
            f"base model {name!r} is not served here; accepted: {', '.join(self.names)} "
            "(a ':suffix' is ignored)"
        )
