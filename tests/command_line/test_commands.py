"""Every command through `main([...])`: which function it calls, with which arguments, what it prints."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.commands.inspect import StageLimits
from m3diff.commands.plan import Run
from m3diff.commands.rescore import rescore
from m3diff.commands.zero_shot import PROMPT, ZeroShotRequest
from m3diff.models import FAMILIES
from m3diff.models.contract import Takes
from m3diff.models.sample_limits import TrainedOn
from m3diff.records.errors import Fault
from m3diff.registry.decisions import Decision
from m3diff.registry.model_source import Source
from m3diff.registry.verification import LineageCheck
from m3diff.scoring.metrics import BY_CHARACTERS
from m3diff.scoring.results import ModelAndBaseScore, RetentionScores
from m3diff.serving.caption import CaptionInput, CaptionOutput
from m3diff.settings.compute import GPUS
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests.command_line.conftest import Recorder, Result
from tests.errors import Message
from tests.stages.train.toy import write_mixture
from tests.tiny import noise_image
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "params.yaml")
ENTRIES = PARAMS.ingest.datasets
IMAGE_CACHE = Path("runs/image_cache.parquet")

BASE = Path("data/00_base")
RECORDS = Path("data/02_records")
CLEAN = Path("data/03_clean")
MIXTURE = Path("data/04_mixture")
MODEL = Path("data/05_model")
PREDICTIONS = Path("data/06_predictions")
REPORT = Path("data/07_report")

LOCAL_URL = "http://127.0.0.1:8000/v1"
REMOTE_URL = "https://a.example/v1"
RESULT = Result(outcome="promoted", lines=["a line", "another"], retention={})
# Results of the functions whose commands read or convert them before they print
RESULTS: dict[str, Any] = {
    "check": ([], True),
    "check_spice": ([], True),
    "compare": {},
    "export_hub": [],
    "list_models": [],
    "prune": ([], []),
    "restore": (Path("folder"), []),
    "score": Result(lines=list),
    "score_model": (Path("folder"), {}),
    "verify_lineage": [],
}

pytestmark = pytest.mark.usefixtures("project")


@pytest.fixture(autouse=True)
def _reports_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stage's command print a recorder's result, which has no numbers."""
    for command in ("augment", "ingest", "validate", "convert"):
        monkeypatch.setattr(f"m3diff.command_line.{command}.format_report", str)


# Which function is called, with which arguments

EVALUATED = {"cfg": PARAMS.evaluate, "compute": PARAMS.compute, "records": RECORDS, "clean": CLEAN}
PROMOTED = {"params": PARAMS, "rescore": rescore}
EXPORTED = {"checkpoint": MODEL / "checkpoint", "out": Path("out")}
LLAVA = {"entries": ENTRIES, "mixture": MIXTURE, "out": Path("out"), "allow_unlicensed": False, "absolute": False}
REMOTE_OPTIONS = "--limit 9 --out out --prompt P --max-tokens 5 --key-variable K --allow-unlicensed"
REMOTE_OPTIONS += " --question-prompt Q --timeout-s 7 --no-reuse-answers"
HEADLINE_SCORES = list(dict.fromkeys((PARAMS.promote.metric, *PARAMS.promote.guards)))
LISTED_SCORES = [*HEADLINE_SCORES, *(f"{score}{BY_CHARACTERS}" for score in HEADLINE_SCORES)]
SCORED = {
    "predictions": Path("captions.json"),
    "benchmark": None,
    "protocol": None,
    "references": None,
    "data": None,
    "spice_dir": None,
    "allow_faults": False,
}
SCORE_OPTIONS = "--benchmark B --protocol P --references r.json --spice-dir jars --allow-faults"

