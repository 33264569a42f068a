"""Every command through `main([...])`: which function it calls, with which arguments, and which code it exits with.

A recorder is in the place of each function; a command that passes what the function does not take fails.
"""

import errno
import functools
import importlib
import inspect
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff import __main__ as command_line
from m3diff.__main__ import COMMANDS, main
from m3diff.commands import usage
from m3diff.commands.inspect import StageLimits
from m3diff.commands.rescore import rescore
from m3diff.commands.zero_shot import PROMPT, Request
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.settings.compute import GPUS
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.stages.ingest.stage import IngestReport
from m3diff.stages.validate.stage import ValidateCounts, ValidateReport
from tests.stages.train.toy import write_mixture
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "profiles" / "embedded.yaml")
ENTRY = PARAMS.ingest.datasets["minichange"]
DATA = Path("data")
CACHE = Path("runs/image_cache.parquet")

ENTRIES, TEST = PARAMS.ingest.datasets, {"mixture": DATA / "04_mixture"}
CLEAN, RECORDS, MODEL = {"clean": DATA / "03_clean"}, {"records": DATA / "02_records"}, {"model": DATA / "05_model"}
EXPORTED = {"checkpoint": DATA / "05_model/checkpoint", "out": Path("out")}
SERVED = {"params": PARAMS}
AUGMENT = "m3diff.stages.augment.stage"
SHARED = {"entries": ENTRIES, **TEST, "out": Path("out"), "allow_unlicensed": False, "absolute": False}
ASKED = {"cfg": PARAMS.evaluate, "compute": PARAMS.compute, **TEST, **RECORDS, **CLEAN}
PROMOTED = {"params": PARAMS, "rescore": rescore}
LOCAL, FAR = "http://127.0.0.1:8000/v1", "https://a.example/v1"

PREDICTED = {"predictions": DATA / "06_predictions"}
TRAINED = {"cfg": PARAMS.train, "model": PARAMS.models["m3diff"], "compute": PARAMS.compute}
MINE = {"reader": "minichange", "settings": PARAMS.synthesize["minichange"]}
CHECKED = {
    "root": Path("somewhere"),
    "entries": ENTRIES,
    "reader": "pairs",
    "stage_limits": StageLimits(PARAMS.validate_, CACHE),
}
FAR_AWAY = "--limit 9 --out out --prompt P --max-tokens 5 --key-variable K --allow-unlicensed"
ANSWERED = Request(LOCAL, "m", PROMPT, "OPENAI_API_KEY", None, PARAMS.predict.limit)
FROM_FAR = Request(FAR, "m", "P", "K", 5, 9, allow_unlicensed=True)
OPEN = {"model": "somewhere", "base": Path("base"), "host": "0.0.0.0", "port": 81}
CLOSED = {"model": "champion", "base": DATA / "00_base", "host": "127.0.0.1", "port": 8000}
INGESTED = {"name": "minichange", "entry": ENTRY, "image_cache": CACHE, "out": DATA / "02_records"}
VALIDATED = {"cfg": PARAMS.validate_, "entries": ENTRIES, "image_cache": CACHE, **RECORDS, "out": DATA / "03_clean"}
CONVERTED = {"cfg": PARAMS.convert, "entries": ENTRIES, **CLEAN, "out": DATA / "04_mixture"}
CAPTIONED = {"cfg": PARAMS.predict, "compute": PARAMS.compute, **TEST, **MODEL, "out": DATA / "06_predictions"}
SCORED = {"cfg": PARAMS.evaluate, "compute": PARAMS.compute, **RECORDS, **CLEAN, **PREDICTED}
HUB = "commands.export.export_hub"
EXPORT, ZERO = "models.checkpoint.export_checkpoint", "commands.zero_shot.zero_shot"
LLAVA = "commands.export.export_llava"

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrain": ("stages.pretrain.stage.pretrain", {"cfg": PARAMS.pretrain, "out": DATA / "00_base"}),
    "synthesize minichange": ("stages.synthesize.stage.synthesize", MINE),
    "ingest minichange": ("stages.ingest.stage.ingest", INGESTED),
    "validate": ("stages.validate.stage.validate", VALIDATED),
    "convert": ("stages.convert.stage.convert", CONVERTED),
    "train": ("stages.train.stage.train", TRAINED | TEST | {"out": DATA / "05_model"}),
    "predict": ("stages.predict.stage.predict", CAPTIONED),
    "evaluate": ("stages.evaluate.stage.evaluate", SCORED | {"out": DATA / "07_report"}),
    "register": ("stages.register.stage.register", {"params": PARAMS}),
    "promote": ("registry.promote.promote", PROMOTED | {"version": None, "again": False}),
    "promote --version 7 --again": ("registry.promote.promote", PROMOTED | {"version": 7, "again": True}),
    "rollback": ("registry.promote.rollback", {"params": PARAMS, "to": None, "why": ""}),
    "rollback --to 3 --why 'a b'": ("registry.promote.rollback", {"params": PARAMS, "to": 3, "why": "a b"}),
    "serve": ("serving.server.serve", SERVED | CLOSED),
    "serve --model somewhere --base base --host 0.0.0.0 --port 81": ("serving.server.serve", SERVED | OPEN),
    "data statistics": ("commands.inspect.statistics.write_statistics", CLEAN),
    "data check somewhere --reader pairs": ("commands.inspect.check", CHECKED),
    "export out": (EXPORT, EXPORTED | {"adapters": False}),
    "export out --adapters": (EXPORT, EXPORTED | {"adapters": True}),
    "export out --hub": (HUB, {"params": PARAMS, "out": Path("out"), "allow_unlicensed": False}),
    "export out --hub --allow-unlicensed": (HUB, {"params": PARAMS, "out": Path("out"), "allow_unlicensed": True}),
    "export-llava out": (LLAVA, SHARED),
    "export-llava out --absolute": (LLAVA, SHARED | {"absolute": True}),
    "export-llava out --allow-unlicensed": (LLAVA, SHARED | {"allow_unlicensed": True}),
    f"zero-shot --url {LOCAL} --model m": (ZERO, ASKED | {"request": ANSWERED, "out": None}),
    f"zero-shot --url {FAR} --model m {FAR_AWAY}": (ZERO, ASKED | {"request": FROM_FAR, "out": Path("out")}),
}
"""By what is typed: the function that is called, and its arguments by its own names."""


