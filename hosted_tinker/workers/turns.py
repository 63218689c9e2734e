"""Who computes next on a device that training and sampling share."""

from __future__ import annotations

from typing import Literal

Side = Literal["training", "sampling"]


class Turns:
    """Weighted fair queueing of two flows (Goyal et al. 1996, start-time fair queueing).

    Each side's clock runs by the seconds that it used over its share; whose clock is behind goes
    next. A side that had nothing to do gets nothing for that time: its clock is set to where the
    last slice of the device began.
    """

    def __init__(self, sampling_share: float) -> None:
        """`sampling_share` is above 0 and below 1."""
        self._shares: dict[Side, float] = {
            "training": 1 - sampling_share,
            "sampling": sampling_share,
        }
        self._clocks: dict[Side, float] = {"training": 0.0, "sampling": 0.0}
        self._last_start = 0.0

    @property
    def sampling_is_due(self) -> bool:
        """Whether sampling goes next where both could."""
        return self._clocks["sampling"] < self._clocks["training"]

    def begin(self, side: Side) -> None:
        """The side has something to do again."""
        self._clocks[side] = max(self._clocks[side], self._last_start)

    def charge(self, side: Side, seconds: float) -> None:
        """The side has used the device."""
        self._last_start = self._clocks[side]
        self._clocks[side] += seconds / self._shares[side]
