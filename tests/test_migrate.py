"""The parameter files of the earlier shape (`tests/old`, as they were committed) rewritten into the present one."""

import shutil
from pathlib import Path

import pytest
import yaml

from components.__main__ import main
from components.migrate import GPU_OF_MEMORY, migrate
from components.params import load_params
from components.profiles import RENAMED, differences, resolve
from components.section import ParamsError
from tests.toy import REPOSITORY

OLD = REPOSITORY / "tests" / "old"
EMBEDDED = REPOSITORY / "profiles" / "embedded.yaml"
PAPERS = ("omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc")


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of an earlier file, with some text replaced."""
    monkeypatch.chdir(tmp_path)

    def old(name: str, **replaced: str) -> Path:
        text = (OLD / f"{name}.yaml").read_text()
        for key, value in replaced.items():
            line = next(line for line in text.split("\n") if line.startswith(f"  {key}:"))
            text = text.replace(f"\n{line}\n", f"\n  {key}: {value}\n")
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return old


def migrated(path: Path) -> dict:
    migrate(path, EMBEDDED, lambda line: None)
    return yaml.safe_load(path.read_text())


CHOSEN_ANEW = {  # since the earlier file, for a benchmark of two levels: what they were
    "train": {"epochs": 5},
    "compute": {"zero_stage": 1},
    "validate": {"max_image_pixels": 50_000_000},
}


def test_the_earlier_embedded_file_becomes_the_committed_parameters_but_for_values_chosen_anew(old):
    path = old("embedded")
    now = resolve(EMBEDDED)[0]
    for datasets in (now["synthesize"], now["ingest"]["datasets"]):
        for name in ("minichange_free", "minichange_shifted"):
            del datasets[name]  # which was not there then
    module = now["models"]["m3diff"]
    assert module.pop("delays")  # likewise
    module["rates"]["module"] = 0.0001
    scenes = now["synthesize"]["minichange"]
    scenes["scenes"]["train"] = 5000
    scenes["oversample_types"].remove("viewpoint")
    for section, were in CHOSEN_ANEW.items():
        now[section] |= were
    path.with_name("now.yaml").write_text(yaml.safe_dump(now))
    scenes.pop("domain")  # what it is where it is not written
    assert migrated(path) == now
    assert load_params(path) == load_params(path.with_name("now.yaml"))


@pytest.mark.parametrize("name", ["paper", "one-gpu"])
def test_an_earlier_profile_becomes_the_present_one_but_for_its_folders(name, old):
    path = old(name)
    expected = ["compute.zero_stage: 1 -> 2"] if name == "one-gpu" else []  # since: gradients added up in fp32
    expected += [
        "models.m3diff.module.init_gain: - -> 0.5",
        "models.m3diff.module.pos_embed_scale: - -> 3.0",
        "models.m3diff.delays.module: - -> 0",
    ]  # rehearsed
    expected += ["validate.max_image_pixels: 50000000 -> 100000000"]
    if name == "one-gpu":
        expected += ["predict.batch_pairs: 16 -> 48"]
    else:
        expected += ["predict.batch_pairs: 16 -> 32", "compute.micro_batch: 4 -> 2"]
        expected += ["compute.activation_checkpointing: full -> selective"]
    expected += ["promote.guards: {} -> -", "promote.guards.METEOR: - -> 0.01"]  # which migrate leaves to a person
    expected += ["convert.references_per_pair: 12 -> null", "register.keeps: merged -> adapters"]
    scored = "CIDEr, METEOR, ROUGE-L, BLEU, SPICE, change_accuracy"  # without what is for drawn images
    expected += [f"evaluate.metrics: [{scored}, pixel_threshold] -> [{scored}]"]
    expected += [f"ingest.datasets.{dataset}.train_on: - -> [train, val]" for dataset in PAPERS]
    values = migrated(path)
    now = resolve(REPOSITORY / "profiles" / f"{name}.yaml")[0]
    kept = (".root: ", "models.difference.", "models.onediff", "models.blip2idc")  # what was not there then
    found = [line for line in differences(values, now) if not any(part in line for part in kept)]
    assert sorted(found) == sorted(expected)
    roots = {dataset: entry["root"] for dataset, entry in values["ingest"]["datasets"].items()}
    assert roots == {dataset: f"data/01_raw/real/{dataset}" for dataset in now["ingest"]["datasets"]}
    one, other = (load_params(file).models for file in (path, REPOSITORY / "profiles" / f"{name}.yaml"))
    assert one["no_module"] == other["no_module"]
    assert (one["m3diff"].lora, one["m3diff"].rates) == (other["m3diff"].lora, other["m3diff"].rates)


@pytest.mark.parametrize("name", ["embedded", "paper", "one-gpu"])
def test_comments_are_kept_beside_their_values(name, old):
    path = old(name)
    before = path.read_text()
    migrate(path, EMBEDDED, lambda line: None)
    text = path.read_text()
    head = before.split("\n\n")[0]
    assert text.startswith(f"{head}\n\npaths:\n")
    for key, comment in {
        "max_quarantined_share: 0.01": "above it the stage fails",
        "allow_test_leakage: false": "true: train on pairs that are in a test set, too",
        "near_duplicate_max_diff: 2": "grey levels by which thumbnails of one image may differ",
        "global_batch": "sequences",
        "tracking_uri": "the store that `make up` serves",
    }.items():
        (line,) = [line for line in text.split("\n") if line.strip().startswith(key)]
        assert f"# {comment}" in line
    assert "\n\n\n" not in text
    assert all(not line.endswith(" ") for line in text.split("\n"))


def test_each_rename_is_said_and_a_copy_is_kept(old):
    path, said = old("embedded"), []
    before = path.read_bytes()
    migrate(path, EMBEDDED, said.append)
    (copy,) = path.parent.glob("embedded.yaml.bak-*")
    assert copy.read_bytes() == before
    assert said[-1] == f"a copy of the file as it was: {copy}"
    for line in (
        "paths.captions -> paths.predictions",
        "paths.scratch -> compute.scratch",
        "validate.image_memory: removed, no longer needed",
        "paths.raw: moved to ingest.datasets.<name>.root",
        "train.checkpointing -> compute.activation_checkpointing",
        "ingest.datasets: a list -> a mapping by name",
        "ingest.datasets.minichange.reader: clevr_change -> minichange, the benchmark that makes itself",
        "register.gate_metric -> promote.metric",
        "register.min_gain -> promote.min_gain",
        "promote: new; the gain is measured on minichange/total, guarded: change_exact_accuracy, no_change_recall",
    ):
        assert line in said
    everything = "\n".join(said)
    for key in RENAMED:
        assert key.rpartition(".")[2] in everything or key.startswith(("synthesize.", "train.perception.")), key


def test_a_renamed_key_goes_where_the_refusal_says_and_no_value_is_lost(old):
    values = {"workers": "5", "lr_tower": "0.1", "lr": "0.2", "lr_perception": "0.3", "val_pairs": "99"}
    more = {
        "checkpointing": "cheap",
        "lora_rank": "6",
        "lora_alpha": "12",
        "scorer_timeout_s": "7",
        "spice_dir": "j",
    }
    now = migrated(old("embedded", **values, **more))
    assert now["models"]["m3diff"]["rates"] == {"vision": 0.1, "projector": 0.2, "module": 0.3, "llm": 0.2}
    assert now["models"]["no_module"]["rates"] == {"vision": 0.1, "projector": 0.2, "module": None, "llm": 0.2}
    committed = resolve(EMBEDDED)[0]["models"]
    for name, model in now["models"].items():
        is_of_then = model["family"] == "m3diff"
        assert model["lora"] == ({"rank": 6, "alpha": 12} if is_of_then else committed[name]["lora"])
    assert now["compute"]["workers"] == 5
    assert now["compute"]["val_pairs"] == 99
    assert now["compute"]["activation_checkpointing"] == "selective"
    assert now["compute"]["scorer_timeout_s"] == 7
    assert now["compute"]["spice_dir"] == "j"


def test_without_a_rate_of_its_own_the_module_has_the_rate_of_the_rest(old):
    now = migrated(old("embedded", lr_perception="null"))
    assert now["models"]["m3diff"]["rates"]["module"] == 0.0014


@pytest.mark.parametrize(("packing", "most"), [("unpacked", 1), ("k", 7), ("full", None)])
def test_packing_becomes_the_captions_of_a_sequence(packing, most, old):
    assert migrated(old("embedded", packing=packing, pack_k="7"))["train"]["max_captions_per_sequence"] == most


def test_a_run_without_the_module_becomes_the_control(old):
    path = old("embedded", perception="null")
    now = migrated(path)
    assert now["train"]["model"] == "no_module"
    assert now["models"]["no_module"]["module"] is None
    assert now["models"]["m3diff"]["module"] is not None
    load_params(path)


def test_sources_keep_what_is_not_their_datasets_own(old):
    path = old("embedded")
    path.write_text(path.read_text().replace("{task: difference}", "{task: difference, weight: 2}"))
    assert migrated(path)["convert"]["sources"] == {"minichange": {"weight": 2}}
    path = old("embedded")
    path.write_text(path.read_text().replace("{task: difference}", "{task: detail}"))
    assert migrated(path)["convert"]["sources"] == {"minichange": {"task": "detail"}}
    path = old("paper")
    path.write_text(path.read_text().replace("    iedit: {task: edit}\n", "    iedit: {weight: 2}\n"))
    assert migrated(path)["convert"]["sources"] == {"iedit": {"weight": 2}}, "no task was the task difference"


def test_counts_that_are_not_the_published_ones_are_kept(old):
    path = old("paper")
    path.write_text(path.read_text().replace("train: 3061", "train: 3060"))
    datasets = migrated(path)["ingest"]["datasets"]
    assert datasets["iedit"]["expected_pairs"] == {"train": 3060, "val": 383, "test": 495}
    assert datasets["clevr_dc"]["expected_pairs"] == "published"


def test_a_dataset_of_ones_own_keeps_its_reader_and_options(old):
    path = old("embedded")
    entry = "    - {name: mine, reader: clevr_change, root: elsewhere, train_on: [train, val]}\n"
    path.write_text(path.read_text().replace("  datasets:\n", f"  datasets:\n{entry}"))
    datasets = migrated(path)["ingest"]["datasets"]
    assert list(datasets) == ["mine", "minichange"]
    assert datasets["mine"] == {"reader": "clevr_change", "root": "elsewhere", "train_on": ["train", "val"]}


def test_a_file_of_the_present_shape_is_left_alone(tmp_path):
    path = tmp_path / "params.yaml"
    shutil.copy(EMBEDDED, path)
    said: list[str] = []
    migrate(path, EMBEDDED, said.append)
    migrate(path, EMBEDDED, said.append)
    assert said == [f"{path} has the present shape already; nothing is changed"] * 2
    assert path.read_text() == EMBEDDED.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_migrated_is_not_migrated_again(old):
    path, said = old("embedded"), []
    migrate(path, EMBEDDED, lambda line: None)
    migrate(path, EMBEDDED, said.append)
    assert said == [f"{path} has the present shape already; nothing is changed"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("  lr_tower: 0.0004\n", "has no train.lr_tower; only a complete earlier file can be migrated"),
        ("convert:\n", "only a complete earlier file"),
    ],
)
def test_a_file_that_is_not_complete_is_refused_and_left_alone(line, words, old):
    path = old("embedded")
    text = path.read_text().replace(line, line.replace("convert", "convrt") if line == "convert:\n" else "")
    path.write_text(text)
    with pytest.raises(ParamsError, match=words):
        migrate(path, EMBEDDED, lambda line: None)
    assert path.read_text() == text


def test_a_key_written_twice_is_refused(old):
    path = old("embedded")
    path.write_text(path.read_text().replace("  epochs: 5\n", "  epochs: 5\n  epochs: 6\n"))
    with pytest.raises(ParamsError, match="epochs: written twice"):
        migrate(path, EMBEDDED, lambda line: None)


def test_the_command_rewrites_the_file_and_prints_what_it_did(old, capsys):
    path = old("one-gpu")
    shutil.copytree(REPOSITORY / "profiles", "profiles")
    assert main(["migrate", str(path)]) == 0
    assert "train.workers -> compute.workers\n" in capsys.readouterr().out
    assert load_params(path).compute.workers == 1


@pytest.mark.parametrize(
    ("memory", "kind", "words"),
    [
        (80, "H100-80GB", "H100-80GB; name another of components/gpus.py if yours is another with this memory"),
        (24.0, "RTX-4090-24GB", "RTX-4090-24GB; name another of components/gpus.py if"),
        (0, None, "null; name one of components/gpus.py for the plan's hours, or leave it where there is no GPU"),
        (33, None, "null; name one of"),
    ],
)
def test_the_memory_of_a_gpu_becomes_a_kind_that_has_it_and_this_is_said(memory, kind, words, tmp_path):
    path, said = tmp_path / "params.yaml", []
    text = EMBEDDED.read_text()
    line = next(line for line in text.split("\n") if line.startswith("  gpu_kind:"))
    path.write_text(text.replace(line, f"  gpu_memory_gb: {memory}   # of mine"))
    migrate(path, EMBEDDED, said.append)
    assert said[0].startswith(f"compute.gpu_memory_gb: {memory} -> compute.gpu_kind: {words}")
    (line,) = [line for line in path.read_text().split("\n") if line.startswith("  gpu_kind:")]
    assert line.split("#")[0].split() == ["gpu_kind:", "null" if kind is None else kind]
    assert line.endswith("# of mine")
    assert load_params(path).compute.gpu_kind == kind
    assert differences(resolve(EMBEDDED)[0], resolve(path)[0]) == (
        [] if kind is None else [f"compute.gpu_kind: null -> {kind}"]
    )
    assert (path.parent / said[1].rpartition("/")[2]).is_file()


def test_a_file_with_the_memory_of_a_gpu_is_refused_with_the_command_that_helps(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(EMBEDDED.read_text().replace("  gpu_kind: null", "  gpu_memory_gb: 80"))
    with pytest.raises(
        ParamsError, match="compute.gpu_memory_gb is now compute.gpu_kind; run `m3diff migrate`"
    ) as error:
        load_params(path)
    assert "missing" not in str(error.value)


def test_a_profile_that_names_the_memory_of_a_gpu_alone_is_migrated_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: paper\n\ncompute:\n  gpu_memory_gb: 40\n")
    assert migrated(path) == {"extends": "paper", "compute": {"gpu_kind": "A100-40GB"}}


# The gate's own section


def before_promote(name: str = "embedded") -> str:
    """A profile as it was when the gate's parameters stood in `register`."""
    text = (REPOSITORY / "profiles" / f"{name}.yaml").read_text()
    start, end = text.index("promote:"), text.index("compute:")
    text = text[:start] + text[end:]
    return text.replace(
        "  model_name: m3diff\n", "  model_name: m3diff\n  gate_metric: METEOR  # of mine\n  min_gain: 0.1\n"
    )


