"""The server's state: what the routes of `api` act on, and the tasks that keep it going."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO

from hosted_tinker.checkpoints import CheckpointSaver
from hosted_tinker.config import Settings
from hosted_tinker.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from hosted_tinker.errors import SettingsError
from hosted_tinker.futures import Futures
from hosted_tinker.model_names import ModelNames
from hosted_tinker.sampling_scheduler import SamplingScheduler
from hosted_tinker.store.checkpoint_files import CheckpointFiles
from hosted_tinker.store.database import open_database
from hosted_tinker.store.metadata import Metadata
from hosted_tinker.training_scheduler import TrainingScheduler
from hosted_tinker.types import AdapterRef
from hosted_tinker.workers.group import GroupState, WorkerGroup
from hosted_tinker.workers.messages import WorkerSpec

logger = logging.getLogger(__name__)

UPKEEP_INTERVAL_S = 30.0
DRAIN_TIMEOUT_S = 60.0


class Server:
    """Everything with a life of its own. `start` and `stop` say in which order.

    Raises:
        SettingsError: the state directory can't be used.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = lock_state_dir(settings.state_dir)
        self.files = CheckpointFiles(settings.state_dir)
        self.files.prepare()
        self.metadata = Metadata(open_database(settings.state_dir / "metadata.sqlite"))
        self.futures = Futures(settings.result_ttl_s)
        self.names = ModelNames(known_names(settings), find_tokenizer(settings))
        self.loading_phase = "starting"
        self._tasks: list[asyncio.Task[None]] = []
        self.trainer = WorkerGroup("trainer", on_restart=lambda: self.training.mark_all_lost())
        self.sampler = WorkerGroup("sampler", on_restart=lambda: None)
        self.training = TrainingScheduler(
            self.trainer, self.futures, gap_s=settings.effective_sequence_gap_s
        )
        self.sampling = SamplingScheduler(
            self.sampler, self.futures, max_queued=settings.max_queued_samples
        )
        self.saver = CheckpointSaver(self.trainer, self.files, self.metadata)

    async def start(self) -> None:
        """Begins to load the model; returns once it is loaded.

        Raises:
            HostedTinkerError: the model can't be loaded. The message is for the operator.
        """
        base_model = await self._find_base_model()
        for group in (self.trainer, self.sampler):
            group.start(
                [
                    WorkerSpec(
                        group.role, base_model, self.settings.backend, self.settings.backend_config
                    )
                ]
            )
        self._tasks = [
            asyncio.create_task(self.training.run_forever()),
            asyncio.create_task(self._keep_up()),
        ]
        await asyncio.gather(self.trainer.wait_ready(), self.sampler.wait_ready())

    async def stop(self) -> None:
        """Ends the workers once checkpoints that are being written are complete."""
        await self.training.drain(DRAIN_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.trainer.stop(), self.sampler.stop())
        self.metadata.close()
        self._lock.close()

    @property
    def status(self) -> Literal["loading", "ok", "failed"]:
        """`ok` when both training and sampling are ready, `failed` when one can't be again."""
        states = {self.trainer.state, self.sampler.state}
        if GroupState.FAILED in states:
            return "failed"
        return "ok" if states == {GroupState.READY} else "loading"

    def describe_loading(self) -> str:
        """What is being done before the server is ready."""
        if self.loading_phase != "workers":
            return self.loading_phase
        return f"trainer: {self.trainer.phase}, sampler: {self.sampler.phase}"

    def resolve_adapter(self, adapter: AdapterRef | None) -> AdapterRef | None:
        """The same adapter with an absolute directory."""
        return adapter and replace(adapter, directory=self.files.resolve(adapter.directory))

    def finish_session(self, session_id: str, reason: str) -> None:
        """Ends a session: its runs leave memory after the requests they have."""
        self.metadata.finish_session(session_id, reason)
        for model_id in self.metadata.list_run_ids_of_session(session_id):
            self.training.close_run(model_id)
        logger.info("session finished session_id=%s reason=%s", session_id, reason)

    async def _find_base_model(self) -> str:
        if self.settings.base_model or self.settings.backend == "fake":
            self.loading_phase = "workers"
            return self.settings.base_model or DEFAULT_MODEL_NAME
        self.loading_phase = "preparing the default model"
        directory = await asyncio.to_thread(ensure_default_model, self._set_loading_phase)
        self.names = ModelNames(self.names.names, str(directory))
        self.loading_phase = "workers"
        return str(directory)

    def _set_loading_phase(self, phase: str) -> None:
        self.loading_phase = phase

    async def _keep_up(self) -> None:
        """Forgets what has expired."""
        while True:
            try:
                await self._forget_expired()
            except (OSError, sqlite3.Error):
                logger.exception("upkeep failed; it is tried again in %.0f s", UPKEEP_INTERVAL_S)
            await asyncio.sleep(UPKEEP_INTERVAL_S)

    async def _forget_expired(self) -> None:
        self.futures.drop_expired()
        idle_since = time.time() - self.settings.session_timeout_s
        for session_id in self.metadata.list_idle_session_ids(idle_since):
            self.finish_session(session_id, "timeout")
        self.metadata.delete_expired_checkpoints()
        unused = self.files.list_unused(self.metadata.list_directories_in_use())
        await asyncio.to_thread(self.files.remove, unused)


def lock_state_dir(directory: Path) -> TextIO:
    """The open lock file; closing it gives the directory free.

    Raises:
        SettingsError: the directory can't be made, or another server uses it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise SettingsError(f"state_dir {directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise SettingsError(f"state_dir {directory} is in use by another server") from error
    return lock


def known_names(settings: Settings) -> list[str]:
    """The model's own name first, then those that the operator gave it."""
    return [settings.base_model or DEFAULT_MODEL_NAME, *settings.served_model_name]


def find_tokenizer(settings: Settings) -> str:
    """A directory is made absolute: clients may run elsewhere on this machine."""
    name = settings.base_model or DEFAULT_MODEL_NAME
    return str(Path(name).resolve()) if Path(name).is_dir() else name
