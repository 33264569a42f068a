"""Runs on Ray Train workers, on one machine and on a cluster, end with the same bits whichever process dies."""

import contextlib
import ipaddress
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import GetTimeoutError

from m3diff.stages.train import on_ray
from tests.errors import Message
from tests.stages.train.cluster import Cluster, cluster
from tests.stages.train.toy import Recipe, recipe

FILES = ("checkpoint/model.safetensors", "checkpoint/manifest.json", "curves.csv", "report.json")
PATIENCE_S = 900
CODE = """
import pickle, sys
from pathlib import Path
from typing import Any
from m3diff.stages.train.stage import train
made, mixture, folder = map(Path, sys.argv[1:])
made = pickle.loads(made.read_bytes()).changed(scratch=folder / "runs")
train(made.cfg, made.model, made.compute, mixture, folder / "out")
"""


# Ray gives its workers a niceness of 15, at which they get no time beside the other tests
NOT_NICE = {"RAY_worker_niceness": "0"}


def start(run_recipe: Recipe, mixture: Path, folder: Path, **options: Any) -> subprocess.Popen:
    """Train in a separate process, which is started as `how` says."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe").write_bytes(pickle.dumps(run_recipe))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", CODE, str(folder / "recipe"), str(mixture), str(folder)]
        environment = options.pop("env", os.environ) | NOT_NICE
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, **options)


def finish(process: subprocess.Popen, folder: Path) -> dict[str, bytes]:
    """Return the contents of the files that the run wrote, by name."""
    assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()[-4000:]
    return {name: (folder / "out" / name).read_bytes() for name in FILES}


def written(folder: Path) -> list[int]:
    """Return the steps of the existing checkpoints."""
    return sorted(int(manifest.parent.name[-8:]) for manifest in folder.glob("runs/train/*/step-*/manifest.json"))


def wait_for_a_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    """Wait for a file, because Ray prints a worker's lines a second late, perhaps after the end of the run."""
    for _ in range(12000):
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        if max(written(folder), default=0) >= 12:
            break
        time.sleep(0.05)


def resumed_at(folder: Path) -> int:
    """Return the step that the run resumed from. Assert that it is not an early one."""
    ip = re.search(r"resumed after step (\d+) of", (folder / "log").read_text())
    assert ip, "the run did not go on from a checkpoint"
    assert int(ip[1]) >= 12
    return int(ip[1])


def listening(family: list[psutil.Process]) -> Iterator[tuple[str, str]]:
    """Return the process name and the address of each listening socket."""
    for process in family:
        with contextlib.suppress(psutil.Error):  # it has ended
            name = " ".join([process.name(), *process.cmdline()[:1]])
            sockets = process.net_connections("inet")
            yield from ((name, socket.laddr.ip) for socket in sockets if socket.status == psutil.CONN_LISTEN)


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@pytest.fixture(scope="module")
def run_recipe(base: Path) -> Recipe:
    return recipe(base, epochs=24, workers=2, micro_batch=2, zero_stage=1, checkpoint_every_steps=6)


Watched = tuple[dict[str, bytes], set[tuple[str, str]]]