# By the words that are typed: the function that is called, and its arguments by its own names
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrain": ("stages.pretrain.stage.pretrain", {"cfg": PARAMS.pretrain, "out": BASE}),
    "synthesize minichange": (
        "stages.synthesize.stage.synthesize",
        {"reader": "minichange", "settings": PARAMS.synthesize["minichange"]},
    ),
    "ingest minichange": (
        "stages.ingest.stage.ingest",
        {"name": "minichange", "entry": ENTRIES["minichange"], "image_cache": IMAGE_CACHE, "out": RECORDS},
    ),
    "validate": (
        "stages.validate.stage.validate",
        {
            "cfg": PARAMS.validate_,
            "entries": ENTRIES,
            "image_cache": IMAGE_CACHE,
            "records": RECORDS,
            "out": CLEAN,
            "protocol": PARAMS.promote.protocol,
        },
    ),
    "convert": (
        "stages.convert.stage.convert",
        {"cfg": PARAMS.convert, "entries": ENTRIES, "clean": CLEAN, "out": MIXTURE},
    ),
    "train": (
        "stages.train.stage.train",
        {
            "cfg": PARAMS.train,
            "model": PARAMS.models["m3diff"],
            "compute": PARAMS.compute,
            "mixture": MIXTURE,
            "out": MODEL,
        },
    ),
    "predict": (
        "stages.predict.stage.predict",
        {
            "cfg": PARAMS.predict,
            "compute": PARAMS.compute,
            "mixture": MIXTURE,
            "model": MODEL,
            "out": PREDICTIONS,
        },
    ),
    "evaluate": ("stages.evaluate.stage.evaluate", EVALUATED | {"predictions": PREDICTIONS, "out": REPORT}),
    "register": ("stages.register.stage.register", {"params": PARAMS}),
    "promote": ("registry.promote.promote", PROMOTED | {"version": None, "again": False}),
    "promote --version 7 --again": ("registry.promote.promote", PROMOTED | {"version": 7, "again": True}),
    "rollback": ("registry.promote.rollback", {"params": PARAMS, "to": None, "why": ""}),
    "rollback --to 3 --why 'a b'": ("registry.promote.rollback", {"params": PARAMS, "to": 3, "why": "a b"}),
    "serve": (
        "serving.server.serve",
        {"params": PARAMS, "model": "champion", "base": BASE, "host": "127.0.0.1", "port": 8000},
    ),
    "serve --model somewhere --base base --host 0.0.0.0 --port 81": (
        "serving.server.serve",
        {"params": PARAMS, "model": "somewhere", "base": Path("base"), "host": "0.0.0.0", "port": 81},
    ),
    "evaluate --model 12": (
        "commands.rescore.score_model",
        {"params": PARAMS, "model": "12", "base": BASE, "out": None},
    ),
    "evaluate --model somewhere --base base --out out": (
        "commands.rescore.score_model",
        {"params": PARAMS, "model": "somewhere", "base": Path("base"), "out": Path("out")},
    ),
    "compare a b --out page.html": (
        "commands.compare.compare",
        {
            "first_path": Path("a"),
            "second_path": Path("b"),
            "records": RECORDS,
            "clean": CLEAN,
            "out": Path("page.html"),
        },
    ),
    "lineage champion": ("registry.verification.verify_lineage", {"cfg": PARAMS.register_, "version": "champion"}),
    "restore 12 --into folder": (
        "registry.restore.restore",
        {"cfg": PARAMS.register_, "version": "12", "into": Path("folder")},
    ),
    "models --json": (
        "registry.versions.list_models",
        {"cfg": PARAMS.register_, "protocol": PARAMS.promote.protocol, "scores": LISTED_SCORES},
    ),
    "prune --yes": ("registry.prune.prune", {"cfg": PARAMS.register_, "keep": 5, "yes": True}),
    "prune --keep 3 --dry-run": ("registry.prune.prune", {"cfg": PARAMS.register_, "keep": 3, "yes": False}),
    "prune --keep 0 --yes --dry-run": ("registry.prune.prune", {"cfg": PARAMS.register_, "keep": 0, "yes": False}),
    "score captions.json --data folder": ("commands.score.score", SCORED | {"data": Path("folder")}),
    f"score captions.json {SCORE_OPTIONS}": (
        "commands.score.score",
        SCORED
        | {
            "benchmark": "B",
            "protocol": "P",
            "references": Path("r.json"),
            "spice_dir": Path("jars"),
            "allow_faults": True,
        },
    ),
    "score --check-spice --spice-dir jars": ("scoring.metrics.spice.check_spice", {"spice_dir": Path("jars")}),
    "data statistics": ("commands.inspect.statistics.write_statistics", {"clean": CLEAN}),
    "data check somewhere --reader pairs": (
        "commands.inspect.check",
        {
            "root": Path("somewhere"),
            "entries": ENTRIES,
            "reader": "pairs",
            "stage_limits": StageLimits(PARAMS.validate_, IMAGE_CACHE, PARAMS.promote.protocol),
        },
    ),
    "export out": ("models.checkpoint.export_checkpoint", EXPORTED | {"adapters": False}),
    "export out --adapters": ("models.checkpoint.export_checkpoint", EXPORTED | {"adapters": True}),
    "export out --hub": (
        "commands.export.hub.export_hub",
        {"params": PARAMS, "out": Path("out"), "allow_unlicensed": False},
    ),
    "export out --hub --allow-unlicensed": (
        "commands.export.hub.export_hub",
        {"params": PARAMS, "out": Path("out"), "allow_unlicensed": True},
    ),
    "export-llava out": ("commands.export.llava.export_llava", LLAVA),
    "export-llava out --absolute": ("commands.export.llava.export_llava", LLAVA | {"absolute": True}),
    "export-llava out --allow-unlicensed": ("commands.export.llava.export_llava", LLAVA | {"allow_unlicensed": True}),
    f"zero-shot --url {LOCAL_URL} --model m": (
        "commands.zero_shot.zero_shot",
        EVALUATED
        | {
            "request": ZeroShotRequest(
                url=LOCAL_URL,
                model="m",
                prompt=PROMPT,
                key_variable="OPENAI_API_KEY",
                max_tokens=None,
                limit=PARAMS.predict.limit,
            ),
            "mixture": MIXTURE,
            "out": None,
        },
    ),
    f"zero-shot --url {REMOTE_URL} --model m {REMOTE_OPTIONS}": (
        "commands.zero_shot.zero_shot",
        EVALUATED
        | {
            "request": ZeroShotRequest(
                url=REMOTE_URL,
                model="m",
                prompt="P",
                question_prompt="Q",
                key_variable="K",
                max_tokens=5,
                limit=9,
                timeout_s=7,
                allow_unlicensed=True,
                reuse_answers=False,
            ),
            "mixture": MIXTURE,
            "out": Path("out"),
        },
    ),
}


