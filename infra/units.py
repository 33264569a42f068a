"""The services as a unit of systemd, for a machine that stays on: `make install-services`, `make uninstall-services`.

The unit (infra/m3diff.service) runs `infra/services.py run`, which starts what `make up` starts and keeps it up;
systemd starts it with the machine and again when it ends. A person gets a unit of their own, root gets one of the
system that runs as the owner of the checkout.
"""

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

from infra.services import SERVICES, ServiceError, check_settings, keeper, read_settings, services

NAME = "m3diff.service"
SYSTEM = "ProtectSystem=full\nProtectKernelTunables=yes\nProtectKernelModules=yes\n"
"""ProtectSystem leaves home, the checkout and /var as they are. A person's systemd may not set these."""


def manager() -> tuple[Path, str | None]:
    """The folder of the systemd that takes the unit, and whom it runs as: the system's for root, else the person's own,
    with None.

    Raises:
        ServiceError: root asks, and the checkout is root's too: a flow runs the code of a commit.
    """
    if os.getuid():
        return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config")) / "systemd" / "user", None
    owner = pwd.getpwuid(Path.cwd().stat().st_uid).pw_name
    if owner == "root":
        raise ServiceError(
            f"{Path.cwd()} belongs to root, and the services run as its owner: give it to an account of its own "
            "(useradd --create-home m3diff; chown -R m3diff ...) and install again"
        )
    return Path("/etc/systemd/system"), owner


def unit(user: str | None) -> str:
    """The unit's text, for this checkout and this Python.

    Args:
        user: whom a unit of the system runs as; None for a person's own unit.

    Raises:
        ServiceError: a path has what systemd would read otherwise.
    """
    paths = {"folder": Path.cwd(), "python": sys.executable, "script": Path(__file__).with_name("services.py")}
    for path in paths.values():
        if re.search(r"[\"'\\$\n]", str(path)):
            raise ServiceError(f"{path}: systemd reads quotes, backslashes and $ as its own; move the checkout")
    escaped = {name: str(path).replace("%", "%%") for name, path in paths.items()}  # % begins one of its own words
    more = {"user": f"User={user}\n", "system": SYSTEM, "target": "multi-user"} if user else {"target": "default"}
    return Path(__file__).with_name(NAME).read_text().format(**{"user": "", "system": ""} | escaped | more)


def install() -> None:
    """Write the unit and start it.

    Raises:
        ServiceError: services of `make up` are up, or the unit is another checkout's.
    """
    read_settings()
    check_settings()
    by_hand = [service.name for service in (*services(), keeper()) if service.process()]
    if by_hand and not keeper().kept().get("unit"):
        raise ServiceError(f"{', '.join(by_hand)}: up already by `make up`; `make down` first")
    folder, user = manager()
    systemctl(folder, user, "--version")
    check_own(folder / NAME, user)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(unit(user))
    for words in (["daemon-reload"], ["enable", NAME], ["restart", NAME]):
        systemctl(folder, user, *words)
    print(f"{folder / NAME}: written and started; logs in {SERVICES}, `make status` says how the services are")
    if user is None:
        print("they end when you log out, unless: loginctl enable-linger")


def uninstall() -> None:
    """End and remove the unit of this checkout."""
    folder, user = manager()
    check_own(folder / NAME, user)
    systemctl(folder, user, "disable", "--now", NAME)
    (folder / NAME).unlink(missing_ok=True)
    systemctl(folder, user, "daemon-reload")
    print(f"{folder / NAME}: removed")


def check_own(file: Path, user: str | None) -> None:
    """Raises ServiceError where the unit there is another checkout's."""
    (ours,) = [line for line in unit(user).splitlines() if line.startswith("WorkingDirectory=")]
    if file.exists() and ours not in file.read_text().splitlines():
        raise ServiceError(f"{file} is not of this checkout; `make uninstall-services` in its own first")


def systemctl(folder: Path, user: str | None, *words: str) -> None:
    command = ["systemctl", *([] if user else ["--user"]), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ServiceError("this machine has no systemd; `make up` works without") from error
    if done.returncode:
        raise ServiceError(f"`{' '.join(command)}` failed, for the units in {folder}:\n  {done.stderr.strip()}")


def main(what: str) -> int:
    try:
        {"install": install, "uninstall": uninstall}[what]()
    except ServiceError as error:
        print(f"make {what}-services: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
