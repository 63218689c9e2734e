"""The server's state: what the routes of `api` act on, and the tasks that keep it going."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sqlite3
import time
from pathlib import Path
from typing import Literal, TextIO

import aiohttp

from hosted_tinker.adapter_holds import AdapterHolds
from hosted_tinker.base_adapter import BaseAdapter
from hosted_tinker.checkpoints import CheckpointSaver
from hosted_tinker.default_model import DEFAULT_MODEL_NAME, ensure_default_model
from hosted_tinker.errors import HostedTinkerError, SettingsError, UnservableError
from hosted_tinker.futures import Futures
from hosted_tinker.model_names import ModelNames
from hosted_tinker.replicas.gpus import list_gpus, measure_weights, place_on_gpus, shares_device
from hosted_tinker.replicas.launch import make_replicas, open_http_session
from hosted_tinker.replicas.pool import ReplicaPool
from hosted_tinker.run_weights import NewestWeights, WeightsStore
from hosted_tinker.samplers import EmbeddedSampler, choose_sampler
from hosted_tinker.sampling_scheduler import SamplingScheduler
from hosted_tinker.settings import Settings
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
CHECK_TIMEOUT_S = 60.0
"""How long the creation of a run waits for a sampler that is being started anew."""


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
        self.metadata.delete_outdated_run_weights()
        self.futures = Futures(settings.result_ttl_s)
        self.names = ModelNames(known_names(settings), find_tokenizer(settings))
        self.started_at = time.time()
        self.loading_phase = "starting"
        self.is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._has_failed = False
        self._http: aiohttp.ClientSession | None = None
        self.holds = AdapterHolds()
        self._gpus = list_gpus()
        is_shared = shares_device(settings, self._gpus)
        self.trainer = WorkerGroup(
            "shared" if is_shared else "trainer",
            on_restart=lambda: self.training.mark_all_lost(),
        )
        self.pool = ReplicaPool(settings.vllm_start_timeout_s) if settings.uses_vllm else None
        self.embedded: EmbeddedSampler | None = None
        if settings.uses_embedded_engine:
            alone = None if is_shared else WorkerGroup("sampler", on_restart=lambda: None)
            self.embedded = EmbeddedSampler(alone or self.trainer)
        self.sampler = choose_sampler(self.pool, self.embedded, self.trainer)
        self.sampling = SamplingScheduler(
            self.sampler, self.futures, self.holds, max_queued=settings.max_queued_samples
        )
        self.training = TrainingScheduler(
            self.trainer,
            self.futures,
            gap_s=settings.effective_sequence_gap_s,
            joint_tokens=settings.joint_tokens,
            on_new_weights=self._note_change,
            may_close=self._may_close,
        )
        self.saver = CheckpointSaver(self.trainer, self.files, self.metadata)
        self.newest = NewestWeights(
            self.training,
            self.sampler,
            self.saver,
            WeightsStore(self.files, self.metadata, self.holds),
            settings.adapter_sync,
        )

    async def start(self) -> None:
        """Begins to load the model; returns once it is loaded.

        Raises:
            HostedTinkerError: the model can't be loaded. The message is for the operator.
        """
        base_model = await self._find_base_model()
        backend_config = place_on_gpus(self.settings, self._gpus, measure_weights(base_model))
        for group in self._groups:
            spec = WorkerSpec(group.role, base_model, self.settings.backend, backend_config)
            group.start([spec])
        self._tasks = [
            asyncio.create_task(self.training.run_forever()),
            asyncio.create_task(self._keep_up()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._note_end)
        if self.pool is not None:
            self._http = open_http_session()
            names = self.names.names
            base_adapter = BaseAdapter(self.trainer, self.settings.state_dir)
            self.pool.start(
                make_replicas(self.settings, base_model, names, self._http, base_adapter.get)
            )
        await asyncio.gather(self.trainer.wait_ready(), self.sampler.wait_ready())

    @property
    def _groups(self) -> list[WorkerGroup]:
        """One for both where training and sampling share a device."""
        embedded = [self.embedded.group] if self.embedded else []
        return list(dict.fromkeys([self.trainer, *embedded]))

    def begin_stop(self) -> None:
        """Wakes held polls. Requests that still run after a grace period are cancelled."""
        self.is_stopping = True
        self.futures.release_waiters()

    async def stop(self) -> None:
        """Ends the workers once checkpoints that are being written are complete."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.training.drain(DRAIN_TIMEOUT_S)
        await self.newest.stop()
        pools = [self.pool] if self.pool else []
        await asyncio.gather(*(part.stop() for part in (*self._groups, *pools)))
        if self._http is not None:
            await self._http.close()
        self.metadata.close()
        self._lock.close()

    @property
    def status(self) -> Literal["loading", "ok", "failed"]:
        """`ok` when both training and sampling are ready, `failed` when one can't be again."""
        states = {self.trainer.state, self.sampler.state}
        if GroupState.FAILED in states or self._has_failed:
            return "failed"
        return "ok" if states == {GroupState.READY} else "loading"

    def describe_loading(self) -> str:
        """What is being done before the server is ready."""
        if self.loading_phase != "workers":
            return self.loading_phase
        if self._groups == [self.trainer] and self.pool is None:
            return self.trainer.phase
        return f"trainer: {self.trainer.phase}, sampler: {self.sampler.phase}"

    async def check_sampler_serves(self, model_id: str) -> None:
        """Publishes a new run's first weights where vLLM samples, before the run trains for hours.

        Raises:
            UnservableError: vLLM refuses an adapter of its shape. The run is forgotten.
        """
        if self.pool is None:
            return
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self.pool.wait_ready()
            await self.newest.get(model_id)
        except UnservableError:
            self.metadata.delete_run(model_id)
            raise
        except (TimeoutError, HostedTinkerError) as error:
            logger.warning("run not checked with the sampler model_id=%s: %r", model_id, error)

    async def preload(self, adapter: AdapterRef) -> None:
        """Loads new weights into the sampler; if that fails now, the first request tries again."""
        resolved = self.files.resolve_adapter(adapter)
        with self.holds.hold(resolved):
            try:
                await self.sampler.load(resolved)
            except HostedTinkerError as error:
                logger.warning("adapter not preloaded name=%s error=%s", adapter.name, error)

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

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Of a task that never ends by itself: without it requests would wait for ever."""
        if not task.cancelled():
            logger.critical("the server is broken, start it anew", exc_info=task.exception())
            self._has_failed = True

    def _note_change(self, model_id: str) -> None:
        self.newest.note_change(model_id)

    def _may_close(self, model_id: str) -> bool:
        return self.newest.may_close(model_id)

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
        self.newest.forget_ended(self.settings.ended_run_ttl_s)
        unused = self.files.list_unused(self.metadata.list_directories_in_use())
        removable = await self._take_from_sampler(set(unused) - self.holds.directories)
        await asyncio.to_thread(self.files.remove, removable)

    async def _take_from_sampler(self, directories: set[Path]) -> list[Path]:
        """Those of the directories that no engine can read any more.

        vLLM ends if it looks for the files of an adapter that it knows and they are gone.
        """
        for name, directory in self.sampler.held_adapters.items():
            if directory in directories:
                await self.sampler.unload(name)
        still_held = set(self.sampler.held_adapters.values())
        return [directory for directory in directories if directory not in still_held]


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
