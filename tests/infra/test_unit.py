"""The systemd unit that runs the keeper."""

import os
import shutil
import subprocess

import pytest

from infra import processes
from tests.infra.toy import machine
from tests.toy import REPOSITORY


@pytest.mark.fault("S5")
def test_a_unit_that_runs_the_keeper_is_installed_started_with_the_machine_and_ended(tmp_path):
    checkout = tmp_path / "my checkout"
    escape = "echo escaped@$3.service"
    path = machine(tmp_path / "bin", systemctl='echo "$*" >> ../requests', **{"systemd-escape": escape})
    shutil.copytree(REPOSITORY / "infra", checkout / "infra")
    for target in ("install-services", "uninstall-services"):
        command = ["make", "-f", str(REPOSITORY / "Makefile"), "-o", "install", target]
        variables = os.environ | {"HOME": str(tmp_path), "PATH": f"{path}:{os.environ['PATH']}"}
        subprocess.run(command, cwd=checkout, env=variables, check=True)
    requests = (tmp_path / "requests").read_text().splitlines()
    unit = f"escaped@{checkout}.service"
    assert requests == [
        f"--user {words}" for words in ("daemon-reload", f"enable --now {unit}", f"disable --now {unit}")
    ]
    (file,) = (tmp_path / ".config/systemd/user").iterdir()
    assert file.name == "m3diff@.service"
    lines = file.read_text().splitlines()
    (start,) = [line.removeprefix("ExecStart=").replace("$$", "$") for line in lines if line.startswith("ExecStart=")]
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to("/bin/echo")
    printed = subprocess.run(
        f"{start.replace('exec', 'env; exec')}", shell=True, cwd=checkout, capture_output=True, text=True
    )
    assert {"infra/services.py keep", f"M3DIFF_SERVICE={checkout}/services/keeper"} <= {*printed.stdout.splitlines()}
    settings = {"Restart=on-failure", "KillMode=control-group", "NoNewPrivileges=yes", "StartLimitIntervalSec=0"}
    assert settings | {"WorkingDirectory=%f", "OOMPolicy=continue"} <= {*lines}
    (stop,) = [line.partition("=")[2] for line in lines if line.startswith("TimeoutStopSec=")]
    assert int(stop) > processes.GRACE_S, "a stage's grace would be cut short"
