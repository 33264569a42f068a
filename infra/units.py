"""The services as units of systemd, for a machine that stays on: `make install-services`, `make uninstall-services`.

A unit runs `infra/services.py run NAME`, so commands, environment and logs are those of `make up`; what is added is
that systemd starts them with the machine and again when they end. A person gets units of their own, root gets units of
the system that run as the owner of the checkout.
"""

import os
import pwd
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from infra.services import SERVICES, ServiceError, check_settings, read_settings, services

TITLES = {"prefect": "Prefect server", "mlflow": "MLflow server", "worker": "Prefect worker"}
NEEDS = {"worker": ("prefect", "mlflow")}
STOP_S = {"prefect": 30, "mlflow": 30, "worker": 90}  # a worker's stage has its own grace inside
MARK = "# Written by `make install-services`; `make uninstall-services` removes it.\n"

RUNS = """
Restart=always
RestartSec=10
{back_off}KillMode=control-group
TimeoutStopSec={stop_s}
OOMPolicy=continue
LimitNOFILE=65536
TasksMax=infinity
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
PrivateTmp=no
"""
"""OOMPolicy: a training that runs out of memory must not take the worker with it. PrivateTmp: Ray's sockets and DVC's
site cache lie in /tmp and /var/tmp, and a shell looks for them there. Devices stay visible, since GPUs are devices."""

SYSTEM_ONLY = """ProtectSystem=full
ProtectKernelTunables=yes
ProtectKernelModules=yes
"""
"""ProtectSystem leaves home, the checkout and /var as they are. A person's systemd may not set these."""

TIMER = """[Unit]
Description=m3diff: keep the logs short

[Timer]
OnCalendar=hourly
Persistent=true

[Install]
WantedBy=timers.target
"""


@dataclass(frozen=True)
class Manager:
    """The systemd that takes the units: a person's own, or the system's, which runs them as `user`."""

    folder: Path
    user: str | None

    @property
    def systemctl(self) -> list[str]:
        return ["systemctl"] if self.user else ["systemctl", "--user"]


def manager() -> Manager:
    """The system's for root, else the person's own.

    Raises:
        ServiceError: root asks, and the checkout is root's too: a flow runs the code of a commit.
    """
    if os.getuid():
        home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
        return Manager(home / "systemd" / "user", None)
    owner = pwd.getpwuid(Path.cwd().stat().st_uid).pw_name
    if owner == "root":
        raise ServiceError(
            f"{Path.cwd()} belongs to root, and the services run as its owner: give it to an account of its own "
            "(useradd --create-home m3diff; chown -R m3diff ...) and install again"
        )
    return Manager(Path("/etc/systemd/system"), owner)


def units(user: str | None, version: int) -> dict[str, str]:
    """Each unit's text by its file name, for this checkout and this Python.

    Args:
        user: whom a unit of the system runs as; None for a person's own unit.
        version: systemd's; only from 254 on does it wait longer from restart to restart.
    """
    found = {f"m3diff-{service.name}.service": unit(service.name, user, version) for service in services()}
    rotate = MARK + "[Unit]\nDescription=m3diff: keep the logs short\n\n[Service]\nType=oneshot\n"
    found["m3diff-logs.service"] = rotate + where(user) + f"ExecStart={command('rotate')}\n"
    found["m3diff-logs.timer"] = MARK + TIMER
    return found


def unit(name: str, user: str | None, version: int) -> str:
    needs = [f"m3diff-{other}.service" for other in NEEDS.get(name, ())]
    back_off = "RestartSteps=6\nRestartMaxDelaySec=300\n" if version >= 254 else ""
    return "".join(
        (
            MARK,
            f"[Unit]\nDescription=m3diff: {TITLES[name]}\n",
            f"Wants={' '.join(['network-online.target', *needs])}\n",
            f"After={' '.join(['network-online.target', 'postgresql.service', *needs])}\n",
            "StartLimitIntervalSec=0\n\n[Service]\nType=exec\n",
            where(user),
            f"ExecStart={command('run', name)}",
            RUNS.format(back_off=back_off, stop_s=STOP_S[name]),
            SYSTEM_ONLY if user else "",
            f"\n[Install]\nWantedBy={'multi-user' if user else 'default'}.target\n",
        )
    )


def where(user: str | None) -> str:
    return (f"User={user}\n" if user else "") + f"WorkingDirectory={escaped(Path.cwd())}\n"


def command(*arguments: str) -> str:
    script = Path(__file__).with_name("services.py")
    return " ".join([f'"{escaped(sys.executable)}"', f'"{escaped(script)}"', *arguments])


def escaped(path: str | Path) -> str:
    """A path as systemd reads it: a percent sign begins one of its own words.

    Raises:
        ServiceError: it has a quote, a backslash or a dollar sign.
    """
    if re.search(r"[\"'\\$\n]", str(path)):
        raise ServiceError(f"{path}: systemd reads quotes, backslashes and dollar signs as its own; move the checkout")
    return str(path).replace("%", "%%")


def installed(folder: Path) -> list[str]:
    """Which units of m3diff are there.

    Raises:
        ServiceError: one was written for another checkout, or by another hand.
    """
    there = [name for name in units(None, 0) if (folder / name).exists()]
    ours = f"WorkingDirectory={escaped(Path.cwd())}\n"
    for name in there:
        text = (folder / name).read_text()
        if MARK not in text or (name.endswith(".service") and ours not in text):
            raise ServiceError(f"{folder / name} is not of this checkout; `make uninstall-services` in its own first")
    return there


def install() -> None:
    read_settings()
    check_settings()
    by_hand = [service.name for service in services() if service.process() and not service.by_systemd()]
    if by_hand:
        raise ServiceError(f"{', '.join(by_hand)}: up already by `make up`; `make down` first")
    chosen = manager()
    texts = units(chosen.user, systemd_version())
    installed(chosen.folder)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (chosen.folder / name).write_text(text)
    print(f"written to {chosen.folder}: {', '.join(texts)}")
    started = [name for name in texts if name != "m3diff-logs.service"]
    tell(chosen, "daemon-reload")
    tell(chosen, "enable", *started)
    tell(chosen, "restart", *started)
    print(f"started; logs in {SERVICES}, `make status` says how they are")
    if chosen.user is None:
        print("they end when you log out, unless: loginctl enable-linger")


def uninstall() -> None:
    chosen = manager()
    names = installed(chosen.folder)
    if not names:
        print("no units of m3diff are installed")
        return
    tell(chosen, "disable", "--now", *[name for name in names if name != "m3diff-logs.service"])
    for name in names:
        (chosen.folder / name).unlink()
    tell(chosen, "daemon-reload")
    print(f"removed from {chosen.folder}: {', '.join(names)}")


def systemd_version() -> int:
    """Raises ServiceError where there is no systemd."""
    try:
        said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ServiceError("this machine has no systemd; `make up` works without") from error
    return int(said.split()[1])


def tell(chosen: Manager, *words: str) -> None:
    done = subprocess.run([*chosen.systemctl, *words], capture_output=True, text=True)
    if done.returncode:
        asked = " ".join([*chosen.systemctl, *words])
        raise ServiceError(f"`{asked}` failed, the units in {chosen.folder} are written:\n  {done.stderr.strip()}")


def main(what: str) -> int:
    try:
        {"install": install, "uninstall": uninstall}[what]()
    except ServiceError as error:
        print(f"make {what}-services: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
