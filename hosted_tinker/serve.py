"""Runs the server: takes the port, serves at once, loads the model meanwhile, ends on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator

import uvicorn
from rich.console import Console

from hosted_tinker.api.app import create_app
from hosted_tinker.errors import SettingsError
from hosted_tinker.server import Server
from hosted_tinker.settings import Settings

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5
GRACEFUL_SHUTDOWN_S = 5


def serve(settings: Settings) -> None:
    """Returns when a signal has ended the server.

    Raises:
        HostedTinkerError: the server can't start; the message is for the operator.
    """
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    allow_many_connections()
    with bind(settings.host, settings.port) as listener:
        asyncio.run(serve_on(settings, listener))


async def serve_on(settings: Settings, listener: socket.socket) -> None:
    """Serves on a bound socket. Same errors as `serve`."""
    server = Server(settings)
    config = uvicorn.Config(
        create_app(server),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    http = HttpServer(config, on_exit=server.begin_stop)
    loading = asyncio.create_task(load(server, http, listener))
    try:
        await http.serve(sockets=[listener])
    finally:
        if not loading.done():
            loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([loading])
        await server.stop()
    if not loading.cancelled():
        loading.result()


class HttpServer(uvicorn.Server):
    """uvicorn, except that a signal ends it with exit code 0 and wakes held polls first."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.exit)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def exit(self) -> None:
        """Begins to stop."""
        self._on_exit()
        self.should_exit = True


def allow_many_connections() -> None:
    """Every held poll is a connection; the usual soft limit of 1,024 files is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SettingsError if the address can't be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    # asyncio sets it only on sockets that were made with the protocol's number, which these are not.
    # Without it the body of an answer waits for the client to acknowledge its head, some 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def load(server: Server, http: HttpServer, listener: socket.socket) -> None:
    """Loads the model and says how it goes. A failure ends the server and is raised."""
    progress = asyncio.create_task(show_progress(server))
    started = False
    try:
        await server.start()
        started = True
    finally:
        progress.cancel()
        if not started:
            http.exit()
    host, port = listener.getsockname()[:2]
    base_model = server.trainer.base_model
    assert base_model is not None
    logger.info(
        "ready url=http://%s:%d models=%s parameters=%d context_length=%d device=%s sampler=%s",
        host,
        port,
        ",".join(server.names.names),
        base_model.num_parameters,
        base_model.context_length,
        base_model.device,
        server.sampler.describe(),
    )


async def show_progress(server: Server) -> None:
    """A live line on a terminal, a log line for each phase elsewhere."""
    console = Console(stderr=True)
    started = time.monotonic()
    shown = ""
    with console.status("starting") if console.is_terminal else contextlib.nullcontext() as status:
        while True:
            phase = server.describe_loading()
            if status is not None:
                status.update(f"{phase} ({time.monotonic() - started:.0f} s)")
            elif phase != shown:
                logger.info("loading phase=%s", phase)
            shown = phase
            await asyncio.sleep(PROGRESS_INTERVAL_S)
