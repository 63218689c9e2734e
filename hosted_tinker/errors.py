"""Every error that we raise on purpose.

    HostedTinkerError
    |-- UserError            the request cannot succeed as sent            400, category user
    |   |-- NotFoundError    it names a run, checkpoint or session unknown 404
    |   |-- TooLargeError    it is over a size limit                       413
    |   |-- ContextError     it is over the model's context length         400
    |   |-- ForbiddenError   the key is missing or wrong                   401
    |   `-- UnservableError  this server's sampler can't do it             400
    |-- SettingsError        the server cannot start with these settings
    |-- BusyError            a queue is full, try again later              429, category server
    |-- WorkerDiedError      a worker process exited during an operation   503
    |-- SamplerDownError     no replica of the sampler answers             503
    `-- WorkerFailedError    an operation raised inside a worker           500

The message is shown to the user as it stands: it names the value and what is accepted.
`http_status` is used where an HTTP answer carries the error, `category` where a future does.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server"]


class HostedTinkerError(Exception):
    """Base of every error that we raise on purpose."""

    http_status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"


class UserError(HostedTinkerError):
    """The request cannot succeed as sent. The message says what to change."""

    http_status = 400
    category = "user"


class NotFoundError(UserError):
    """The request names something that does not exist, or no longer does."""

    http_status = 404


class TooLargeError(UserError):
    """The request is over a size limit of the server."""

    http_status = 413


class ContextError(UserError):
    """Prompt and completion together are longer than the model's context."""


class ForbiddenError(UserError):
    """The API key is missing or is not one that this server accepts."""

    http_status = 401


class UnservableError(UserError):
    """The sampler of this server can't do what the request, or the run, needs."""


class SettingsError(HostedTinkerError):
    """The server cannot start with these settings. Shown as one line by the command line."""

    category = "user"


class BusyError(HostedTinkerError):
    """A queue is full. Only sampling answers with it: the SDK backs off and tries again."""

    http_status = 429


class WorkerDiedError(HostedTinkerError):
    """A worker process exited while it held an operation, or holds the run no longer."""

    http_status = 503


class SamplerDownError(HostedTinkerError):
    """No replica of the sampler answers; the request can be sent again."""

    http_status = 503


class WorkerFailedError(HostedTinkerError):
    """An operation raised an unexpected exception inside a worker."""