@pytest.mark.parametrize("typed", CALLS)
def test_a_command_calls_its_function_with_exactly_its_arguments(typed, monkeypatch):
    path, expected = CALLS[typed]
    module, _, function = path.rpartition(".")
    result = RESULTS.get(function, RESULT)
    recorder = Recorder(monkeypatch, f"m3diff.{module}", **{function: result})
    monkeypatch.setattr("m3diff.registry.tracking.log_evaluation", lambda *arguments: None)
    monkeypatch.setattr("m3diff.report.origin.write_creation_note", lambda folder: None)
    monkeypatch.setattr("m3diff.scoring.results.headline_scores", lambda report: {})
    assert main(shlex.split(typed)) == 0
    for _, arguments in recorder.calls:
        arguments.pop("follow", None)
        arguments.pop("origin", None)  # names this machine's commit and training
        arguments.pop("warnings", None)  # depends on this machine's mixture
    assert recorder.calls == [(function, expected)]
    for argument, value in expected.items():
        assert type(recorder.calls[0][1][argument]) is type(value), argument


@pytest.mark.parametrize("has_characters", [False, True], ids=["by words alone", "by characters too"])
def test_models_shows_a_score_by_characters_if_a_version_has_it(has_characters, monkeypatch):
    scores = [*HEADLINE_SCORES]
    if has_characters:
        scores.append(f"{PARAMS.promote.metric}{BY_CHARACTERS}")
    versions = [{"scores": {}}, {"scores": dict.fromkeys(scores, 0.5)}]
    recorder = Recorder(monkeypatch, "m3diff.registry.versions", list_models=versions, format_table="")
    assert main(["models"]) == 0
    name, arguments = recorder.calls[-1]
    assert name == "format_table"
    assert arguments["scores"] == scores


def test_training_takes_the_model_that_train_model_names(monkeypatch, project):
    params_file = project / "params.yaml"
    params_file.write_text(params_file.read_text().replace("\n  model: m3diff\n", "\n  model: no_module\n"))
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    assert main(["train"]) == 0
    assert recorder.calls[0][1]["model"] == PARAMS.models["no_module"]


def test_ingest_without_a_name_reads_every_dataset_in_order(monkeypatch):
    for entry in ENTRIES.values():
        entry.root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(monkeypatch, "m3diff.stages.ingest.stage", ingest=None)
    assert main(["ingest"]) == 0
    assert [(arguments["name"], arguments["entry"]) for _, arguments in recorder.calls] == [*ENTRIES.items()]


MADE_DATA = "--params profiles/made-data.yaml"


def test_augment_makes_the_entry_that_is_named_and_prints_rejections(monkeypatch, capsys):
    recorder = Recorder(monkeypatch, "m3diff.stages.augment.stage", augment=Result(reasons=lambda: ["a reason"]))
    assert main(f"{MADE_DATA} augment minichange_edits".split()) == 0
    params = load_params(Path("profiles/made-data.yaml"))
    expected = {"name": "minichange_edits", "cfg": params.augment["minichange_edits"], "compute": params.compute}
    assert recorder.calls == [("augment", expected)]
    assert capsys.readouterr().out == f"{RESULT}\naugment: rejected: a reason\n"


# What is printed, and the exit code

LINES = "a line\nanother\n"
VERSIONS_JSON = '[\n  {\n    "version": 1\n  }\n]\n'
SOUND_LINK = LineageCheck("mixture", Path("train"), "0a1b", "ok")
LOST_LINK = LineageCheck("checkpoint", Path("model"), "2c3d", "missing")
# Each outcome of checking a version's lineage, with its links, the exit code and the beginning of what is printed
LINEAGES = (
    ("sound", [SOUND_LINK], 0, f"{SOUND_LINK}\n"),
    ("damaged", [SOUND_LINK, LOST_LINK], 3, f"{SOUND_LINK}\n{LOST_LINK}\n"),
)


