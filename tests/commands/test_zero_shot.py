"""A model behind an endpoint on the test split, against a server on 127.0.0.1: what is sent, kept, counted, scored."""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.zero_shot import (
    PROMPT,
    QUESTION_PROMPT,
    ZERO_SHOT_METHODS,
    ZeroShotReport,
    ZeroShotRequest,
    ZeroShotResult,
    ask_endpoint,
    caption_of,
    question_about,
    zero_shot,
)
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.endpoint import client, url
from m3diff.endpoint.answers import EndpointAnswer, OtherServerError
from m3diff.endpoint.transport import EndpointError
from m3diff.records.errors import DataError, Fault
from m3diff.records.sample import ImageRef, Turn
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.records.tables import read_table
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.scoring.published import published_rows
from m3diff.scoring.results import EvaluateReport, ProtocolScores
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.predict.stage import PredictionItem
from tests.chat import Fault as ServerFault
from tests.chat import Server, chat_server
from tests.errors import raises
from tests.layouts import write_record_table
from tests.scoring import bench

REFUSED = {"content": None, "refusal": "I will not say."}
CUT = {"content": "the red cube at the", "finish_reason": "length"}
REASONED = {"content": None, "reasoning_content": "The cup is new."}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("A_KEY", "secret")
    with chat_server() as chat:
        chat.replies = {f"pair {i.rpartition('/')[2]}?": [text] for i, text in bench.PREDICTIONS.items()}
        yield chat


@pytest.fixture
def folders(tmp_path: Path) -> bench.Folders:
    """The bench with its mixture, in another order than the records, each pair with a question of its own."""
    folders = bench.write(tmp_path)
    rows = []
    for record in pq.read_table(folders.clean / "records", filters=[("split", "=", "test")]).to_pylist():
        fields = {
            "record": record["id"],
            "image_set": record["image_set"],
            "history": record["history"],
            "dataset": record["dataset"],
            "split": record["split"],
            "images": record["images"],
            "question": f"What changed in pair {record['id'].rpartition('/')[2]}?",
        }
        rows += [fields | {"id": f"{record['id']}#{k}", "answer": text} for k, text in enumerate(record["references"])]
    (tmp_path / "mixture" / "test").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[::-1], SAMPLE_SCHEMA), tmp_path / "mixture" / "test" / "00000.parquet")
    return folders


def make_request(server: Server, **changes: Any) -> ZeroShotRequest:
    return replace(ZeroShotRequest(server.url, "a/model", key_variable="A_KEY", timeout_s=20), **changes)


def run(root: Path, request: ZeroShotRequest, out: Path | None = None, **changes: Any) -> ZeroShotResult:
    cfg = bench.config(**({"metrics": ["change_accuracy"]} | changes))
    compute = bench.compute(scratch=root / "scratch")
    return zero_shot(request, cfg, compute, root / "mixture", root / "records", root / "clean", out)


def predictions(result: ZeroShotResult) -> dict[str, str]:
    rows = json.loads((result.folder / "predictions/predictions.json").read_text(encoding="utf-8"))
    return {row["image_id"]: row["caption"] for row in rows}


def test_where_the_images_go_is_printed_before_the_first_is_sent(server, folders, tmp_path, capsys, monkeypatch):
    printed = []
    ask = client.Endpoint.ask

    def ask_after_reading_output(*arguments: Any) -> Any:
        printed.append(capsys.readouterr().out)
        return ask(*arguments)

    monkeypatch.setattr(client.Endpoint, "ask", ask_after_reading_output)
    run(tmp_path, make_request(server))
    assert f"sent to {server.url}, model 'a/model'\n" in printed[0]


def test_both_images_go_in_one_message_with_the_pair_s_own_question(server, folders, tmp_path):
    run(tmp_path, make_request(server))
    assert len(server.requests) == 6
    for body in server.requests:
        (message,) = body["messages"]
        *images, text = message["content"]
        name = re.search(r"pair (\d)\?", text["text"])[1]
        assert text["text"] == PROMPT.replace("{question}", f"What changed in pair {name}?")
        sent = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in images]
        assert sent == [(tmp_path / f"{name}_{side}.png").read_bytes() for side in ("before", "after")]
        assert body["model"] == "a/model"
        assert body["temperature"] == 0
        assert "max_tokens" not in body


def set_own_questions(folders: bench.Folders, questions: dict[str, str]) -> None:
    """Give records questions of their own, as validate writes them."""
    records = read_table(folders.clean / "records").to_pylist()
    for record in records:
        record["question"] = questions.get(record["id"])
    write_record_table(folders.clean / "records", records)


