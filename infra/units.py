"""The services as a unit of systemd, for a machine that stays on: `make install-services`, `make uninstall-services`.

The unit runs `infra/services.py run`, which starts what `make up` starts, keeps it up, and has the same commands,
environment and logs; systemd starts it with the machine and again when it ends. A person gets a unit of their own, root
gets one of the system that runs as the owner of the checkout.
"""

import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

from infra.services import SERVICES, ServiceError, check_settings, keeper, read_settings, services

NAME = "m3diff.service"
MARK = "# Written by `make install-services`; `make uninstall-services` removes it.\n"

# OOMPolicy: a training that runs out of memory must not take the rest with it. PrivateTmp: Ray's sockets and DVC's site
# cache lie in /tmp and /var/tmp, and a shell looks for them there. Devices stay visible, since GPUs are devices.
UNIT = """[Unit]
Description=m3diff: Prefect, MLflow, worker
Wants=network-online.target
After=network-online.target postgresql.service
StartLimitIntervalSec=0

[Service]
Type=exec
{user}WorkingDirectory={folder}
ExecStart="{python}" "{script}" run
Restart=always
RestartSec=10
KillMode=control-group
TimeoutStopSec=90
OOMPolicy=continue
LimitNOFILE=65536
TasksMax=infinity
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
PrivateTmp=no
{system}
[Install]
WantedBy={target}.target
"""
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
    """
    return MARK + UNIT.format(
        user=f"User={user}\n" if user else "",
        folder=escaped(Path.cwd()),
        python=escaped(sys.executable),
        script=escaped(Path(__file__).with_name("services.py")),
        system=SYSTEM if user else "",
        target="multi-user" if user else "default",
    )


def escaped(path: str | Path) -> str:
    """A path as systemd reads it: a percent sign begins one of its own words.

    Raises:
        ServiceError: it has a quote, a backslash or a dollar sign.
    """
    if re.search(r"[\"'\\$\n]", str(path)):
        raise ServiceError(f"{path}: systemd reads quotes, backslashes and dollar signs as its own; move the checkout")
    return str(path).replace("%", "%%")


def installed(folder: Path) -> list[str]:
    """The units of m3diff that are there; earlier versions wrote one for each service.

    Raises:
        ServiceError: one was written for another checkout, or by another hand.
    """
    there = sorted([*folder.glob("m3diff*.service"), *folder.glob("m3diff*.timer")])
    ours = f"WorkingDirectory={escaped(Path.cwd())}\n"
    for file in there:
        text = file.read_text()
        if MARK not in text or (file.suffix == ".service" and ours not in text):
            raise ServiceError(f"{file} is not of this checkout; `make uninstall-services` in its own first")
    return [file.name for file in there]


def install() -> None:
    read_settings()
    check_settings()
    by_hand = [service.name for service in (*services(), keeper()) if service.process()]
    if by_hand and not keeper().kept().get("unit"):
        raise ServiceError(f"{', '.join(by_hand)}: up already by `make up`; `make down` first")
    folder, user = manager()
    systemctl(folder, user, "--version")
    remove(folder, user)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(unit(user))
    for words in (["daemon-reload"], ["enable", NAME], ["restart", NAME]):
        systemctl(folder, user, *words)
    print(f"{folder / NAME}: written and started; logs in {SERVICES}, `make status` says how the services are")
    if user is None:
        print("they end when you log out, unless: loginctl enable-linger")


def uninstall() -> None:
    folder, user = manager()
    names = remove(folder, user)
    print(f"removed from {folder}: {', '.join(names)}" if names else "no units of m3diff are installed")


def remove(folder: Path, user: str | None) -> list[str]:
    names = installed(folder)
    if names:
        systemctl(folder, user, "disable", "--now", *names)
        for name in names:
            (folder / name).unlink()
        systemctl(folder, user, "daemon-reload")
    return names


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
