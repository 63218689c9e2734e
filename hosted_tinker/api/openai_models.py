"""/v1/models, and what a model id stands for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from hosted_tinker.api.context import ServerDep
from hosted_tinker.base_adapter import BASE_PREFIX
from hosted_tinker.errors import NotFoundError, UserError
from hosted_tinker.served_weights import ServedWeights
from hosted_tinker.server import Server
from hosted_tinker.store.records import Checkpoint, RunWeights
from hosted_tinker.tinker_path import CheckpointKind, parse_tinker_path

router = APIRouter()

VERSION_MARK = "@"
"""Between a run's id and a version in the name of an adapter."""


@router.get("/models")
async def list_models(server: ServerDep) -> dict[str, Any]:
    """The base model under its names, runs by their ids, sampler checkpoints by their paths."""
    models = [encode_base(server, name) for name in server.names.names]
    weights = {one.model_id: one for one in server.metadata.list_run_weights()}
    live = [id for id in server.training.list_run_ids() if server.metadata.has_run(id)]
    for model_id in dict.fromkeys([*live, *weights]):
        models.append(encode_run(server, model_id, weights.get(model_id)))
    checkpoints, _ = server.metadata.list_checkpoints()
    models += [
        encode_kept(server, str(one.path), one) for one in checkpoints if is_for_sampling(one)
    ]
    return {"object": "list", "data": models}


@router.get("/models/{model:path}")
async def get_model(model: str, server: ServerDep) -> dict[str, Any]:
    """Any id that a request may name."""
    if model in server.names or model.startswith(BASE_PREFIX):
        return encode_base(server, model)
    if names_kept(model):
        return encode_kept(server, model, find_kept(server, model))
    if server.metadata.has_run(model):
        return encode_run(server, model, server.metadata.find_run_weights(model))
    raise make_unknown(server, model)


async def find_weights(server: Server, model: str) -> ServedWeights:
    """What the id stands for now. The caller must hold the adapter before it awaits anything else.

    Raises:
        NotFoundError: it is none of the ids that are served.
        HostedTinkerError: the run's newest weights can't be had.
    """
    if model in server.names:
        run = find_newest_run(server) if server.settings.serve_latest else None
        return ServedWeights(model, None) if run is None else await find_run(server, model, run)
    if model.startswith(BASE_PREFIX):
        return ServedWeights(model, None)
    if names_kept(model):
        return to_served(server, model, find_kept(server, model))
    if server.metadata.has_run(model):
        return await find_run(server, model, model)
    raise make_unknown(server, model)


async def find_run(server: Server, model: str, model_id: str) -> ServedWeights:
    return to_served(server, model, await server.newest.get(model_id))


def names_kept(model: str) -> bool:
    """Whether the id is of certain weights: a checkpoint's path, or a version."""
    return model.startswith("tinker://") or VERSION_MARK in model


def find_kept(server: Server, model: str) -> Checkpoint | RunWeights:
    """Raises UserError for a checkpoint that can't be sampled, NotFoundError if it is not kept."""
    if not model.startswith("tinker://"):
        return find_version(server, model)
    path = parse_tinker_path(model)
    if path.kind is not CheckpointKind.SAMPLER:
        raise UserError(
            f"model {model!r} is a training checkpoint; sampling needs one of "
            "save_weights_for_sampler (tinker://MODEL_ID/sampler_weights/NAME)"
        )
    return server.metadata.get_checkpoint(path)


def find_version(server: Server, model: str) -> Checkpoint | RunWeights:
    """An adapter by the name that an earlier answer gave, as long as something keeps it."""
    model_id, _, version = model.rpartition(VERSION_MARK)
    weights = server.metadata.find_run_weights(model_id)
    if weights is not None and weights.version == version:
        return weights
    checkpoint = server.metadata.find_checkpoint_of_version(model_id, version)
    if checkpoint is None or not is_for_sampling(checkpoint):
        raise NotFoundError(
            f"model {model!r}: this version of the run's weights is not kept any more; ask for "
            f"the run's newest, {model_id!r}, or for a sampler checkpoint"
        )
    return checkpoint


def to_served(server: Server, model: str, kept: Checkpoint | RunWeights) -> ServedWeights:
    adapter = server.files.resolve_adapter(kept.adapter)
    return ServedWeights(model, adapter, get_run_id(kept), kept.step)


def get_run_id(kept: Checkpoint | RunWeights) -> str:
    return kept.model_id if isinstance(kept, RunWeights) else kept.path.model_id


def find_newest_run(server: Server) -> str | None:
    """The run created last of those that have weights."""
    live = [id for id in server.training.list_run_ids() if server.metadata.has_run(id)]
    ended = [weights.model_id for weights in server.metadata.list_run_weights()]
    return max(
        {*live, *ended},
        key=lambda model_id: server.metadata.get_run(model_id).created_at,
        default=None,
    )


def is_for_sampling(checkpoint: Checkpoint) -> bool:
    return checkpoint.path.kind is CheckpointKind.SAMPLER


def make_unknown(server: Server, model: str) -> NotFoundError:
    return NotFoundError(
        f"model {model!r} does not exist; accepted: {', '.join(server.names.names)}, the id of a "
        "training run, or the tinker:// path of a sampler checkpoint (GET /v1/models lists them)"
    )


def encode_base(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(server.started_at),
        "owned_by": "hosted-tinker",
        "root": name,
        "parent": None,
        "max_model_len": server.sampler.context_length,
    }


def encode_run(server: Server, model_id: str, weights: RunWeights | None) -> dict[str, Any]:
    """`step` and `adapter` are of the weights that would answer a request that came now, or None
    while they wait for the first request."""
    if weights is not None:
        return encode_kept(server, model_id, weights)
    run = server.metadata.get_run(model_id)
    return {
        **encode_base(server, run.base_model),
        "id": model_id,
        "created": int(run.created_at),
        "parent": run.base_model,
        "run": model_id,
        "step": None,
        "adapter": None,
    }


def encode_kept(server: Server, id: str, kept: Checkpoint | RunWeights) -> dict[str, Any]:
    run = server.metadata.get_run(get_run_id(kept))
    return {
        **encode_base(server, run.base_model),
        "id": id,
        "created": int(kept.created_at),
        "parent": run.base_model,
        "run": run.model_id,
        "step": kept.step,
        "adapter": kept.adapter.name,
    }
