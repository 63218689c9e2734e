"""What every route needs: the server, and answers in one form."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from hosted_tinker.errors import NotFoundError
from hosted_tinker.futures import Future
from hosted_tinker.server import Server


def get_server(request: Request) -> Server:
    return request.app.state.server


ServerDep = Annotated[Server, Depends(get_server)]


def accepted(future: Future, model_id: str | None = None) -> dict[str, Any]:
    """The answer to a request whose result comes later."""
    answer = {"request_id": future.request_id}
    return answer if model_id is None else {**answer, "model_id": model_id}


def check_run_in_memory(server: Server, model_id: str) -> None:
    """Raises NotFoundError, with what to do, for a run that can't be trained now."""
    if server.training.has_run(model_id):
        return
    server.metadata.get_run(model_id)
    raise NotFoundError(
        f"training run {model_id!r} is not in memory: its session ended or the server was "
        "restarted; create a training client from its last checkpoint"
    )


def seq_id_or_next(server: Server, model_id: str, seq_id: int | None) -> int:
    """Old clients send no number."""
    return server.training.next_seq_id(model_id) if seq_id is None else seq_id
