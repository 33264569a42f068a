"""The services as a systemd unit of the user, for a machine that stays on: `make install-services`,
`make uninstall-services`.

The unit (infra/m3diff.service) runs `infra/services.py run`, which starts what `make up` starts and keeps it up;
systemd starts it with the machine and again when it ends.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from infra.services import SERVICES, ServiceError, check_settings, keeper, read_settings, services

NAME = "m3diff.service"


def place() -> Path:
    """The unit's file.

    Raises:
        ServiceError: root asks (a flow runs the code of a commit), or the unit is another checkout's.
    """
    if os.getuid() == 0:
        raise ServiceError("run it as the account that owns the checkout, not as root; see loginctl enable-linger")
    file = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "systemd" / "user" / NAME
    (ours,) = [line for line in unit().splitlines() if line.startswith("WorkingDirectory=")]
    if file.exists() and ours not in file.read_text().splitlines():
        raise ServiceError(f"{file} is not of this checkout; `make uninstall-services` in its own first")
    return file


def unit() -> str:
    """The unit's text, for this checkout and this Python.

    Raises:
        ServiceError: a path has what systemd would read otherwise.
    """
    paths = {"folder": Path.cwd(), "python": sys.executable, "script": Path(__file__).with_name("services.py")}
    for path in paths.values():
        if re.search(r"[\"'\\$\n]", str(path)):
            raise ServiceError(f"{path}: systemd reads quotes, backslashes and $ as its own; move the checkout")
    escaped = {name: str(path).replace("%", "%%") for name, path in paths.items()}  # % begins one of its own words
    return Path(__file__).with_name(NAME).read_text().format(**escaped)


def install() -> None:
    """Write the unit and start it.

    Raises:
        ServiceError: services of `make up` are up.
    """
    read_settings()
    check_settings()
    by_hand = [service.name for service in (*services(), keeper()) if service.process()]
    if by_hand and not keeper().kept().get("unit"):
        raise ServiceError(f"{', '.join(by_hand)}: up already by `make up`; `make down` first")
    file = place()
    systemctl("--version")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(unit())
    for words in (["daemon-reload"], ["enable", NAME], ["restart", NAME]):
        systemctl(*words)
    print(f"{file}: written and started; logs in {SERVICES}, `make status` says how the services are")
    print("they end when you log out, unless: loginctl enable-linger")


def uninstall() -> None:
    """End and remove the unit of this checkout."""
    file = place()
    systemctl("disable", "--now", NAME)
    file.unlink(missing_ok=True)
    systemctl("daemon-reload")
    print(f"{file}: removed")


def systemctl(*words: str) -> None:
    command = ["systemctl", "--user", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ServiceError("this machine has no systemd; `make up` works without") from error
    if done.returncode:
        raise ServiceError(f"`{' '.join(command)}` failed:\n  {done.stderr.strip()}")


def main(what: str) -> int:
    try:
        {"install": install, "uninstall": uninstall}[what]()
    except ServiceError as error:
        print(f"make {what}-services: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
