"""Define the error responses of the server, which say what was found, what is allowed, and what to do."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

# OpenAI's error types for the status codes that have a specific type
OPENAI_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

# Additional response headers by status code
REFUSAL_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}

CLIENT_CLOSED_REQUEST = 499  # nginx's status code for a client that disconnected before the answer

MAX_EXCERPT_CHARS = 60  # maximum length of a text from a request in a refusal


class RequestRefusedError(Exception):
    """The server refuses to answer a request.

    Args:
        status: HTTP status code of the response.
        code: machine-readable error code.
        finding: what the request contains. It is the field `found` of the response.
        limit: what is allowed instead.
        remedy: what to do.
        field: the field of the request that caused the error, if any.
    """

    def __init__(self, status: int, code: str, finding: str, limit: str, remedy: str, field: str | None = None) -> None:
        location = f"{field}: " if field else ""
        super().__init__(f"{location}{finding}; {limit}; {remedy}")
        self.status = status
        self.field = field
        self.headers: Mapping[str, str] = REFUSAL_HEADERS.get(status, {})
        self.body = {"error": code, "field": field, "found": finding, "limit": limit, "remedy": remedy}

    def response(self, path: str) -> Response:
        """Return the HTTP response. Routes of the OpenAI API use the error format that its clients expect."""
        if path.startswith("/v1/"):
            return JSONResponse({"error": self._openai_error()}, self.status, headers=self.headers)
        return JSONResponse(self.body, self.status, headers=self.headers)

    def _openai_error(self) -> dict[str, Any]:
        default_type = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "message": str(self),
            "type": OPENAI_ERROR_TYPES.get(self.status, default_type),
            "param": self.field,
            "code": self.body["error"],
        }


def unprocessable(code: str, finding: str, limit: str, remedy: str, field: str | None = None) -> RequestRefusedError:
    """Return the error for a request with invalid content (HTTP 422)."""
    return RequestRefusedError(422, code, finding, limit, remedy, field)


async def respond(request: Request, error: Exception) -> Response:
    """Return the HTTP response for a request that raised an error.

    Unexpected errors may mention files on this machine, so their text is written to the log and not sent to the client.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return _refusal_of_error(request, error).response(request.url.path)


def _refusal_of_error(request: Request, error: Exception) -> RequestRefusedError:
    if isinstance(error, RequestRefusedError):
        return error
    if not isinstance(error, HTTPException):
        return RequestRefusedError(
            status=500,
            code="failed",
            finding="an error of the server",
            limit="none",
            remedy="its log says more; try again",
        )
    refusal = _refusal_of_route(request, error)
    refusal.headers = error.headers or {}
    return refusal


def _refusal_of_route(request: Request, error: HTTPException) -> RequestRefusedError:
    """Return the refusal of a request with an unknown path (HTTP 404), or with a wrong method (HTTP 405)."""
    requested_route = f"{request.method} {request.url.path[:100]}"
    allowed_methods = (error.headers or {}).get("Allow")
    if allowed_methods:
        return RequestRefusedError(
            status=error.status_code,
            code="no_such_route",
            finding=f"{requested_route}: this path has no such method",
            limit=f"the methods of this path: {allowed_methods}",
            remedy="correct the method",
        )
    return RequestRefusedError(
        status=error.status_code,
        code="no_such_route",
        finding=f"{requested_route}: there is no such route",
        limit="the routes in docs/serving.md",
        remedy="correct the method and the path",
    )


def shorten(value: object) -> str:
    """Return the value as text. If it has more than MAX_EXCERPT_CHARS characters, cut it and append "..."."""
    text = str(value)
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}..."
