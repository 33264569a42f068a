"""Training on a cluster of two nodes: the same to the bit as on one, also where a node dies in the middle; and a node
that does not come back ends the run in words."""

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.stages.train.cluster import Cluster, cluster
from tests.stages.train.test_killed_worker import start, wait_for_a_checkpoint, written
from tests.stages.train.toy import Recipe, recipe

FILES = ("checkpoint/model.safetensors", "checkpoint/manifest.json", "curves.csv", "report.json")
PATIENCE_S = 600


def finish(process: subprocess.Popen, folder: Path) -> dict[str, bytes]:
    """What the run wrote, by file."""
    assert process.wait(PATIENCE_S) == 0, (folder / "log").read_text()[-4000:]
    return {name: (folder / "out" / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def made(base: Path) -> Recipe:
    return recipe(base, epochs=24, workers=2, micro_batch=2, zero_stage=1, checkpoint_every_steps=6)


@pytest.fixture(scope="module")
def on_one_node(made: Recipe, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("nodes") / "one"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return finish(start(made, mixture, folder, env=environment), folder)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """A head, and two nodes with room for one worker each."""
    with cluster() as made:
        made.add(3)
        made.add(4)
        yield made


@pytest.mark.slow(150)
def test_two_nodes_with_a_worker_each_write_what_one_node_with_both_writes(
    made: Recipe, mixture: Path, on_one_node: dict[str, bytes], two_nodes: Cluster, tmp_path: Path
) -> None:
    process = start(made, mixture, tmp_path / "two", env=two_nodes.of_a_driver)
    wait_for_a_checkpoint(process, tmp_path / "two")
    trained_on = {number: len(workers) for number, workers in two_nodes.workers().items()}
    assert finish(process, tmp_path / "two") == on_one_node
    assert trained_on == {3: 1, 4: 1}


@pytest.mark.slow(400)
def test_a_run_whose_node_dies_goes_on_when_another_joins_and_one_that_gets_none_says_what_is_missing(
    made: Recipe, mixture: Path, on_one_node: dict[str, bytes], two_nodes: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    process = start(made, mixture, folder, env=two_nodes.of_a_driver)
    wait_for_a_checkpoint(process, folder)
    two_nodes.kill(4)
    assert max(written(folder)) < 72, "the run had ended before the node died"
    two_nodes.add(5)
    assert finish(process, folder) == on_one_node
    resumed = re.search(r"resumed after step (\d+) of", (folder / "log").read_text())
    assert resumed, "the run did not go on from a checkpoint"
    assert int(resumed[1]) >= 12

    folder = tmp_path / "ended"
    process = start(made, mixture, folder, env=two_nodes.of_a_driver)
    wait_for_a_checkpoint(process, folder)
    two_nodes.kill(5)
    began = time.monotonic()
    assert process.wait(PATIENCE_S) == 1
    assert time.monotonic() - began < 400  # Ray takes minutes to call a node dead
    said = (folder / "log").read_text()
    assert "the nodes of Ray have room for 1 of 2 workers: a worker needs 1 CPU;" in said
    assert "127.0.0.3 has 1 CPU" in said
    assert written(folder), "its checkpoints are kept for the next start"


@pytest.mark.fault("T15")
@pytest.mark.slow(500)
def test_what_trains_on_a_host_that_is_cut_off_ends_when_the_run_goes_on_elsewhere(
    made: Recipe, mixture: Path, tmp_path: Path
) -> None:
    """The older workers would train to the end, beside the new ones and into the same folder. Ray takes over a minute
    to call the host dead, so that the training must last for some."""
    longer = made.changed(epochs=400, checkpoint_every_steps=12, val_pairs=0)
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
        assert (alive, process.poll()) == ([], None), "the run ended before its older workers"
        assert finish(process, folder) == undisturbed
    assert "resumed after step" in (folder / "log").read_text()
