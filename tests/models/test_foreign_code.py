"""Model folders with code, pickles or references to other files are refused, and no code runs."""

import ast
import builtins
import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jinja2.exceptions import SecurityError

from m3diff.models import FAMILIES
from m3diff.models import checkpoint as checkpoint_module
from m3diff.models import family as family_module
from m3diff.models.checkpoint import (
    ADAPTERS,
    LORA,
    CheckpointError,
    check_base,
    export_checkpoint,
    load_model,
    read_manifest,
    write_manifest,
)
from m3diff.models.device import Device
from m3diff.models.foreign_code import INDEX, NAMES_CODE, ForeignCodeError, refuse_foreign_code
from m3diff.models.generation import load_captioner
from m3diff.settings.load import load_params
from m3diff.stages.augment.params import FeatureModel
from m3diff.stages.augment.weights import Features
from m3diff.stages.pretrain.bases import create_architecture
from m3diff.stages.pretrain.params import Blip2
from tests.errors import raises
from tests.tiny import pair_prompt, tiny_base, tiny_checkpoint, tiny_settings
from tests.toy import REPOSITORY

FAMILY = FAMILIES["m3diff"]

EVIL_CLASSES = """
from pathlib import Path
Path({mark!r}).touch()
class Evil:
    @classmethod
    def from_pretrained(cls, *args, **options):
        return cls()
class EvilConfig(Evil):
    pass
def generate(*args, **options):
    pass
"""
# What a published folder may hold beside its own files
EVIL_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
OWN_MAP = {"AutoConfig": "m3diff_model.M3DiffConfig"}


class TouchMark:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.fixture(scope="module")
def base_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("foreign") / "base")


@pytest.fixture(scope="module")
def checkpoint_once(base_once: Path) -> Path:
    return tiny_checkpoint(base_once, base_once.parent / "checkpoint")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return the file that foreign code creates if it runs."""
    return tmp_path / "ran"


@pytest.fixture
def checkpoint(
    base_once: Path, checkpoint_once: Path, tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A copy of a checkpoint beside a copy of its base, with Python in it that could be imported; standard input must
    not be read."""
    prompts: list[object] = []

    def answer(prompt: object = "") -> str:
        prompts.append(prompt)
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    shutil.copytree(base_once, tmp_path / "base")
    folder = Path(shutil.copytree(checkpoint_once, tmp_path / "checkpoint"))
    code = EVIL_CLASSES.format(mark=str(mark))
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    assert prompts == []


def set_fields(file: Path, **fields: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | fields))


def list_again(folder: Path) -> None:
    """Write a manifest of the current files of the folder, like an attacker."""
    facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
    write_manifest(folder, **facts)


# Fields of JSON files: the file in the checkpoint, the field by its place, and the value
FIELDS: dict[str, tuple[str, str, object]] = {
    "a tokenizer": ("tokenizer_config.json", "auto_map", EVIL_MAP),
    "a tokenizer, as a list": ("tokenizer_config.json", "auto_map", ["evil.Evil", None]),
    "a configuration": ("config.json", "auto_map", {"AutoConfig": "evil.EvilConfig"}),
    "a model of a hub": ("config.json", "auto_map", {"AutoModel": "owner/name--evil.Evil"}),
    "a part of a configuration": ("config.json", "text_config.auto_map", {"AutoConfig": "evil.EvilConfig"}),
    "a processor": ("processor_config.json", "auto_map", {"AutoProcessor": "evil.Evil"}),
    "an image processor": ("processor_config.json", "image_processor.auto_map", {"AutoImageProcessor": "evil.Evil"}),
    "an image processor by itself": ("preprocessor_config.json", "auto_map", {"AutoImageProcessor": "evil.Evil"}),
    "a video processor": ("video_preprocessor_config.json", "auto_map", {"AutoVideoProcessor": "evil.Evil"}),
    "own code in a folder below": ("question_encoder/config.json", "auto_map", OWN_MAP),
    "generation": ("generation_config.json", "custom_generate", "evil"),
    "a pipeline": ("config.json", "custom_pipelines", {"x": {"impl": "evil.Evil"}}),
    "a class that is no tokenizer": ("tokenizer_config.json", "tokenizer_class", "AutoModelForCausalLM"),
    "a tokenizer that asks again": ("tokenizer_config.json", "tokenizer_class", "AutoTokenizer"),
    "compiled code of a hub": ("config.json", "attn_implementation", "owner/kernel"),
    "other weights": ("config.json", "transformers_weights", "adapter_model.bin"),
    "another configuration": ("config.json", "configuration_files", ["config.4.0.0.json"]),
    "another tokenizer": ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.4.0.0.json"]),
    "shards elsewhere": ("model.safetensors.index.json", "weight_map.a", "../base/model.safetensors"),
}


