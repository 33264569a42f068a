"""The verdict on a model that has learned nothing, and where a report's captions come from."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.records.sample import ImageRef
from m3diff.report.curves import Phase, Point
from m3diff.report.origin import read_origin, write_creation_note
from m3diff.report.verdict import LearningVerdict, judge_learning_by_scores
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.results import ProtocolScores
from tests.errors import raises

NOISE = ["the the a", "a a the", "red red"]


def protocol(captions: list[str], dataset: str = "toy") -> ProtocolPairs:
    pairs = [
        EvalPair(
            id=f"{dataset}/{number}",
            dataset=dataset,
            images=(ImageRef("b"), ImageRef("a")),
            references=["the red cube turned blue"],
            change_types=["color"],
            prediction=caption,
        )
        for number, caption in enumerate(captions)
    ]
    return ProtocolPairs(dataset, Protocol("test", published_pairs=None), pairs)


def scored(value: float | None, name: str = "CIDEr") -> ProtocolScores:
    return ProtocolScores(pairs=3, published_pairs=None, scores={name: value}, intervals={}, groups={}, absent={})


def verdict(cider: float | None, captions: list[str] = NOISE, **options: Any) -> LearningVerdict | None:
    return judge_learning_by_scores([protocol(captions)], {"toy/test": scored(cider)}, **options)


@pytest.mark.parametrize("cider", [0.0, 0.004, 0.0099])
def test_a_model_whose_captions_share_nothing_with_the_references_gets_a_sentence(cider):
    learning_verdict = verdict(cider)
    assert learning_verdict is not None
    assert "has not learned to describe changes yet" in learning_verdict.sentence
    assert f"CIDEr is {100 * cider:.1f}" in learning_verdict.sentence
    assert learning_verdict.advice


@pytest.mark.parametrize("cider", [0.01, 1.2, None])
def test_a_model_that_describes_changes_or_was_not_scored_gets_none(cider):
    assert verdict(cider) is None


def test_captions_that_are_references_word_for_word_are_learned_though_cider_is_0():
    """CIDEr is 0 for whatever is predicted where no word is rare."""
    assert verdict(0.0, ["The red cube turned blue."] * 3) is None


def test_one_test_set_that_went_well_is_enough_for_no_verdict():
    protocols = [protocol(NOISE), protocol(NOISE, "other")]
    assert judge_learning_by_scores(protocols, {"toy/test": scored(0.0), "other/test": scored(0.8)}) is None
    assert judge_learning_by_scores(protocols, {"toy/test": scored(0.0), "other/test": scored(0.0)}) is not None


def test_scores_of_characters_count_where_words_have_none():
    scores = {"toy/test": replace_scores({"CIDEr": None, "CIDEr-char": 0.0})}
    assert judge_learning_by_scores([protocol(NOISE)], scores) is not None


def replace_scores(values: dict[str, float | None]) -> ProtocolScores:
    return scored(None).model_copy(update={"scores": values})


def test_a_model_that_says_the_same_of_every_pair_is_quoted():
    learning_verdict = verdict(0.0, ["a a a"] * 3)
    assert learning_verdict is not None
    assert "“a a a”" in learning_verdict.sentence


def training(steps: int, first_loss: float, last_loss: float) -> Phase:
    losses = [Point(step, first_loss if step <= steps // 2 else last_loss) for step in range(1, steps + 1)]
    return Phase(name="Fine-tuning", steps=steps, columns={"loss": losses})


@pytest.mark.parametrize(
    ("phase", "says", "does_not_say"),
    [
        (training(180, 4.6, 4.39), ["180 steps", "from 4.60 to 4.39", "train.epochs", "hardly fallen"], []),
        (training(2000, 4.6, 0.5), ["2,000 steps"], ["train.epochs", "hardly fallen"]),
        (training(2000, 4.6, 4.0), ["hardly fallen"], ["train.epochs"]),
        (training(1, 4.6, 4.6), ["1 step,"], []),
    ],
    ids=["few steps", "fell", "did not fall", "one step"],
)
def test_the_advice_follows_from_the_course_of_the_training(phase, says, does_not_say):
    learning_verdict = verdict(0.0, training=phase)
    assert learning_verdict is not None
    text = " ".join(learning_verdict.advice)
    assert [words for words in says if words not in text] == []
    assert [words for words in does_not_say if words in text] == []


def test_the_base_of_the_project_is_named_as_one_that_knows_drawn_scenes_alone():
    embedded_verdict = verdict(0.0, base="data/00_base")
    other_verdict = verdict(0.0, base="models/llava-onevision")
    assert embedded_verdict is not None
    assert other_verdict is not None
    assert "photographs" in " ".join(embedded_verdict.advice)
    assert "photographs" not in " ".join(other_verdict.advice)


# Where the captions come from

REPORT = {
    **{"steps": 1097, "rows_out": 35056, "parameters_trainable": 1737153, "parameters_frozen": 668672},
    **{"exported_step": 1097, "alignment": {}},
}
SETTINGS = {
    **{"model": "small", "family": "m3diff", "base": "data/00_base", "seed": 5, "epochs": 2.7, "global_batch": 16},
    **{"lora": {"rank": 32, "alpha": 256}, "rates": {"vision": 0.0004, "llm": 0.0014}},
}


WITHOUT_LORA = {name: value for name, value in SETTINGS.items() if name != "lora"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository of one commit, of a known time; the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("a: 1\n")
    git("init", "--quiet")
    commit("the first", "2026-03-05T23:30:00+00:00")
    return tmp_path


def git(*arguments: str, time: str = "") -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    environment = {"GIT_COMMITTER_DATE": time, "GIT_AUTHOR_DATE": time, "PATH": "/usr/bin:/bin"} if time else None
    return subprocess.run(
        ["git", *identity, *arguments], capture_output=True, check=True, text=True, env=environment
    ).stdout


def commit(message: str, time: str) -> None:
    git("add", "--all")
    git("commit", "--quiet", "--message", message, time=time)


def write_report(folder: Path, **changes: Any) -> Path:
    (folder / "report.json").write_text(json.dumps(REPORT | {"settings": SETTINGS, "warnings": []} | changes))
    return folder


def creation_note(folder: Path) -> str:
    """The sentence of made.js beside a page of the folder."""
    (folder / "report.html").write_text('<div id="made" data-key="0123456789abcdef" hidden></div>')
    write_creation_note(folder)
    key, text = re.fullmatch(r'made\("(.*?)", "(.*)"\)\n', (folder / "made.js").read_text()).groups()
    assert key == "0123456789abcdef"
    return text


def code_of(text: str) -> str:
    return text.partition("; page created on ")[0]


def test_the_head_names_model_base_training_parameters_and_rates(project):
    assert read_origin(write_report(project)).facts == {
        "Model": "small (family m3diff)",
        "Base": "data/00_base",
        "Learning rates": "vision 0.0004, llm 0.0014",
        "Training": "1,097 steps of 16 sequences (2.7 epochs, 35,056 captions), seed 5",
        "Parameters": "1.74 M trained, 0.67 M frozen; LoRA of rank 32, alpha 256",
    }


def test_the_file_beside_the_page_names_the_commit_and_when_the_page_was_drawn(project):
    code, _, drawn = creation_note(project).partition("; page created on ")
    assert code == f"last changed in commit {git('rev-parse', 'HEAD')[:8]} of 5 March 2026"
    assert re.fullmatch(r"\d+ \w+ 20\d\d, \d\d:\d\d UTC", drawn)


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"exported_step": 800}, "Checkpoint", "step 800, which has the highest CIDEr on validation pairs"),
        ({"alignment": {"steps": 1, "captions": 40, "loss": 2.0}}, "Alignment before it", "1 step (40 captions)"),
        ({"settings": SETTINGS | {"model": "m3diff"}}, "Model", "m3diff"),
        ({"settings": SETTINGS | {"lora": {"rank": 0}}}, "Parameters", "1.74 M trained, 0.67 M frozen"),
        ({"settings": WITHOUT_LORA}, "Parameters", "1.74 M trained, 0.67 M frozen"),
    ],
    ids=["best checkpoint", "alignment", "model of its family's name", "LoRA of rank 0", "no LoRA"],
)
def test_the_head_says_what_is_special_about_a_training(project, changes, name, value):
    assert read_origin(write_report(project, **changes)).facts[name] == value


def test_the_curves_of_a_training_are_those_beside_its_report_if_it_has_any(project):
    assert read_origin(write_report(project)).curves is None
    (project / "curves.csv").write_text("step,loss\n1,2.0\n")
    assert read_origin(project).curves == project / "curves.csv"


@pytest.mark.parametrize("warnings", [["few steps"], []], ids=["warned", "not warned"])
def test_the_head_has_the_warnings_of_the_training(project, warnings):
    assert read_origin(write_report(project, warnings=warnings)).warnings == warnings


def test_a_commit_of_documents_or_of_the_lock_does_not_change_the_code_of_the_page(project):
    before = code_of(creation_note(project))
    (project / "dvc.lock").write_text("stages: {}\n")
    (project / "README.md").write_text("words\n")
    commit("the lock", "2026-04-01T00:00:00+00:00")
    assert code_of(creation_note(project)) == before


def test_a_repository_without_a_commit_of_code_has_no_code_to_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("words\n")
    git("init", "--quiet")
    commit("the first", "2026-03-05T23:30:00+00:00")
    assert creation_note(tmp_path).startswith("page created on ")


def test_changed_parameters_that_are_not_committed_are_named(project):
    (project / "params.yaml").write_text("a: 2\n")
    assert code_of(creation_note(project)).endswith(", with changes that were not committed")
    commit("the second", "2026-04-01T00:00:00+00:00")
    assert code_of(creation_note(project)).endswith("of 1 April 2026")


def test_without_git_or_training_the_head_says_what_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_origin(tmp_path).facts == {}
    assert read_origin(tmp_path).curves is None
    assert creation_note(tmp_path).startswith("page created on ")


def test_a_damaged_report_of_the_training_is_named(project):
    (project / "report.json").write_text('{"steps": 5')
    with raises(DataError, "files.unreadable_stage_output", path=project / "report.json", writer="train"):
        read_origin(project)