def test_only_the_question_of_a_record_is_sent_with_the_prompt_for_short_answers(server, folders, tmp_path):
    set_own_questions(folders, {"toy/1": "What changed in pair 1?", "toy/6": "of the train split"})
    run(tmp_path, make_request(server))
    own_texts = [text for text in server.texts if "pair 1?" in text]
    assert own_texts == [QUESTION_PROMPT.replace("{question}", "What changed in pair 1?")]
    task_texts = [text for text in server.texts if "pair 1?" not in text]
    assert sorted(task_texts) == [PROMPT.replace("{question}", f"What changed in pair {n}?") for n in (0, 2, 3, 4, 5)]


def test_the_prompt_for_questions_is_that_of_the_request(server, folders, tmp_path):
    set_own_questions(folders, {f"toy/{number}": "a" for number in range(6)})
    run(tmp_path, make_request(server, question_prompt="{question} In French."))
    assert min(server.texts) == "What changed in pair 0? In French."
    assert make_request(server, question_prompt="a").default_folder(tmp_path) != make_request(server).default_folder(
        tmp_path
    )


TURNS = (Turn("Is it red?", "Yes."), Turn("Why?"))
ITEMS = {
    "a pair": (PredictionItem("a", (ImageRef("1.png"), ImageRef("2.png")), TURNS[1:]), PROMPT),
    "one image": (PredictionItem("a", (ImageRef("1.png"),), TURNS[1:]), QUESTION_PROMPT),
    "no image": (PredictionItem("a", (), TURNS[1:]), QUESTION_PROMPT),
    "an own question": (PredictionItem("own", (ImageRef("1.png"), ImageRef("2.png")), TURNS), QUESTION_PROMPT),
}


@pytest.mark.parametrize(("item", "prompt"), ITEMS.values(), ids=ITEMS)
def test_the_prompt_about_two_images_is_only_for_pairs_and_the_task(item, prompt):
    question = question_about(ZeroShotRequest("http://127.0.0.1/v1", "m"), item, {"own"})
    assert question.text == prompt.replace("{question}", "Why?")
    assert question.images == tuple(Path(image.uri) for image in item.images)
    assert question.history == item.turns[:-1]


def test_the_default_prompt_asks_for_one_plain_sentence():
    # pinned word by word: the prompt decides the captions, and it is in the key of stored answers and of the result
    assert PROMPT == (
        "The two images come in order: the first was taken before, the second after. {question} "
        "Answer with one plain sentence of what changed, and nothing else."
    )


def test_the_key_is_sent_and_stored_in_no_file(server, folders, tmp_path):
    run(tmp_path, make_request(server))
    assert server.keys == {"Bearer secret"}
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_prompt_and_length_are_those_of_the_request(server, folders, tmp_path):
    run(tmp_path, make_request(server, prompt="Say it in {detail}. {question}", max_tokens=7))
    assert min(server.texts) == "Say it in {detail}. What changed in pair 0?"
    assert {body["max_tokens"] for body in server.requests} == {7}


def test_captions_are_scored_as_evaluate_scores_them(server, folders, tmp_path):
    result = run(tmp_path, make_request(server))
    assert predictions(result) == bench.PREDICTIONS
    for extra in ("predictions_shuffled.json", "saliency.npz"):
        (folders.predictions / extra).unlink()
    cfg = bench.config(metrics=["change_accuracy"])
    report = evaluate(cfg, bench.compute(), *folders, tmp_path / "own")
    assert result.scores_report == report
    assert report.protocols["toy/test"].scores["change_type_accuracy"] == 2 / 3
    for name in ("metrics.json", "headline.json", "scores.parquet"):
        assert (result.folder / "report" / name).read_bytes() == (tmp_path / "own" / name).read_bytes(), name


def test_the_page_names_the_model_and_its_server(server, folders, tmp_path):
    result = run(tmp_path, make_request(server))
    page = (result.folder / "report/report.html").read_text()
    assert "<dt>Model</dt><dd>a/model behind http://127.0.0.1:" in page


def test_a_folder_that_is_named_is_not_written_over(server, folders, tmp_path):
    assert run(tmp_path, make_request(server), tmp_path / "named").folder == tmp_path / "named"
    with raises(DataError, "zero_shot.folder_exists", path=tmp_path / "named"):
        run(tmp_path, make_request(server), tmp_path / "named")


