"""Write the page of a run: report.html, with its tables as LaTeX and CSV.

Images are embedded in the page if they are small enough in total. Otherwise they are files in the folder `images` next
to the page. The page does not load anything from the network, and equal inputs give identical bytes. Its text and style
are in the templates.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets.spec import DatasetSpec
from m3diff.records.files import write_atomic
from m3diff.report.curves import draw_phase, read_phases
from m3diff.report.gallery import RunPairs, build_gallery
from m3diff.report.images import MB, find_image_rights, read_saliency
from m3diff.report.origin import CREATION_NOTE, Origin
from m3diff.report.retention import describe_retention
from m3diff.report.score_tables import (
    answer_table,
    describe_pairs,
    describe_rules,
    group_table,
    headline_table,
    overview_table,
    published_table,
    type_table,
)
from m3diff.report.tables import file_name_of_protocol
from m3diff.report.templates import load_templates
from m3diff.report.verdict import judge_learning_by_scores
from m3diff.scoring import bootstrap
from m3diff.scoring.grammar import ParsedCaption, change_type_order
from m3diff.scoring.metrics import BY_CHARACTERS, HEADLINE_SCORES, METRICS, Metric, PairValue
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import MIN_TEXT_WORDS, ProtocolPairs, select_main_protocols
from m3diff.scoring.published import find_published_rows
from m3diff.scoring.results import EvaluateReport, ProtocolScores
from m3diff.scoring.run import ABSENT_RECORDS

NO_KEY = "0" * 16  # placeholder for the page's key, which is a hash of the page
FIRST_CARDS = 6  # number of pairs that the gallery shows at first; few, because other sections follow it


@dataclass(frozen=True)
class PageContent:
    """Everything that the page of a run shows.

    Attributes:
        metrics: metrics that at least one protocol has, by name.
        report: scores of all protocols.
        protocols: all protocols, each with its pairs.
        pair_scores: protocol -> pair id -> column of scores.parquet -> value.
        parsed: parsed predictions by pair id.
        specs: specs of the datasets, by dataset.
        saliency: path of the saliency maps, which may not exist.
        notes: notes about the texts of references and predictions.
        origin: origin of the captions, for the top of the page.
        retention: records of datasets with the role `retention`, with the model's predictions. Their scores are in
            `report`, and the specs of these datasets are in `specs`.
        retention_of_base: the same records, with the base's predictions.
    """

    metrics: Mapping[str, Metric]
    report: EvaluateReport
    protocols: list[ProtocolPairs]
    pair_scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]
    parsed: Mapping[str, ParsedCaption]
    specs: Mapping[str, DatasetSpec]
    saliency: Path
    notes: Sequence[str] = ()
    origin: Origin = field(default_factory=Origin)
    retention: Sequence[EvalPair] = ()
    retention_of_base: Sequence[EvalPair] = ()


def write_report(content: PageContent, out: Path, embedded_mb: int) -> None:
    """Write `out`/report.html and the folder `out`/images, which is empty if the images are embedded in the page.

    Args:
        embedded_mb: limit in MB for images embedded in the page. Above it, all images are written to the folder.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    values = page_values(content, images, embedded_mb)
    text = load_templates().get_template("report.html.j2").render(key=NO_KEY, **values)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    write_atomic(out / "report.html", text.replace(NO_KEY, key, 1))
    # clear the file, which may contain the commit of an earlier page; `write_creation_note` fills it in later
    write_atomic(out / CREATION_NOTE, "")


