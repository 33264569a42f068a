"""Caption the test split with a model behind an OpenAI-compatible endpoint, and score the captions.

Papers report such zero-shot scores for large models. Each pair is sent as one message with the image before, the image
after, and the question that the stage predict asks. If a record has its own question, this question is sent with a
sentence that asks for a short answer, and the turns before it are sent as earlier messages. The captions are written in
the format of predict and scored by the stage evaluate, which also writes its page. There are no controls, saliency maps
or training curves. Run: `m3diff zero-shot --url URL --model NAME`.

Refusals, empty answers and truncated answers are scored as empty captions and listed. Answers are stored in the scratch
folder by question and server, so repeating a finished run sends nothing, and repeating a killed run continues it.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from m3diff.datasets.spec import check_licence
from m3diff.endpoint.answers import AnswerSource, EndpointAnswer
from m3diff.endpoint.client import Endpoint
from m3diff.endpoint.questions import EndpointQuestion, replace_surrogates
from m3diff.endpoint.transport import EndpointError
from m3diff.endpoint.url import on_this_machine
from m3diff.images.open import ImageError, load_image
from m3diff.records.errors import DataError, Fault, format_count, redact
from m3diff.records.files import StageReport, new_folder, write_atomic
from m3diff.records.tables import read_table
from m3diff.report.origin import Origin
from m3diff.scoring.metrics import choose_metrics, needs_java
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.pairs import list_ids, read_test_records
from m3diff.scoring.protocols import load_specs, select_protocols
from m3diff.scoring.published import published_rows
from m3diff.scoring.results import EvaluateReport, headline_scores
from m3diff.settings.compute import Compute
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import check_complete, evaluate
from m3diff.stages.predict.stage import PredictionItem, read_test_items

# Written for this project, because the paper with the zero-shot scores (arXiv 2503.11093 v2) does not print a prompt
PROMPT = (
    "The two images come in order: the first was taken before, the second after. {question} "
    "Answer with one plain sentence of what changed, and nothing else."
)
# Own questions of records, such as "How many buildings are new?", also have short answers as references
QUESTION_PROMPT = (
    "{question} Answer as briefly as possible: with yes or no, a number, a few words, or one short sentence."
)
# Methods whose published scores are marked as zero-shot (arXiv 2503.11093 v2, Table 3)
ZERO_SHOT_METHODS = ("GPT-4o", "LLaVA-OneVision-7B", "Qwen-2.5-VL-7B")
MAX_EXCERPT_CHARS = 200  # maximum number of characters of an answer in a message
CAPTIONLESS_KINDS = ("refused", "empty", "cut")  # kinds of answers that are scored as an empty caption


@dataclass(frozen=True)
class ZeroShotRequest:
    """The model behind an endpoint and how to query it.

    Attributes:
        url: URL of the endpoint, ending with /v1.
        prompt: text sent with the images of a pair. {question} is replaced by the question that the stage predict asks
            about the pair.
        question_prompt: text sent instead of `prompt` if the question belongs to the record, or if the record is not
            about a pair. {question} is replaced by the question.
        key_variable: environment variable that holds the key, so that it is not stored in any file.
        max_tokens: maximum length of an answer, in tokens; None uses the server's default.
        limit: maximum number of test pairs; 0 uses all.
        timeout_s: time limit for one question, in seconds.
        reuse_answers: whether to use stored answers that may come from another server. None raises an error, and False
            asks the questions again.
    """

    url: str
    model: str
    prompt: str = PROMPT
    question_prompt: str = QUESTION_PROMPT
    key_variable: str = "OPENAI_API_KEY"
    max_tokens: int | None = None
    limit: int = 0
    timeout_s: int = 120
    allow_unlicensed: bool = False
    reuse_answers: bool | None = None

    def default_folder(self, scratch: Path) -> Path:
        """Return the default output folder, named after the model and a hash of everything that affects the result."""
        inputs = [self.model, self.url, self.prompt, self.max_tokens, self.limit]
        if self.question_prompt != QUESTION_PROMPT:
            inputs.append(self.question_prompt)
        if self.reuse_answers:  # another server's answers must not replace this server's result
            inputs.append("reuse_answers")
        digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:8]
        return scratch / "evaluated" / f"zero-shot-{re.sub(r'[^A-Za-z0-9_.]+', '-', self.model)[:80]}-{digest}"


class ZeroShotReport(StageReport):
    """Report of the captions. `rows_in` counts test pairs, and `rows_out` counts captions. There are no controls.

    Attributes:
        words: mean number of words per caption, including empty captions.
        without_caption: ids of the pairs that are scored as an empty caption, by kind of answer.
        sources: servers that answered, with the number of cached answers and their dates.
    """

    url: str
    model: str
    prompt: str
    words: float
    without_caption: dict[str, list[str]]
    sources: list[AnswerSource]
    control: int = 0
    reversed: int = 0


class ZeroShotResult(NamedTuple):
    """The output folder with `predictions/` and `report/`, the report of the captions, and their scores."""

    folder: Path
    captions_report: ZeroShotReport
    scores_report: EvaluateReport

    @property
    def lines(self) -> list[str]:
        """Lines for the user: the pairs without a caption, then the scores next to those published in papers."""
        lines = []
        test_pairs = self.captions_report.rows_in
        for kind, ids in self.captions_report.without_caption.items():
            if ids:
                answers = f"{len(ids):,} of {format_count(test_pairs, 'answer was', 'answers were')} {kind}"
                lines.append(f"{answers} and are scored as an empty caption: {list_ids(ids)}")
        for protocol, percentages in headline_scores(self.scores_report).items():
            protocol_scores = self.scores_report.protocols[protocol]
            coverage = ""
            published_pairs = protocol_scores.published_pairs
            if protocol_scores.is_partial and published_pairs is not None:
                coverage = f" ({protocol_scores.pairs:,} of {format_count(published_pairs, 'pair')})"
            lines.append(f"{protocol}{coverage}, times 100: {format_scores(percentages)}")
            dataset = protocol.partition("/")[0]
            for row in published_rows(dataset):
                if row.method in ZERO_SHOT_METHODS:
                    scores = format_scores(row.scores)
                    lines.append(f"  {row.method}, zero-shot, published in {row.source}: {scores}")
        lines.append(f"report: {self.folder / 'report' / 'report.html'}")
        return lines


def format_scores(scores: Mapping[str, float | None]) -> str:
    """Return names and scores as comma-separated text with one decimal. Missing scores are omitted."""
    return ", ".join(f"{name} {value:.1f}" for name, value in scores.items() if value is not None)


def zero_shot(
    request: ZeroShotRequest,
    cfg: Evaluate,
    compute: Compute,
    mixture: Path,
    records: Path,
    clean: Path,
    out: Path | None,
) -> ZeroShotResult:
    """Caption the mixture's test split with the endpoint, score it, and write `predictions/` and `report/`.

    Args:
        cfg: settings of the stage evaluate. If the request has a limit, the report states that fewer pairs are scored
            than in papers.
        out: output folder, which must not exist yet; None uses the default folder inside the scratch folder and
            replaces it.

    Raises:
        DataError: there is no test set, a published protocol lacks pairs, a licence does not allow images to be passed
            on, an image has changed since ingest, or `out` exists. These errors are raised before anything is sent.
            Also raised if none of the answers is a caption; these answers are not stored.
        ParamsError: the endpoint rejects the key, the model or the form of a question.
        OtherServerError: stored answers come from another server, and the request does not say what to do with them.
        EndpointError: the endpoint cannot be reached, keeps failing, or does not answer in time. Answers received
            before that are stored.
    """
    if out is not None and out.exists():
        raise DataError("zero_shot.folder_exists", path=out)
    cfg = cfg.model_copy(update={"allow_fewer_pairs": cfg.allow_fewer_pairs or request.limit > 0})
    pairs = read_test_items(mixture)[: request.limit or None]
    check_before_sending(request, cfg, pairs, records, clean)
    answers, sources = ask_endpoint(request, pairs, read_own_questions(clean), compute.scratch)
    folder = out or request.default_folder(compute.scratch)
    with new_folder(folder) as unfinished:
        predictions = unfinished / "predictions"
        captions_report = write_predictions(request, pairs, answers, sources, predictions)
        origin = Origin(facts={"Model": f"{request.model} behind {redact(request.url)}", "Prompt": request.prompt})
        scores_report = evaluate(cfg, compute, records, clean, predictions, unfinished / "report", origin)
    return ZeroShotResult(folder=folder, captions_report=captions_report, scores_report=scores_report)


def check_before_sending(
    request: ZeroShotRequest, cfg: Evaluate, pairs: Sequence[PredictionItem], records: Path, clean: Path
) -> None:
    """Check everything that can be checked before images are sent and answers are paid for.

    If images are sent to another machine, the conditions of their licences are printed.
    """
    if needs_java(choose_metrics(cfg.metrics)):
        require_java()
    test_records = read_test_records(clean)
    pair_records = [test_records[pair.id] for pair in pairs if pair.id in test_records]
    specs = load_specs(records, pair_records)
    if not cfg.allow_fewer_pairs:
        check_complete(select_protocols(pair_records, specs))
    if not on_this_machine(request.url):
        notices = [check_licence(spec, "redistribute", request.allow_unlicensed) for spec in specs.values()]
        for notice in dict.fromkeys(filter(None, notices)):
            print(f"zero-shot: {notice}", flush=True)
    for pair in pairs:
        try:
            for image in pair.images:
                load_image(*image)
        except ImageError as error:
            raise DataError("zero_shot.unusable_image", pair=pair.id, cause=error.fault) from error


def read_own_questions(clean: Path) -> frozenset[str]:
    """Return the ids of the test records that have a question of their own, not one of their dataset's task.

    Raises:
        DataError: the records cannot be read.
    """
    rows = read_table(clean / "records", ["id", "question"], filters=[("split", "=", "test")]).to_pylist()
    return frozenset(row["id"] for row in rows if row["question"] is not None)


def question_about(request: ZeroShotRequest, item: PredictionItem, own_questions: Collection[str]) -> EndpointQuestion:
    """Return the question about a record as it is sent to the endpoint.

    Args:
        own_questions: ids of the records that have a question of their own.
    """
    *history, last_turn = item.turns
    asks_what_changed = len(item.images) == 2 and item.id not in own_questions
    prompt = request.prompt if asks_what_changed else request.question_prompt
    return EndpointQuestion(
        text=prompt.replace("{question}", last_turn.question),
        images=tuple(Path(image.uri) for image in item.images),
        history=tuple(history),
    )


def ask_endpoint(
    request: ZeroShotRequest, pairs: Sequence[PredictionItem], own_questions: Collection[str], scratch: Path
) -> tuple[list[EndpointAnswer], list[AnswerSource]]:
    """Return the answers for the pairs, in order, and the servers that gave them.

    The destination of the images is printed before the first one is sent.

    Args:
        own_questions: ids of the records that have a question of their own.
    """
    print(
        f"zero-shot: {len(pairs):,} test pairs: the images and the question of each pair without a stored answer are "
        f"sent to {request.url}, model {request.model!r}",
        flush=True,
    )
    endpoint = Endpoint(
        url=request.url,
        model=request.model,
        key_variable=request.key_variable,
        timeout_s=request.timeout_s,
        store=scratch / "zero_shot.jsonl",
        max_tokens=request.max_tokens,
        reuse=request.reuse_answers,
        option=Fault("zero_shot.reuse_option"),
    )
    questions = [question_about(request, pair, own_questions) for pair in pairs]
    try:
        answers = endpoint.ask(questions, "zero-shot")
    except EndpointError as error:
        raise EndpointError("endpoint.interrupted", cause=error.fault) from error
    if all(answer.kind in CAPTIONLESS_KINDS for answer in answers):
        endpoint.forget(questions)
        counts = Counter(answer.kind for answer in answers)
        example = next((answer.text.strip() for answer in answers if answer.text.strip()), "")
        raise DataError(
            "zero_shot.no_caption",
            url=request.url,
            model=request.model,
            answers=[f"{count:,} {kind}" for kind, count in counts.items()],
            excerpt=example[:MAX_EXCERPT_CHARS],
        )
    return answers, endpoint.sources


def write_predictions(
    request: ZeroShotRequest,
    pairs: Sequence[PredictionItem],
    answers: Sequence[EndpointAnswer],
    sources: list[AnswerSource],
    out: Path,
) -> ZeroShotReport:
    """Write predictions.json in the format of predict, and report.json."""
    captions: dict[str, str] = {}
    without_caption: dict[str, list[str]] = {kind: [] for kind in CAPTIONLESS_KINDS}
    for pair, answer in zip(pairs, answers, strict=True):
        captions[pair.id] = caption_of(answer)
        if answer.kind in without_caption:
            without_caption[answer.kind].append(pair.id)
    rows = [{"image_id": pair_id, "caption": caption} for pair_id, caption in captions.items()]
    write_atomic(out / "predictions.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return ZeroShotReport(
        stage="zero-shot",
        rows_in=len(pairs),
        rows_out=len(pairs),
        url=request.url,
        model=request.model,
        prompt=request.prompt,
        words=round(sum(len(caption.split()) for caption in captions.values()) / len(captions), 2),
        without_caption=without_caption,
        sources=sources,
    ).write(out / "report.json")


def caption_of(answer: EndpointAnswer) -> str:
    """Return an answer as a single line, or an empty caption if its kind is not "text"."""
    return " ".join(replace_surrogates(answer.text).split()) if answer.kind == "text" else ""
