"""Check and normalise the URLs of endpoints."""

import ipaddress
import re
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from m3diff.records.errors import ValueFault

URL = re.compile(r"https?://(\[[\da-f:]+\]|[^\s/:\[\]]+)(:[1-9]\d*)?(/\S*)?", re.IGNORECASE)

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def endpoint_url(text: str) -> str:
    """Check and return a URL from the parameters or the command line.

    The URL must not contain a key, because reports show it.

    Raises:
        ValueFault: the text is not a valid endpoint URL. The error does not repeat anything that may be a key.
    """
    if "@" in text or "?" in text or "#" in text:
        raise ValueFault("endpoint.url_with_key")
    if not URL.fullmatch(text):
        raise ValueFault("endpoint.not_a_url", value=text)
    return text


# Type of URL fields in sections
EndpointUrl = Annotated[str, AfterValidator(endpoint_url)]


def on_this_machine(url: str) -> bool:
    """Return whether requests to a URL stay on this machine. Such requests do not use a proxy."""
    return urlsplit(url).hostname in THIS_MACHINE


def normalised_url(url: str) -> str:
    """Return the URL in a normalised form for comparison.

    User, key, default port and trailing slash are removed, the host is lowercase, and all names of this machine become
    one.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    with suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    if host in THIS_MACHINE:
        host = THIS_MACHINE[0]
    default_port = 443 if parts.scheme == "https" else 80
    port = "" if parts.port in (None, default_port) else f":{parts.port}"
    bracketed_host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{bracketed_host}{port}{parts.path.rstrip('/')}"
