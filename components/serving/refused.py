"""What the server refuses, in words: what was found, the limit, and the remedy."""

from collections.abc import Mapping
from typing import Any


class RequestRefusedError(ValueError):
    """A request that gets no caption.

    Args:
        status: of HTTP.
        code: a word for machines.
        found: what the request is or has.
        limit: what is allowed instead.
        remedy: what to do.
        field: of the request, where one is meant.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        found: str,
        limit: str,
        remedy: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field + ': ' if field else ''}{found}; {limit}; {remedy}")
        self.status, self.code, self.field = status, code, field
        self.found, self.limit, self.remedy = found, limit, remedy
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        said = {"error": self.code, "field": self.field, "found": self.found}
        return said | {"limit": self.limit, "remedy": self.remedy}

    def as_openai(self) -> dict[str, Any]:
        """The same in the shape of OpenAI's errors, which its clients read."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def unprocessable(code: str, found: str, limit: str, remedy: str, field: str | None = None) -> RequestRefusedError:
    return RequestRefusedError(422, code, found, limit, remedy, field)
