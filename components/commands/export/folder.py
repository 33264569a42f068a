"""The trained model as a folder of its own: `m3diff export FOLDER` copies the checkpoint for use with this project;
`m3diff export --hub FOLDER` writes what others load without it:

    model.safetensors, config.json, generation_config.json     the weights, and how they are used
    FAMILY_model.py, processing_FAMILY.py, ...                 the code (see families.py); `auto_map` names it
    processor_config.json, chat_template.jinja, tokenizer*     images and words as the model takes them
    example_before.png, example_after.png                      a test pair, where its licence lets it be passed on
    README.md                                                  the card (see card.py)
    manifest.json                                              the hash of every file

Needed to use it: torch, transformers, safetensors, pillow.
"""

import json
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from m3diff.commands.export.card import find_example, licence_notices, read_datasets, write_card
from m3diff.commands.export.families import SHARED, SharedFamily
from m3diff.records.errors import DataError
from m3diff.settings.tree import Params

WEIGHTS = ("[!.]*.safetensors", "[!.]*.safetensors.index.json")


def export_hub(params: Params, out: Path, allow_unlicensed: bool = False) -> list[str]:
    """Write the trained model to `out`, whole or not at all; returns what the licences ask for.

    Raises:
        DataError: there is no whole checkpoint, `out` exists, or a dataset's licence does not let it be passed on.
    """
    from m3diff.models.checkpoint import verify_manifest, write_manifest
    from m3diff.models.generation import QUESTION

    if out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    datasets = read_datasets(params)
    # to train, and to redistribute, for a model may reproduce its training data
    trained = {each.name: each.spec for each in datasets if each.samples["train"]}
    notices = licence_notices(trained, ("train", "redistribute"), allow_unlicensed)
    checkpoint = params.paths.model / "checkpoint"
    manifest = verify_manifest(checkpoint)
    if (family := SHARED.get(manifest["family"])) is None:
        raise DataError(
            f"{checkpoint}: of the family {manifest['family']!r}; a folder to share is written of {', '.join(SHARED)}; "
            "`m3diff export FOLDER` copies the checkpoint of any"
        )
    example = find_example(params.paths, datasets)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        write_model(checkpoint, folder, family, params.predict.max_new_tokens, QUESTION)
        config = json.loads((folder / "config.json").read_text())
        for file, text in family.sources(config).items():
            (folder / file).write_text(text, encoding="utf-8")
        for side in ("before", "after"):
            if example is not None:
                shutil.copyfile(example[side], folder / f"example_{side}{example[side].suffix}")
        card = write_card(out.name, params, family, manifest, config, datasets, example, QUESTION)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_manifest(folder, family=manifest["family"], base_sha256=manifest["base_sha256"])
        folder.rename(out)
    return notices


def write_model(checkpoint: Path, folder: Path, family: SharedFamily, max_new_tokens: int, question: str) -> None:
    """Write weights, configuration and processor."""
    from transformers import GenerationConfig

    from m3diff.models import FAMILIES

    for file in (file for pattern in WEIGHTS for file in checkpoint.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    known: Any = FAMILIES[family.name].load_processor(checkpoint)
    ends = {"eos_token_id": known.end_id, "pad_token_id": known.pad_id}
    # BLIP-2's `generate` decodes by what config.json says of its language model
    inner = {"text_config": config["text_config"] | ends} if config["model_type"] == "blip-2" else {}
    (folder / "config.json").write_text(json.dumps(config | inner | family.auto_map(config), indent=2) + "\n")
    processing = import_module(family.processing)
    processing.shared_processor(family.name, known, question, config).save_pretrained(folder)
    decoding: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens} | ends
    GenerationConfig(**decoding).save_pretrained(folder)
