"""`m3diff export --hub`: export the trained model as a folder that can be loaded without this project.

    model.safetensors, config.json, generation_config.json     weights and configuration
    FAMILY_model.py, processing_FAMILY.py, ...                 copies of the project's files, listed in `auto_map`
    processor_config.json, chat_template.jinja, tokenizer*     files of the processor
    example_before.png, example_after.png                      a test pair, if its licence allows redistribution
    README.md                                                  the model card
    manifest.json                                              the hash of every other file

Loading the folder requires torch, transformers, safetensors and Pillow. A model of the family `auto` is the base's own
class, so its folder has no Python files. It contains the files of the checkpoint that transformers wrote.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from m3diff.commands.export.card import CardFacts, write_card
from m3diff.commands.export.datasets import licence_notices, read_datasets
from m3diff.commands.export.example import ExamplePair, find_example
from m3diff.commands.export.families import SHARED, SharedFamily
from m3diff.models import FAMILIES
from m3diff.records.errors import DataError
from m3diff.settings.tree import Params

WEIGHT_FILES = ("[!.]*.safetensors", "[!.]*.safetensors.index.json")


def export_hub(params: Params, out: Path, allow_unlicensed: bool = False) -> list[str]:
    """Export the trained model to `out`, which is created only when the export is complete.

    Args:
        params: the parameters.
        out: the folder to create.
        allow_unlicensed: whether to ignore licences that do not permit training or redistribution.

    Returns:
        The conditions of the training data's licences.

    Raises:
        DataError: the checkpoint is missing or incomplete, `out` exists, or the licence of a training dataset does not
            permit training or redistribution.
    """
    from m3diff.models.checkpoint import read_trained_on, verify_manifest, write_manifest
    from m3diff.models.generation import QUESTION

    if out.exists():
        raise DataError("export.folder_exists", path=out)
    datasets = read_datasets(params)
    training_specs = {dataset.name: dataset.spec for dataset in datasets if dataset.has_trained}
    # A model may reproduce its training data, so the licences must also permit redistribution
    notices = licence_notices(training_specs, ("train", "redistribute"), allow_unlicensed)
    checkpoint = params.paths.model / "checkpoint"
    manifest = verify_manifest(checkpoint)
    question = read_trained_on(manifest).question or QUESTION
    family = find_family(checkpoint, manifest)
    example = find_example(params.paths, datasets)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        if family.is_stock:
            config = copy_stock_model(checkpoint, folder, manifest, params.predict.max_new_tokens)
        else:
            config = write_model(checkpoint, folder, family, params.predict.max_new_tokens, question)
        for file_name, source in family.source_files(config).items():
            (folder / file_name).write_text(source, encoding="utf-8")
        if example is not None:
            copy_example(example, folder)
        facts = CardFacts(
            name=out.name,
            family=family,
            manifest=manifest,
            config=config,
            datasets=datasets,
            example=example,
            question=question,
            processor_config=json.loads((folder / "processor_config.json").read_text(encoding="utf-8")),
        )
        (folder / "README.md").write_text(write_card(params, facts), encoding="utf-8")
        # A checkpoint that does not name its question must not be exported as if it did
        origin = {name: manifest[name] for name in ("family", "base_sha256", "trained_on") if name in manifest}
        write_manifest(folder, **origin)
        folder.rename(out)
    return notices


def find_family(checkpoint: Path, manifest: Mapping[str, Any]) -> SharedFamily:
    """Return the family of a checkpoint. Raises DataError if the family cannot be shared."""
    name = manifest["family"]
    if name not in SHARED:
        raise DataError("export.other_family", path=checkpoint, value=name, expected=list(SHARED))
    return SHARED[name]


def write_model(
    checkpoint: Path, folder: Path, family: SharedFamily, max_new_tokens: int, question: str
) -> dict[str, Any]:
    """Write the weights, configuration and processor, and return the content of config.json.

    Args:
        checkpoint: folder of the checkpoint.
        folder: folder to write to.
        family: family of the model.
        max_new_tokens: maximum length of a caption in tokens, written to generation_config.json.
        question: default question of the processor.
    """
    from transformers import GenerationConfig

    for pattern in WEIGHT_FILES:
        for file in checkpoint.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    trained_processor: Any = FAMILIES[family.name].load_processor(checkpoint)
    end_tokens = {"eos_token_id": trained_processor.end_id, "pad_token_id": trained_processor.pad_id}
    trained_config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config = dict(trained_config)
    if config["model_type"] == "blip-2":
        # BLIP-2's `generate` reads these from the language model's configuration, not from generation_config.json
        config["text_config"] = config["text_config"] | end_tokens
    config |= family.auto_map(config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    assert family.processing is not None
    processing: Any = import_module(family.processing)
    processing.shared_processor(family.name, trained_processor, question, trained_config).save_pretrained(folder)
    GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **end_tokens).save_pretrained(folder)
    return config


def copy_stock_model(
    checkpoint: Path, folder: Path, manifest: Mapping[str, Any], max_new_tokens: int
) -> dict[str, Any]:
    """Copy the files that transformers wrote to a checkpoint, and return the content of config.json.

    Args:
        checkpoint: folder of the checkpoint.
        folder: folder to write to.
        manifest: the checkpoint's manifest.
        max_new_tokens: maximum length of a caption in tokens, written to generation_config.json.

    Raises:
        ForeignCodeError: the checkpoint refers to code or contains code.
    """
    from transformers import GenerationConfig

    from m3diff.models.auto_processor import CHOICES
    from m3diff.models.checkpoint import ADAPTERS
    from m3diff.models.foreign_code import refuse_code_files, refuse_foreign_code

    refuse_foreign_code(checkpoint)
    refuse_code_files(checkpoint)
    for name in manifest["files"]:
        if name != CHOICES and not name.startswith(f"{ADAPTERS}/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, folder / name)
    generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    generation_config.update(do_sample=False, max_new_tokens=max_new_tokens)
    generation_config.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def copy_example(example: ExamplePair, folder: Path) -> None:
    """Copy the images of the example pair to `example_before` and `example_after`, with their original suffixes."""
    shutil.copyfile(example.before, folder / f"example_before{example.before.suffix}")
    shutil.copyfile(example.after, folder / f"example_after{example.after.suffix}")
