"""Which positions a step computes: one of every sequence that decodes, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Sequence


def plan_step(pending: Sequence[int], max_tokens: int) -> list[int]:
    """How many positions of each sequence a step computes.

    Every sequence that decodes goes on by its one position, whatever waits beside it. What is left
    of the budget goes to prompts, in the order in which they came, and at least one position does:
    a prompt is never starved.

    Args:
        pending: positions that each sequence has yet to compute, first come first.
        max_tokens: the budget.
    """
    room = max(1, max_tokens - sum(count == 1 for count in pending))
    plan: list[int] = []
    for count in pending:
        taken = 1 if count == 1 else min(count, room)
        if count > 1:
            room -= taken
        plan.append(taken)
    return plan
