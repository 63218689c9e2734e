"""Our errors in OpenAI's shape (https://platform.openai.com/docs/guides/error-codes)."""

from __future__ import annotations

from typing import Any

from hosted_tinker.errors import HostedTinkerError, NotFoundError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def to_openai_error(error: HostedTinkerError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. Clients send again what failed with 429 or 5xx."""
    status = error.http_status
    names_model = isinstance(error, NotFoundError)
    return status, {
        "error": {
            "message": str(error),
            "type": TYPES.get(status, "server_error"),
            "param": "model" if names_model else None,
            "code": "model_not_found" if names_model else CODES.get(status),
        }
    }
