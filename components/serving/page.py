"""Read the page that the server shows at `/`: a single file that does not load anything from other machines."""

import base64
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


def read_page() -> tuple[str, str]:
    """Return the page and its Content-Security-Policy.

    The policy allows connections only to this server, and allows the page's own script and style by their hashes.
    """
    html = FILE.read_text(encoding="utf-8")
    script = hash_of_element("script", html)
    style = hash_of_element("style", html)
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def hash_of_element(tag: str, html: str) -> str:
    """Return the CSP hash of the page's only element with this tag."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
