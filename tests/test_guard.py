"""An edit while a stage runs: it fails with what was edited, nothing is recorded, and the run cache stays clean."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from m3diff.__main__ import USAGE, main
from m3diff.provenance import code
from m3diff.provenance.guard import Watched, differences, unchanged, watched
from m3diff.settings.section import ParamsError
from tests import toy

NEW = hashlib.sha256(b"('Module',)").hexdigest()[:12]
EDIT = """
def {stage}(params, paths, *dataset):
    {edit}
    real_{stage}(params, paths, *dataset)


def real_{stage}("""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = toy.build(tmp_path / "project")
    monkeypatch.chdir(root)
    return root


def edit_during(stage: str, edit: str) -> None:
    """Have the toy's stage do this in its midst, as a person in an editor does."""
    text = Path("toy.py").read_text()
    Path("toy.py").write_text(text.replace(f"\ndef {stage}(", EDIT.format(stage=stage, edit=edit), 1))


def repro(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def set_seed(seed: int) -> str:
    return f"p = Path('params.yaml'); p.write_text(p.read_text().replace('seed: 7407', 'seed: {seed}'))"


@pytest.mark.fault("B1")
@pytest.mark.slow
def test_a_parameter_edited_during_training_fails_the_stage_and_is_not_recorded(project: Path):
    assert repro("convert")[0] == 0
    lock = Path("dvc.lock").read_bytes()
    original = Path("toy.py").read_text()
    edit_during("train", set_seed(9999))
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


def fails(stage: str, monkeypatch: pytest.MonkeyPatch, edit: str) -> str:
    """What is said where this is done while the stage runs."""
    monkeypatch.setenv("DVC_STAGE", stage)
    with pytest.raises(ParamsError) as said, unchanged():
        exec(edit, {"Path": Path})
    return str(said.value)


@pytest.mark.fault("B1")
def test_code_is_named_with_both_hashes_and_what_comes_or_goes_too(project: Path, monkeypatch: pytest.MonkeyPatch):
    file = Path("components/stages/train/loop.py")
    before, text = code.digest(file)[:12], file.read_text()
    for edit, after in (("write_text('# new')", NEW), ("write_text('(')", "broken"), ("unlink()", "absent")):
        said = fails("train", monkeypatch, f"Path('{file}').{edit}")
        assert f"{file} {before} -> {after}" in said
        file.write_text(text)
    said = fails("convert", monkeypatch, "Path('profiles/questions.yaml').write_text('tasks: {}')")
    assert "profiles/questions.yaml " in said


def test_a_stage_does_not_begin_where_its_recorded_code_is_another(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DVC_STAGE", "train")
    file = Path("components/stages/train/loop.py")
    file.write_text(file.read_text() + "ADDED = 1\n")
    said = rf"code/train.json is of other code \({file}\); run `dvc repro code`"
    with pytest.raises(ParamsError, match=said), unchanged():
        pytest.fail("it began")


def test_an_edit_of_what_the_stage_does_not_watch_is_nobodys_concern(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DVC_STAGE", "train")
    with unchanged():
        text = Path("params.yaml").read_text()
        Path("params.yaml").write_text(
            text.replace("max_new_tokens: 64", "max_new_tokens: 65").replace("workers: 2", "workers: 1")
        )
        Path("components/stages/evaluate/stage.py").write_text("# new")
        Path("components/stages/train/__pycache__").mkdir(exist_ok=True)
        Path("components/stages/train/__pycache__/x.pyc").write_bytes(b"")
    assert "max_new_tokens: 65" in Path("params.yaml").read_text()


def test_each_stage_watches_the_parameters_and_files_that_dvc_yaml_names(project: Path):
    values = yaml.safe_load(Path("params.yaml").read_text())
    train = watched("train")
    assert train.params == {"train": values["train"], "models.m3diff": values["models"]["m3diff"]}
    assert {"components/stages/train/loop.py", "components/provenance/code.py"} <= train.files.keys()
    assert not any(name.startswith("components/stages/evaluate") for name in train.files)
    drawn = watched("synthesize@minichange")
    assert drawn.params == {
        "synthesize.minichange": values["synthesize"]["minichange"],
        "ingest.datasets.minichange.reader": "minichange",
    }
    assert "components/datasets/minichange/render.py" in drawn.files
    assert "profiles/questions.yaml" in watched("convert").files
    assert not any(name.startswith("data") for name in watched("evaluate").files)


def test_a_stage_by_hand_and_another_command_are_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    with unchanged():
        pass


@pytest.mark.slow(15)
def test_the_stages_error_is_its_own(project: Path, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        Path("params.yaml").write_text("{}")
        raise ZeroDivisionError

    monkeypatch.setenv("DVC_STAGE", "train")
    with pytest.raises(ZeroDivisionError), unchanged():
        fail()


def test_values_are_named_to_the_last_key():
    before = Watched({"train": {"seed": 1, "epochs": 2}, "models.a": {"rates": {"llm": 1}}, "models.b": None}, {})
    after = Watched({"train": {"seed": 3, "epochs": 2, "new": "x"}, "models.a": {"rates": {"llm": None}}}, {})
    assert list(differences(before, after)) == [
        "train.seed 1 -> 3",
        'train.new null -> "x"',
        "models.a.rates.llm 1 -> null",
    ]


def test_the_command_line_ends_with_the_code_of_wrong_parameters(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from m3diff import __main__ as command_line

    monkeypatch.setenv("DVC_STAGE", "train")
    text = Path("params.yaml").read_text().replace("seed: 7407", "seed: 9999")

    def edit(*_: object) -> None:
        Path("params.yaml").write_text(text)

    command = command_line.COMMANDS["train"]._replace(run=edit)
    monkeypatch.setitem(command_line.COMMANDS, "train", command)
    assert main(["train"]) == USAGE
    assert "m3diff: train: edited while it ran: train.seed 7407 -> 9999." in capsys.readouterr().err