@pytest.mark.parametrize(
    ("changes", "questions"),
    [
        pytest.param({}, 0, id="the same request"),
        pytest.param({"limit": 2}, 0, id="fewer pairs"),
        pytest.param({"model": "other"}, 6, id="another model"),
        pytest.param({"prompt": "{question}"}, 6, id="another prompt"),
    ],
)
def test_a_second_run_asks_only_what_is_not_stored(changes, questions, server, folders, tmp_path):
    earlier = run(tmp_path, make_request(server))
    server.requests.clear()
    result = run(tmp_path, make_request(server, **changes))
    assert len(server.requests) == questions
    assert (result.scores_report == earlier.scores_report) is ("limit" not in changes)
    assert (result.folder == earlier.folder) is (not changes)


def test_the_default_folder_is_made_anew(server, folders, tmp_path):
    result = run(tmp_path, make_request(server))
    assert result.folder == make_request(server).default_folder(tmp_path / "scratch")
    (result.folder / "old").write_text("of the first run")
    run(tmp_path, make_request(server))
    assert not (result.folder / "old").exists()


def test_another_length_has_another_folder(server, tmp_path):
    folder = make_request(server).default_folder(tmp_path)
    assert make_request(server, max_tokens=9).default_folder(tmp_path) != folder


def test_files_outside_the_scratch_folder_stay_as_they_are(server, folders, tmp_path):
    def files_of_run() -> list[Path]:
        return sorted(path for path in tmp_path.rglob("*") if "scratch" not in path.parts)

    files = files_of_run()
    run(tmp_path, make_request(server))
    assert files_of_run() == files


def test_a_run_continues_a_killed_one_with_the_answers_that_are_missing(server, folders, tmp_path):
    run(tmp_path, make_request(server))
    store = tmp_path / "scratch/zero_shot.jsonl"
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join(lines[:3]) + lines[3][:-20])
    server.requests.clear()
    assert predictions(run(tmp_path, make_request(server))) == bench.PREDICTIONS
    assert len(server.requests) == 3


def test_a_server_that_goes_on_failing_leaves_no_result(server, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 1)
    server.replies["pair 0?"] = [500]
    with raises(EndpointError, "endpoint.interrupted") as interrupted:
        run(tmp_path, make_request(server))
    assert interrupted.value.fields["cause"].code == "endpoint.failed"
    assert not (tmp_path / "scratch/evaluated").exists()


