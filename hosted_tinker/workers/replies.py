"""What a worker answers when an operation fails."""

from __future__ import annotations

import traceback

from hosted_tinker.errors import HostedTinkerError
from hosted_tinker.workers.messages import Failure


def describe_failure(error: Exception) -> Failure:
    """What the parent shows: our own errors as they are, others with their traceback for the log."""
    if isinstance(error, HostedTinkerError):
        return Failure(str(error), error.category)
    trace = "".join(traceback.format_exception(error))
    return Failure(f"{type(error).__name__}: {error}", "server", trace)
