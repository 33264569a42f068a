"""What people and servers are told holds no secrets: an address may carry a password, an error may quote a token."""

import os
import re

IN_ADDRESS = re.compile(r"(\w+://)(?=[^\s/'\"]*:[^\s/'\"]*@|(?<=http://)|(?<=https://))[^\s/'\"]*@")
IN_QUERY = re.compile(r"(?i)([?&][\w-]*(?:token|secret|password|signature|credential|sig|key)=)[^&\s'\"]+")
SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|AUTH_STRING|API_KEY|ACCESS_KEY|CONNECTION_URL|M3DIFF_NOTIFY")
LEAST = 8  # characters: a shorter word may be any other's
HIDDEN = "***"


def redacted(text: str) -> str:
    """The text without the user and password of an address, keys in a query, and values of this process's secrets."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= LEAST:
            text = text.replace(value, HIDDEN)
    return IN_QUERY.sub(rf"\1{HIDDEN}", IN_ADDRESS.sub(rf"\1{HIDDEN}@", text))
