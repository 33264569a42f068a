"""Decide which requests are answered.

A server with a token answers every request that includes the token. A server without a token answers only requests from
programs on this machine and from its own page.
"""

import hmac

from starlette.datastructures import Headers

from m3diff.serving.refusals import RequestRefusedError
from m3diff.serving.same_origin import foreign_header

# Health probes do not send a token. These routes only reveal whether the server is up and ready
OPEN_ROUTES = ("/healthz", "/readyz")

# Maps the name of a header that is not allowed to the code, limit and remedy of the refusal
FOREIGN_REQUESTS = {
    "host": ("wrong_host", "127.0.0.1 or localhost", "ask by that name; other names need M3DIFF_SERVE_TOKEN"),
    "origin": ("other_site", "this server's own page", "ask from a program, or set M3DIFF_SERVE_TOKEN"),
}


def access_refusal(path: str, headers: Headers, token: str | None) -> RequestRefusedError | None:
    """Return the refusal for a request, or None if the request is allowed.

    Args:
        token: the server's token, or None. Without a token, the request must address this machine as 127.0.0.1 or
            localhost, since another site can make its host name resolve to this machine (DNS rebinding). The request
            also must not come from another site's page.
    """
    if token is None:
        return _refusal_of_foreign_request(headers)
    if path in OPEN_ROUTES:
        return None
    return _refusal_without_token(headers, token)


def _refusal_of_foreign_request(headers: Headers) -> RequestRefusedError | None:
    header = foreign_header(headers.raw)
    if header is None:
        return None
    name, value = header
    code, limit, remedy = FOREIGN_REQUESTS[name]
    return RequestRefusedError(403, code, f"{name} {value[:100]!r}", limit, remedy, field=name)


def _refusal_without_token(headers: Headers, token: str) -> RequestRefusedError | None:
    scheme, _, sent_token = headers.get("authorization", "").partition(" ")
    is_same_token = hmac.compare_digest(sent_token.strip().encode(), token.encode())
    if scheme.lower() == "bearer" and is_same_token:
        return None
    return RequestRefusedError(
        status=401,
        code="unauthorized",
        finding="another token" if sent_token else "no token",
        limit="the token of this server",
        remedy="send the header `Authorization: Bearer TOKEN`",
        field="authorization",
    )
