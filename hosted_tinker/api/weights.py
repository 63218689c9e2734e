"""save_weights, save_weights_for_sampler, load_weights, weights_info."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter

from hosted_tinker.api.context import ServerDep, accepted, check_run_in_memory, seq_id_or_next
from hosted_tinker.api.models import check_optimizer, close_if_session_ended, make_model_id
from hosted_tinker.api.sampling import make_sampling_session_id
from hosted_tinker.checkpoints import SaveOptions
from hosted_tinker.errors import UserError
from hosted_tinker.run_queue import CREATE_SEQ_ID, Job
from hosted_tinker.run_state import RunProgress
from hosted_tinker.server import Server
from hosted_tinker.store.records import Checkpoint, RunRecord
from hosted_tinker.tinker_path import (
    CheckpointKind,
    TinkerPath,
    parse_checkpoint_name,
    parse_tinker_path,
)
from hosted_tinker.types import CaptureState, LoadState, LoraConfig, NamedResult
from hosted_tinker.wire.schemas import LoadWeightsRequest, SaveWeightsRequest, WeightsInfoRequest

router = APIRouter()

MAX_TTL_SECONDS = 10 * 365 * 24 * 3600
"""Ten years, as the SDK documents it."""


@router.post("/save_weights")
async def save_weights(body: SaveWeightsRequest, server: ServerDep) -> dict[str, Any]:
    return submit_named_save(server, body, CheckpointKind.TRAINING)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: SaveWeightsRequest, server: ServerDep) -> dict[str, Any]:
    """Named, or for one sampling session. Both are snapshots that later steps never change."""
    if body.sampling_session_seq_id is None:
        return submit_named_save(server, body, CheckpointKind.SAMPLER)
    check_run_in_memory(server, body.model_id)
    run = server.metadata.get_run(body.model_id)
    session_id = make_sampling_session_id(run.session_id, body.sampling_session_seq_id)

    async def save(snapshot_id: str, _step: int) -> NamedResult:
        adapter = await server.saver.save_ephemeral(snapshot_id, run, session_id)
        await server.preload(adapter)
        return NamedResult({"sampling_session_id": session_id})

    return submit_save(server, body, CheckpointKind.SAMPLER, save)


def submit_named_save(
    server: Server, body: SaveWeightsRequest, kind: CheckpointKind
) -> dict[str, Any]:
    check_run_in_memory(server, body.model_id)
    seq_id = seq_id_or_next(server, body.model_id, body.seq_id)
    options = SaveOptions(body.ttl_seconds, bool(body.overwrite), body.user_metadata or {})
    error: UserError | None = None
    path = TinkerPath(body.model_id, kind, f"{seq_id:06d}" if body.path is None else body.path)
    try:
        parse_checkpoint_name(path.name)
        check_ttl(body.ttl_seconds)
        server.saver.check_name(path, options)
    except UserError as raised:
        error = raised

    async def save(snapshot_id: str, step: int) -> NamedResult:
        checkpoint = await server.saver.save_named(snapshot_id, path, options, step=step)
        if kind is CheckpointKind.SAMPLER:
            await server.preload(checkpoint.adapter)
        return NamedResult({"path": str(path)})

    return submit_save(server, body, kind, save, error)


def submit_save(
    server: Server,
    body: SaveWeightsRequest,
    kind: CheckpointKind,
    save: Callable[[str, int], Awaitable[NamedResult]],
    error: UserError | None = None,
) -> dict[str, Any]:
    """The capture has its turn among the run's requests; writing goes on beside the next ones.

    `save` gets the snapshot's id, and how many optimizer steps are behind it.
    """
    seq_id = seq_id_or_next(server, body.model_id, body.seq_id)
    future, is_new = server.futures.create(("train", body.model_id, seq_id))
    if not is_new:
        return accepted(future, body.model_id)
    snapshot_id = uuid.uuid4().hex
    capture = CaptureState(
        body.model_id, snapshot_id, with_optimizer=kind is CheckpointKind.TRAINING
    )

    async def finish(captured: RunProgress) -> NamedResult:
        return await save(snapshot_id, captured.step)

    server.metadata.touch_run(body.model_id)
    server.training.submit(Job(body.model_id, seq_id, error or capture, future, finish))
    return accepted(future, body.model_id)


def check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        raise UserError(f"ttl_seconds = {ttl_seconds}; accepted: 1 to {MAX_TTL_SECONDS}, or none")


@router.post("/load_weights")
async def load_weights(body: LoadWeightsRequest, server: ServerDep) -> dict[str, Any]:
    """Onto a run, or creating one of the checkpoint's shape."""
    check_optimizer(body.optimizer_config)
    if body.base_model is not None:
        server.names.check(body.base_model)
    if body.model_id is not None:
        check_run_in_memory(server, body.model_id)
        seq_id = seq_id_or_next(server, body.model_id, body.seq_id)
        return submit_load(server, body, body.model_id, seq_id)
    if body.session_id is None or body.model_seq_id is None:
        raise UserError("load_weights needs model_id, or session_id and model_seq_id")
    server.metadata.get_live_session(body.session_id)
    model_id = make_model_id(body.session_id, body.model_seq_id)
    if not server.training.has_run(model_id):
        server.training.add_run(model_id)
    return submit_load(server, body, model_id, CREATE_SEQ_ID)


