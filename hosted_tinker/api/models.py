"""create_model, get_info, unload_model."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter

from hosted_tinker.api.context import ServerDep, accepted, check_run_in_memory
from hosted_tinker.errors import UserError
from hosted_tinker.run_queue import CREATE_SEQ_ID, Job
from hosted_tinker.server import Server
from hosted_tinker.types import CreateModel, LoraConfig, NamedResult
from hosted_tinker.wire.schemas import (
    CreateModelRequest,
    LoraConfigJson,
    ModelIdRequest,
    OptimizerConfigJson,
)

router = APIRouter()


@router.post("/create_model")
async def create_model(body: CreateModelRequest, server: ServerDep) -> dict[str, Any]:
    server.metadata.get_live_session(body.session_id)
    server.names.check(body.base_model)
    check_optimizer(body.optimizer_config)
    model_id = make_model_id(body.session_id, body.model_seq_id)
    future, is_new = server.futures.create(("train", model_id, CREATE_SEQ_ID))
    if not is_new:
        return accepted(future, model_id)
    lora = to_lora_config(body.lora_config or LoraConfigJson())

    async def finish(_output: object) -> NamedResult:
        server.metadata.add_run(
            model_id, body.session_id, body.base_model, lora, body.user_metadata
        )
        await server.check_sampler_serves(model_id)
        close_if_session_ended(server, model_id)
        return NamedResult({"type": "create_model", "model_id": model_id})

    if not server.training.has_run(model_id):
        server.training.add_run(model_id)
    work = CreateModel(model_id, lora)
    server.training.submit(Job(model_id, CREATE_SEQ_ID, work, future, finish))
    return accepted(future, model_id)


@router.post("/get_info")
async def get_info(body: ModelIdRequest, server: ServerDep) -> dict[str, Any]:
    run = server.metadata.get_run(body.model_id)
    base_model = server.trainer.base_model
    return {
        "type": "get_info",
        "model_id": run.model_id,
        "model_data": {
            "arch": base_model and base_model.architecture,
            "model_name": run.base_model,
            "tokenizer_id": server.names.tokenizer_id,
        },
        "model_name": run.base_model,
        "is_lora": True,
        "lora_rank": run.lora_rank,
    }


@router.post("/unload_model")
async def unload_model(body: ModelIdRequest, server: ServerDep) -> dict[str, Any]:
    check_run_in_memory(server, body.model_id)
    server.training.close_run(body.model_id)
    future, is_new = server.futures.create(("unload", body.model_id))
    if is_new:
        result = NamedResult({"type": "unload_model", "model_id": body.model_id})
        server.futures.settle(future, result)
    return accepted(future, body.model_id)


def close_if_session_ended(server: Server, model_id: str) -> None:
    """For a run whose creation was still queued when its session ended."""
    run = server.metadata.get_run(model_id)
    if server.metadata.get_session(run.session_id).finished_at is not None:
        server.training.close_run(model_id)


def make_model_id(session_id: str, model_seq_id: int) -> str:
    """The SDK computes the same id when it creates a client from a checkpoint."""
    return f"{session_id}:train:{model_seq_id}"


def to_lora_config(body: LoraConfigJson) -> LoraConfig:
    """A seed that the client left out is drawn here, so that it is known from now on."""
    return LoraConfig(
        lora_rank=body.rank,
        seed=secrets.randbits(31) if body.seed is None else body.seed,
        train_attn=body.train_attn,
        train_mlp=body.train_mlp,
        train_unembed=body.train_unembed,
    )


def check_optimizer(optimizer: OptimizerConfigJson | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise UserError(f"optimizer {optimizer.type!r} is not supported; accepted: adamw")