def page_values(content: PageContent, images: Path, embedded_mb: int) -> dict[str, Any]:
    """Return the values for the page's template.

    Args:
        images: folder for images that are not embedded in the page.
    """
    scores = content.report.protocols
    rights = {dataset: find_image_rights(spec) for dataset, spec in content.specs.items()}
    saliency = read_saliency(content.saliency) if content.saliency.is_file() else {}
    columns = choose_columns(content.metrics, scores)
    run = RunPairs(
        name="this run",
        pairs={protocol.name: {pair.id: pair for pair in protocol.pairs} for protocol in content.protocols},
        scores=content.pair_scores,
        parsed=content.parsed,
    )
    first_protocol = content.protocols[0]
    main_protocols = select_main_protocols(content.protocols)
    parts = describe_protocols(content, columns)
    gallery = build_gallery([run], content.metrics, rights, saliency, images, embedded_mb * MB)
    descriptions = {protocol.name: describe_pairs(protocol.rules) for protocol in content.protocols}
    questions = count_questions(content.protocols)
    origin = content.origin
    trainings = read_phases(origin.curves) if origin.curves else []
    last_training = trainings[-1] if trainings else None
    return dict(
        report=content.report,
        origin=origin,
        trainings=[draw_phase(training) for training in trainings],
        verdict=judge_learning_by_scores(main_protocols, scores, last_training, origin.base),
        headline_table=headline_table(content.report, [protocol.name for protocol in main_protocols]),
        datasets=list(dict.fromkeys(protocol.dataset for protocol in content.protocols)),
        first_scores=scores[first_protocol.name],
        columns=[name for name in columns.main_scores if name in scores[first_protocol.name].scores],
        questions=questions,
        captions=count_captions(content.protocols),
        answers=[part for part in parts if part["answers"]],
        percentage_titles=percentage_titles(),
        change_scores=change_scores(),
        overview=overview_table(scores, columns.main_scores, descriptions, content.notes),
        parts=parts,
        retention=describe_retention(
            content.report.retention, content.retention, content.retention_of_base, content.specs, rights
        ),
        published=[part for part in parts if part["published"] and part["is_main_protocol"]],
        confusion=confusion_table(grammar_captions(content, first_protocol)),
        gallery=gallery | {"first": FIRST_CARDS},
        gallery_title="All questions" if questions else "All pairs",
        gallery_note=(
            f"All test {'questions with the answers' if questions else 'pairs with the captions'} of the model. "
            "Open a pair to slide between its images."
        ),
        image_rights=rights,
        has_saliency=bool(saliency),
        absent_scores=absent_scores(main_protocols, scores),
        control_pairs=sum(pair.shuffled_prediction is not None for pair in first_protocol.pairs),
        fewest_pairs=bootstrap.MIN_PAIRS,
        text_words=MIN_TEXT_WORDS,
        few_pairs=[name for name, values in scores.items() if values.pairs < bootstrap.MIN_PAIRS],
    )


def count_questions(protocols: Iterable[ProtocolPairs]) -> int:
    """Return the number of records with questions of their own, which may be in several protocols."""
    ids: set[str] = set()
    for protocol in protocols:
        ids |= {pair.id for pair in protocol.pairs if pair.question is not None}
    return len(ids)


def count_captions(protocols: Iterable[ProtocolPairs]) -> int:
    """Return the number of captioned pairs, which may be in several protocols."""
    ids: set[str] = set()
    for protocol in protocols:
        ids |= {pair.id for pair in protocol.pairs if pair.question is None}
    return len(ids)


def percentage_titles() -> dict[str, str]:
    """Return the scores that are shown as percentages at the top of the page, with their titles."""
    titles = {}
    for score, headline_score in HEADLINE_SCORES.items():
        if headline_score.tile_title is not None:
            titles[score] = headline_score.tile_title
    return titles


def change_scores() -> list[str]:
    """Return the scores that are shown at the top of the page if the dataset has a grammar."""
    return [score for score in percentage_titles() if METRICS[HEADLINE_SCORES[score].metric].needs_grammar]


def grammar_captions(content: PageContent, protocol: ProtocolPairs) -> list[ParsedCaption]:
    """Return the parsed predictions of a protocol, or an empty list if the grammar cannot read most of them."""
    if content.report.protocols[protocol.name].scores.get("change_type_accuracy") is None:
        return []
    return [content.parsed[pair.id] for pair in protocol.pairs if pair.id in content.parsed]


class AbsentScore(NamedTuple):
    """A score that is missing for one or more main protocols, with the reason.

    protocols: names of the protocols without the score. Empty if all main protocols lack the score.
    """

    score: str
    reason: str
    protocols: list[str]


