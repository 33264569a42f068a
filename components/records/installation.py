"""Describe how this package is installed: from a checkout or from a wheel.

The project is not on a package index, so error messages refer to the checkout or the wheel file. Every command imports
this module, so heavy imports are inside functions.
"""

from pathlib import Path

NAME = "m3diff"
# Folder with the profiles in an installed wheel. In a checkout, it is a symbolic link to the folder `profiles`
PROFILES = Path(__file__).parents[1] / "_profiles"


def is_checkout() -> bool:
    """Return True if this code is in a checkout, and False if it is in an installed wheel."""
    return PROFILES.is_symlink()


def root() -> Path:
    """Return the folder that contains the package. In a checkout, it is the root folder with pyproject.toml."""
    return PROFILES.parents[1].resolve() if is_checkout() else PROFILES.parents[1]


def questions_file() -> Path:
    """Return the file of the package with the questions for each task."""
    return PROFILES.resolve() / "questions.yaml"


def version_number() -> str:
    """Return the version, such as `0.1.0`.

    In a checkout, it is read from pyproject.toml, because the installed metadata may be outdated.
    """
    if is_checkout():
        import tomllib

        project = tomllib.loads((root() / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return str(project["version"])
    from importlib import metadata

    return metadata.version(NAME)


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package.

    For a wheel, this is a command such as `pip install 'm3diff-0.1.0-py3-none-any.whl[serve]'`.

    Args:
        extra: name of a group of optional dependencies in pyproject.toml.
    """
    if is_checkout():
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install '{wheel_file()}[{extra}]'"


def wheel_file() -> str:
    """Return the path of the wheel file that this package was installed from, or its name if the file is missing."""
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    distribution = metadata.distribution(NAME)
    # pip records where a package comes from if it was not downloaded from an index (PEP 610)
    origin = distribution.read_text("direct_url.json")
    url = urlsplit(json.loads(origin)["url"]) if origin else None
    if url is not None and url.scheme == "file":
        file = Path(unquote(url.path))
        if file.is_file():
            return str(file)
    return f"{NAME}-{distribution.version}-py3-none-any.whl"
