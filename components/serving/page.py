"""The page at `/`: one file that asks nothing of any other machine, and the policy that holds it to that."""

import base64
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


class Page:
    """Attributes:
    html: the page.
    policy: its Content-Security-Policy: this server alone, and no script or style but the page's own, by hash.
    """

    def __init__(self) -> None:
        self.html = FILE.read_text(encoding="utf-8")
        script, style = (_hash_of(self.html, tag) for tag in ("script", "style"))
        self.policy = (
            f"default-src 'none'; script-src {script}; style-src {style}; img-src 'self' data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _hash_of(html: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