def set_at(file: Path, path: str, value: object) -> None:
    """Set a field of a JSON file by its path, such as `text_config.auto_map`."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    *parents, name = path.split(".")
    inner = content
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[name] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def code_of(case: str) -> str:
    """Return the error code for a case of FIELDS."""
    if case in ("a class that is no tokenizer", "a tokenizer that asks again"):
        return "models.field_names_no_tokenizer"
    if case == "compiled code of a hub":
        return "models.field_names_compiled_code"
    if case in ("other weights", "another configuration", "another tokenizer", "shards elsewhere"):
        return "models.field_names_files"
    return "models.field_names_code"


@pytest.mark.fault("31")
@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_leads_to_code_or_other_files_is_refused_by_name(case, checkpoint, mark):
    name, field, value = FIELDS[case]
    set_at(checkpoint / name, field, value)
    list_again(checkpoint)
    with raises(ForeignCodeError, code_of(case), path=checkpoint / name, field=field, value=value) as refused:
        load_captioner(checkpoint)
    assert refused.value.fault.remedy
    assert not mark.exists()


@pytest.mark.fault("31")
def test_a_field_within_a_list_is_refused_by_its_place(tmp_path):
    set_fields(tmp_path / "config.json", parts=[{}, {"auto_map": EVIL_MAP}])
    expected = {"path": tmp_path / "config.json", "field": "parts.1.auto_map", "value": EVIL_MAP}
    with raises(ForeignCodeError, "models.field_names_code", **expected):
        refuse_foreign_code(tmp_path)


@pytest.mark.fault("31")
@pytest.mark.parametrize("case", [case for case, (_, field, _) in FIELDS.items() if field.endswith("auto_map")])
def test_transformers_itself_is_told_to_trust_no_code(case, checkpoint, mark, monkeypatch):
    """If nothing refused these folders, they would load or fail, but not prompt or run code."""
    for module in (checkpoint_module, family_module):
        monkeypatch.setattr(module, "refuse_foreign_code", lambda folder: None)
    name, field, value = FIELDS[case]
    set_at(checkpoint / name, field, value)
    if name == "tokenizer_config.json":
        set_fields(checkpoint / name, tokenizer_class="Evil")
    if field == "auto_map" and name == "config.json":
        set_fields(checkpoint / name, model_type="evil")
        monkeypatch.setattr(checkpoint_module, "_check_model_type", lambda *arguments: None)
    list_again(checkpoint)
    with suppress(CheckpointError):
        load_captioner(checkpoint)
    assert not mark.exists()


@pytest.mark.fault("31")
def test_adapters_in_a_models_own_folder_are_refused(checkpoint):
    """transformers would add such adapters to the model by itself, whatever their kind."""
    set_fields(checkpoint / "adapter_config.json", peft_type="LORA", base_model_name_or_path="owner/name")
    list_again(checkpoint)
    with raises(ForeignCodeError, "models.adapters_of_transformers", path=checkpoint / "adapter_config.json"):
        load_model(checkpoint)


@pytest.mark.fault("31")
@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "models.field_imports_megatron", "megatron_config"),
        ({"megatron_core": "evil"}, NAMES_CODE, "megatron_core"),
        (
            {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
            NAMES_CODE,
            "auto_mapping.parent_library",
        ),
        (
            {"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "owner/name"},
            "models.other_kind_of_adapter",
            "peft_type",
        ),
        ({"peft_type": "XLORA", "adapters": {"0": "owner/name"}}, "models.other_kind_of_adapter", "peft_type"),
    ],
    ids=["megatron", "megatron's module", "a base of foreign code", "a tokenizer of a hub", "adapters of a hub"],
)
def test_adapters_that_import_or_fetch_something_are_refused(fields, code, field, checkpoint, mark):
    file = checkpoint / ADAPTERS / LORA / "adapter_config.json"
    set_fields(file, **fields)
    list_again(checkpoint / ADAPTERS)
    with raises(ForeignCodeError, code, path=file, field=field):
        load_model(checkpoint / ADAPTERS)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("field", "value"), [("use_dora", True), ("rank_pattern", {"q_proj": 1}), ("of_a_later_peft", "on")]
)
def test_adapters_of_another_recipe_than_training_writes_are_refused(field, value, checkpoint):
    file = checkpoint / ADAPTERS / LORA / "adapter_config.json"
    set_fields(file, **{field: value})
    list_again(checkpoint / ADAPTERS)
    with raises(CheckpointError, "models.other_recipe_of_adapters", path=file, field=field, value=value):
        load_model(checkpoint / ADAPTERS)


@pytest.mark.fault("31")
@pytest.mark.parametrize(
    ("weights", "pickled"),
    [
        ("model.safetensors", "pytorch_model.bin"),
        ("adapters/lora/adapter_model.safetensors", "adapters/lora/adapter_model.bin"),
    ],
    ids=["of a model", "of adapters"],
)
def test_pickled_weights_in_place_of_safetensors_are_refused_unread(weights, pickled, checkpoint, mark):
    folder = checkpoint / ADAPTERS if pickled.startswith(ADAPTERS) else checkpoint
    (checkpoint / weights).unlink()
    (checkpoint / pickled).write_bytes(pickle.dumps(TouchMark(mark)))
    list_again(folder)
    with raises(ForeignCodeError, "models.pickle", path=checkpoint / pickled):
        load_model(folder)
    assert not mark.exists()


@pytest.mark.fault("31")
def test_without_its_files_a_folder_of_adapters_asks_no_hub(checkpoint, monkeypatch):
    """A relative path of two names is also the name of a repository on a hub."""
    monkeypatch.chdir(checkpoint)
    monkeypatch.setattr(socket.socket, "connect", refuse_connection)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (checkpoint / ADAPTERS / LORA / name).unlink()
        list_again(checkpoint / ADAPTERS)
        with raises(CheckpointError, "models.missing_file", path=Path(ADAPTERS, LORA, name)):
            load_model(Path(ADAPTERS))


def refuse_connection(*arguments: object) -> NoReturn:
    raise AssertionError("a connection was opened")


def link_to_a_private_file(folder: Path) -> Path:
    private = folder.parent / "private.jinja"
    private.write_text("secret")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(private)
    return folder / "chat_template.jinja"


def link_to_a_folder(folder: Path) -> Path:
    (folder / "additional_chat_templates").symlink_to(folder.parent / "base")
    return folder / "additional_chat_templates"


@pytest.mark.fault("31")
@pytest.mark.parametrize("make_link", [link_to_a_private_file, link_to_a_folder])
def test_a_link_out_of_the_folder_is_refused(make_link, checkpoint):
    link = make_link(checkpoint)
    list_again(checkpoint)
    with raises(ForeignCodeError, "models.link_out_of_folder", path=link):
        load_model(checkpoint)


def test_links_within_the_folder_and_into_caches_by_content_are_followed(checkpoint, tmp_path):
    shutil.move(checkpoint / "tokenizer.json", checkpoint / "other.json")
    (checkpoint / "tokenizer.json").symlink_to("other.json")
    for target in ("cache/files/md5/0f/" + "a" * 30, "hub/models--a--b/blobs/" + "b" * 40):
        (tmp_path / target).parent.mkdir(parents=True)
    shutil.move(checkpoint / "config.json", tmp_path / ("cache/files/md5/0f/" + "a" * 30))
    (checkpoint / "config.json").symlink_to(tmp_path / ("cache/files/md5/0f/" + "a" * 30))
    shutil.move(checkpoint / "chat_template.jinja", tmp_path / ("hub/models--a--b/blobs/" + "b" * 40))
    (checkpoint / "chat_template.jinja").symlink_to(tmp_path / ("hub/models--a--b/blobs/" + "b" * 40))
    shutil.move(checkpoint / "model.safetensors", tmp_path / "weights.safetensors")
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    assert load_model(checkpoint)[1].settings


@pytest.mark.fault("31")
def test_names_of_places_are_not_followed_and_what_lies_beside_is_not_read(checkpoint, mark, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", refuse_connection)
    adapters = checkpoint / ADAPTERS
    set_fields(adapters / LORA / "adapter_config.json", base_model_name_or_path="owner/name", revision="evil")
    for folder in (checkpoint, adapters):
        set_fields(folder / "config.json", _name_or_path="https://example.org/owner/name")
        set_fields(folder / "tokenizer_config.json", processor_class="Evil", vocab_file="/etc/passwd")
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(TouchMark(mark)))
    (adapters / LORA / "adapter_model.bin").write_bytes(pickle.dumps(TouchMark(mark)))
    list_again(adapters)
    list_again(checkpoint)
    for folder in (checkpoint, adapters):
        load_captioner(folder)
    assert not mark.exists()


@pytest.mark.fault("31")
def test_a_chat_template_reaches_nothing_of_python(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    list_again(checkpoint)
    captioner = load_captioner(checkpoint)
    with pytest.raises(SecurityError):
        pair_prompt(captioner.processor, "What changed?")


@pytest.mark.parametrize("model_type", ["llava", "evil", ["m3diff"]], ids=str)
def test_a_model_of_another_type_than_the_manifest_says_is_refused(model_type, checkpoint):
    set_fields(checkpoint / "config.json", model_type=model_type)
    list_again(checkpoint)
    names = ["m3diff", "llava_onevision"]
    with raises(
        CheckpointError, "models.other_model_type", path=checkpoint / "config.json", value=model_type, names=names
    ):
        load_model(checkpoint)


def test_a_folder_to_share_loads_by_the_projects_own_classes(checkpoint, mark):
    set_fields(checkpoint / "config.json", auto_map=OWN_MAP)
    code = {"AutoProcessor": "processing_m3diff.ImagePairProcessor"}
    set_fields(checkpoint / "processor_config.json", auto_map=code)
    for name in ("m3diff_model.py", "processing_m3diff.py"):
        (checkpoint / name).write_text((checkpoint / "evil.py").read_text())
    list_again(checkpoint)
    captioner = load_captioner(checkpoint)
    assert type(captioner.model).__module__.startswith("m3diff.")
    assert not mark.exists()


def name_code(folder: Path) -> None:
    set_fields(folder / "config.json", auto_map={"AutoConfig": "evil.EvilConfig"})


def start_blip2(folder: Path) -> None:
    pretrain = load_params(REPOSITORY / "profiles" / "embedded.yaml").pretrain
    blip2 = Blip2(start=folder, queries=6, qformer_layers=2, stacked=False)
    create_architecture(pretrain.model_copy(update={"blip2": blip2}), tokenizer=None)


def compute_features(folder: Path) -> None:
    device = Device(gpu=False, precision="fp32")
    Features(FeatureModel(kind="encoder", model=folder), device).features([])


LOADS: dict[str, Callable[[Path], object]] = {
    "before training": check_base,
    "to train": lambda folder: FAMILY.load_base(folder, tiny_settings(), "float32", "sdpa"),
    "its processor": FAMILY.load_processor,
    "to plan": lambda folder: FAMILY.planned_config(folder, tiny_settings()),
    "adapters on it": lambda folder: load_model(folder.parent / "checkpoint" / ADAPTERS, base=folder),
    "to start a BLIP-2": start_blip2,
    "to compute features": compute_features,
}


@pytest.mark.fault("31")
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_base_is_refused_wherever_it_is_read(load, checkpoint):
    base = checkpoint.parent / "base"
    name_code(base)
    with raises(ForeignCodeError, "models.field_names_code", path=base / "config.json", field="auto_map"):
        load(base)


@pytest.mark.parametrize(
    ("component", "is_refused"),
    [
        (["evil", "Evil"], True),
        (["os", "system"], True),
        (["diffusers", "DDIMScheduler"], False),
        (["stable_diffusion", "StableDiffusionSafetyChecker"], False),
        ([None, None], False),
    ],
    ids=str,
)
def test_a_pipeline_imports_nothing_but_diffusers_and_transformers(component, is_refused, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "A", "unet": component}))
    if not is_refused:
        refuse_foreign_code(tmp_path)
        return
    with raises(ForeignCodeError, "models.field_names_code", field="unet", value=component):
        refuse_foreign_code(tmp_path)


def test_a_configuration_nested_without_end_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with raises(CheckpointError, "models.not_json", path=tmp_path / "config.json"):
        refuse_foreign_code(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", f"model{INDEX}"])
def test_a_folder_in_place_of_a_configuration_is_named(name, tmp_path):
    (tmp_path / name).mkdir()
    with raises(CheckpointError, "files.unreadable", path=tmp_path / name):
        refuse_foreign_code(tmp_path)


@pytest.mark.parametrize("load", [load_model, check_base], ids=["a checkpoint", "a base"])
@pytest.mark.parametrize("method", ["gptq", "torchao"])
def test_quantized_weights_are_refused_by_their_method(load, method, checkpoint):
    set_fields(checkpoint / "config.json", quantization_config={"quant_method": method})
    list_again(checkpoint)
    config = checkpoint / "config.json"
    with raises(CheckpointError, "models.quantized", path=config, field="quantization_config", value=method):
        load(checkpoint)


@pytest.mark.parametrize("adapters", [False, True], ids=["the model", "its adapters"])
def test_a_checkpoint_that_names_code_is_not_exported(adapters, checkpoint):
    source = checkpoint / ADAPTERS if adapters else checkpoint
    set_fields(source / "tokenizer_config.json", auto_map=EVIL_MAP)
    list_again(source)
    list_again(checkpoint)
    file = source / "tokenizer_config.json"
    with raises(ForeignCodeError, "models.field_names_code", path=file, field="auto_map"):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters)
    assert not (checkpoint.parent / "out").exists()


@pytest.mark.parametrize("name", ["notes.py", "m3diff_model.py", "lora/fast.so"])
def test_code_beside_the_weights_is_not_exported(name, checkpoint):
    shutil.rmtree(checkpoint / "custom_generate")
    (checkpoint / "evil.py").unlink()
    code = checkpoint / name
    code.parent.mkdir(exist_ok=True)
    code.write_text("print()")
    with raises(ForeignCodeError, "models.code_file", path=code):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters=False)
    assert not (checkpoint.parent / "out").exists()


def test_adapters_are_not_exported_beside_a_base_that_names_code(checkpoint):
    base = checkpoint.parent / "base"
    name_code(base)
    with raises(ForeignCodeError, "models.field_names_code", path=base.resolve() / "config.json"):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters=True)


def test_a_vocabulary_may_have_any_word(tmp_path):
    for name in ("vocab.json", "added_tokens.json", "tokenizer.json"):
        (tmp_path / name).write_text(json.dumps({"auto_map": 1, "custom_generate": 2}))
    refuse_foreign_code(tmp_path)


# Loaders in the project's code


def calls_of_loaders() -> list[tuple[str, ast.Call]]:
    """Return each call of a `from_pretrained` with its location."""
    calls: list[tuple[str, ast.Call]] = []
    for package in ("components", "flows", "infra", "benchmarks"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                    calls.append((f"{os.path.relpath(file, REPOSITORY)}:{node.lineno}", node))
    return calls


def refuses_code(call: ast.Call) -> bool:
    """Return whether a call has `trust_remote_code=False`, or `config` for peft, which lacks this argument."""
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    if ast.unparse(call.func) == "PeftModel.from_pretrained":
        return "config" in arguments
    trust = arguments.get("trust_remote_code")
    return isinstance(trust, ast.Constant) and trust.value is False


def test_every_loader_of_the_project_trusts_no_code():
    calls = calls_of_loaders()
    assert len(calls) >= 15
    assert [location for location, call in calls if not refuses_code(call)] == []


def test_the_project_calls_no_loader_that_unpickles_or_makes_a_pipeline():
    forbidden = ("torch.load", "pickle.load", "pickle.loads", "transformers.pipeline", "torch.hub.load", "joblib.load")
    locations = []
    for file in sorted((REPOSITORY / "components").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in forbidden:
                locations.append(f"{file.name}:{node.lineno}")
    assert locations == []