def absent_scores(protocols: Sequence[ProtocolPairs], scores: Mapping[str, ProtocolScores]) -> list[AbsentScore]:
    """Return the scores that are missing for the first protocol of each dataset.

    Protocols for a subset of a dataset are left out, because a subset naturally lacks some scores. For example, pairs
    that all have a change have no score for pairs without one. The page's section on the protocol lists these scores.
    """
    protocols_by_absence: dict[tuple[str, str], list[str]] = defaultdict(list)
    for protocol in protocols:
        for score, reason in scores[protocol.name].absent.items():
            protocols_by_absence[score, reason].append(protocol.name)
    absences = []
    for (score, reason), names in protocols_by_absence.items():
        is_absent_everywhere = len(names) == len(protocols)
        absences.append(AbsentScore(score, reason, [] if is_absent_everywhere else names))
    return absences


class TableColumns(NamedTuple):
    """The scores that tables show.

    scores: all scores, for wide tables.
    main_scores: the main score of each metric, for tiles and narrow tables.
    """

    scores: list[str]
    main_scores: list[str]


def choose_columns(metrics: Mapping[str, Metric], protocols: Mapping[str, ProtocolScores]) -> TableColumns:
    """Choose the scores for tables: word scores or character scores, depending on what the protocols have."""
    computed_scores: set[str] = set()
    for protocol in protocols.values():
        computed_scores |= {name for name, value in protocol.scores.items() if value is not None}
    scores: list[str] = []
    main_scores: list[str] = []
    for metric in metrics.values():
        has_main_score = metric.main_score in computed_scores
        has_characters_alone = f"{metric.main_score}{BY_CHARACTERS}" in computed_scores and not has_main_score
        has_no_record = all(
            protocol.absent.get(metric.main_score) == ABSENT_RECORDS[metric.records] for protocol in protocols.values()
        )
        is_left_out = has_no_record or (metric.extra_input is not None and not has_main_score)
        if metric.scores and not has_characters_alone and not is_left_out:
            scores += metric.scores
            main_scores.append(metric.main_score)
    return TableColumns(scores, main_scores)


def describe_protocols(content: PageContent, columns: TableColumns) -> list[dict[str, Any]]:
    """Return the page's section for each protocol. Only the first protocol of each dataset has a complete section.

    The table of groups has no column for a score that only other protocols have.
    """
    main_protocol_names = {protocol.name for protocol in select_main_protocols(content.protocols)}
    parts = []
    for protocol in content.protocols:
        scores = content.report.protocols[protocol.name]
        is_main_protocol = protocol.name in main_protocol_names
        types = sorted(scores.groups_in_folder("by_type"), key=change_type_order) if is_main_protocol else []
        published = None
        if not protocol.counts_characters:  # published scores are computed on words
            published_rows = find_published_rows(protocol.dataset, protocol.rules, is_main_protocol)
            published = published_table(protocol.name, scores, published_rows, protocol.rules.ranking_score)
        parts.append(
            {
                "name": protocol.name,
                "id": file_name_of_protocol(protocol.name),
                "pairs": describe_pairs(protocol.rules),
                "rules": describe_rules(protocol.rules, protocol.counts_characters),
                "counts_characters": protocol.counts_characters,
                "is_main_protocol": is_main_protocol,
                "published": published,
                "several": scores.groups.get("multi_change") if is_main_protocol else None,
                "types": type_table(protocol.name, scores, types, columns.main_scores) if types else None,
                "answers": answer_table(protocol.name, scores),
                "groups": group_table(
                    protocol.name, scores, [name for name in columns.scores if name in scores.scores]
                ),
                "absent": scores.absent,
            }
        )
    return parts


def confusion_table(captions: Iterable[ParsedCaption]) -> dict[str, Any]:
    """Count predicted types by true type, for pairs with exactly one change or none.

    Returns:
        columns: all types in order.
        rows: true type -> counts by predicted type.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for caption in captions:
        if len(caption.pair.change_types) == 1:
            true_type = caption.pair.change_types[0]
            counts[true_type][caption.predicted_type] += 1
    types = set(counts)
    for predicted_types in counts.values():
        types |= predicted_types.keys()
    return {
        "columns": sorted(types, key=change_type_order),
        "rows": {true_type: counts[true_type] for true_type in sorted(counts, key=change_type_order)},
    }