@pytest.mark.parametrize(
    ("typed", "module", "results", "code", "printed"),
    [
        pytest.param("register", "stages.register.stage", {"register": RESULT}, 0, f"{RESULT}\n", id="register"),
        pytest.param("rollback", "registry.promote", {"rollback": RESULT}, 0, f"{RESULT}\n", id="rollback"),
        *(
            pytest.param(
                "promote", "registry.promote", {"promote": Result(outcome=outcome)}, code, f"{RESULT}\n", id=outcome
            )
            for outcome, code in (("promoted", 0), ("first", 0), ("unchanged", 0), ("refused", 4))
        ),
        pytest.param(
            "data statistics",
            "commands.inspect.statistics",
            {"write_statistics": None},
            0,
            "written to data/03_clean/st",
            id="statistics",
        ),
        pytest.param(
            "data check a", "commands.inspect", {"check": (["a line", "another"], True)}, 0, LINES, id="a sound folder"
        ),
        pytest.param(
            "data check a", "commands.inspect", {"check": (["a line", "another"], False)}, 3, LINES, id="a bad folder"
        ),
        pytest.param(
            "export out --hub", "commands.export.hub", {"export_hub": ["a line", "another"]}, 0, LINES, id="notices"
        ),
        pytest.param(
            "compare a b --out c",
            "commands.compare",
            {"compare": {"t": 1}, "format_table": "T"},
            0,
            "T\n\npair by pair: c\n",
            id="compare",
        ),
        pytest.param("ingest minichange", "stages.ingest.stage", {"ingest": RESULT}, 0, f"{RESULT}\n", id="ingest"),
        pytest.param(
            "validate",
            "stages.validate.stage",
            {"validate": RESULT},
            0,
            f"{RESULT}\nvalidate: the page: data/03_",
            id="validate",
        ),
        pytest.param("convert", "stages.convert.stage", {"convert": RESULT}, 0, f"{RESULT}\n", id="convert"),
        pytest.param(
            "models",
            "registry.versions",
            {"list_models": [], "format_table": "a table"},
            0,
            "a table\n",
            id="a table of versions",
        ),
        pytest.param(
            "models --json",
            "registry.versions",
            {"list_models": [{"version": 1}]},
            0,
            VERSIONS_JSON,
            id="versions in JSON",
        ),
        *(
            pytest.param(
                f"lineage {outcome}",
                "registry.verification",
                {"verify_lineage": checks},
                code,
                lines,
                id=f"lineage {outcome}",
            )
            for outcome, checks, code, lines in LINEAGES
        ),
        *(
            pytest.param(
                "restore 1",
                "registry.restore",
                {"restore": (Path("folder"), checks)},
                code,
                lines,
                id=f"restore {outcome}",
            )
            for outcome, checks, code, lines in LINEAGES
        ),
        pytest.param(
            "score a", "commands.score", {"score": Result(lines=lambda: ["a line", "another"])}, 0, LINES, id="scores"
        ),
        pytest.param(
            "score a --json",
            "commands.score",
            {"score": Result(model_dump_json=lambda indent: "{}")},
            0,
            "{}\n",
            id="scores in JSON",
        ),
        pytest.param(
            "score --check-spice",
            "scoring.metrics.spice",
            {"check_spice": (["a line", "another"], True)},
            0,
            LINES,
            id="SPICE works",
        ),
        pytest.param(
            "score --check-spice",
            "scoring.metrics.spice",
            {"check_spice": (["a line", "another"], False)},
            3,
            LINES,
            id="SPICE does not work",
        ),
        pytest.param(
            "evaluate --model 1",
            "commands.rescore",
            {"score_model": (Path("folder"), {"mini/total": {"CIDEr": 51.2}})},
            0,
            "mini/total, times 100: CIDEr 51.2\nreport: folder/report/report.html\n",
            id="a model's scores",
        ),
    ],
)
def test_an_outcome_is_printed_and_decides_the_exit_code(typed, module, results, code, printed, monkeypatch, capsys):
    Recorder(monkeypatch, f"m3diff.{module}", **results)
    assert main(typed.split()) == code
    assert capsys.readouterr().out.startswith(printed)


def test_restore_says_whether_the_version_was_restored(monkeypatch, capsys):
    last_lines = []
    for checks in ([SOUND_LINK], [LOST_LINK]):
        Recorder(monkeypatch, "m3diff.registry.restore", restore=(Path("folder"), checks))
        main(["restore", "1"])
        last_lines.append(capsys.readouterr().out.splitlines()[-1])
    assert last_lines == ["restored to folder", "NOT restored, see above: folder"]