@pytest.fixture
def mixed_result(server: Server, folders: bench.Folders, tmp_path: Path) -> ZeroShotResult:
    """Answers of every kind: put off and then given, refused in two ways, empty, cut, in parts."""
    server.replies |= {
        "pair 0?": [429, bench.PREDICTIONS["toy/0"]],
        "pair 1?": [REFUSED],
        "pair 2?": ["  \n"],
        "pair 3?": [{"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}],
        "pair 4?": [CUT],
        "pair 5?": [(400, {"error": {"message": "no", "code": "content_filter"}})],
    }
    return run(tmp_path, make_request(server))


MIXED_CAPTIONS = {
    "toy/0": bench.PREDICTIONS["toy/0"],
    "toy/1": "",
    "toy/2": "",
    "toy/3": "in parts",
    "toy/4": "",
    "toy/5": "",
}


def test_answers_without_a_caption_are_written_as_empty_captions(mixed_result):
    assert predictions(mixed_result) == MIXED_CAPTIONS


def test_the_report_names_the_pairs_without_a_caption(mixed_result):
    report = json.loads((mixed_result.folder / "predictions/report.json").read_text())
    assert report["without_caption"] == {"refused": ["toy/5", "toy/1"], "empty": ["toy/2"], "cut": ["toy/4"]}
    assert report["rows_in"] == 6
    assert report["rows_out"] == 6
    assert report["model"] == "a/model"
    assert report["words"] == round(sum(len(text.split()) for text in MIXED_CAPTIONS.values()) / 6, 2)


def test_empty_captions_are_scored(mixed_result):
    scored = mixed_result.scores_report.protocols["toy/test"]
    assert scored.pairs == 6
    assert scored.scores["unreadable"] == 5 / 6


def test_the_printed_lines_name_the_pairs_without_a_caption(mixed_result):
    facts = [re.findall(r"^\d of 6|refused|empty(?! caption)|cut|toy/\d", line) for line in mixed_result.lines[:3]]
    assert facts == [
        ["2 of 6", "refused", "toy/5", "toy/1"],
        ["1 of 6", "empty", "toy/2"],
        ["1 of 6", "cut", "toy/4"],
    ]


@pytest.mark.parametrize(
    ("reply", "kind", "excerpt"),
    [
        pytest.param(None, "empty", "", id="empty"),
        pytest.param(REASONED, "empty", "The cup is new.", id="reasoning alone"),
        pytest.param(CUT, "cut", "the red cube at the", id="cut"),
        pytest.param(REFUSED, "refused", "I will not say.", id="refused"),
    ],
)
def test_answers_without_any_caption_are_an_error_and_the_next_run_asks_anew(
    reply, kind, excerpt, server, folders, tmp_path
):
    replies = server.replies
    server.replies = {"pair": [reply]}
    with raises(DataError, "zero_shot.no_caption", answers=[f"6 {kind}"], excerpt=excerpt):
        run(tmp_path, make_request(server))
    assert not (tmp_path / "scratch/evaluated").exists()
    server.replies = replies  # the server is mended
    assert predictions(run(tmp_path, make_request(server))) == bench.PREDICTIONS
    assert len(server.requests) == 12


def test_the_first_answer_with_a_text_is_quoted_if_none_is_a_caption(tmp_path, monkeypatch):
    answers = [EndpointAnswer("empty", " "), EndpointAnswer("cut", f" {'a' * 300}"), EndpointAnswer("empty", "b")]
    endpoint = SimpleNamespace(ask=lambda questions, title: answers, forget=lambda questions: None)
    monkeypatch.setattr("m3diff.commands.zero_shot.Endpoint", lambda **options: endpoint)
    items = [PredictionItem(str(number), (), TURNS) for number in range(3)]
    with raises(DataError, "zero_shot.no_caption", excerpt="a" * 200, answers=["2 empty", "1 cut"]):
        ask_endpoint(ZeroShotRequest("http://127.0.0.1/v1", "m"), items, (), tmp_path)


def test_scores_of_a_benchmark_are_printed_above_published_ones_without_training():
    fields = {"rows_in": 9, "rows_out": 9}
    scores = ProtocolScores(pairs=9, published_pairs=1_270, scores={"CIDEr": 0.5}, intervals={}, groups={}, absent={})
    report = EvaluateReport(stage="evaluate", protocols={"omnidiff_real/real": scores}, **fields)
    request = {"url": "u", "model": "m", "prompt": "p"}
    captions_report = ZeroShotReport(stage="zero-shot", words=1, without_caption={}, sources=[], **request, **fields)
    own_line, *published_lines, page_line = ZeroShotResult(Path("out"), captions_report, report).lines
    assert own_line == "omnidiff_real/real (9 of 1,270 pairs), times 100: CIDEr 50.0"
    rows = [row for row in published_rows("omnidiff_real") if row.method in ZERO_SHOT_METHODS]
    assert [line.partition(",")[0].strip() for line in published_lines] == [row.method for row in rows]
    assert f"CIDEr {rows[0].scores['CIDEr']:.1f}" in published_lines[0]
    assert page_line == "report: out/report/report.html"


def test_marks_in_captions_are_counted(server, folders, tmp_path, capsys):
    server.replies = {pair: [f"assistant\n{texts[0]}"] for pair, texts in server.replies.items()}
    result = run(tmp_path, make_request(server))
    assert "note: 6 of 6 captions contain a role name" in capsys.readouterr().out
    assert "6 of 6 captions contain" in (result.folder / "report/report.html").read_text()
    assert predictions(result)["toy/0"] == f"assistant {bench.PREDICTIONS['toy/0']}"


def test_a_caption_is_one_line_of_unicode():
    assert caption_of(EndpointAnswer("text", " the cup \ud83d\n\nwent\n")) == "the cup ? went"


def set_published_pairs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    spec = replace(DATASETS["pairs"], protocols=(Protocol("test", published_pairs=count),))
    monkeypatch.setitem(DATASETS.data, "pairs", spec)


def test_a_limit_takes_the_first_pairs_and_says_how_many_papers_score(server, folders, tmp_path, monkeypatch):
    set_published_pairs(monkeypatch, 6)
    result = run(tmp_path, make_request(server, limit=2))
    assert list(predictions(result)) == ["toy/5", "toy/4"]
    assert result.lines[0].startswith("toy/test (2 of 6 pairs), times 100: ")


def test_fewer_pairs_than_papers_score_are_refused_unsent(server, folders, tmp_path, monkeypatch):
    set_published_pairs(monkeypatch, 7)
    with pytest.raises(DataError, match="7"):
        run(tmp_path, make_request(server))
    assert server.requests == []


def test_a_changed_image_is_refused_unsent(server, folders, tmp_path):
    bench.paint(tmp_path / "3_after.png", (0, 0, 0))
    with raises(DataError, "zero_shot.unusable_image", pair="toy/3") as changed:
        run(tmp_path, make_request(server), metrics=["CIDEr"], allow_fewer_pairs=True)
    assert changed.value.fields["cause"].code == "images.changed_since_ingest"
    assert server.requests == []


def test_a_metric_without_its_java_is_refused_unsent(server, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing):
        run(tmp_path, make_request(server), metrics=["CIDEr"], allow_fewer_pairs=True)
    assert server.requests == []


@pytest.fixture
def unlicensed(folders: bench.Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench's images without a licence, and its server on another machine."""
    bench.write_json(folders.records / "toy.json", {"reader": "omnidiff"})
    monkeypatch.setattr("m3diff.endpoint.url.THIS_MACHINE", ())


def test_images_without_a_licence_are_not_sent_to_another_machine(server, unlicensed, tmp_path):
    with pytest.raises(DataError, match="OmniDiff"):
        run(tmp_path, make_request(server), metrics=["CIDEr"], allow_fewer_pairs=True)
    assert server.requests == []


def test_images_without_a_licence_are_sent_with_a_notice_if_the_user_allows_it(server, unlicensed, tmp_path, capsys):
    run(tmp_path, make_request(server, allow_unlicensed=True), allow_fewer_pairs=True)
    assert "OmniDiff" in capsys.readouterr().out
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("api.example.org", False),
        ("localhost.example.org", False),
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
    ],
)
def test_only_loopback_addresses_are_of_this_machine(host, is_here):
    assert url.on_this_machine(f"http://{host}/v1") is is_here


def without_servers(store: Path) -> None:
    """Rewrite the store as an earlier version wrote it."""
    entries = [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({name: entry[name] for name in entry if name not in ("server", "date")}) for entry in entries]
    store.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("earlier", ["another server", "an earlier version"])
def test_captions_of_another_server_are_not_published_as_this_ones(earlier, server, folders, tmp_path):
    with chat_server("the lamp is gone") as other_server:
        run(tmp_path, make_request(other_server if earlier == "another server" else server))
    if earlier == "an earlier version":
        without_servers(tmp_path / "scratch/zero_shot.jsonl")
    server.requests.clear()
    with raises(OtherServerError, "endpoint.other_server", answers=6, option=Fault("zero_shot.reuse_option")):
        run(tmp_path, make_request(server))
    assert server.requests == []
    own_folder = make_request(server).default_folder(tmp_path / "scratch")
    assert earlier == "an earlier version" or not own_folder.exists()
    reused = run(tmp_path, make_request(server, reuse_answers=True))
    assert reused.folder != own_folder
    assert server.requests == []
    assert predictions(run(tmp_path, make_request(server, reuse_answers=False))) == bench.PREDICTIONS
    assert len(server.requests) == 6


def test_the_report_says_whose_answers_are_from_the_cache_and_from_when(server, folders, tmp_path, capsys):
    server.models = {"data": [{"id": "a/model", "root": "/weights", "max_model_len": 9}]}
    run(tmp_path, make_request(server, limit=2))
    assert "from the cache" not in capsys.readouterr().out
    result = run(tmp_path, make_request(server))
    assert "zero-shot: 2 of 6 answers are from the cache" in capsys.readouterr().out
    (source,) = json.loads((result.folder / "predictions/report.json").read_text())["sources"]
    stored = [json.loads(line)["date"] for line in (tmp_path / "scratch/zero_shot.jsonl").read_text().splitlines()]
    assert source.pop("cached_from") in stored
    assert source.pop("cached_until") in stored
    assert source == {
        "url": server.url,
        "id": "a/model",
        "root": "/weights",
        "max_model_len": 9,
        "answers": 6,
        "cached": 2,
    }


def test_a_server_that_hangs_on_two_images_leaves_no_result(server, folders, tmp_path):
    server.replies = {}
    server.default = ServerFault.HANG
    with raises(EndpointError, "endpoint.interrupted") as interrupted:
        run(tmp_path, make_request(server, timeout_s=1))
    cause = interrupted.value.fields["cause"]
    assert cause.code == "endpoint.silent_on_images"
    assert cause.fields["questions"] == 6
    assert cause.fields["limit"] == 1
    assert len(server.requests) == 12
    assert not (tmp_path / "scratch/evaluated").exists()