def test_the_gates_keys_move_to_a_section_of_their_own_which_the_embedded_profile_completes(tmp_path):
    path, said = tmp_path / "params.yaml", []
    path.write_text(before_promote())
    migrate(path, EMBEDDED, said.append)
    assert differences(resolve(EMBEDDED)[0], resolve(path)[0]) == [
        "promote.metric: CIDEr -> METEOR",
        "promote.min_gain: 0.0 -> 0.1",
    ]
    assert list(yaml.safe_load(path.read_text())) == list(yaml.safe_load(EMBEDDED.read_text())), "sections in order"
    assert "  metric: METEOR" in path.read_text()
    assert said[:2] == ["register.gate_metric -> promote.metric", "register.min_gain -> promote.min_gain"]
    assert load_params(path).promote.metric == "METEOR"


def test_on_a_dataset_without_a_grammar_no_accuracy_is_guarded(tmp_path):
    path = tmp_path / "params.yaml"
    text = before_promote().replace("{reader: minichange,", "{reader: birds_to_words,")
    text = text.replace("    minichange: {reader", "    birds: {reader")
    start, end = text.index("synthesize:"), text.index("ingest:")
    path.write_text(text[:start] + "synthesize: {}\n\n" + text[end:])
    migrate(path, EMBEDDED, lambda line: None)
    gate = load_params(path).promote
    assert (gate.protocol, gate.guards) == ("birds/test", {})


def test_a_profile_that_names_one_key_of_the_gate_keeps_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: paper\n\nregister:\n  gate_metric: METEOR\n")
    assert migrated(path) == {"extends": "paper", "promote": {"metric": "METEOR"}}
    path.write_text("extends: paper\n\nregister:\n  experiment: mine\n  min_gain: 1.0\n")
    assert migrated(path) == {"extends": "paper", "register": {"experiment": "mine"}, "promote": {"min_gain": 1.0}}


def test_a_file_with_the_gate_in_register_is_refused_with_the_command_that_helps(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(before_promote())
    with pytest.raises(ParamsError, match="register.gate_metric is now promote.metric; run `m3diff migrate`") as error:
        load_params(path)
    assert "missing" not in str(error.value)


def test_the_kind_that_an_earlier_file_gets_is_one_of_todays_with_its_memory():
    from components.gpus import GPUS

    assert all(GPUS[kind].memory_gb == memory for memory, kind in GPU_OF_MEMORY.items())
