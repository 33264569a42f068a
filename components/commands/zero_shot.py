"""A model that was never trained here, on the test set that lies here: the papers' zero-shot rows of large models.

An OpenAI-compatible endpoint gets both images of a pair in one message, before and then after, with the question that
predict asks. Its captions are written as predict writes them and scored by the stage evaluate, with its page; there
are no controls, saliency maps or training curves. Run: `m3diff zero-shot --url URL --model NAME`.

A refusal, an empty answer and one that was cut are scored as an empty caption, and told. Answers are kept by their
content and their server in the scratch folder: a second run asks nothing, and one that was killed goes on.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from m3diff.datasets.spec import check_licence
from m3diff.endpoint import Answer, AnswerSource, Endpoint, Question, in_unicode, on_this_machine
from m3diff.images.open import ImageError, load_image
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, new_folder, write_atomic
from m3diff.scoring.metrics import choose_metrics, needs_java
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.pairs import load_specs, published_rows, read_test_records, select, some
from m3diff.scoring.run import EvaluateReport, headline
from m3diff.settings.compute import Compute
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import check_complete, evaluate
from m3diff.stages.predict.stage import PairSample, read_test_pairs

PROMPT = (  # the project's own: the paper whose zero-shot scores are published (arXiv 2503.11093 v2) prints none
    "The two images come in order: the first was taken before, the second after. {question} "
    "Answer with one plain sentence of what changed, and nothing else."
)
# The published rows of models that were not trained on the benchmark (arXiv 2503.11093 v2, Table 3, marked so)
PUBLISHED = ("GPT-4o", "LLaVA-OneVision-7B", "Qwen-2.5-VL-7B")
WITHOUT = ("refused", "empty", "cut")  # answers that are scored as an empty caption


@dataclass(frozen=True)
class Request:
    url: str  # up to and with /v1
    model: str
    prompt: str = PROMPT  # {question} stands for the pair's own, which predict asks
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no key stands in a file
    max_tokens: int | None = None  # of an answer; None: as the server has it
    limit: int = 0  # pairs of the test split; 0: all
    timeout_s: int = 120  # of one question
    allow_unlicensed: bool = False
    # Stored answers that are not known to be of this server. None: refuse them; True: use them; False: ask anew
    reuse_answers: bool | None = None

    def place(self, scratch: Path) -> Path:
        """The default folder of the result, named by the model and by a hash of all that decides it."""
        decides = [self.model, self.url, self.prompt, self.max_tokens, self.limit]
        if self.reuse_answers:  # the result may be another server's, and must not replace this one's
            decides.append("reuse_answers")
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
        return scratch / "evaluated" / f"zero-shot-{re.sub(r'[^A-Za-z0-9_.]+', '-', self.model)[:80]}-{digest}"


class ZeroShotReport(StageReport):
    """Pairs of the test split in, captions out; `words` is the mean length of a caption, empty ones among them; there
    are no pairs of the controls."""

    url: str
    model: str
    prompt: str
    words: float
    without_caption: dict[str, list[str]]  # kind of answer -> ids of the pairs, scored as an empty caption
    sources: list[AnswerSource]  # whose answers they are, how many are from the cache, and from when
    control: int = 0
    reversed: int = 0


class Result(NamedTuple):
    """The captions' report, their scores, and the folder that holds `predictions/` and `report/`."""

    folder: Path
    captioned: ZeroShotReport
    scored: EvaluateReport

    @property
    def lines(self) -> list[str]:
        """For people: the pairs without a caption, and the scores beside those that papers print."""
        told = [
            f"{len(ids):,} of {self.captioned.rows_in:,} answers {kind}, scored as an empty caption: {some(ids)}"
            for kind, ids in self.captioned.without_caption.items()
            if ids
        ]
        for protocol, found in headline(self.scored).items():
            scores = self.scored.protocols[protocol]
            part = f" ({scores.pairs:,} of {scores.published_pairs:,} pairs)" if scores.is_partial else ""
            told.append(f"{protocol}{part}, times 100: {listed(found)}")
            told += [
                f"  {row.method}, zero-shot, published in {row.source}: {listed(row.scores)}"
                for row in published_rows(protocol.partition("/")[0])
                if row.method in PUBLISHED
            ]
        return [*told, f"report: {self.folder / 'report' / 'report.html'}"]


def listed(scores: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in scores.items() if value is not None)


