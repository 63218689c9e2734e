"""Our errors in OpenAI's shape (https://platform.openai.com/docs/guides/error-codes)."""

from __future__ import annotations

from typing import Any

from hosted_tinker.errors import ContextError, HostedTinkerError, NotFoundError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def to_openai_error(error: HostedTinkerError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. Clients send again what failed with 429 or 5xx."""
    status = error.http_status
    if isinstance(error, NotFoundError):
        return status, make_body(status, str(error), param="model", code="model_not_found")
    if isinstance(error, ContextError):
        return status, make_body(status, str(error), code="context_length_exceeded")
    return status, make_body(status, str(error))


def make_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer with that HTTP status."""
    return {
        "error": {
            "message": message,
            "type": TYPES.get(status, "server_error"),
            "param": param,
            "code": code or CODES.get(status),
        }
    }
