"""Build backend for pip that runs setuptools with a build folder outside the checkout.

By default, setuptools builds wheels in the `build/` folder of the source tree and leaves it there. The checkout then
has untracked files, and the next wheel still contains files that have since been renamed or removed.
"""

import tempfile
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel (PEP 517) and return its file name."""
    settings = dict(config_settings or {})
    global_options = settings.get("--global-option") or []
    with tempfile.TemporaryDirectory(prefix="m3diff-wheel-") as folder:
        # These words come before the wheel command on setuptools' command line
        words = global_options.split() if isinstance(global_options, str) else list(global_options)
        settings["--global-option"] = [*words, "build", f"--build-base={folder}"]
        return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
