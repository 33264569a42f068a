"""The trained model as a folder that others load without this project: `m3diff export --hub FOLDER`.

    model.safetensors, config.json, generation_config.json     the weights, and how they are used
    configuration_FAMILY.py, modeling_FAMILY.py, ...           the model's code (see sources.py); `auto_map` names it
    processor_config.json, chat_template.jinja, tokenizer*     images and words as the model takes them
    example_before.png, example_after.png                      a test pair, where its licence lets it be passed on
    README.md                                                  the card (see card.py)
    manifest.json                                              the hash of every file

Needed to use it: torch, transformers, safetensors, pillow.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from m3diff.commands.export.hub.blip2idc.family import BLIP2IDC
from m3diff.commands.export.hub.card import Facts, write_card
from m3diff.commands.export.hub.family import SharedFamily
from m3diff.commands.export.hub.m3diff.family import M3DIFF
from m3diff.commands.export.hub.onediff.family import ONEDIFF
from m3diff.commands.export.hub.run import (
    Example,
    Run,
    Trace,
    check_licences,
    find_example,
    read_datasets,
    read_report,
    read_scores,
)
from m3diff.commands.export.hub.sources import standalone
from m3diff.records.errors import DataError

WEIGHTS = ("[!.]*.safetensors", "[!.]*.safetensors.index.json")
SHARED = {family.name: family for family in (M3DIFF, ONEDIFF, BLIP2IDC)}


def export_hub(run: Run, out: Path, allow_unlicensed: bool = False) -> list[str]:
    """Write the model of `run` to `out`, whole or not at all; returns what the licences ask for.

    Raises:
        DataError: there is no whole checkpoint, `out` exists, or a dataset's licence does not let it be passed on.
    """
    from m3diff.models.checkpoint import write_manifest

    if out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    datasets = read_datasets(run)
    notices = check_licences(datasets, allow_unlicensed)
    checkpoint = run.model / "checkpoint"
    manifest, family = _verified(checkpoint)
    trace, untraced = _traced(run)
    example = find_example(run, datasets)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        weights = write_model(checkpoint, folder, family, run.max_new_tokens)
        config = json.loads((folder / "config.json").read_text())
        for file, text in standalone(family.roots(config), family.omitted, family.file_names()).items():
            (folder / file).write_text(text, encoding="utf-8")
        _write_example(example, folder)
        facts = Facts(
            name=out.name,
            family=family,
            base=run.base,
            base_sha256=manifest["base_sha256"],
            config=config,
            question=_question(),
            max_new_tokens=run.max_new_tokens,
            datasets=datasets,
            scores=read_scores(run.report),
            report=read_report(run.model),
            trace=trace,
            untraced=untraced,
            example=example,
            weights={name: manifest["files"][name] for name in weights},
        )
        (folder / "README.md").write_text(write_card(facts), encoding="utf-8")
        write_manifest(folder, family=manifest["family"], base_sha256=manifest["base_sha256"])
        folder.rename(out)
    return notices


def write_model(checkpoint: Path, folder: Path, family: SharedFamily, max_new_tokens: int) -> list[str]:
    """Weights, configuration and processor; returns the names of the files of weights."""
    from transformers import GenerationConfig

    from m3diff.models import FAMILIES

    files = sorted({file for pattern in WEIGHTS for file in checkpoint.glob(pattern)})
    for file in files:
        shutil.copyfile(file, folder / file.name)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    known = FAMILIES[family.name].load_processor(checkpoint)
    ends = {"eos_token_id": known.end_id, "pad_token_id": known.pad_id}
    inner = {"text_config": config["text_config"] | ends} if family.inner_generation else {}
    (folder / "config.json").write_text(json.dumps(config | inner | family.auto_map(config), indent=2) + "\n")
    family.processor(known, _question(), config).save_pretrained(folder)
    decoding: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens} | ends
    GenerationConfig(**decoding).save_pretrained(folder)
    return [file.name for file in files if file.suffix == ".safetensors"]


def _question() -> str:
    from m3diff.models.generation import QUESTION

    return QUESTION


def _verified(checkpoint: Path) -> tuple[dict[str, Any], SharedFamily]:
    """The manifest of a checkpoint, every file of which is whole, and the family that it is of."""
    from m3diff.models.checkpoint import CheckpointError, verify_manifest

    try:
        manifest = verify_manifest(checkpoint)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    if (family := SHARED.get(manifest["family"])) is None:
        raise DataError(
            f"{checkpoint}: of the family {manifest['family']!r}; a folder to share is written of {', '.join(SHARED)}; "
            "`m3diff export FOLDER` copies the checkpoint of any"
        )
    return manifest, family


def _traced(run: Run) -> tuple[Trace | None, str]:
    """What `dvc.lock` knows, or why it knows nothing of these files."""
    try:
        return run.trace(), ""
    except DataError as error:
        return None, str(error)


def _write_example(example: Example | None, folder: Path) -> None:
    if example is not None:
        shutil.copyfile(example.before, folder / f"example_before{example.before.suffix}")
        shutil.copyfile(example.after, folder / f"example_after{example.after.suffix}")