@pytest.fixture(scope="module")
def undisturbed(run_recipe: Recipe, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Return the outputs of an undisturbed run on this machine, and the addresses where its processes listened."""
    folder = tmp_path_factory.mktemp("workers") / "whole"
    listeners = set()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = start(run_recipe, mixture, folder, env=environment)
    while process.poll() is None:
        listeners |= set(listening(psutil.Process(process.pid).children(recursive=True)))
        time.sleep(0.2)
    return finish(process, folder), listeners


@pytest.mark.fault("S7")
@pytest.mark.slow(70)
def test_a_run_on_one_machine_listens_on_its_loopback_interface_alone(undisturbed):
    _, listeners = undisturbed
    for name in ("gcs_server", "raylet", "TrainWorker"):
        assert any(name in listens for listens, _ in listeners), f"{name} was not seen to listen: {listeners}"
    assert not sorted((name, address) for name, address in listeners if not is_loopback(address))


@pytest.mark.fault("01")
@pytest.mark.slow(100)
def test_a_run_whose_worker_is_killed_ends_with_the_same_weights(run_recipe, mixture, undisturbed, tmp_path):
    folder = tmp_path / "broken"
    broken = start(run_recipe, mixture, folder)
    wait_for_a_checkpoint(broken, folder)
    family = psutil.Process(broken.pid).children(recursive=True)
    workers = [child for child in family if "TrainWorker" in " ".join([child.name(), *child.cmdline()])]
    assert workers, [child.cmdline() for child in family]
    workers[0].kill()
    assert finish(broken, folder) == undisturbed[0]
    resumed_at(folder)


@pytest.mark.fault("03")
@pytest.mark.slow(120)
def test_a_run_whose_group_is_asked_to_end_writes_a_checkpoint_and_goes_on_from_it(
    run_recipe, mixture, undisturbed, tmp_path
):
    folder = tmp_path / "stopped"
    leader = subprocess.Popen(["sleep", "600"], process_group=0)
    process = start(run_recipe, mixture, folder, process_group=leader.pid)
    wait_for_a_checkpoint(process, folder)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(leader.pid, signal.SIGTERM)
    leader.wait()
    assert process.wait(timeout=60) == 143, (folder / "log").read_text()[-4000:]
    step = written(folder)[-1]
    assert Message("train.stopped", step=step).in_text((folder / "log").read_text()), "it did not end by its own"
    assert not psutil.wait_procs(family, timeout=20)[1], "what it had started is left"
    assert finish(start(run_recipe, mixture, folder), folder) == undisturbed[0]
    assert resumed_at(folder) == step


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Start a head, and two nodes with room for one worker each."""
    with cluster() as run_recipe:
        run_recipe.add(3)
        run_recipe.add(4)
        yield run_recipe


@pytest.mark.slow(400)
def test_a_run_whose_node_dies_goes_on_when_another_joins_or_says_what_is_missing(
    run_recipe, mixture, undisturbed, two_nodes, tmp_path
):
    folder = tmp_path / "broken"
    process = start(run_recipe, mixture, folder, env=two_nodes.of_a_driver)
    wait_for_a_checkpoint(process, folder)
    assert {number: len(workers) for number, workers in two_nodes.workers().items()} == {3: 1, 4: 1}
    two_nodes.kill(4)
    assert max(written(folder)) < 72, "the run had ended before the node died"
    two_nodes.add(5)
    assert finish(process, folder) == undisturbed[0]
    resumed_at(folder)

    folder = tmp_path / "ended"
    process = start(run_recipe, mixture, folder, env=two_nodes.of_a_driver)
    wait_for_a_checkpoint(process, folder)
    two_nodes.kill(5)
    began = time.monotonic()
    assert process.wait(PATIENCE_S) == 1
    assert time.monotonic() - began < 400  # Ray takes minutes to call a node dead
    log = (folder / "log").read_text()
    assert "1 of 2" in log
    assert "127.0.0.3 has 1 CPU" in log
    assert written(folder), "its checkpoints are kept for the next start"


@pytest.mark.fault("T15")
@pytest.mark.slow(500)
def test_what_trains_on_a_host_that_is_cut_off_ends_when_the_run_goes_on_elsewhere(run_recipe, mixture, tmp_path):
    """Ray takes over a minute to declare a host dead, so the training must take longer."""
    longer = run_recipe.changed(epochs=400, checkpoint_every_steps=12, val_pairs=0)
    undisturbed = finish(start(longer, mixture, tmp_path / "one", env=dict(os.environ)), tmp_path / "one")
    folder = tmp_path / "cut"
    with cluster() as hosts:
        hosts.add(3, cpus=2)
        process = start(longer, mixture, folder, env=hosts.of_a_driver)
        wait_for_a_checkpoint(process, folder)
        older = hosts.workers()[3]
        hosts.add(4, cpus=2)
        hosts.cut_off(3)
        alive = psutil.wait_procs(older, timeout=PATIENCE_S)[1]
        assert alive == []
        assert process.poll() is None, "the run ended before its older workers"
        assert finish(process, folder) == undisturbed
    assert "resumed after step" in (folder / "log").read_text()


class Actor:
    """A Ray actor that may or may not answer whether it is ready."""

    class __ray_ready__:  # noqa: N801  # Ray's own name
        @staticmethod
        def remote() -> str:
            return "ready"


def test_the_coordinator_answers_before_the_training_begins(monkeypatch):
    requests: list[tuple[str, float]] = []
    monkeypatch.setattr(on_ray, "get_or_create_autoscaling_coordinator", Actor)
    monkeypatch.setattr(on_ray.ray, "get", lambda answer, timeout: requests.append((answer, timeout)))
    on_ray.start_coordinator()
    assert requests == [("ready", on_ray.JOIN_S)]


@pytest.mark.parametrize("alone", [True, False], ids=["this machine", "a cluster"])
def test_only_a_ray_of_this_machine_s_own_waits_for_its_coordinator(alone, monkeypatch, tmp_path):
    order: list[str] = []
    trainer = SimpleNamespace(fit=lambda: order.append("training"))
    job: Any = SimpleNamespace(run_dir=tmp_path, compute=None)
    (tmp_path / "figures.json").write_text("{}")
    monkeypatch.setattr(on_ray, "on_one_machine", lambda: alone)
    monkeypatch.setattr(on_ray, "make_trainer", lambda job: trainer)
    monkeypatch.setattr(on_ray, "start_ray", lambda compute: order.append("ray"))
    monkeypatch.setattr(on_ray, "wait_for_room", lambda compute, seconds: order.append("room"))
    monkeypatch.setattr(on_ray, "start_coordinator", lambda: order.append("coordinator"))
    monkeypatch.setattr(on_ray.ray, "shutdown", lambda: order.append("end"))
    on_ray.run_on_ray(job)
    assert order == ["ray", "room", *(["coordinator"] if alone else []), "training", "end"]


def test_a_coordinator_that_does_not_answer_keeps_no_training_from_beginning(monkeypatch):
    def get(answer: str, timeout: float) -> None:
        raise GetTimeoutError("not ready")

    monkeypatch.setattr(on_ray, "get_or_create_autoscaling_coordinator", Actor)
    monkeypatch.setattr(on_ray.ray, "get", get)
    on_ray.start_coordinator()