def zero_shot(
    request: Request, cfg: Evaluate, compute: Compute, mixture: Path, records: Path, clean: Path, out: Path | None
) -> Result:
    """Caption the mixture's test split by the endpoint, score it, and write `predictions/` and `report/`.

    Args:
        cfg: how evaluate scores; with a limit it may score fewer pairs than papers do, and says so.
        out: a folder that does not exist; None: one in the scratch folder, made anew.

    Raises:
        DataError: before anything is sent: there is no test set, a protocol lacks pairs, a licence does not allow to
            hand images on, an image is not the one that ingest saw, or `out` exists. Afterwards: no answer is a
            caption; these answers are forgotten.
        ParamsError: the endpoint refuses the key, the model or the form of a question.
        OtherServerError: stored answers are of another server, and the request does not say what to do with them.
        ConnectionError: it cannot be reached, goes on failing, or gives no answer in time; what it answered is kept.
    """
    if out is not None and out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    cfg = cfg.model_copy(update={"allow_fewer_pairs": cfg.allow_fewer_pairs or request.limit > 0})
    pairs = read_test_pairs(mixture)[: request.limit or None]
    check(request, cfg, pairs, records, clean)
    answers, sources = ask(request, pairs, compute.scratch)
    place = out or request.place(compute.scratch)
    with new_folder(place) as made:
        captioned = write_predictions(request, pairs, answers, sources, made / "predictions")
        scored = evaluate(cfg, compute, records, clean, made / "predictions", made / "report")
    return Result(place, captioned, scored)


def check(request: Request, cfg: Evaluate, pairs: Sequence[PairSample], records: Path, clean: Path) -> None:
    """Refuse what can be refused before an image is sent and an answer is paid for.

    Where images go to another machine, the conditions of their licences are printed.
    """
    if needs_java(choose_metrics(cfg.metrics)):
        require_java()
    rows = read_test_records(clean)
    known = [rows[pair.id] for pair in pairs if pair.id in rows]
    specs = load_specs(records, known)
    if not cfg.allow_fewer_pairs:
        check_complete(select(known, specs))
    if not on_this_machine(request.url):
        notices = [check_licence(spec, "redistribute", request.allow_unlicensed) for spec in specs.values()]
        for notice in dict.fromkeys(filter(None, notices)):
            print(f"zero-shot: {notice}", flush=True)
    for pair in pairs:
        try:
            load_image(pair.before, pair.before_sha256)
            load_image(pair.after, pair.after_sha256)
        except ImageError as error:
            raise DataError(f"{pair.id}: {error}") from error


def ask(request: Request, pairs: Sequence[PairSample], scratch: Path) -> tuple[list[Answer], list[AnswerSource]]:
    """The endpoint's answer to each pair, in order, and whose answers they are; says first where the images go."""
    print(
        f"zero-shot: {len(pairs):,} test pairs: both images and the question of each that is not answered yet go to "
        f"{request.url}, model {request.model!r}",
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
        option="pass --reuse-answers to use them, or --no-reuse-answers to ask anew and keep both",
    )
    questions = [
        Question(request.prompt.replace("{question}", pair.question), (Path(pair.before), Path(pair.after)))
        for pair in pairs
    ]
    try:
        answers = endpoint.ask(questions, "zero-shot")
    except ConnectionError as error:
        raise ConnectionError(f"{error}; what it answered is kept: run the command again") from error
    if all(answer.kind in WITHOUT for answer in answers):
        endpoint.forget(questions)
        kinds = Counter(answer.kind for answer in answers)
        said = next((answer.text.strip() for answer in answers if answer.text.strip()), "")
        raise DataError(
            f"{request.url}, model {request.model!r}: no answer is a caption: "
            f"{', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}, such as {said[:200]!r}. For cut ones "
            "pass a larger --max-tokens; switch a reasoning parser or thinking off in the server; else pass another "
            "--prompt or --model. Run the command again: it asks anew"
        )
    return answers, endpoint.sources


def write_predictions(
    request: Request, pairs: Sequence[PairSample], answers: Sequence[Answer], sources: list[AnswerSource], out: Path
) -> ZeroShotReport:
    """predictions.json as predict writes it, and report.json."""
    captions = {pair.id: caption_of(answer) for pair, answer in zip(pairs, answers, strict=True)}
    rows = [{"image_id": i, "caption": caption} for i, caption in captions.items()]
    write_atomic(out / "predictions.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    kinds = [(i, answer.kind) for i, answer in zip(captions, answers, strict=True)]
    return ZeroShotReport(
        stage="zero-shot",
        rows_in=len(pairs),
        rows_out=len(pairs),
        url=request.url,
        model=request.model,
        prompt=request.prompt,
        words=round(sum(len(caption.split()) for caption in captions.values()) / len(captions), 2),
        without_caption={kind: [i for i, found in kinds if found == kind] for kind in WITHOUT},
        sources=sources,
    ).write(out / "report.json")


def caption_of(answer: Answer) -> str:
    """An answer on one line; nothing of one that is no caption."""
    return " ".join(in_unicode(answer.text).split()) if answer.kind == "text" else ""
