"""The card of a shared model, README.md: what it is, what it was trained on, how well it does and what it may not.

`card_FAMILY.md.j2` has the words on a family and its paper, `card.md.j2` all else.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from m3diff.commands.export.families import SharedFamily
from m3diff.commands.export.run import Dataset, Example, Run, Trace, read_json
from m3diff.registry.lineage import CODE, RAW, VERSION
from m3diff.scoring.bootstrap import CONFIDENCE, RESAMPLES

SCORES = {
    "CIDEr": "CIDEr",
    "METEOR": "METEOR",
    "ROUGE-L": "ROUGE-L",
    "BLEU-4": "BLEU-4",
    "SPICE": "SPICE",
    "change_type_accuracy": "type of a single change named correctly, %",
    "change_exact_accuracy": "single change: type, object, place, what became what, %",
    "multi_change_exact_f1": "several changes, all of each correct: F1 times 100",
    "no_change_recall": '"nothing changed" of pairs without a change, %',
    "false_no_change": '"nothing changed" of pairs with a change, %',
    "reversal": "the images swapped: the inverse change named, %",
}
"""What the card shows of metrics.json, in this order; all times 100."""

ANSWERS = {"yes": "yes", "conditions": "on conditions", "no": "no", "unstated": "not stated"}


def write_card(
    name: str,
    run: Run,
    family: SharedFamily,
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    datasets: list[Dataset],
    trace: Trace | None,
    untraced: str,
    example: Example | None,
    question: str,
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        manifest: of the checkpoint.
        config: the model's config.json.
        untraced: why there is no trace.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scores = read_json(run.report / "metrics.json").get("protocols", {})
    first = {protocol.partition("/")[0]: protocol for protocol in reversed(scores)}
    headlines = {protocol: scores[protocol] for protocol in scores if protocol in first.values()}
    trained = [each for each in datasets if each.trains]
    return environment.get_template(f"card_{family.name}.md.j2").render(
        name=name,
        run=run,
        family=family,
        datasets=datasets,
        trace=trace,
        untraced=untraced,
        example=example,
        question=question,
        scores=scores,
        report=read_json(run.model / "report.json"),
        module=config[family.module] if family.has_module(config) else None,
        side=config["vision_config"]["image_size"],
        patch=config["vision_config"]["patch_size"],
        front=front_matter(run, family, trained),
        table=score_table(headlines),
        types=type_table(headlines),
        absent={score: why for each in headlines.values() for score, why in each.get("absent", {}).items()},
        known_scores=SCORES,
        answers=ANSWERS,
        recipe=trace and recipe(trace.parameters),
        hashes=hashes(manifest, trace),
        trained=sorted({each.spec.title for each in trained}),
        drawn=all(each.spec.generate is not None for each in trained),
        versions={name: version(name) for name in ("torch", "transformers")},
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        resamples=f"{RESAMPLES:,}",
    )


def front_matter(run: Run, family: SharedFamily, trained: list[Dataset]) -> str:
    """The card's head, which model hubs read; YAML."""
    free = all(
        use.answer == "yes" and each.spec.licence.name.lower() == "apache-2.0"
        for each in trained
        for use in (each.spec.licence.train, each.spec.licence.redistribute)
    )
    head = {"license": "apache-2.0"} if free else {"license": "other", "license_name": "see-data-and-licences"}
    if run.base.name in family.bases:
        head["base_model"] = family.bases[run.base.name]
    head |= {"language": "en", "library_name": "transformers"}
    if family.reads_question:
        head["pipeline_tag"] = "image-text-to-text"  # a pipeline sends a text
    tags = ["image-difference-captioning", "change-captioning", *family.tags]
    return yaml.safe_dump({**head, "tags": tags}, sort_keys=False).strip()


def score_table(protocols: Mapping[str, Any]) -> list[list[str]]:
    """A row for each score that any protocol has, with its interval; the protocols' names first."""
    pairs = ["pairs"]
    for protocol in protocols.values():
        published = protocol.get("published_pairs") or 0
        note = f" of {published:,} that papers score" if protocol["pairs"] < published else ""
        pairs.append(f"{protocol['pairs']:,}{note}")
    rows = [["", *(f"`{name}`" for name in protocols)], pairs]
    for score, title in SCORES.items():
        if any(protocol.get(score) is not None for protocol in protocols.values()):
            rows.append([title, *(cell(protocol, score) for protocol in protocols.values())])
    return rows


def cell(protocol: Mapping[str, Any], score: str) -> str:
    """A score times 100, and its interval where it has one."""
    value, interval = protocol.get(score), protocol["intervals"].get(score)
    bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
    return "–" if value is None else f"{100 * value:.1f}{bounds}"


def type_table(protocols: Mapping[str, Any]) -> list[list[str]]:
    """The share of single changes that were named wholly right, %, by change type: a row a type, and how many pairs.
    Nothing where no grammar reads captions."""
    by_type = {name: protocol.get("by_type", {}) for name, protocol in protocols.items()}
    known = {
        name: kinds
        for name, kinds in by_type.items()
        if any(kind.get("exact_accuracy") is not None for kind in kinds.values())
    }
    rows = [["change type", *(f"`{name}`" for name in known)]] if known else []
    for kind in dict.fromkeys(kind for kinds in known.values() for kind in kinds):
        values = [kinds.get(kind, {}) for kinds in known.values()]
        shares = (each.get("exact_accuracy") for each in values)
        cells = zip(shares, values, strict=True)
        rows.append([kind, *("–" if x is None else f"{100 * x:.0f} % of {each['pairs']}" for x, each in cells)])
    return rows


def recipe(parameters: Mapping[str, Any]) -> str:
    """The parameters of training, as `dvc.lock` has them; YAML."""
    names = ["train", f"models.{parameters['train']['model']}", "convert"]
    return yaml.safe_dump({name: parameters[name] for name in names if name in parameters}, sort_keys=False).strip()


def hashes(manifest: Mapping[str, Any], trace: Trace | None) -> list[tuple[str, str, str]]:
    """Rows of subject, kind of hash, hash: of the weights, and of all that the trace knows."""
    weights = {
        file: sha for file, sha in manifest["files"].items() if file.endswith(".safetensors") and "/" not in file
    }
    rows = [(f"`{file}`", "sha256", digest) for file, digest in weights.items()]
    rows.append(("base, content of its folder", "sha256", manifest["base_sha256"]))
    if trace is None:
        return rows
    tags = trace.lineage
    dirty = ", with changes that were not committed" if tags["git.dirty"] == "true" else ""
    return [
        *rows,
        (f"commit of the project that wrote this folder{dirty}", "git", tags["git.commit"]),
        ("`dvc.lock`", "sha256", tags["dvc.lock.sha256"]),
        ("test set: ids, references, images", "sha256", tags["test_set.sha256"]),
        ("checkpoint", "DVC", tags[VERSION]),
        ("training samples", "DVC", tags["dvc.data"]),
        ("validation samples", "DVC", tags["dvc.val_data"]),
        ("base", "DVC", tags["dvc.base"]),
        ("code of the model", "DVC", tags[CODE]),
        ("`metrics.json`", "DVC", tags["dvc.metrics"]),
        *((f"raw data of `{tag.removeprefix(RAW)}`", "DVC", tags[tag]) for tag in tags if tag.startswith(RAW)),
    ]
