"""A task for inspect-ai with documents of its own."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message


@task
def animals() -> Task:
    return Task(
        dataset=[
            Sample(input="the quick brown fox", target="o"),
            Sample(input="the lazy dog jumps", target="o"),
        ],
        solver=[system_message("Answer in a word."), generate()],
        scorer=includes(),
    )