class Result(types.SimpleNamespace):
    def __str__(self) -> str:
        return "what the stage said"

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)


class Recorder:
    """Functions of a module that note their arguments by name, as the functions themselves call them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, **results: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        for name, result in results.items():
            real = getattr(importlib.import_module(module), name)
            monkeypatch.setattr(f"{module}.{name}", self.recording(real, result))

    def recording(self, function: Any, result: Any) -> Any:
        @functools.wraps(function)
        def record(*values: Any, **named: Any) -> Any:
            arguments = inspect.signature(function).bind(*values, **named).arguments
            self.calls.append((function.__name__, dict(arguments)))
            if isinstance(result, BaseException):
                raise result
            return result

        return record


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "profiles", "profiles")
    shutil.copy("profiles/embedded.yaml", "params.yaml")
    Path("data/00_base").mkdir(parents=True)
    shutil.copy(REPOSITORY / "data/00_base/config.json", "data/00_base")
    Path("data/01_raw/minichange").mkdir(parents=True)
    return tmp_path


RESULT = Result(outcome="promoted", sound=True, lines=["a line", "another"])


@pytest.mark.parametrize("typed", CALLS)
def test_a_command_calls_its_function_with_exactly_its_arguments(typed, monkeypatch):
    place, expected = CALLS[typed]
    module, _, function = place.rpartition(".")
    recorder = Recorder(monkeypatch, f"m3diff.{module}", **{function: ([], True) if function == "check" else RESULT})
    monkeypatch.setattr(command_line, "told", str)
    monkeypatch.setattr("m3diff.registry.tracking.completed", lambda *report: None)
    assert main(shlex.split(typed)) == 0
    for _, arguments in recorder.calls:
        arguments.pop("follow", None)
    assert recorder.calls == [(function, expected)]
    for argument, value in expected.items():
        assert type(recorder.calls[0][1][argument]) is type(value), argument


SAID, LINES = "what the stage said\n", "a line\nanother\n"
PRINTED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("register", "stages.register.stage", {"register": RESULT}, 0, SAID),
    ("rollback", "registry.promote", {"rollback": RESULT}, 0, SAID),
    *(
        ("promote", "registry.promote", {"promote": Result(outcome=outcome)}, 4 if outcome == "refused" else 0, SAID)
        for outcome in ("promoted", "first", "unchanged", "refused")
    ),
    ("data statistics", "commands.inspect.statistics", {"write_statistics": None}, 0, "written to data/03_clean/st"),
    ("data check a", "commands.inspect", {"check": (["a line", "another"], True)}, 0, LINES),
    ("data check a", "commands.inspect", {"check": (["a line", "another"], False)}, 3, LINES),
    ("export out --hub", "commands.export", {"export_hub": ["a line", "another"]}, 0, LINES),
    ("compare a b --out c", "commands.compare", {"compare": {"t": 1}, "as_text": "T"}, 0, "T\n\npair by pair: c\n"),
    ("ingest minichange", "stages.ingest.stage", {"ingest": RESULT}, 0, SAID),
    ("validate", "stages.validate.stage", {"validate": RESULT}, 0, f"{SAID}validate: the page: data/03_"),
    ("convert", "stages.convert.stage", {"convert": RESULT}, 0, SAID),
]


@pytest.mark.parametrize(("typed", "module", "results", "code", "words"), PRINTED)
def test_an_outcome_is_printed_and_decides_the_exit_code(typed, module, results, code, words, monkeypatch, capsys):
    Recorder(monkeypatch, f"m3diff.{module}", **results)
    monkeypatch.setattr(command_line, "told", str)
    assert main(typed.split()) == code
    assert capsys.readouterr().out.startswith(words)


def test_training_is_followed_in_mlflow_and_its_run_completed_by_evaluate(monkeypatch):
    made = []
    monkeypatch.setattr("m3diff.registry.tracking.followed", lambda *given: made.append(given))
    monkeypatch.setattr("m3diff.registry.tracking.completed", lambda *given: made.append(given))
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    assert main(["train"]) == 0
    recorder.calls[0][1]["follow"]("the key", Path("rows"))
    Recorder(monkeypatch, "m3diff.stages.evaluate.stage", evaluate=None)
    assert main(["evaluate"]) == 0
    (described, model, key, rows), (again, of, metrics) = made
    assert (model, key, rows) == (DATA / "05_model", "the key", Path("rows"))
    assert (of, metrics) == (DATA / "05_model", DATA / "07_report/metrics.json")
    assert described == again
    assert (described.tracking_uri, described.experiment) == (PARAMS.register_.tracking_uri, "m3diff")
    assert (described.model, described.max_new_tokens) == ("m3diff", PARAMS.predict.max_new_tokens)
    params = yaml.safe_load(Path("params.yaml").read_text())
    assert described.params["train"] == params["train"]
    assert described.params["models"]["m3diff"]["rates"] == params["models"]["m3diff"]["rates"]
    assert list(described.params["models"]) == ["m3diff"]


def test_training_takes_the_model_that_is_picked(monkeypatch, project):
    path = project / "params.yaml"
    path.write_text(path.read_text().replace("\n  model: m3diff\n", "\n  model: no_module\n"))
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    assert main(["train"]) == 0
    assert recorder.calls[0][1]["model"] == PARAMS.models["no_module"]


@pytest.mark.parametrize(("memory_gb", "code"), [(0.01, 2), (24, 0)])
def test_train_refuses_what_its_gpu_cannot_hold_before_it_writes(memory_gb, code, monkeypatch, project, capsys):
    shutil.copytree(REPOSITORY / "data/00_base", "data/00_base", dirs_exist_ok=True)
    write_mixture(DATA / "04_mixture", {"train": {"minichange": 3}})
    monkeypatch.setattr("m3diff.commands.plan.found_memory_gb", lambda: memory_gb)
    recorder = Recorder(monkeypatch, "m3diff.stages.train.stage", train=None)
    before = sorted(project.rglob("*"))
    assert main(["--params", "profiles/embedded-gpu.yaml", "train"]) == code
    assert [name for name, _ in recorder.calls] == ([] if code else ["train"])
    assert (f"but {memory_gb} GB hold" in capsys.readouterr().err) == bool(code)
    assert sorted(project.rglob("*")) == before


def test_ingest_without_a_name_reads_every_dataset_in_order(monkeypatch):
    for entry in ENTRIES.values():
        entry.root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(monkeypatch, "m3diff.stages.ingest.stage", ingest=None)
    monkeypatch.setattr(command_line, "told", str)
    assert main(["ingest"]) == 0
    assert [(arguments["name"], arguments["entry"]) for _, arguments in recorder.calls] == [*ENTRIES.items()]


INGESTED = {"stage": "ingest", "rows_in": 9, "rows_out": 9, "dataset": "mini", "reader": "pairs", "images": 15000}
INGESTED |= {"pairs": {"test": 500, "train": 7000, "val": 0}, "references": {"train": 9000, "val": 0, "test": 500}}
INGESTED |= dict.fromkeys(("empty_references", "faults", "unread_images"), 0)


def test_a_report_is_told_in_numbers_without_zeros_and_each_of_its_datasets_in_a_line():
    start = "ingest: mini: rows in 9, rows out 9, pairs 7,500 (test 500, train 7,000), references 9,500 (train 9,000, "
    assert usage.told(IngestReport(**INGESTED)) == f"{start}test 500), images 15,000"
    assert usage.told(IngestReport(**INGESTED | {"faults": 2})) == f"{start}test 500), faults 2, images 15,000"
    counts = {"pairs": {"train": 8}, "references": {"train": 16}, "lost_test_pairs": ["a"]}
    mini = ValidateCounts(**counts, quarantined=3, broken_rules={"no_leak": 2, "unique": 1})
    datasets = {"mini": mini, "other": ValidateCounts(**counts, quarantined=0, broken_rules={})}
    none = dict.fromkeys(("references_respaced", "bad_images", "mislabelled_images"), 0)
    read = {"stage": "validate", "rows_in": 19, "rows_out": 16, "quarantined": 3, "leaks": 2, "overlaps": {}}
    pairs = "pairs 8 (train 8), references 16 (train 16)"
    assert usage.told(ValidateReport(**read, **none, images=38, datasets=datasets)).split("\n") == [
        "validate: rows in 19, rows out 16, quarantined 3, leaks 2, images 38",
        f"validate: mini: {pairs}, quarantined 3, broken rules 3 (no_leak 2, unique 1)",
        f"validate: other: {pairs}",
    ]


MADE, EDITS = "--params profiles/made-data.yaml", "data/01_raw/minichange_edits"


def test_augment_makes_the_entry_that_is_named_and_prints_what_it_made(monkeypatch, capsys):
    recorder = Recorder(monkeypatch, AUGMENT, augment=Result(reasons=lambda: ["a reason"]))
    monkeypatch.setattr(command_line, "told", str)
    assert main(f"{MADE} augment minichange_edits".split()) == 0
    params = load_params(Path("profiles/made-data.yaml"))
    expected = {"name": "minichange_edits", "cfg": params.augment["minichange_edits"], "compute": params.compute}
    assert recorder.calls == [("augment", expected)]
    assert capsys.readouterr().out == f"{SAID}augment: rejected: a reason\n"


RAW, BASE_FILE = "data/01_raw/minichange", "data/00_base/config.json"
REFUSED: list[tuple[str, str, str]] = [
    ("ingest minichang", "", "ingest.datasets: no entry 'minichang'; did you mean 'minichange'?"),
    (f"{MADE} augment minichange_edit", "", "augment: no entry 'minichange_edit'; did you mean 'minichange_edits'?"),
    ("synthesize minichang", "", "synthesize: no entry 'minichang'; did you mean 'minichange'?"),
    ("train", BASE_FILE, f"train.base: {BASE_FILE} is not there; `make base`"),
    ("convert", "profiles/questions.yaml", "convert.questions: profiles/questions.yaml is not there"),
    ("ingest", RAW, f"ingest.datasets.minichange.root: {RAW} is not there; `m3diff synthesize minichange`"),
    (f"{MADE} augment minichange_edits", RAW, f"source.root: {RAW} is not there; fetch the source"),
    (f"{MADE} ingest minichange_edits", "", f"root: {EDITS} is not there; `m3diff augment minichange_edits`"),
    ("evaluate", "jars", "compute.spice_dir: jars is not there"),
    ("evaluate --out x", "", "evaluate: --out and --base need --model VERSION or FOLDER"),
]


@pytest.mark.parametrize(("typed", "gone", "words"), REFUSED)
def test_a_stage_is_refused_where_what_it_reads_is_not_there(typed, gone, words, monkeypatch, project, capsys):
    stage = typed.removeprefix(MADE).split()[0]
    recorder = Recorder(monkeypatch, f"m3diff.stages.{stage}.stage", **{stage: None})
    if gone == "jars":
        path = project / "params.yaml"
        path.write_text(path.read_text().replace("spice_dir: null", "spice_dir: jars"))
    elif gone:
        Path(gone).rmdir() if Path(gone).is_dir() else Path(gone).unlink()
    assert main(typed.split()) == 2
    assert words in capsys.readouterr().err
    assert recorder.calls == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ParamsError("train: no"), 2, "m3diff: train: no\n"),
        (DataError("records: no"), 3, "m3diff validate: records: no\n"),
        (ConnectionError("no server"), 75, "m3diff validate: no server\n"),
        (BlockingIOError("locked"), 75, "m3diff validate: locked\n"),
        (OSError(errno.ENOSPC, "full"), 75, "m3diff validate: [Errno 28] full; make room and run it again\n"),
        (KeyError("a bug"), None, ""),
        (OSError(errno.EIO, "a bug"), None, ""),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_a_bug_is_not_hidden(error, code, words, monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.stages.validate.stage", validate=error)
    if code is None:
        with pytest.raises(type(error)):
            main(["validate"])
    else:
        assert main(["validate"]) == code
    assert capsys.readouterr().err == words


def record_plan(monkeypatch, before: Any = None, check: Any = None) -> tuple[Any, Recorder]:
    made = Result()
    answers = {"make_plan": made, "plan_alignment": before, "check_fits": check, "print_plan": None}
    return made, Recorder(monkeypatch, "m3diff.commands.plan", **answers)


def test_plan_counts_prints_then_refuses_what_does_not_fit(monkeypatch, capsys):
    before, gpu, hfu = Result(), GPUS["H200-141GB"], 0.3
    made, recorder = record_plan(monkeypatch, before)
    assert main(["--params", "profiles/paper.yaml", "plan", "--gpu", "H200-141GB", "--utilisation", "0.3"]) == 0
    assert capsys.readouterr().out.endswith("\nthe fine-tuning\n")
    params = load_params(Path("profiles/paper.yaml"))
    train, compute, settings = params.train, params.compute, params.models["m3diff"]
    run = {"run": (train, settings, compute, params.ingest.datasets, params.convert, DATA / "04_mixture")}
    assert recorder.calls == [
        ("plan_alignment", run),
        ("make_plan", run),
        ("print_plan", {"compute": compute, "plan": before, "gpu": gpu, "hfu": hfu}),
        ("print_plan", {"compute": compute, "plan": made, "gpu": gpu, "hfu": hfu}),
        ("check_fits", {"compute": compute, "plan": before, "memory_gb": gpu.memory_gb}),
        ("check_fits", {"compute": compute, "plan": made, "memory_gb": gpu.memory_gb}),
    ]
    for profile, kind, code in (("embedded", None, 0), ("paper", "A100-40GB", 2), ("embedded-gpu", None, 0)):
        _, recorder = record_plan(monkeypatch, check=ParamsError("needs 90 GB"))
        assert main(["--params", f"profiles/{profile}.yaml", "plan"]) == code
        assert dict(recorder.calls)["print_plan"]["gpu"] is (kind and GPUS[kind])


def test_profile_writes_the_parameters_that_are_named_and_prints_what_changes(project, capsys):
    paper = load_params(Path("profiles/paper.yaml"))
    assert main(["--params", "mine.yaml", "profile", "paper"]) == 0
    assert load_params(Path("mine.yaml")) == paper
    assert (project / "params.yaml").read_text() == (project / "profiles/embedded.yaml").read_text()
    assert "params.yaml differs" not in capsys.readouterr().out
    (project / "profiles" / "wrong.yaml").write_text("extends: embedded\ntrain: {epochs: -1}\n")
    assert main(["profile", "wrong"]) == 2
    assert "profiles/wrong.yaml: 1 fault(s)\n  train.epochs: Input should be greater" in capsys.readouterr().err
    (project / "params.yaml").write_text("train: [")
    assert main(["profile", "one-gpu"]) == 0
    assert load_params() == load_params(Path("profiles/one-gpu.yaml"))
    assert [path.read_text() for path in project.glob("params.yaml.bak-*")] == ["train: ["], "broken, and kept"


@pytest.mark.parametrize(
    ("typed", "words"),
    [("", "COMMAND"), ("unknown", "invalid choice: 'unknown'"), ("synthesize", "name"), ("data", "ACTION")]
    + [("export", "out"), ("profile", "name"), ("plan --gpu H100", "invalid choice: 'H100' (choose from")]
    + [("export --hub --adapters out", "not allowed with"), ("serve --port 70000", "expected a port, 1 to 65535")]
    + [("prune --keep x", "expected a number, 0 or more"), ("zero-shot --url ftp://x --model m", "ftp://x")]
    + [("zero-shot", "--url, --model"), ("zero-shot --url https://me:key@x.org/v1 --model m", "without a key or a u")],
)
def test_usage_errors_exit_with_two_and_name_the_argument(typed, words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(typed.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help_needs_no_parameters(capsys, project):
    (project / "params.yaml").unlink()
    for argv in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        assert "usage: m3diff" in capsys.readouterr().out


def test_under_dvc_a_command_asks_to_be_ended_with_its_parent(monkeypatch):
    asked = []
    libc = types.SimpleNamespace(prctl=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(command_line.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(command_line.sys, "platform", "linux")
    Recorder(monkeypatch, "m3diff.stages.predict.stage", predict=None)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    main(["predict"])
    assert asked == []
    monkeypatch.setenv("DVC_STAGE", "predict")
    monkeypatch.chdir(REPOSITORY)
    main(["predict"])
    assert asked == [(1, 15)]


def test_every_command_has_examples_that_are_right():
    parser = usage.make_parser(COMMANDS, "")
    for name, command in COMMANDS.items():
        for line in command.examples:
            program, *argv = shlex.split(line)
            args = parser.parse_args(argv)
            assert (program, args.command) == ("m3diff", name)
            assert args.params == Path("params.yaml") or (REPOSITORY / args.params).is_file()


@pytest.mark.parametrize(("command", "extra"), [("score", "score"), ("caption", "serve"), ("train", "train")])
def test_where_a_package_is_missing_the_extra_that_brings_it_is_named(command, extra, monkeypatch, tmp_path, capsys):
    def run(*given):
        raise ModuleNotFoundError("No module named 'pycocoevalcap'", name="pycocoevalcap.cider")

    monkeypatch.setitem(COMMANDS, command, COMMANDS[command]._replace(run=run))
    given = {"score": ["predictions.json"], "caption": ["a.png", "b.png"]}.get(command, [])
    assert main([command, *given]) == 2
    missing = f"m3diff {command}: the package 'pycocoevalcap' is not installed here"
    remedy = f"pip install -c constraints.txt -e '.[{extra}]' ({sys.executable})"
    assert capsys.readouterr().err == f"{missing}; {remedy}\n"
    monkeypatch.setattr(usage, "SHIPPED", tmp_path)
    assert main([command, *given]) == 2
    assert capsys.readouterr().err == f"{missing}; pip install 'm3diff[{extra}]' ({sys.executable})\n", "in a wheel"


@pytest.mark.parametrize("name", ["m3diff.no_such", "flows", None])
def test_a_module_of_the_project_that_is_missing_is_a_fault_of_the_project(name, monkeypatch):
    def run(*given):
        raise ModuleNotFoundError("missing", name=name)

    monkeypatch.setitem(COMMANDS, "train", COMMANDS["train"]._replace(run=run))
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


def test_outside_a_checkout_the_profiles_of_the_wheel_are_taken(tmp_path, monkeypatch, capsys):
    asked, text = Path("params.yaml"), (REPOSITORY / "profiles" / "embedded.yaml").read_text()
    (tmp_path / "outside").mkdir()
    monkeypatch.chdir(tmp_path / "outside")
    assert usage.profiles_folder() == Path("profiles"), "a checkout's code has none inside"
    assert main(["train"]) == main(["serve"]) == 2
    assert capsys.readouterr().err.count("`m3diff profile embedded` writes one") == 2
    shipped = tmp_path / "installed"
    shipped.mkdir()
    (shipped / "embedded.yaml").write_text(text)
    monkeypatch.setattr(usage, "SHIPPED", shipped)
    assert usage.load_anywhere(asked).train.epochs == 2.7
    with pytest.raises(ParamsError, match=r"other\.yaml: no such file"):
        usage.load_anywhere(Path("other.yaml"))
    assert main(["profile", "embedded"]) == 0
    assert asked.read_text() == text
    asked.write_text(text.replace("epochs: 2.7", "epochs: 3"))
    assert usage.load_anywhere(asked).train.epochs == 3
    Path("profiles").mkdir()
    assert usage.profiles_folder() == Path("profiles")


def test_long_work_shows_how_far_it_is_in_a_log(capsys):
    assert list(progress([1, 2], "count")) == [1, 2]
    assert re.search(r"^count: 100%\|#+\| 2/2 \[.*[0-9?]it/s\]$", capsys.readouterr().err.rpartition("\r")[2].rstrip())