def submit_load(
    server: Server, body: LoadWeightsRequest, model_id: str, seq_id: int
) -> dict[str, Any]:
    future, is_new = server.futures.create(("train", model_id, seq_id))
    if not is_new:
        return accepted(future, model_id)
    creates = body.model_id is None
    work: LoadState | UserError
    step = 0
    try:
        checkpoint, source = find_training_checkpoint(server, body.path)
        directory = server.files.resolve(checkpoint.directory)
        work = LoadState(model_id, directory, with_optimizer=bool(body.optimizer), create=creates)
        step = checkpoint.step or 0
    except UserError as raised:
        work, source = raised, None

    async def finish(_output: object) -> NamedResult:
        if creates and source is not None:
            add_resumed_run(server, body, model_id, source)
            await server.check_sampler_serves(model_id)
            close_if_session_ended(server, model_id)
        return NamedResult({"type": "load_weights", "path": body.path, "model_id": model_id})

    server.training.submit(Job(model_id, seq_id, work, future, finish, loaded_step=step))
    return accepted(future, model_id)


def find_training_checkpoint(server: Server, uri: str) -> tuple[Checkpoint, RunRecord]:
    """Raises UserError for a path that is no training checkpoint."""
    path = parse_tinker_path(uri)
    if path.kind is not CheckpointKind.TRAINING:
        raise UserError(
            f"path {uri!r} is for sampling; training continues from one of save_state "
            "(tinker://MODEL_ID/weights/NAME)"
        )
    checkpoint, run = server.metadata.get_checkpoint(path), server.metadata.get_run(path.model_id)
    server.names.check(run.base_model)
    return checkpoint, run


def add_resumed_run(
    server: Server, body: LoadWeightsRequest, model_id: str, source: RunRecord
) -> None:
    """Records the new run, under the base model's name that the old one had."""
    assert body.session_id is not None
    lora = LoraConfig(
        lora_rank=source.lora_rank,
        seed=0,
        train_attn=source.train_attn,
        train_mlp=source.train_mlp,
        train_unembed=source.train_unembed,
    )
    base_model = body.base_model or source.base_model
    server.metadata.add_run(
        model_id, body.session_id, base_model, lora, body.user_metadata or source.user_metadata
    )


@router.post("/weights_info")
async def weights_info(body: WeightsInfoRequest, server: ServerDep) -> dict[str, Any]:
    path = parse_tinker_path(body.tinker_path)
    server.metadata.get_checkpoint(path)
    run = server.metadata.get_run(path.model_id)
    return {
        "base_model": run.base_model,
        "is_lora": True,
        "lora_rank": run.lora_rank,
        "train_unembed": run.train_unembed,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
    }
