"""What is answered when something is wrong: every status from 400 on has an `ErrorView`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headtrace.errors import HeadtraceError
from headtrace.explorer.server.jobs import QueueFullError, told_to_clients
from headtrace.explorer.server.schemas import ErrorView


class RefusedError(HeadtraceError):
    """A request that is answered with an error of a status of its own."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self.code, self.headers = status, code, headers
        super().__init__(message)


def not_kept() -> RefusedError:
    return RefusedError(
        404, "not_kept", "This recording is not kept any more (or never was). Record the prompt again."
    )


def no_job() -> RefusedError:
    return RefusedError(
        404, "no_job", "There is no such job: it was too long ago, or the server was started anew since."
    )


def refusal(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as it is sent. In ASCII: what a client gave may hold halves of characters."""
    content = json.dumps(ErrorView(code=code, message=message).model_dump())
    return Response(content, status, dict(headers or {}), "application/json")


def failure(error: Exception) -> Response:
    """The answer to a request that raised an error."""
    match error:
        case RefusedError():
            return refusal(error.status, error.code, str(error), error.headers)
        case QueueFullError():
            return refusal(429, "busy", str(error), {"Retry-After": str(error.retry_after)})
        case HeadtraceError():
            return refusal(422, "input", str(error))
        case RequestValidationError():
            return refusal(422, "input", _sentences(error))
        case HTTPException():
            return refusal(error.status_code, *_status(error), error.headers)
        case MemoryError():
            return refusal(422, "memory", told_to_clients(error))
        case _:
            return refusal(500, "internal", told_to_clients(error))


async def handle(_: Request, error: Exception) -> Response:
    return failure(error)


def _sentences(error: RequestValidationError) -> str:
    """What is wrong with a request, field by field, without repeating all of it."""
    told = [f"{_place(each['loc'])}: {each['msg']}" for each in error.errors()[:5]]
    more = len(error.errors()) - len(told)
    return (
        "The request is not as expected. "
        + "; ".join(told)
        + (f"; and {more} more" if more > 0 else "")
        + "."
    )


def _place(loc: tuple[Any, ...]) -> str:
    inner = [str(part)[:80] for part in loc if part not in ("body", "query", "path")]
    return ".".join(inner) or "body"


def _status(error: HTTPException) -> tuple[str, str]:
    match error.status_code:
        case 404:
            return "not_found", "There is nothing at this address."
        case 405:
            return (
                "method",
                "This address does not take requests of this method; the header Allow says which.",
            )
        case _:
            return "request", str(error.detail)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI schema: a route's own errors, and those that any request may meet."""
    common = (400, 401, 403, 413, 415, 422, 429, 500, 503)
    return {
        status: {"model": ErrorView, "description": _DESCRIPTIONS[status]}
        for status in sorted({*common, *statuses})
    }


_DESCRIPTIONS = {
    400: "No request that can be read",
    401: "The token is missing",
    403: "From another site",
    404: "There is no such thing, or it is not kept any more",
    408: "The body did not come in time",
    409: "Not yet: the job has not ended",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "What was asked for cannot be done; the message says why",
    429: "Too many at once; Retry-After says when to come again",
    500: "A mistake of the server",
    503: "The server is stopping",
}
