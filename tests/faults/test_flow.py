"""Faults of what a flow's run needs, and of DVC: where it ends, that nothing wrong is registered, and that the next run
needs no hand, or a sentence says what to do."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from flows import alerts, dvc, pipeline, watch
from flows.workspace import FLOWS_FOLDER, workspace
from m3diff.__main__ import main
from m3diff.commands.preflight import NotReadyError
from m3diff.provenance.dvc import md5
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, Fault
from m3diff.registry import prune, tracking
from tests import toy
from tests.errors import Message, raises
from tests.servers import free_port, prefect_server, until
from tests.toy import change, store

STAGES = {"ingest@minichange", "validate", "convert", "train", "predict", "evaluate"}


@pytest.mark.fault("24", "25", "see")
@pytest.mark.slow(60)
def test_a_second_run_skips_all_and_a_parameter_of_evaluate_runs_evaluate_alone(flow):
    state, done = flow.run()
    assert state.name == "Completed"
    assert flow.branches == {"runs/run1", "runs/latest", "runs/history"}
    assert {outcome for name, outcome in done.items() if name not in ("register", "promote")} == {"Skipped"}
    assert done.keys() > STAGES
    (version,) = flow.versions
    assert version.tags["prefect.flow_run"] == "run1"
    (page,) = flow.pages
    for text in ("- because a test", "| minichange/total | CIDEr |", "m3diff version 1", "git show runs/run1:dvc.lock"):
        assert text in page, text
    report_name = git("ls-tree", "--name-only", "runs/run1:reports", cwd=flow.root)
    assert git("show", f"runs/run1:reports/{report_name}", cwd=flow.root) == page
    state, done = flow.run()
    assert state.name == "Skipped"
    assert set(done.values()) == {"Skipped"}
    state, done = flow.run("evaluate.gallery=7")
    assert [name for name, outcome in done.items() if outcome == "Ran"] == ["evaluate", "register"]
    assert [registered.version for registered in flow.versions] == [version.version]


@pytest.mark.fault("T10")
@pytest.mark.slow(60)
def test_a_deleted_experiment_is_met_before_the_first_step_and_mended_by_its_remedy(flow, monkeypatch):
    flow.run()
    client = store(flow.root)
    experiment = client.get_experiment_by_name("m3diff").experiment_id
    client.delete_experiment(experiment)
    flow.tries.clear()
    with raises(NotReadyError, "preflight.cannot_start") as refused:
        flow.run("train.seed=1")
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "registry.deleted_experiment"
    assert fault.fields["command"].endswith(f"mlflow experiments restore --experiment-id {experiment}")
    assert flow.tries == ["preflight"]
    client.restore_experiment(experiment)
    with monkeypatch.context() as later:
        later.setattr(pipeline, "preflight", lambda params: client.delete_experiment(experiment))
        with raises(DataError, "registry.deleted_experiment", command=fault.fields["command"]):
            flow.run("train.seed=1")
    client.restore_experiment(experiment)
    state, done = flow.run("train.seed=1")
    assert done["train"] == "Restored"
    assert done["evaluate"] == "Restored"
    assert done["register"] == "Ran"
    assert len(flow.versions) == 2


def flip_a_bit(rng, root: Path, folder: Path) -> tuple[Path, Path, str]:
    """In the cache's copy of one file of `folder`, its size and time kept: the file, the copy and the hash it had."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    hash_ = md5(file)
    copy = root / ".dvc/cache/files/md5" / hash_[:2] / hash_[2:]
    was = copy.stat()
    data = bytearray(copy.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    copy.chmod(was.st_mode | stat.S_IWUSR)
    copy.write_bytes(data)
    copy.chmod(was.st_mode)
    os.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
    return file, copy, hash_


@pytest.mark.fault("09", "m8")
@pytest.mark.slow(30)
@pytest.mark.parametrize("part", ["05_model/checkpoint", "04_mixture/train", "06_predictions"])
def test_a_bit_that_flipped_in_the_cache_is_found_before_anything_is_registered(flow, rng, part):
    file, copy, _ = flip_a_bit(rng, flow.root, flow.root / "data" / part)
    with raises(DataError, "dvc.differs_from_lock") as refused:
        flow.run()
    fields = refused.value.fields
    assert str(fields["path"]).startswith(f"data/{part}")
    assert fields["value"] != fields["expected"]
    assert flow.versions == []
    assert md5(file) != md5(copy), "the checkout's own file is whole"


@pytest.mark.fault("09", "T17")
@pytest.mark.slow(30)
def test_a_bit_that_flipped_in_what_a_stage_reads_is_found_before_it_begins(flow, rng):
    file, copy, hash_ = flip_a_bit(rng, flow.root, flow.root / "data/04_mixture/train")
    with raises(DataError, "flows.damaged_inputs", stage="train") as refused:
        flow.run("train.seed=3")
    path = f"data/04_mixture/train/{file.name}"
    assert Fault("dvc.damaged_object", path=path, object=copy, value=md5(copy)) in refused.value.fields["faults"]
    assert "toy train" not in flow.logged
    copy.unlink()
    assert flow.run("train.seed=3")[1]["train"] == "Ran"
    assert md5(copy) == hash_, "the stage that made it made it again"


@pytest.mark.fault("09", "21")
@pytest.mark.slow(30)
def test_damaged_bytes_are_not_sent_to_the_remote_and_are_named_with_both_hashes(flow, rng, tmp_path):
    remote = with_remote(flow.root, tmp_path)
    _, copy, hash_ = flip_a_bit(rng, flow.root, flow.root / "data/05_model/checkpoint")
    with raises(DataError, "flows.damaged_outputs") as refused:
        flow.run()
    faults = refused.value.fields["faults"]
    assert any(fault.fields["path"].startswith("data/05_model/checkpoint/") for fault in faults)
    assert {fault.fields["value"] for fault in faults} == {md5(copy)}
    assert all(str(fault.fields["object"]).endswith(f"{hash_[:2]}/{hash_[2:]}") for fault in faults)
    assert not any(path.is_file() for path in remote.rglob("*"))
    assert flow.versions == []
    copy.unlink()
    assert flow.run()[1]["push"] == "Ran"
    assert md5(copy) == hash_
    assert len(flow.versions) == 1


def with_remote(root: Path, tmp_path: Path) -> Path:
    remote = tmp_path / "remote"
    remote.mkdir()
    toy.run(root, "dvc", "remote", "add", "--quiet", "--default", "store", str(remote))
    toy.commit(root, "a remote")
    return remote


@pytest.mark.fault("T5")
@pytest.mark.slow(60)
@pytest.mark.parametrize("local", ["--local", "--project"])
def test_a_remote_with_a_relative_path_is_the_named_one(flow, tmp_path, capsys, monkeypatch, local):
    remote = tmp_path / "dvc-store"
    stray = flow.root / "runs" / "flows" / "dvc-store"
    toy.run(flow.root, "dvc", "remote", "add", local, "--default", "store", "../dvc-store")
    toy.commit(flow.root, "a remote")
    assert flow.run()[1]["push"] == "Ran"
    assert not stray.exists()
    stray.mkdir()
    (stray / "kept").write_text("a person's")
    os.utime(stray, (0, 0))
    shutil.rmtree(remote)
    assert flow.run()[1]["push"] == "Ran", "the remote is asked in each run, not a record"
    assert (stray / "kept").is_file()
    toy.run(tmp_path, "git", "clone", "-q", str(flow.root), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    if local == "--local":
        toy.run(tmp_path / "clone", "dvc", "remote", "add", "--local", "--default", "store", "../dvc-store")
    assert main(["restore", "runs/run1", "--into", "../elsewhere/back"]) == 0, capsys.readouterr()
    assert toy.status(tmp_path / "elsewhere" / "back") == {}


@pytest.mark.fault("21", "10")
@pytest.mark.slow(60)
def test_a_remote_that_fails_half_way_leaves_nothing_registered_until_the_next_run(flow, rng, tmp_path):
    remote = with_remote(flow.root, tmp_path)
    (remote / "files" / "md5").mkdir(parents=True)
    looked_at_before = {hash_[:2] for hashes in dvc.outputs_by_remote().values() for hash_ in hashes.values()}
    objects = {path.name for path in (flow.root / ".dvc/cache/files/md5").iterdir()} - looked_at_before
    sealed = [remote / "files" / "md5" / name for name in rng.sample(sorted(objects), len(objects) // 2)]
    for folder in sealed:
        folder.symlink_to("away")  # a volume that is not mounted: what belongs there cannot be written
    with raises(dvc.RemoteError, "flows.push_failed", remote="store"):
        flow.run()
    assert flow.tries.count("push") == 4
    assert flow.versions == []
    sent = {path for path in remote.rglob("*") if path.is_file()}
    assert sent, "what can be sent is sent"
    times = {path: path.stat().st_mtime_ns for path in sent}
    for folder in sealed:
        folder.unlink()
    _, done = flow.run()
    assert done["push"] == "Ran"
    assert {done[stage] for stage in STAGES} == {"Skipped"}
    assert {path: path.stat().st_mtime_ns for path in sent} == times, "sent once"
    assert len(flow.versions) == 1


@pytest.mark.fault("11", "m3", "19")
def test_a_gpu_or_a_server_of_mlflow_that_is_not_there_is_told_before_anything_runs(flow, tmp_path, monkeypatch):
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{driver.parent}:{os.environ['PATH']}")
    began = time.monotonic()
    no_gpu = Fault("preflight.too_few_gpus", key="compute.gpu", value=0, needed=2)
    with raises(NotReadyError, "preflight.cannot_start", faults=[no_gpu]):
        flow.run("compute.gpu=true", "compute.workers=2")
    assert time.monotonic() - began < 60
    assert str(no_gpu) in flow.pages[-1]
    with raises(NotReadyError, "preflight.cannot_start") as refused:
        flow.run("register.tracking_uri=http://127.0.0.1:9", "train.seed=3")
    assert [fault.code for fault in refused.value.fields["faults"]] == ["preflight.no_mlflow"]
    assert flow.tries == ["preflight"] * 2


@pytest.mark.fault("19")
@pytest.mark.slow(60)
def test_mlflow_that_goes_after_the_preflight_costs_no_stage_and_a_rerun_registers(flow, monkeypatch):
    change(flow.root, "register", tracking_uri="http://127.0.0.1:9")
    toy.commit(flow.root, "a server that is gone")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "preflight", lambda params: None)
        with pytest.raises(tracking.TrackingUnavailableError):
            flow.run("evaluate.gallery=7")
    assert flow.tries.count("register") == 4
    change(flow.root, "register", tracking_uri="sqlite:///services/mlflow/mlflow.db")
    toy.commit(flow.root, "it is back")
    _, done = flow.run("evaluate.gallery=7")
    assert done["evaluate"] in ("Skipped", "Restored"), "what was made while MLflow was gone is not made again"
    assert done["register"] == "Ran"
    assert len(flow.versions) == 1


@pytest.mark.fault("13", "m4")
@pytest.mark.slow(30)
def test_a_training_that_diverges_is_neither_tried_again_nor_registered(flow):
    ends = "    print('train: step 7: loss nan at rate 0.001', flush=True)\n    sys.exit(1)\n"
    toy.replace_stage(flow.root, "train", f"def train(params, paths):\n{ends}")
    toy.commit(flow.root, "diverges")
    with pytest.raises(Exception, match="step 7: loss nan"):
        flow.run("train.seed=3")
    assert "step 7: loss nan" in flow.pages[-1]
    assert flow.versions == []
    assert flow.logged.count("train: step 7: loss nan at rate 0.001") == 1


FLOW = "from flows.pipeline import full; full(ref='HEAD', overrides=['evaluate.gallery=7'])"


@pytest.mark.fault("20", "32")
@pytest.mark.slow(150)
def test_a_server_of_prefect_that_is_killed_in_mid_run_costs_no_stage(project, tmp_path):
    toy.replace_stage(project, "evaluate", toy.WAITS)
    toy.commit(project, "a slow stage")
    marks = tmp_path / "prefect"
    port = free_port()
    variables = {"PREFECT_CLIENT_MAX_RETRIES": "1", "TOY_MARKS": str(marks)}

    def begin(environment: dict[str, str]) -> subprocess.Popen:
        log = (marks / "flow.log").open("a")
        return subprocess.Popen([sys.executable, "-c", FLOW], env=environment | variables, stdout=log, stderr=log)

    with prefect_server(marks, port) as environment:
        flow = begin(environment)
        until(lambda: (marks / "began").exists() or flow.poll() is not None)
        assert flow.poll() is None, (marks / "flow.log").read_text()[-4000:]
    time.sleep(5)
    (marks / "go").touch()
    flow.wait(timeout=400)
    assert (marks / "ended").read_text() == "once "
    with prefect_server(marks, port) as environment:
        assert begin(environment).wait(timeout=400) == 0, (marks / "flow.log").read_text()[-4000:]
    assert (marks / "ended").read_text() == "once ", "the stage ran a second time"
    assert len(store(project).search_model_versions("name = 'm3diff'")) == 1


# Faults of DVC's own files and processes

STAGE = "evaluate"
HOLD = """def evaluate(params, paths):
    import subprocess
    held = "import time; from dvc.repo import Repo\\n"
    held += "with Repo('.').lock: print('held', flush=True); time.sleep(8)"
    other = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\\n"
    old(params, paths)
"""
SLEEP = """def evaluate(params, paths):
    from m3diff.__main__ import die_with_parent
    die_with_parent()
    time.sleep(120)
"""


def set_gallery(root: Path, pairs: int = 7) -> None:
    """A parameter that puts the last stage out of date."""
    toy.change(root, "evaluate", gallery=pairs)


def of_stage(root: Path) -> list[psutil.Process]:
    processes = [process for process in psutil.process_iter(["cmdline", "cwd"]) if process.info["cwd"] == str(root)]
    return [process for process in processes if "toy.py" in (process.info["cmdline"] or [])]


@pytest.mark.fault("02")
@pytest.mark.slow(30)
def test_a_killed_dvc_takes_its_stage_with_it_and_the_next_run_needs_no_hand(project, rng):
    text = toy.replace_stage(project, STAGE, f"import time\n\n\n{SLEEP}")
    set_gallery(project)
    process = subprocess.Popen([*dvc.DVC_COMMAND, "repro", "-s", STAGE], env=dvc.environment(), start_new_session=True)
    until(lambda: of_stage(project), 120)
    time.sleep(2 + 2 * rng.random())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not of_stage(project), 5)
    Path("toy.py").write_text(text)
    assert dvc.repro(STAGE, print) == "Ran"
    assert toy.status(project) == {}


@pytest.mark.fault("06")
@pytest.mark.slow(30)
def test_a_lock_that_is_held_as_a_stage_ends_is_waited_for_and_the_stage_recorded(project):
    set_gallery(project)
    toy.replace_stage(project, STAGE, HOLD)
    lines: list[str] = []
    assert dvc.repro(STAGE, lines.append) == "Ran", lines
    recorded = yaml.safe_load(Path("dvc.lock").read_text())["stages"][STAGE]
    assert recorded["params"]["params.yaml"]["evaluate"]["gallery"] == 7


@pytest.mark.fault("07", "S4")
@pytest.mark.slow(30)
@pytest.mark.parametrize("text", ["", '{"write": {"data/07'])
def test_a_rwlock_that_a_killed_dvc_left_hinders_no_flow_and_a_persons_own_stays(project, text):
    persons_lock = project / ".dvc" / "tmp" / "rwlock"
    persons_lock.write_text(text)
    with workspace("one", "HEAD", ["evaluate.gallery=7"]):
        dvc.link_data()
        Path(".dvc/tmp").mkdir(exist_ok=True)
        Path(".dvc/tmp/rwlock").write_text(text)
        assert dvc.repro(STAGE, print) == "Ran"
    assert persons_lock.read_text() == text


CONFLICT = "<<<<<<< HEAD\nschema: '2.0'\nstages: {}\n=======\nschema: '2.0'\n>>>>>>> theirs\n"


@pytest.mark.fault("08")
def test_a_dvc_lock_that_is_none_is_told_with_gits_command(project, capsys):
    for text in ("", "schema: '2", CONFLICT):
        (project / "dvc.lock").write_text(text)
        with raises(dvc.DvcError, "flows.command_failed") as failed:
            dvc.repro(STAGE, print)
        assert Message("flows.broken_lock").in_text(failed.value.fields["output"])
    toy.commit(project, "broken")
    with raises(dvc.DvcError, "flows.command_failed") as failed, workspace("one", None, []):
        dvc.status()
    assert Message("flows.broken_lock").in_text(failed.value.fields["output"])
    assert main(["register"]) == 3
    assert Message("dvc.broken_lock", path="dvc.lock").in_text(capsys.readouterr().err)


def cut_lock(state: str) -> None:
    """Leave of `dvc.lock` what a kill may: nothing, half of it, or whole lines without those of the last stage."""
    text = Path("dvc.lock").read_text()
    last_stage = text.rindex("\n  ", 0, text.rindex("\n    cmd:")) + 1
    Path("dvc.lock").write_text({"empty": "", "half": text[: len(text) // 2 + 3], "short": text[:last_stage]}[state])


@pytest.mark.fault("T12")
@pytest.mark.parametrize("state", ["empty", "half", "short"])
def test_a_dvc_that_is_killed_as_it_writes_its_lock_leaves_the_one_before(project, monkeypatch, state):
    before = Path("dvc.lock").read_bytes()
    cut_lock(state)
    cut = Path("dvc.lock").read_bytes()
    Path("dvc.lock").write_bytes(before)
    killed = f"import os; open('dvc.lock', 'wb').write({cut!r}); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(dvc, "DVC_COMMAND", [sys.executable, "-c", killed])
    for expected in (before, None):
        with raises(dvc.DvcError, "flows.command_failed", command="stage evaluate"):
            dvc.repro(STAGE, print)
        assert (Path("dvc.lock").read_bytes() if Path("dvc.lock").exists() else None) == expected
        Path("dvc.lock").unlink(missing_ok=True)


@pytest.mark.fault("T12")
def test_a_lock_that_is_cut_short_is_not_committed(project):
    before = Path("dvc.lock").read_bytes()
    for state in ("empty", "half", "short"):
        cut_lock(state)
        Path("beside.json").write_text(state)
        dvc.commit("what a killed run left", ())
        assert git("show", "--name-only", "--format=").split() == ["beside.json"]
        assert Path("dvc.lock").read_bytes() == before
    git("rm", "--quiet", "dvc.lock")
    git("commit", "--quiet", "--amend", "--no-edit")
    Path("dvc.lock").write_text("")
    dvc.commit("before anything was recorded", ())
    assert "dvc.lock" not in git("ls-tree", "--name-only", "HEAD").split()


@pytest.mark.fault("T12")
@pytest.mark.parametrize("text", ["", "{", '{"sent": {'], ids=["empty", "half", "cut"])
def test_what_flows_keep_beside_their_runs_may_be_damaged(project, text, monkeypatch):
    """A loss of power leaves an empty file on some disks; then it is as if there were none."""
    flows = project / FLOWS_FOLDER
    flows.mkdir(parents=True)
    for name in ("watch.json", "alerts.json"):
        (flows / name).write_text(text)
    assert watch.read_json(watch.STATE_FILE) is None
    monkeypatch.setenv("M3DIFF_NOTIFY", "")
    alerts.send_alert(pytest.fail, checkout=project)
    alerts.send_alert(pytest.fail, "key", "title", "text", project)


@pytest.mark.fault("T12")
@pytest.mark.slow(20)
def test_a_lock_that_is_cut_short_hinders_no_prune_unless_it_is_a_working_tree_s(project, tmp_path):
    toy.run(project, "dvc", "gc", "--workspace", "--all-commits", "-f")
    assert [*prune.find_obstacles_to_gc((), ())] == []
    assert "--skip-failed" not in prune.build_gc_arguments()
    person = tmp_path / "person"
    git("worktree", "add", "--quiet", "--detach", str(person))
    (person / "dvc.lock").write_text("")
    (hindrance,) = prune.find_obstacles_to_gc((), ())
    command = f"git -C {person} checkout HEAD -- dvc.lock"
    assert command in str(hindrance)
    subprocess.run(command.split(), check=True)
    assert [*prune.find_obstacles_to_gc((), ())] == []
    before = Path("dvc.lock").read_bytes()
    for text in (b"", before):
        Path("dvc.lock").write_bytes(text)
        toy.commit(project, "a lock of no bytes, as an earlier version of m3diff committed it, and the next")
    objects = sorted(path for path in Path(".dvc/cache/files").rglob("*") if path.is_file())
    toy.run(project, "dvc", *prune.build_gc_arguments(), "-f")
    assert sorted(path for path in Path(".dvc/cache/files").rglob("*") if path.is_file()) == objects != []
