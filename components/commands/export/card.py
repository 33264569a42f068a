"""The card of a shared model, README.md: what it is, what it was trained on, how well it does and what it may not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from m3diff.commands.export.families import SharedFamily
from m3diff.commands.export.run import Dataset, Example, Trace
from m3diff.scoring.bootstrap import CONFIDENCE, RESAMPLES

HERE = Path(__file__).parent

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


@dataclass(frozen=True)
class Facts:
    """All that the card is made of."""

    name: str  # the folder's
    family: SharedFamily
    base: Path
    base_sha256: str
    config: Mapping[str, Any]  # config.json
    question: str
    max_new_tokens: int
    datasets: list[Dataset]
    scores: Mapping[str, Any]  # by protocol
    report: Mapping[str, Any]  # train's
    trace: Trace | None
    untraced: str  # why there is no trace
    example: Example | None
    weights: Mapping[str, str]  # sha256 by file


def write_card(facts: Facts) -> str:
    """The text of README.md."""
    environment = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    vision = facts.config["vision_config"]
    side, patch = vision["image_size"], vision["patch_size"]
    return environment.get_template("card.md.j2").render(
        facts=facts,
        front=front_matter(facts),
        table=score_table(facts.scores),
        types=type_table(facts.scores),
        absent=absent_scores(facts.scores),
        licences=licence_rows(facts.datasets),
        recipe=recipe(facts),
        hashes=list(hashes(facts)),
        trained=sorted({each.spec.title for each in facts.datasets if each.trains}),
        drawn=all(each.spec.generate is not None for each in facts.datasets if each.trains),
        control=facts.family.control(facts.config),
        images=f"{facts.family.images.format(side=side, half=side // 2)}, in patches of {patch}",
        versions={name: version(name) for name in ("torch", "transformers")},
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        resamples=f"{RESAMPLES:,}",
    )


def front_matter(facts: Facts) -> str:
    """The card's head, which model hubs read; YAML."""
    free = all(
        use.answer == "yes" and each.spec.licence.name.lower() == "apache-2.0"
        for each in facts.datasets
        if each.trains
        for use in (each.spec.licence.train, each.spec.licence.redistribute)
    )
    licence = {"license": "apache-2.0"} if free else {"license": "other", "license_name": "see-data-and-licences"}
    known = facts.family.bases.get(facts.base.name)
    base = {"base_model": known} if known else {}
    tags = ["image-difference-captioning", "change-captioning", *facts.family.tags]
    head = {"language": "en", "library_name": "transformers"}
    head |= {"pipeline_tag": "image-text-to-text"} if facts.family.reads_question else {}  # a pipeline sends a text
    return yaml.safe_dump(licence | base | head | {"tags": tags}, sort_keys=False).strip()


def score_table(protocols: Mapping[str, Any]) -> list[list[str]]:
    """A row for each score that any protocol has, with its interval; the protocols' names first. Of each dataset its
    headline's protocol."""
    chosen = {name: protocols[name] for name in headlines(protocols)}
    pairs = ["pairs"]
    for protocol in chosen.values():
        published = protocol.get("published_pairs") or 0
        note = f" of {published:,} that papers score" if protocol["pairs"] < published else ""
        pairs.append(f"{protocol['pairs']:,}{note}")
    rows = [
        [title, *(cell(protocol, score) for protocol in chosen.values())]
        for score, title in SCORES.items()
        if any(protocol.get(score) is not None for protocol in chosen.values())
    ]
    return [["", *(f"`{name}`" for name in chosen)], pairs, *rows]


def headlines(protocols: Mapping[str, Any]) -> list[str]:
    """Each dataset's first protocol."""
    first: dict[str, str] = {}
    for name in protocols:
        first.setdefault(name.partition("/")[0], name)
    return list(first.values())


def type_table(protocols: Mapping[str, Any]) -> list[list[str]]:
    """The share of single changes that were named wholly right, %, by change type: a row a type, and how many pairs.
    Nothing where no grammar reads captions."""
    by_type = {name: protocols[name].get("by_type", {}) for name in headlines(protocols)}
    known = {
        name: kinds
        for name, kinds in by_type.items()
        if any(kind.get("exact_accuracy") is not None for kind in kinds.values())
    }
    if not known:
        return []
    rows = []
    for kind in dict.fromkeys(kind for kinds in known.values() for kind in kinds):
        row = [kind]
        for kinds in known.values():
            value = kinds.get(kind, {}).get("exact_accuracy")
            row.append("–" if value is None else f"{100 * value:.0f} % of {kinds[kind]['pairs']}")
        rows.append(row)
    return [["change type", *(f"`{name}`" for name in known)], *rows]


def cell(protocol: Mapping[str, Any], score: str) -> str:
    """A score times 100, and its interval where it has one."""
    value, interval = protocol.get(score), protocol["intervals"].get(score)
    bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
    return "–" if value is None else f"{100 * value:.1f}{bounds}"


def absent_scores(protocols: Mapping[str, Any]) -> dict[str, str]:
    """Scores of the headlines that were asked for and are not there, and why."""
    found: dict[str, str] = {}
    for name in headlines(protocols):
        found |= {score: why for score, why in protocols[name].get("absent", {}).items() if score in SCORES}
    return found


def licence_rows(datasets: list[Dataset]) -> list[tuple[str, ...]]:
    """A row for each dataset: name, licence, and its answers to training, redistributing and showing."""
    answers = {"yes": "yes", "conditions": "on conditions", "no": "no", "unstated": "not stated"}
    rows = []
    for each in datasets:
        licence = each.spec.licence
        uses = (licence.train, licence.redistribute, licence.show)
        name = f"[{licence.name}]({licence.url})" if licence.url else licence.name
        rows.append((each.name, name, *(f"{answers[use.answer]}: {use.reason}" for use in uses)))
    return rows


def recipe(facts: Facts) -> str | None:
    """The parameters of training, as `dvc.lock` has them; YAML."""
    if facts.trace is None:
        return None
    parameters = facts.trace.parameters
    names = ["train", f"models.{parameters['train']['model']}", "convert"]
    return yaml.safe_dump({name: parameters[name] for name in names if name in parameters}, sort_keys=False).strip()


def hashes(facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Rows of subject, kind of hash, hash: of the weights, and of all that the trace knows."""
    yield from ((f"`{file}`", "sha256", digest) for file, digest in facts.weights.items())
    yield "base, content of its folder", "sha256", facts.base_sha256
    if facts.trace is None:
        return
    lineage = facts.trace.lineage
    dirty = ", with changes that were not committed" if lineage.git_dirty else ""
    yield f"commit of the project that wrote this folder{dirty}", "git", lineage.git_commit
    yield "`dvc.lock`", "sha256", lineage.dvc_lock_sha256
    yield "test set: ids, references, images", "sha256", lineage.test_set_sha256
    dvc = {
        "checkpoint": lineage.checkpoint,
        "training samples": lineage.data,
        "validation samples": lineage.val_data,
        "base": lineage.base,
        "code of the model": lineage.code,
        "`metrics.json`": lineage.metrics,
    } | {f"raw data of `{name}`": md5 for name, md5 in lineage.raw.items()}
    yield from ((what, "DVC", md5) for what, md5 in dvc.items())
