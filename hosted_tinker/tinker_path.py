"""`tinker://{model_id}/{segment}/{name}`: the address of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hosted_tinker.errors import UserError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MODEL_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,199}")


class CheckpointKind(StrEnum):
    """What a checkpoint is for. The value is the SDK's `checkpoint_type`."""

    TRAINING = "training"
    SAMPLER = "sampler"

    @property
    def segment(self) -> str:
        """The middle part of the path."""
        return {"training": "weights", "sampler": "sampler_weights"}[self.value]


KIND_BY_SEGMENT = {kind.segment: kind for kind in CheckpointKind}


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A parsed path; `str()` gives the URI back."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """`weights/NAME` or `sampler_weights/NAME`."""
        return f"{self.kind.segment}/{self.name}"


def parse_tinker_path(uri: str) -> TinkerPath:
    """Raises UserError unless `uri` has the three parts that the SDK writes."""
    parts = uri.removeprefix("tinker://").split("/")
    if not uri.startswith("tinker://") or len(parts) != 3 or parts[1] not in KIND_BY_SEGMENT:
        raise UserError(
            f"path {uri!r} is not a checkpoint: expected tinker://MODEL_ID/SEGMENT/NAME with "
            f"SEGMENT one of {', '.join(KIND_BY_SEGMENT)}"
        )
    if not MODEL_ID_PATTERN.fullmatch(parts[0]):
        raise UserError(f"path {uri!r} has a malformed model id {parts[0]!r}")
    return TinkerPath(parts[0], KIND_BY_SEGMENT[parts[1]], parse_checkpoint_name(parts[2]))


def parse_checkpoint_name(name: str) -> str:
    """Returns `name`, or raises UserError if it can't be a directory of its own."""
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"checkpoint name {name!r} is not accepted: 1 to 200 letters, digits, '.', '_' or "
            "'-', starting with a letter or digit"
        )
    return name
