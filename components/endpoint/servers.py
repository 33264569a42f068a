"""The identity of a server, based on what it reports about the model that it serves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m3diff.endpoint.url import normalised_url


@dataclass(frozen=True)
class ServerIdentity:
    """A server's normalised URL and its entry for the model in `GET /v1/models`. Missing fields are None."""

    url: str
    id: str | None = None
    root: str | None = None
    max_model_len: int | None = None

    def __str__(self) -> str:
        fields = {"id": self.id, "root": self.root, "max_model_len": self.max_model_len}
        facts = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        return f"{self.url} ({facts})" if facts else self.url


def identity_in_list(url: str, model: str, listing: str) -> ServerIdentity:
    """Return the identity of the server at a URL.

    Args:
        listing: reply to `GET /v1/models`. If it does not list the model but has a single entry, that entry is used,
            since some servers accept an alias or any name.
    """
    try:
        entry = _entry_of_model(json.loads(listing)["data"], model)
    except (ValueError, TypeError, KeyError, RecursionError):  # not a list of models
        entry = {}
    return _identity_of_entry(normalised_url(url), entry)


def _entry_of_model(entries: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """Return the entry of the model, the only entry, or an empty dictionary. See `identity_in_list`."""
    matching_entries = [entry for entry in entries if entry["id"] == model]
    if matching_entries:
        return matching_entries[0]
    return entries[0] if len(entries) == 1 else {}


def _identity_of_entry(url: str, entry: Mapping[str, Any]) -> ServerIdentity:
    """Return the identity of a server. Fields of the entry with an unexpected type become None."""
    texts = {name: entry[name] for name in ("id", "root") if isinstance(entry.get(name), str)}
    length = entry.get("max_model_len")
    max_model_len = length if type(length) is int else None  # True is an instance of int, too
    return ServerIdentity(url=url, **texts, max_model_len=max_model_len)


def read_server(value: Any) -> ServerIdentity | None:
    """Return the server named in a line of the cache, or None if the line does not name a server."""
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        return None
    return _identity_of_entry(value["url"], value)
