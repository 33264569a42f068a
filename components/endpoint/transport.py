"""Create an HTTP client that limits the time for a whole reply and does not follow redirects."""

import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

from m3diff.endpoint.url import URL, normalised_url
from m3diff.records.errors import CodedError
from m3diff.settings.section import ParamsError

NOT_IMPLEMENTED = 501


class EndpointError(CodedError, ConnectionError):
    """The endpoint cannot be reached, keeps failing, or does not answer in time. A later run may succeed."""


class RedirectError(ParamsError):
    """The server answers with a redirect. It is never followed, so that images and key go only to the given URL."""

    @property
    def status(self) -> int:
        """The HTTP status, from 300 to 399."""
        return self.fields["status"]

    @property
    def target(self) -> str | None:
        """The target of the redirect without user, key and query, or None if the reply does not contain one."""
        return self.fields["target"]


def redirect_error(url: str, status: int, target: str | None) -> RedirectError:
    """Return the error for a redirect.

    Args:
        url: URL of the endpoint.
        status: HTTP status, from 300 to 399.
        target: target of the redirect, or None if the reply does not contain one.
    """
    if target is None:
        return RedirectError("endpoint.redirect_without_target", url=url, status=status, target=None)
    base = target.removesuffix("/chat/completions").removesuffix("/models")
    if URL.fullmatch(base):
        return RedirectError("endpoint.redirect", url=url, status=status, target=target, expected=base)
    return RedirectError("endpoint.redirect_to_no_endpoint", url=url, status=status, target=target)


def http_client(trust_env: bool) -> Any:
    """Return openai's HTTP client with a time limit for a whole reply.

    httpx2 only limits the time of each read, so a server that sends a byte now and then could keep a question open
    forever. If a request times out, this client raises openai's own error instead of httpx2's, because openai passes on
    its own errors immediately but would retry after httpx2's.

    Args:
        trust_env: whether to use the proxies set in the environment.
    """
    import httpx2
    import openai

    class LimitedStream(httpx2.SyncByteStream):
        """The body of a reply, which must be complete by a deadline."""

        def __init__(self, stream: Any, deadline: float) -> None:
            self.stream = stream
            self.deadline = deadline

        def __iter__(self) -> Iterator[bytes]:
            for chunk in self.stream:
                if time.monotonic() > self.deadline:
                    raise httpx2.ReadTimeout("the reply was not complete in time")
                yield chunk

        def close(self) -> None:
            self.stream.close()

    class LimitedClient(openai.DefaultHttpxClient):
        """openai's client, which applies the read timeout to the whole body of a reply."""

        def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            deadline = time.monotonic() + request.extensions["timeout"]["read"]
            try:
                response = super().send(request, stream=True, **options)
                response.stream = LimitedStream(response.stream, deadline)
                if response.status_code == NOT_IMPLEMENTED:  # openai would retry five times
                    response.headers["x-should-retry"] = "false"
                if not stream:
                    try:
                        response.read()
                    finally:
                        response.close()
            except httpx2.ConnectTimeout as error:  # the server cannot be reached, so the question is not the cause
                raise httpx2.ConnectError(str(error)) from error
            except httpx2.TimeoutException as error:
                raise openai.APITimeoutError(request=request) from error
            return response

    return LimitedClient(trust_env=trust_env, follow_redirects=False, event_hooks={"response": [refuse_redirect]})


def refuse_redirect(response: Any) -> None:
    """Raise openai.OpenAIError if the response is a redirect, even to the same server.

    openai does not retry after this error.
    """
    import openai

    if not 300 <= response.status_code < 400:
        return
    requested_url = str(response.request.url)
    redirect = redirect_error(
        url=normalised_url(requested_url),
        status=response.status_code,
        target=redirect_target(requested_url, response.headers),
    )
    raise openai.OpenAIError(str(redirect)) from redirect


def redirect_target(requested_url: str, headers: Mapping[str, str]) -> str | None:
    """Return the target URL of a redirect in a printable form, or None if the reply does not contain one."""
    if "location" not in headers:
        return None
    location = headers["location"]
    try:
        target = normalised_url(urljoin(requested_url, location))
    except ValueError:  # invalid port or host
        return repr(location[:100])
    # Escape control characters, which would otherwise reach the terminal
    return target if target.isprintable() else repr(target[:100])


def describe_error(error: Exception) -> str:
    """Return a description of an error and its cause, because openai's own text is only "Connection error."."""
    description = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if cause is None or str(cause) in str(error):
        return description
    return f"{description} ({type(cause).__name__}: {cause})"