@pytest.mark.parametrize(
    ("options", "removed_versions", "code"),
    [([], [1], 2), ([], [], 0), (["--dry-run"], [1], 0), (["--yes"], [1], 0)],
    ids=["not confirmed", "nothing to remove", "dry run", "confirmed"],
)
def test_prune_lists_its_plan_and_asks_to_confirm_it(options, removed_versions, code, monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.registry.prune", prune=(removed_versions, ["a line", "another"]))
    assert main(["prune", *options]) == code
    printed = capsys.readouterr()
    assert printed.out == LINES
    assert Message("command.prune_not_confirmed").in_text(printed.err) == bool(code)


# history

PROMOTED_FIRST = Decision(
    number=1,
    decided_at="2026-01-02T03:04:05Z",
    author="me@here",
    flow_run=None,
    commit=None,
    action="promote",
    model="m3diff",
    champion_before=None,
    target=1,
    outcome="first",
    reason="",
)


@pytest.fixture
def record_history(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the faults and the pending move of a record with one decision."""

    def record(faults: list[Fault], pending_move: Decision | None) -> None:
        Recorder(
            monkeypatch,
            "m3diff.registry.decisions",
            read_decisions=[PROMOTED_FIRST],
            numbering_faults=faults,
            find_pending_move=pending_move,
        )

    return record


def test_history_prints_decisions_as_a_table_or_in_json_by_the_names_of_the_record(record_history, capsys):
    record_history(faults=[], pending_move=None)
    assert main(["history", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["who"] == "me@here"
    assert row["to"] == 1
    assert main(["history"]) == 0
    printed = capsys.readouterr()
    assert "me@here" in printed.out.splitlines()[-1] + printed.out.splitlines()[-2]
    assert printed.err == ""


def test_history_reports_a_changed_record_and_exits_with_three(record_history, capsys):
    fault = Fault("registry.decision_misnumbered", position=1, value=2)
    record_history(faults=[fault], pending_move=None)
    assert main(["history"]) == 3
    assert capsys.readouterr().err == f"m3diff history: {fault}\n"


def test_history_names_a_move_that_may_be_under_way_and_exits_with_zero(record_history, capsys):
    record_history(faults=[], pending_move=PROMOTED_FIRST)
    assert main(["history"]) == 0
    assert "decision 1 " in capsys.readouterr().err


# What is refused before a stage begins

RAW_FOLDER = "data/01_raw/minichange"
MADE_FOLDER = "data/01_raw/minichange_edits"
BASE_CONFIG = "data/00_base/config.json"


def no_entry(section: str, name: str, nearest: str) -> Message:
    """The message on a name that a section does not have, with the nearest name."""
    hint = Message("settings.nearest_name", nearest=nearest).fault
    return Message("command.no_entry", key=section, found=repr(name), hint=hint)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("ingest minichang", no_entry("ingest.datasets", "minichang", "minichange")),
        (f"{MADE_DATA} augment minichange_edit", no_entry("augment", "minichange_edit", "minichange_edits")),
        ("synthesize minichang", no_entry("synthesize", "minichang", "minichange")),
        (
            f"{MADE_DATA} ingest minichange_edits",
            Message("settings.dataset_not_made", path=MADE_FOLDER, command="m3diff augment minichange_edits"),
        ),
        ("evaluate --out x", Message("command.output_of_no_model")),
        ("evaluate --base x", Message("command.output_of_no_model")),
    ],
)
def test_a_stage_is_refused_for_words_that_cannot_be_meant(typed, message, monkeypatch, capsys):
    recorder = record_stage(monkeypatch, typed)
    assert main(typed.split()) == 2
    assert message.in_text(capsys.readouterr().err)
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("typed", "key", "missing_path", "code"),
    [
        ("train", "train.base", BASE_CONFIG, "base_not_made"),
        ("convert", "convert.questions", "profiles/questions.yaml", "no_questions"),
        ("ingest", "ingest.datasets.minichange.root", RAW_FOLDER, "dataset_not_made"),
        (f"{MADE_DATA} augment minichange_edits", "augment.minichange_edits.source.root", RAW_FOLDER, "no_source"),
    ],
)
def test_a_stage_is_refused_if_a_path_that_it_reads_is_missing(typed, key, missing_path, code, monkeypatch, capsys):
    recorder = record_stage(monkeypatch, typed)
    path = Path(missing_path)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    assert main(typed.split()) == 2
    assert Message(f"settings.{code}", key=key, path=missing_path).in_text(capsys.readouterr().err)
    assert recorder.calls == []


def test_convert_warns_of_what_the_training_lacks(monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.stages.convert.stage", convert=RESULT)
    Path(BASE_CONFIG).unlink()
    assert main(["convert"]) == 0
    assert Message("settings.base_not_made", key="train.base", path=BASE_CONFIG).in_text(capsys.readouterr().err)


def test_train_names_the_setting_of_a_model_that_does_not_fit_its_base(monkeypatch, capsys):
    recorder = record_stage(monkeypatch, "train")
    fault = Fault("settings.wrong_value", key="lora.rank", found="-1", expected="a rank")
    settings = PARAMS.models["m3diff"]
    family = FAMILIES[settings.family]
    checked = []

    def refuse(self: Any, *arguments: Any) -> None:
        checked.append(arguments)
        raise ParamsError(fault)

    monkeypatch.setattr(type(family), "check_base", refuse)
    assert main(["train"]) == 2
    assert Message("settings.wrong_value", key="models.m3diff.lora.rank").in_text(capsys.readouterr().err)
    assert checked == [(BASE, settings)]
    assert recorder.calls == []


def test_train_is_refused_if_the_mixture_has_no_test_pair_for_the_gate(monkeypatch, capsys):
    recorder = record_stage(monkeypatch, "train")
    (MIXTURE / "test").mkdir(parents=True)
    assert main(["train"]) == 3
    fields = {"dataset": "minichange", "protocol": PARAMS.promote.protocol}
    assert Message("ingest.no_test_pair", path=MIXTURE / "test", **fields).in_text(capsys.readouterr().err)
    assert recorder.calls == []


def test_commands_without_the_file_or_folder_that_they_need_ask_for_it(capsys):
    assert main(["data", "check"]) == 2
    assert Message("check.no_folder_named").in_text(capsys.readouterr().err)
    assert main(["score"]) == 2
    assert Message("command.no_captions").in_text(capsys.readouterr().err)


def test_evaluate_is_refused_if_the_jars_of_spice_are_missing(monkeypatch, project, capsys):
    recorder = record_stage(monkeypatch, "evaluate")
    params_file = project / "params.yaml"
    params_file.write_text(params_file.read_text().replace("spice_dir: null", "spice_dir: jars"))
    assert main(["evaluate"]) == 2
    assert Message("settings.no_spice", key="compute.spice_dir", path="jars").in_text(capsys.readouterr().err)
    assert recorder.calls == []


def record_stage(monkeypatch: pytest.MonkeyPatch, typed: str) -> Recorder:
    stage = typed.removeprefix(MADE_DATA).split()[0]
    return Recorder(monkeypatch, f"m3diff.stages.{stage}.stage", **{stage: None})


# Training and evaluation share an MLflow run


@pytest.fixture
def training_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments with which train follows its MLflow run, and evaluate completes it."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "m3diff.registry.tracking.log_curves_while_training", lambda *arguments: calls.append(arguments)
    )
    monkeypatch.setattr("m3diff.registry.tracking.log_evaluation", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("m3diff.report.origin.write_creation_note", lambda folder: None)
    monkeypatch.setattr("m3diff.scoring.results.headline_scores", lambda report: {"mini/total": {"CIDEr": 51.2}})
    trainer = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    Recorder(monkeypatch, "m3diff.stages.evaluate.stage", evaluate=RESULT)
    assert main(["train"]) == 0
    trainer.calls[0][1]["follow"]("the key", Path("rows"))
    assert main(["evaluate"]) == 0
    return calls


def test_evaluate_prints_its_scores_and_its_page(training_run, capsys):
    assert main(["evaluate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["mini/total, times 100: CIDEr 51.2", "report: data/07_report/report.html"]


def test_evaluate_prints_the_first_score_that_each_retention_set_keeps(training_run, monkeypatch, capsys):
    scores = {"CIDEr": ModelAndBaseScore(model=0.512, base=0.6), "METEOR": ModelAndBaseScore(model=0.1, base=0.2)}
    retention = {"vqa/all": RetentionScores(records=2, scores=scores)}
    Recorder(monkeypatch, "m3diff.stages.evaluate.stage", evaluate=Result(retention=retention))
    assert main(["evaluate"]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "vqa/all, kept of the base, times 100: CIDEr 51.2 (base 60.0)"


def test_evaluate_notes_the_creation_of_its_page(training_run, monkeypatch):
    recorder = Recorder(monkeypatch, "m3diff.report.origin", write_creation_note=None)
    assert main(["evaluate"]) == 0
    assert [arguments for _, arguments in recorder.calls] == [{"folder": REPORT}]


def test_training_is_followed_and_completed_as_one_run(training_run):
    followed, completed = training_run
    assert followed[1:] == (MODEL, "the key", Path("rows"))
    assert completed[1:] == (MODEL, REPORT / "metrics.json")
    assert followed[0] == completed[0]


def test_the_run_is_described_by_the_model_and_the_sections_that_decide_it(training_run):
    description = training_run[0][0]
    assert description.tracking_uri == PARAMS.register_.tracking_uri
    assert description.experiment == "m3diff"
    assert description.model == "m3diff"
    assert description.max_new_tokens == PARAMS.predict.max_new_tokens
    params = yaml.safe_load(Path("params.yaml").read_text())
    assert description.params["train"] == params["train"]
    assert description.params["models"]["m3diff"]["rates"] == params["models"]["m3diff"]["rates"]
    assert list(description.params["models"]) == ["m3diff"]


# Checks before a training


@pytest.mark.parametrize(("memory_gb", "code"), [(0.01, 2), (24, 0)], ids=["too small", "large enough"])
def test_train_refuses_what_its_gpu_cannot_hold_before_it_writes(memory_gb, code, monkeypatch, project, capsys):
    shutil.copytree(REPOSITORY / "data/00_base", "data/00_base", dirs_exist_ok=True)
    write_mixture(MIXTURE, {"train": {"minichange": 3}})
    monkeypatch.setattr("m3diff.commands.plan.fit.smallest_gpu_gb", lambda: memory_gb)
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    files = sorted(project.rglob("*"))
    assert main(["--params", "profiles/embedded-gpu.yaml", "train"]) == code
    assert [name for name, _ in recorder.calls] == ([] if code else ["train"])
    refusal = Message("plan.does_not_fit_into_memory", memory_gb=memory_gb)
    assert refusal.in_text(capsys.readouterr().err) == bool(code)
    assert sorted(project.rglob("*")) == files


def test_train_prints_its_warnings_and_trains_all_the_same(monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.commands.plan", warnings_before_training=["few steps", "unknown words"])
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    assert main(["train"]) == 0
    assert capsys.readouterr().out == "train: warning: few steps\ntrain: warning: unknown words\n"
    assert [name for name, _ in recorder.calls] == ["train"]
    assert recorder.calls[0][1]["warnings"] == ["few steps", "unknown words"]


# plan


def record_plan(monkeypatch: pytest.MonkeyPatch, training_plan: Any, alignment_plan: Any, check: Any) -> Recorder:
    return Recorder(
        monkeypatch,
        "m3diff.commands.plan",
        plan_run=training_plan,
        plan_alignment=alignment_plan,
        check_fits=check,
        print_plan=None,
    )


def test_plan_prints_both_phases_and_then_checks_their_memory(monkeypatch, capsys):
    alignment_plan = Result(phase="alignment")
    training_plan = Result(phase="training")
    recorder = record_plan(monkeypatch, training_plan, alignment_plan, check=None)
    assert main(["--params", "profiles/paper.yaml", "plan", "--gpu", "H200-141GB", "--utilisation", "0.3"]) == 0
    assert capsys.readouterr().out.endswith("\nthe fine-tuning\n")
    params = load_params(Path("profiles/paper.yaml"))
    gpu = GPUS["H200-141GB"]
    run = {"run": Run.from_params(params)}
    printed = {"compute": params.compute, "gpu": gpu, "hfu": 0.3}
    checked = {"compute": params.compute, "memory_gb": gpu.memory_gb}
    assert recorder.calls == [
        ("plan_alignment", run),
        ("plan_run", run),
        ("print_plan", printed | {"plan": alignment_plan}),
        ("print_plan", printed | {"plan": training_plan}),
        ("check_fits", checked | {"plan": alignment_plan}),
        ("check_fits", checked | {"plan": training_plan}),
    ]


def test_plan_assumes_the_share_of_the_peak_that_the_docs_name(monkeypatch):
    recorder = record_plan(monkeypatch, Result(), None, check=None)
    page = (REPOSITORY / "docs" / "your-data.md").read_text(encoding="utf-8")
    (percent,) = re.findall(r"the hours assume that the GPU runs at (\d+) % of", page)
    assert main(["--params", "profiles/paper.yaml", "plan", "--gpu", "H100-80GB"]) == 0
    assert dict(recorder.calls)["print_plan"]["hfu"] == int(percent) / 100


@pytest.mark.parametrize(
    ("profile", "gpu_kind", "code"), [("embedded", None, 0), ("paper", "A100-40GB", 2), ("embedded-gpu", None, 0)]
)
def test_plan_refuses_what_does_not_fit_if_the_gpu_is_known(profile, gpu_kind, code, monkeypatch):
    recorder = record_plan(monkeypatch, Result(), None, check=ParamsError("settings.no_file", path="params.yaml"))
    assert main(["--params", f"profiles/{profile}.yaml", "plan"]) == code
    assert dict(recorder.calls)["print_plan"]["gpu"] is (gpu_kind and GPUS[gpu_kind])


# profile


def test_profile_writes_the_parameter_file_that_is_named(project):
    assert main(["--params", "mine.yaml", "profile", "paper"]) == 0
    assert load_params(Path("mine.yaml")) == load_params(Path("profiles/paper.yaml"))
    assert (project / "params.yaml").read_text() == (REPOSITORY / "params.yaml").read_text()
    assert list(project.glob("*.bak-*")) == []


def test_a_wrong_profile_is_refused_with_its_fault(project, capsys):
    (project / "profiles" / "wrong.yaml").write_text("extends: embedded\ntrain: {epochs: -1}\n")
    assert main(["profile", "wrong"]) == 2
    error = capsys.readouterr().err
    assert Message("settings.faults", path="profiles/wrong.yaml", count=1).in_text(error)
    assert Message("settings.wrong_value", key="train.epochs", found="-1").in_text(error)


def test_profile_replaces_a_broken_parameter_file_and_keeps_a_copy(project):
    (project / "params.yaml").write_text("train: [")
    assert main(["profile", "one-gpu"]) == 0
    assert load_params() == load_params(Path("profiles/one-gpu.yaml"))
    assert [path.read_text() for path in project.glob("params.yaml.bak-*")] == ["train: ["]


def test_the_same_profile_again_changes_nothing(capsys):
    assert main(["profile", "one-gpu"]) == 0
    assert "train.global_batch: " in capsys.readouterr().out
    assert main(["profile", "one-gpu"]) == 0
    first_line, *other_lines = capsys.readouterr().out.splitlines()
    assert first_line.startswith("params.yaml")
    assert "one-gpu" in first_line
    assert [line for line in other_lines if "train.global_batch" in line] == []


# caption

SOURCE = Source(name="m3diff/12", folder=Path("checkpoint"), max_new_tokens=7, base=None)
PAIR_IMAGES = (Path("a.png"), Path("b.png"))
UNREADABLE = Fault("serving.missing_image", path=Path("a.png"))


@pytest.fixture
def record_answers(monkeypatch: pytest.MonkeyPatch, project: Path) -> Any:
    """Return a function that replaces the model by given answers and returns the recorded calls."""
    for image in PAIR_IMAGES:
        noise_image(1, (40, 40)).save(image)

    def record(*outputs: CaptionOutput) -> list[tuple[str, dict[str, Any]]]:
        limits = (Takes(), TrainedOn())
        Recorder(monkeypatch, "m3diff.models.checkpoint", read_sample_limits=limits)
        Recorder(monkeypatch, "m3diff.serving.model_card", note_on_training="drawn scenes alone")
        finder = Recorder(monkeypatch, "m3diff.registry.model_source", find=SOURCE, load="the model")
        asker = Recorder(monkeypatch, "m3diff.serving.caption", check_question=None, answer_inputs=outputs)
        if len(outputs) > 1:
            inputs = [output.input for output in outputs]
            Recorder(monkeypatch, "m3diff.serving.caption", find_inputs=inputs)
        asker.calls = finder.calls
        return finder.calls

    return record


def answered(name: str, caption: str | None = None, **fields: Any) -> CaptionOutput:
    """Return the answer to a pair with this name."""
    return CaptionOutput(CaptionInput(name, PAIR_IMAGES), caption, **fields)


def test_caption_asks_the_model_that_is_named_with_all_its_options(record_answers):
    calls = record_answers(answered("a", "a cup is gone"))
    options = "--model 12 --base base --question What? --overlay o.png"
    assert main(["caption", *map(str, PAIR_IMAGES), *options.split()]) == 0
    asked_input = CaptionInput("a", PAIR_IMAGES, "What?")
    register = PARAMS.register_
    assert calls == [
        (
            "find",
            {
                "tracking_uri": register.tracking_uri,
                "model_name": register.model_name,
                "model": "12",
                "base": Path("base"),
                "max_new_tokens": PARAMS.predict.max_new_tokens,
            },
        ),
        ("load", {"source": SOURCE}),
        ("check_question", {"captioner": "the model", "question": "What?"}),
        (
            "answer_inputs",
            {
                "captioner": "the model",
                "inputs": [asked_input],
                "overlay": Path("o.png"),
                "max_pixels": PARAMS.validate_.max_image_pixels,
            },
        ),
    ]


def test_caption_takes_the_champion_and_the_base_of_the_training_by_default(record_answers):
    calls = record_answers(answered("a", "a cup is gone"))
    assert main(["caption", *map(str, PAIR_IMAGES)]) == 0
    (_, find_arguments), *_ = calls
    assert find_arguments["model"] == "champion"
    assert find_arguments["base"] == PARAMS.train.base


def test_caption_reads_a_table_s_columns_and_root_as_they_are_named(record_answers, monkeypatch):
    record_answers(answered("a", "a cup is gone"))
    pair = CaptionInput("a", PAIR_IMAGES)
    finder = Recorder(monkeypatch, "m3diff.serving.caption", find_inputs=[pair])
    for options in ("--before B --after A --image-root r", "--after A", ""):
        assert main(["caption", "t.csv", *options.split()]) == 0
    named_root, named_after, named_nothing = (arguments for _, arguments in finder.calls)
    assert named_root == {
        "path": Path("t.csv"),
        "after": None,
        "image_root": Path("r"),
        "columns": {"before": "B", "after": "A"},
    }
    assert named_after["columns"] == {"after": "A"}
    assert named_nothing["columns"] is None


def test_a_single_caption_is_printed_as_one_line_without_the_name(record_answers, capsys):
    record_answers(answered("a", "a cup\nis gone"))
    assert main(["caption", *map(str, PAIR_IMAGES)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "a cup is gone\n"
    assert printed.err == "m3diff caption: note: drawn scenes alone\n"


def test_captions_follow_their_names_and_faults_and_notes_go_to_stderr(record_answers, capsys):
    record_answers(
        answered("a", "a cup is gone", note="a note"),
        answered("b", fault=UNREADABLE),
        answered("c", "a cup is new", note="a note"),
    )
    assert main(["caption", "t.csv"]) == 3
    printed = capsys.readouterr()
    assert printed.out == "a\ta cup is gone\nc\ta cup is new\n"
    notes = ["drawn scenes alone", "a note"]
    expected = [f"note: {notes[0]}", f"note: {notes[1]}", str(UNREADABLE)]
    assert printed.err.splitlines() == [f"m3diff caption: {line}" for line in expected]


def test_captions_in_json_have_a_line_per_input_and_a_summary_of_the_faults(record_answers, capsys):
    outputs = [answered("a", "eine Tür"), answered("b", fault=UNREADABLE), answered("c", fault=UNREADABLE)]
    record_answers(*outputs)
    assert main(["caption", "t.csv", "--json"]) == 3
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == [
        output.as_dict(SOURCE.name) for output in outputs
    ]
    assert "eine Tür" in printed.out
    summary = Fault("command.pairs_without_caption", count=2, pairs=3, first=f"b: {UNREADABLE}")
    assert printed.err.splitlines()[-1] == f"m3diff caption: {summary}"


def test_captions_in_json_without_a_fault_exit_with_zero(record_answers, capsys):
    record_answers(answered("a", "a cup is gone"))
    assert main(["caption", *map(str, PAIR_IMAGES), "--json"]) == 0
    assert not Message("command.pairs_without_caption").in_text(capsys.readouterr().err)


# Commands that need no project


def test_data_check_needs_no_parameter_file(outside, capsys):
    (outside / "mine").mkdir()
    for name in ("a", "b"):
        noise_image(ord(name), (40, 40)).save(outside / "mine" / f"{name}.png")
    (outside / "mine" / "pairs.csv").write_text("before,after,caption\na.png,b.png,a cup is gone\n")
    assert main(["data", "check", "mine"]) in (0, 3)
    printed = capsys.readouterr()
    assert "a.png" in printed.out or "pairs.csv" in printed.out
    assert not Message("settings.no_file").in_text(printed.err)


def test_score_without_anything_to_score_against_says_what_to_name(outside, capsys):
    Path("captions.json").write_text("{}")
    assert main(["score", "captions.json"]) == 2
    message = capsys.readouterr().err
    assert "m3diff score captions.json --benchmark " in message
    assert "m3diff score captions.json --references " in message
