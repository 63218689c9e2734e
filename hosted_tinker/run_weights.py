"""The newest weights of each run, ready to be sampled under the run's id.

A publication copies a run's adapter between two of its requests, writes it beside the next ones,
loads it into the sampler under a name of its own, and only then becomes what the run's id stands
for; the one before leaves the sampler after its last request. A run has one publication under way
at a time: what changes meanwhile is in the next one. What nobody has asked for is published in a small
share of the time only; a request, and the end of a run, does not wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
import uuid
from dataclasses import dataclass, field

from hosted_tinker.adapter_holds import AdapterHolds
from hosted_tinker.checkpoints import CheckpointSaver
from hosted_tinker.errors import HostedTinkerError, NotFoundError, WorkerFailedError
from hosted_tinker.samplers import Sampler
from hosted_tinker.settings import AdapterSync
from hosted_tinker.store.checkpoint_files import CheckpointFiles
from hosted_tinker.store.metadata import Metadata
from hosted_tinker.store.records import RunWeights
from hosted_tinker.training_scheduler import TrainingScheduler

logger = logging.getLogger(__name__)

FIRST_GENERATION = 1
"""The weights that a run was created with."""
UNASKED_SHARE = 0.05
"""Share of the time in which weights are published that no request waits for. Where sampler and
trainer share cores, as without GPUs, publishing slows training down (`benchmarks/sync.py`)."""


@dataclass(slots=True)
class Publication:
    """A run's published weights, and the task that publishes newer ones.

    Attributes:
        generation: of the published weights; 0 before the first.
        failure: why a generation could not be published.
        asked: set while somebody waits for newer weights.
        news: set, and replaced, whenever one of the others changes.
    """

    weights: RunWeights | None = None
    generation: int = 0
    failure: tuple[int, HostedTinkerError] | None = None
    task: asyncio.Task[None] | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class WeightsStore:
    """Where published weights are kept, and which of them requests are using."""

    files: CheckpointFiles
    metadata: Metadata
    holds: AdapterHolds


class NewestWeights:
    """Publishes runs' weights, and knows what a run's id stands for.

    The training scheduler calls `note_change` and `may_close`.
    """

    def __init__(
        self,
        training: TrainingScheduler,
        sampler: Sampler,
        saver: CheckpointSaver,
        store: WeightsStore,
        sync: AdapterSync,
    ) -> None:
        self._training = training
        self._sampler = sampler
        self._saver = saver
        self._files = store.files
        self._metadata = store.metadata
        self._holds = store.holds
        self._sync: AdapterSync = sync
        self._publications: dict[str, Publication] = {}
        self._rest_until = 0.0
        self._retiring: set[asyncio.Task[None]] = set()

    def note_change(self, model_id: str) -> None:
        """A run has new weights. Those that it was created with wait until they are asked for."""
        try:
            self._metadata.mark_run_weights_outdated(model_id)
        except sqlite3.Error:
            logger.exception("weights not marked as outdated model_id=%s", model_id)
        generation = self._training.get_progress(model_id).generation
        if self._sync == "every_step" and generation > FIRST_GENERATION:
            self._ensure_publishing(model_id)

    def may_close(self, model_id: str) -> bool:
        """Whether a run's last weights are published. Starts with it if not."""
        generation = self._training.get_progress(model_id).generation
        publication = self._publications.setdefault(model_id, Publication())
        if publication.task is not None:
            publication.asked.set()
            return False
        failed = publication.failure is not None and publication.failure[0] >= generation
        if failed and publication.weights is not None:
            # Older ones must not pass for the run's newest after it has ended.
            try:
                self._metadata.delete_run_weights(model_id)
            except sqlite3.Error:
                logger.exception("run is kept in memory model_id=%s", model_id)
                return False
        if failed or generation <= max(publication.generation, FIRST_GENERATION):
            del self._publications[model_id]
            return True
        publication.asked.set()
        self._ensure_publishing(model_id)
        return False

    async def get(self, model_id: str) -> RunWeights:
        """The run's weights at the time of the call, or newer ones.

        The caller must hold the adapter before it awaits anything else.

        Raises:
            NotFoundError: the run does not exist, or has ended without weights.
            HostedTinkerError: the weights can't be published.
        """
        if not self._training.has_run(model_id):
            return self._get_ended(model_id)
        wanted = max(self._training.get_progress(model_id).generation, FIRST_GENERATION)
        publication = self._publications.setdefault(model_id, Publication())
        while publication.weights is None or publication.generation < wanted:
            news = publication.news
            publication.asked.set()
            self._ensure_publishing(model_id)
            await news.wait()
            if publication.failure is not None and publication.failure[0] >= wanted:
                raise publication.failure[1].with_traceback(None)
        return publication.weights

    def forget_ended(self, ttl_s: float) -> None:
        """Drops the weights of runs that left memory longer ago than that."""
        for weights in self._metadata.list_run_weights():
            ended = not self._training.has_run(weights.model_id)
            if ended and weights.created_at < time.time() - ttl_s:
                self._metadata.delete_run_weights(weights.model_id)

    async def stop(self) -> None:
        """Ends what is under way."""
        tasks = [one.task for one in self._publications.values() if one.task is not None]
        for task in (*tasks, *self._retiring):
            task.cancel()
        await asyncio.gather(*tasks, *self._retiring, return_exceptions=True)

    def _get_ended(self, model_id: str) -> RunWeights:
        if weights := self._metadata.find_run_weights(model_id):
            return weights
        self._metadata.get_run(model_id)
        raise NotFoundError(
            f"training run {model_id!r} has ended and its weights are gone; ask for one of its "
            "sampler checkpoints (tinker://...), or train on from a checkpoint"
        )

    def _ensure_publishing(self, model_id: str) -> None:
        publication = self._publications.setdefault(model_id, Publication())
        if publication.task is None:
            publication.task = asyncio.create_task(self._publish(model_id, publication))

    async def _publish(self, model_id: str, publication: Publication) -> None:
        """Publishes until what is published is current, or can't be."""
        try:
            while True:
                asked = await self._rest(publication)
                started = time.monotonic()
                await self._publish_once(model_id, publication)
                if not asked:
                    took_s = time.monotonic() - started
                    self._rest_until = max(self._rest_until, started) + took_s / UNASKED_SHARE
                if not self._is_behind(model_id, publication):
                    return
        finally:
            publication.task = None
            announce(publication)
            self._training.wake()

    async def _rest(self, publication: Publication) -> bool:
        """Until it is time for weights that nobody waits for, or somebody does: then it is true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._rest_until - time.monotonic())):
                await publication.asked.wait()
        asked = publication.asked.is_set()
        publication.asked.clear()
        return asked

    def _is_behind(self, model_id: str, publication: Publication) -> bool:
        if self._sync == "on_request" or not self._training.has_run(model_id):
            return False
        current = self._training.get_progress(model_id).generation
        failed = publication.failure[0] if publication.failure else 0
        return current > max(publication.generation, failed)

    def _is_outdated(self, model_id: str, generation: int) -> bool:
        """Whether the run has had newer weights since."""
        has_run = self._training.has_run(model_id)
        return has_run and self._training.get_progress(model_id).generation > generation

    async def _publish_once(self, model_id: str, publication: Publication) -> None:
        started = time.monotonic()
        publication.failure = None
        snapshot_id = uuid.uuid4().hex
        generation = self._training.get_progress(model_id).generation
        try:
            progress = await self._training.capture(model_id, snapshot_id)
            generation = progress.generation
            version, directory = await self._saver.save_snapshot(snapshot_id)
            weights = RunWeights(model_id, version, directory, progress.step)
            adapter = self._files.resolve_adapter(weights.adapter)
            with self._holds.hold(adapter):
                await self._sampler.load(adapter)
                self._metadata.put_run_weights(weights)
                if self._is_outdated(model_id, generation):
                    self._metadata.mark_run_weights_outdated(model_id)
        except (HostedTinkerError, OSError, sqlite3.Error) as error:
            logger.warning("weights not published model_id=%s error=%s", model_id, error)
            publication.failure = (generation, to_own_error(error))
            announce(publication)
            return
        old = publication.weights
        publication.weights, publication.generation = weights, generation
        announce(publication)
        logger.info(
            "weights published adapter=%s step=%d ms=%.0f",
            adapter.name,
            weights.step,
            1000 * (time.monotonic() - started),
        )
        if old is not None:
            self._retire(old)

    def _retire(self, weights: RunWeights) -> None:
        task = asyncio.create_task(self._remove(weights))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _remove(self, weights: RunWeights) -> None:
        """Takes replaced weights out of the sampler, and then their files off the disk."""
        await self._holds.wait_free(weights.adapter.name)
        try:
            await self._sampler.unload(weights.adapter.name)
        except HostedTinkerError as error:
            # What still has them will be asked again by the server's upkeep.
            logger.warning("unload failed adapter=%s error=%s", weights.adapter.name, error)
            return
        if weights.directory not in self._metadata.list_directories_in_use():
            await asyncio.to_thread(self._files.remove, [self._files.resolve(weights.directory)])


def announce(publication: Publication) -> None:
    """Wakes those who wait for a change."""
    publication.news.set()
    publication.news = asyncio.Event()


def to_own_error(error: Exception) -> HostedTinkerError:
    """For those who wait: what went wrong with the disk or the database, as one of our errors."""
    if isinstance(error, HostedTinkerError):
        return error
    return WorkerFailedError(f"the run's weights can't be stored: {error}")
