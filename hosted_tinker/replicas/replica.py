"""One sampler replica: a vLLM server, its health, and what it holds.

A task watches it for life: starts the process where it is ours, waits until it answers, brings back
the adapters that it had, and begins anew when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hosted_tinker.errors import HostedTinkerError, SamplerDownError, SettingsError
from hosted_tinker.replicas.child import ChildSpec, VllmChild, check_can_start
from hosted_tinker.replicas.engine_client import (
    AdapterLostError,
    EngineClient,
    EngineModels,
    ReplicaGoneError,
)
from hosted_tinker.replicas.gate import Gate
from hosted_tinker.replicas.held_adapters import EngineDir, HeldAdapters
from hosted_tinker.replicas.sample_requests import (
    EngineFacts,
    adapts_unembedding,
    to_completion_body,
    to_sample_output,
)
from hosted_tinker.settings import Settings
from hosted_tinker.types import AdapterRef, Sample, SampleOutput
from hosted_tinker.workers.group import GroupState

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
WATCH_INTERVAL_S = 2.0
START_POLL_S = 0.5
MakeBaseAdapter = Callable[[], Awaitable[AdapterRef]]
"""An adapter that changes nothing, under which the base model is asked for."""
MAX_DEATHS = 5
"""A server of ours that dies this often within `DEATHS_WINDOW_S`, and answers nothing in between, is
not started again."""
DEATHS_WINDOW_S = 600.0
MAX_BACKOFF_S = 30.0


class Replica:
    """A server that is ours (`child`), or that runs already. `names` are the base model's."""

    def __init__(
        self,
        client: EngineClient,
        engine_dir: EngineDir,
        settings: Settings,
        names: Sequence[str],
        child: ChildSpec | None,
        make_base_adapter: MakeBaseAdapter,
    ) -> None:
        self.client = client
        self._names = names
        self._make_base_adapter = make_base_adapter
        self._base_adapter: AdapterRef | None = None
        self._gate = Gate()
        self.adapters = HeldAdapters(client, settings.vllm_max_cpu_loras, engine_dir)
        self.num_requests = 0
        self.state = GroupState.LOADING
        self.phase = "starting"
        self.facts: EngineFacts | None = None
        self.failure: HostedTinkerError | None = None
        self.changed = asyncio.Event()
        self._engine_dir = engine_dir
        self._start_timeout_s = settings.vllm_start_timeout_s
        self._spec = child
        self._on_cpu = settings.vllm_on_cpu
        self._child: VllmChild | None = None
        self._base_model = ""
        # vLLM mixes up whose output head gets which adapter when it scores a prompt: the CPU's
        # kernels always, the others once an adapter is on the head.
        self._scores_alone = settings.vllm_on_cpu
        self._has_scored_together = not settings.vllm_on_cpu
        self._suspect = asyncio.Event()
        self._deaths: list[float] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.client.url

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())
        self._task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._child is not None:
            await self._child.stop()

    def model_name(self, adapter: AdapterRef | None) -> str:
        """What a request names in the engine."""
        named = adapter or self._base_adapter
        return named.name if named else self._base_model

    @contextlib.asynccontextmanager
    async def use(
        self, adapter: AdapterRef | None, *, scores_prompt: bool = False
    ) -> AsyncGenerator[None]:
        """Counts a request; its adapter is loaded while the context is open.

        Args:
            scores_prompt: the request asks for log-probabilities of its prompt, and may have to
                be alone in the engine.

        Raises UnservableError, UserError for files that can't be read, or ReplicaGoneError.
        """
        self.num_requests += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                if named := adapter or self._base_adapter:
                    if adapts_unembedding(named):
                        await self._end_scoring_together()
                    entering = stack.enter_async_context(self.adapters.use(named))
                    await self._noting_failure(entering)
                entering = self._gate.enter(lambda: scores_prompt and self._scores_alone)
                await stack.enter_async_context(entering)
                yield
        finally:
            self.num_requests -= 1

    async def _end_scoring_together(self) -> None:
        """Returns when prompts are scored alone, and those who scored together have left."""
        self._scores_alone = True
        if self._has_scored_together:
            async with self._gate.enter(lambda: True):
                self._has_scored_together = False

    async def sample(self, sample: Sample) -> SampleOutput:
        """Within `use`. Raises ReplicaGoneError if it should be sent to another, or again."""
        assert self.facts is not None
        body = to_completion_body(sample, self.model_name(sample.adapter), self.facts)
        try:
            answer = await self._noting_failure(self.client.complete(body))
        except AdapterLostError as error:
            named = sample.adapter or self._base_adapter
            if named is None:
                raise
            self.adapters.mark_lost(named)
            raise ReplicaGoneError(f"vLLM at {self.url} has lost an adapter: {error}") from error
        self.note_success()
        return to_sample_output(sample, answer)

    def note_success(self) -> None:
        """A request was answered: earlier deaths were not for good."""
        self._deaths.clear()

    async def load(self, adapter: AdapterRef) -> None:
        """Raises what `use` raises."""
        async with self.use(adapter):
            pass

    async def unload(self, name: str) -> None:
        """After the last request that uses it. Raises ReplicaGoneError."""
        await self._noting_failure(self.adapters.unload(name))

    async def has_lost(self, adapter: AdapterRef | None) -> bool:
        """After a 404: whether it no longer has an adapter that was loaded into it."""
        named = adapter or self._base_adapter
        if named is None:
            return False
        models = await self._noting_failure(self.client.fetch_models())
        if named.name in models.adapters:
            return False
        self.adapters.mark_lost(named)
        return True

    async def is_alive(self) -> bool:
        """After an error of its: whether it still works. If not, it is looked after at once."""
        healthy = await self.client.is_healthy()
        if not healthy:
            self.report_failure("its health check fails")
        return healthy

    def report_failure(self, reason: object) -> None:
        """A request could not be answered: takes it out until it has proved healthy again."""
        if self.state is GroupState.READY:
            logger.warning("sampler replica failed url=%s reason=%s", self.url, reason)
            self._set_state(GroupState.LOADING, "checking its health")
        self._suspect.set()

    async def _noting_failure(self, call: Awaitable[Result]) -> Result:
        try:
            return await call
        except ReplicaGoneError as error:
            self.report_failure(error)
            raise

    async def _watch(self) -> None:
        """Ends by cancellation, or when the replica has failed for good."""
        had: list[AdapterRef] = []
        while True:
            try:
                await self._bring_up(had)
                await self._wait_until_down()
                self._set_state(GroupState.LOADING, "not answering")
            except (HostedTinkerError, OSError) as error:
                # A server that never was ready is set up wrongly; one that was may be again.
                if self.facts is None and not isinstance(error, ReplicaGoneError):
                    await self._fail(to_own_error(error))
                    return
                logger.warning("sampler replica is gone url=%s reason=%s", self.url, error)
                self._set_state(GroupState.LOADING, str(error))
                await asyncio.sleep(WATCH_INTERVAL_S)
            had = self.adapters.forget_loaded() or had
            if self._child is not None and not await self._is_child_well():
                logger.warning("vLLM died: %s", self._child.describe_failure())
                self._note_death()
                if len(self._deaths) >= MAX_DEATHS:
                    reason = self._child.describe_failure()
                    await self._fail(SamplerDownError(f"vLLM died {MAX_DEATHS} times: {reason}"))
                    return
                await asyncio.sleep(min(MAX_BACKOFF_S, 2.0 ** (len(self._deaths) - 1)))

    def _note_end(self, watch: asyncio.Task[None]) -> None:
        """Nobody waits for the task: what it did not expect must not leave the replica loading."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("sampler replica is not watched any more", exc_info=error)
            self._note_failure(
                SamplerDownError(f"{type(error).__name__}: {error}; see the server's log")
            )

    def _note_death(self) -> None:
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if at > now - DEATHS_WINDOW_S] + [now]

    async def _fail(self, error: HostedTinkerError) -> None:
        """Gives up, and gives the GPUs of a child free."""
        self._note_failure(error)
        if self._child is not None:
            await self._child.stop()

    def _note_failure(self, error: HostedTinkerError) -> None:
        logger.error("sampler replica failed for good url=%s: %s", self.url, error)
        self.failure = error
        self._set_state(GroupState.FAILED, str(error))

    def _set_state(self, state: GroupState, phase: str) -> None:
        is_new, self.state = state is not self.state, state
        self.phase = f"vLLM at {self.url}: {phase}"
        if is_new:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    async def _bring_up(self, had: list[AdapterRef]) -> None:
        """Until it is ready: the process, its health, what it knows, the adapters that it had."""
        if self._spec is not None and (self._child is None or not await self._is_child_well()):
            await self._start_child(self._spec)
        await self._wait_healthy()
        self._suspect.clear()
        models = await self.client.fetch_models()
        self._check_base_model(models)
        self._base_model = models.base_model
        facts = await self._find_facts(models)
        if self._on_cpu:
            # In vLLM 0.32's kernels for the CPU a row without an adapter gets the last slot's
            # (index -1 in lora/ops/torch_ops), so that no row may be without.
            self._base_adapter = await self._make_base_adapter()
        await self._reconcile(models, had)
        self.facts = facts
        self._set_state(GroupState.READY, "ready")
        logger.info("sampler replica ready url=%s", self.url)

    async def _is_child_well(self) -> bool:
        assert self._child is not None
        return not self._child.has_ended and await self.client.is_healthy()

    async def _start_child(self, spec: ChildSpec) -> None:
        if self._child is not None:
            await self._child.stop()
        else:
            await asyncio.to_thread(check_can_start, spec)
        self._child = VllmChild(spec)
        await self._child.start()

    async def _wait_healthy(self) -> None:
        started = time.monotonic()
        while not await self.client.is_healthy():
            waited_s = time.monotonic() - started
            if self._child is None:
                self._set_state(GroupState.LOADING, "waiting for it")
            elif self._child.has_ended:
                raise SettingsError(
                    f"vLLM ended while it started: {self._child.describe_failure()}"
                )
            else:
                self._set_state(GroupState.LOADING, self._child.read_phase())
            starts = self.facts is None or self._child is not None
            if starts and waited_s > self._start_timeout_s:
                raise SettingsError(
                    f"vLLM at {self.url} was not healthy within {self._start_timeout_s:.0f} s "
                    "(vllm_start_timeout_s)"
                )
            await asyncio.sleep(START_POLL_S if self._child else WATCH_INTERVAL_S)

    def _check_base_model(self, models: EngineModels) -> None:
        """A name proves nothing, so that another one is worth a warning only."""
        known = {Path(name).name for name in self._names}
        if not known & {Path(models.base_model).name, Path(models.base_model_source).name}:
            logger.warning(
                "vLLM at %s serves %r (%s), and this server trains %s: make sure that these are the "
                "same weights",
                self.url,
                models.base_model,
                models.base_model_source,
                self._names[0],
            )

    async def _find_facts(self, models: EngineModels) -> EngineFacts:
        """Of the one possible token at top_k 1, the scaled log-probability is 0."""
        answer = await self.client.complete(
            {
                "model": models.base_model,
                "prompt": [1, 2],
                "max_tokens": 1,
                "temperature": 0.5,
                "top_k": 1,
                "logprobs": 0,
            }
        )
        (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
        return EngineFacts(models.max_model_len, logprob == 0.0, self._on_cpu)

    async def _reconcile(self, models: EngineModels, had: list[AdapterRef]) -> None:
        """Brings back what it had, and takes out what an earlier life of this server left in it."""
        missing: list[AdapterRef] = []
        # Those whose files are gone were replaced meanwhile.
        for adapter in (one for one in had if one.directory.is_dir()):
            if adapter.name in models.adapters:
                self.adapters.adopt(adapter)
            else:
                missing.append(adapter)
        known = self.adapters.directories
        for name, directory in models.adapters.items():
            if name not in known and self._engine_dir.contains(directory):
                await self.client.unload_adapter(name)
        self._set_state(GroupState.LOADING, f"loading {len(missing)} adapters")
        await self.adapters.restore(missing)

    async def _wait_until_down(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._suspect.wait()
            ended = self._child is not None and self._child.has_ended
            if self._suspect.is_set() or ended or not await self.client.is_healthy():
                return


def to_own_error(error: HostedTinkerError | OSError) -> HostedTinkerError:
    if isinstance(error, HostedTinkerError):
        return error
    return SettingsError(f"vLLM can't be started: {error}")
