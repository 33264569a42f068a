"""An edit while a stage runs: it fails with what was edited, nothing is recorded, and the run cache stays clean."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from m3diff import __main__ as command_line
from m3diff.__main__ import USAGE, main
from m3diff.provenance import code
from m3diff.provenance.guard import unchanged, watched
from m3diff.settings.section import ParamsError
from tests import toy

NEW = hashlib.sha256(b"('Module',)").hexdigest()[:12]
EDIT = """
def train(params, paths):
    p = Path('params.yaml')
    p.write_text(p.read_text().replace('seed: 7407', 'seed: 9999'))
    real_train(params, paths)


def real_train("""
LOOP = Path("components/stages/train/loop.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("guard") / "project")


@pytest.fixture
def project(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(shutil.copytree(built, tmp_path / "project", symlinks=True))
    monkeypatch.chdir(root)
    monkeypatch.setenv("DVC_STAGE", "train")
    return root


def repro(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


@pytest.mark.fault("B1")
@pytest.mark.slow
def test_a_parameter_edited_during_training_fails_the_stage_and_is_not_recorded(project: Path):
    assert repro("convert")[0] == 0
    lock, original = Path("dvc.lock").read_bytes(), Path("toy.py").read_text()
    Path("toy.py").write_text(original.replace("\ndef train(", EDIT, 1))  # in its midst, as a person in an editor does
    code, said = repro("-s", "train")
    assert code != 0
    assert "train: edited while it ran: train.seed 7407 -> 9999." in said
    assert "nothing is recorded" in said
    assert Path("dvc.lock").read_bytes() == lock

    Path("toy.py").write_text(original)
    code, said = repro("-s", "train")  # with the edit let stand
    assert (code, "Running stage 'train'" in said) == (0, True), "what ran with 7407 is not restored as 9999"
    recorded = yaml.safe_load(Path("dvc.lock").read_text())["stages"]["train"]
    assert recorded["params"]["params.yaml"]["train"]["seed"] == 9999
    word = Path("data/05_model/checkpoint/word.txt").read_text()

    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("seed: 9999", "seed: 7407"))
    code, said = repro("-s", "train")
    assert (code, "Running stage 'train'" in said) == (0, True), "nor was 7407 recorded"
    assert Path("data/05_model/checkpoint/word.txt").read_text() != word


@pytest.mark.fault("B1")
def test_code_is_named_with_both_hashes_what_comes_or_goes_too_and_a_stage_of_other_code_does_not_begin(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    before, text = code.digest(LOOP)[:12], LOOP.read_text()
    for new, after in (("# new", NEW), ("(", "broken"), (None, "absent")):
        with pytest.raises(ParamsError) as said, unchanged():
            LOOP.unlink() if new is None else LOOP.write_text(new)
        assert f"{LOOP} {before} -> {after}" in str(said.value)
        LOOP.write_text(text)
    LOOP.write_text(f"{text}ADDED = 1\n")
    with (
        pytest.raises(ParamsError, match=rf"train.json is of other code \({LOOP}\); run `dvc repro code`"),
        unchanged(),
    ):
        pytest.fail("it began")
    monkeypatch.setenv("DVC_STAGE", "convert")
    with pytest.raises(ParamsError, match="profiles/questions.yaml "), unchanged():
        Path("profiles/questions.yaml").write_text("tasks: {}")


def test_an_edit_of_what_the_stage_does_not_watch_is_nobodys_concern_and_the_stages_error_is_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    edited = Path("params.yaml").read_text().replace("max_new_tokens: 64", "max_new_tokens: 65")
    with unchanged():
        Path("params.yaml").write_text(edited.replace("workers: 2", "workers: 1"))
        Path("components/stages/evaluate/stage.py").write_text("# new")
        Path("components/stages/train/__pycache__").mkdir(exist_ok=True)
        Path("components/stages/train/__pycache__/x.pyc").write_bytes(b"")
    assert "max_new_tokens: 65" in Path("params.yaml").read_text()
    with pytest.raises(ZeroDivisionError), unchanged():
        assert Path("params.yaml").write_text("{}") / 0
    monkeypatch.delenv("DVC_STAGE")
    with unchanged():
        Path("dvc.yaml").unlink()  # a stage by hand is not watched


def test_each_stage_watches_the_parameters_and_files_that_dvc_yaml_names_to_the_last_key(project: Path):
    train, drawn = watched("train"), watched("synthesize@minichange")
    assert (train["train.seed"], train["models.m3diff.family"]) == ("7407", '"m3diff"')
    assert {str(LOOP), "components/provenance/code.py", "train.base", "models.m3diff.rates.llm"} <= train.keys()
    assert not any(name.startswith(("components/stages/evaluate", "compute", "predict")) for name in train)
    assert {"synthesize.minichange.scenes.train", "components/datasets/minichange/render.py"} <= drawn.keys()
    assert drawn["ingest.datasets.minichange.reader"] == '"minichange"'
    assert "profiles/questions.yaml" in watched("convert")
    assert not any(name.startswith("data") for name in watched("evaluate"))


def test_parameters_that_are_edited_come_or_go_are_named_and_the_command_ends_with_the_code_of_wrong_ones(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    values = yaml.safe_load(Path("params.yaml").read_text())
    del values["train"]["seed"]
    values["train"] |= {"epochs": 99, "new": "x"}
    text = yaml.safe_dump(values)
    command = command_line.COMMANDS["train"]._replace(run=lambda *_: Path("params.yaml").write_text(text) and None)
    monkeypatch.setitem(command_line.COMMANDS, "train", command)
    assert main(["train"]) == USAGE
    said = capsys.readouterr().err
    assert "m3diff: train: edited while it ran: " in said
    for change in ("train.seed 7407 -> absent", " -> 99;", 'train.new absent -> "x"'):
        assert change in said
