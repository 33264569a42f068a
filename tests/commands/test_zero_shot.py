"""A model behind an endpoint on the test split, against a server on 127.0.0.1: what is sent, kept, counted, scored."""

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff import endpoint
from m3diff.commands import zero_shot as module
from m3diff.commands.zero_shot import PROMPT, Request, Result, caption_of, zero_shot
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.endpoint import Answer, OtherServerError
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.stages.evaluate.stage import evaluate
from tests.chat import Fault, Server, chat_server
from tests.scoring import bench

REFUSED = {"content": None, "refusal": "I will not say."}
CUT = {"content": "the red cube at the", "finish_reason": "length"}
REASONED = {"content": None, "reasoning_content": "The cup is new."}
KEPT = ("dataset", "split", "before", "after", "before_sha256", "after_sha256")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("A_KEY", "secret")
    with chat_server() as known:
        known.replies = {f"pair {i.rpartition('/')[2]}?": [text] for i, text in bench.PREDICTIONS.items()}
        yield known


@pytest.fixture
def folders(tmp_path: Path) -> bench.Folders:
    """The bench with its mixture, in another order than the records, each pair with a question of its own."""
    folders = bench.write(tmp_path)
    rows = []
    for record in pq.read_table(folders.clean / "records.parquet", filters=[("split", "=", "test")]).to_pylist():
        question = f"What changed in pair {record['id'].rpartition('/')[2]}?"
        rows += [
            {name: record[name] for name in KEPT}
            | {"id": f"{record['id']}#{k}", "pair": record["id"], "question": question, "reference": text}
            for k, text in enumerate(record["references"])
        ]
    (tmp_path / "mixture" / "test").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[::-1], SAMPLE_SCHEMA), tmp_path / "mixture" / "test" / "00000.parquet")
    return folders


def asked_of(server: Server, **changes: Any) -> Request:
    return replace(Request(server.url, "a/model", key_variable="A_KEY", timeout_s=20), **changes)


def run(root: Path, request: Request, out: Path | None = None, **changes: Any) -> Result:
    cfg = bench.config(**({"metrics": ["change_accuracy"]} | changes))
    compute = bench.compute(scratch=root / "scratch")
    return zero_shot(request, cfg, compute, root / "mixture", root / "records", root / "clean", out)


def predictions(result: Result) -> dict[str, str]:
    rows = json.loads((result.folder / "predictions/predictions.json").read_text(encoding="utf-8"))
    return {row["image_id"]: row["caption"] for row in rows}


def test_both_images_go_in_one_message_with_the_pairs_own_question(server, folders, tmp_path, capsys, monkeypatch):
    told = []
    real = endpoint.Endpoint.ask
    monkeypatch.setattr(module.Endpoint, "ask", lambda *given: told.append(capsys.readouterr().out) or real(*given))
    run(tmp_path, asked_of(server))
    assert f"go to {server.url}, model 'a/model'\n" in told[0], "said before the first is sent"
    assert len(server.asked) == 6
    for body in server.asked:
        (message,) = body["messages"]
        *images, text = message["content"]
        name = re.search(r"pair (\d)\?", text["text"])[1]
        assert text["text"] == PROMPT.replace("{question}", f"What changed in pair {name}?")
        sent = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in images]
        assert sent == [(tmp_path / f"{name}_{side}.png").read_bytes() for side in ("before", "after")]
        assert (body["model"], body["temperature"], body.get("max_tokens")) == ("a/model", 0, None)
    assert server.keys == {"Bearer secret"}
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    server.asked.clear()
    run(tmp_path, asked_of(server, prompt="Say it in {detail}. {question}", max_tokens=7))
    assert min(server.texts) == "Say it in {detail}. What changed in pair 0?"
    assert {body["max_tokens"] for body in server.asked} == {7}


def test_the_scores_are_those_that_evaluate_gives_and_no_folder_is_written_over(server, folders, tmp_path):
    result = run(tmp_path, asked_of(server))
    assert predictions(result) == bench.PREDICTIONS
    for extra in ("predictions_shuffled.json", "saliency.npz"):
        (folders.predictions / extra).unlink()
    cfg = bench.config(metrics=["change_accuracy"])
    own = evaluate(cfg, bench.compute(), *folders, tmp_path / "own")
    assert result.scored == own
    assert own.protocols["toy/test"].scores["change_type_accuracy"] == 2 / 3
    for name in ("metrics.json", "headline.json", "scores.parquet", "report.html"):
        assert (result.folder / "report" / name).read_bytes() == (tmp_path / "own" / name).read_bytes(), name
    assert run(tmp_path, asked_of(server), tmp_path / "named").folder == tmp_path / "named"
    with pytest.raises(DataError, match="exists; name a folder that does not"):
        run(tmp_path, asked_of(server), tmp_path / "named")


def test_a_second_run_asks_nothing_another_model_is_asked_and_one_that_was_killed_goes_on(server, folders, tmp_path):
    before = sorted(path for path in tmp_path.rglob("*") if "scratch" not in path.parts)
    first = run(tmp_path, asked_of(server))
    assert first.folder == asked_of(server).place(tmp_path / "scratch")
    (first.folder / "left").write_text("of the first")
    for changes, asked in (({}, 6), ({"limit": 2}, 6), ({"model": "other"}, 12), ({"prompt": "{question}"}, 18)):
        found = run(tmp_path, asked_of(server, **changes))
        assert len(server.asked) == asked
        assert (found.scored == first.scored) is ("limit" not in changes)
        assert (found.folder == first.folder) is (not changes)
    assert not (first.folder / "left").exists(), "made anew"
    assert sorted(path for path in tmp_path.rglob("*") if "scratch" not in path.parts) == before
    assert asked_of(server, max_tokens=9).place(tmp_path / "scratch") != first.folder
    store = tmp_path / "scratch/zero_shot.jsonl"
    lines = store.read_bytes().splitlines(keepends=True)
    store.write_bytes(b"".join(lines[:3]) + lines[3][:-20])
    assert predictions(run(tmp_path, asked_of(server))) == bench.PREDICTIONS
    assert len(server.asked) == 18 + 3


def test_a_server_that_goes_on_failing_leaves_no_result(server, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 1)
    server.replies["pair 0?"] = [500]
    with pytest.raises(ConnectionError, match="what it answered is kept: run the command again"):
        run(tmp_path, asked_of(server))
    assert not (tmp_path / "scratch/evaluated").exists()


def test_what_is_put_off_is_asked_again_and_what_is_no_caption_is_scored_as_empty_and_named(server, folders, tmp_path):
    server.replies |= {"pair 0?": [429, bench.PREDICTIONS["toy/0"]], "pair 1?": [REFUSED], "pair 2?": ["  \n"]}
    server.replies |= {"pair 4?": [CUT], "pair 5?": [(400, {"error": {"message": "no", "code": "content_filter"}})]}
    server.replies["pair 3?"] = [{"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}]
    result = run(tmp_path, asked_of(server))
    said = {f"toy/{n}": "" for n in (1, 2, 4, 5)} | {"toy/0": bench.PREDICTIONS["toy/0"], "toy/3": "in parts"}
    assert predictions(result) == said
    report = json.loads((result.folder / "predictions/report.json").read_text())
    assert report["without_caption"] == {"refused": ["toy/5", "toy/1"], "empty": ["toy/2"], "cut": ["toy/4"]}
    assert (report["rows_in"], report["rows_out"], report["model"]) == (6, 6, "a/model")
    assert report["words"] == round(sum(len(text.split()) for text in said.values()) / 6, 2)
    found = result.scored.protocols["toy/test"]
    assert (found.pairs, found.scores["unreadable"]) == (6, 5 / 6), "none is left out"
    assert result.lines[:3] == [
        "2 of 6 answers refused, scored as an empty caption: toy/5, toy/1",
        "1 of 6 answers empty, scored as an empty caption: toy/2",
        "1 of 6 answers cut, scored as an empty caption: toy/4",
    ]


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (None, "6 empty, such as ''"),
        (REASONED, "6 empty, such as 'The cup is new.'"),
        (CUT, "6 cut, such as 'the red cube at the'. For cut ones pass a larger --max-tokens"),
        (REFUSED, "6 refused, such as 'I will not say.'"),
    ],
)
def test_answers_without_a_caption_are_an_error_and_the_next_run_asks_anew(reply, told, server, folders, tmp_path):
    replies, server.replies = server.replies, {"pair": [reply]}
    with pytest.raises(DataError, match="no answer is a caption") as refused:
        run(tmp_path, asked_of(server))
    assert told in str(refused.value)
    assert not (tmp_path / "scratch/evaluated").exists()
    server.replies = replies  # the server is mended
    assert predictions(run(tmp_path, asked_of(server))) == bench.PREDICTIONS
    assert len(server.asked) == 12


def test_marks_in_captions_are_counted_and_a_caption_stands_on_one_line(server, folders, tmp_path, capsys):
    server.replies = {pair: [f"assistant\n{texts[0]}"] for pair, texts in server.replies.items()}
    result = run(tmp_path, asked_of(server))
    assert "note: 6 of 6 captions hold a role" in capsys.readouterr().out
    assert "6 of 6 captions hold" in (result.folder / "report/report.html").read_text()
    assert predictions(result)["toy/0"] == f"assistant {bench.PREDICTIONS['toy/0']}"
    assert caption_of(Answer("text", " the cup \ud83d\n\nwent\n")) == "the cup ? went"


def test_a_limit_takes_the_first_pairs_and_papers_score_more(server, folders, tmp_path, monkeypatch):
    spec = replace(DATASETS["pairs"], protocols=(Protocol("test", n=6),))
    monkeypatch.setitem(DATASETS.data, "pairs", spec)
    result = run(tmp_path, asked_of(server, limit=2))
    assert list(predictions(result)) == ["toy/5", "toy/4"]
    assert result.lines[0].startswith("toy/test (2 of 6 pairs), times 100: ")
    monkeypatch.setitem(DATASETS.data, "pairs", replace(spec, protocols=(Protocol("test", n=7),)))
    server.asked.clear()
    with pytest.raises(DataError, match="6 pairs, papers score 7"):
        run(tmp_path, asked_of(server, model="other"))
    assert server.asked == []


@pytest.mark.parametrize("fault", ["changed", "java", "licence"])
def test_what_cannot_be_scored_or_shown_is_refused_unsent(fault, server, folders, tmp_path, monkeypatch, capsys):
    if fault == "changed":
        bench.paint(tmp_path / "3_after.png", (0, 0, 0))
    elif fault == "java":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        bench.write_json(folders.records / "toy.json", {"reader": "omnidiff"})
        monkeypatch.setattr("m3diff.endpoint.THIS_MACHINE", ())
    with pytest.raises(JavaMissing if fault == "java" else DataError, match="Java|toy/3|none stated") as refused:
        run(tmp_path, asked_of(server), metrics=["CIDEr"], allow_fewer_pairs=True)
    assert server.asked == []
    if fault == "licence":
        assert "pass --allow-unlicensed" in str(refused.value)
        run(tmp_path, asked_of(server, allow_unlicensed=True), allow_fewer_pairs=True)
        assert "zero-shot: OmniDiff (licence: none stated): redistribute" in capsys.readouterr().out
        assert len(server.asked) == 6


def test_images_that_no_licence_allows_to_hand_on_go_to_this_machine_alone():
    hosts = {"api.example.org": False, "localhost.example.org": False, "127.0.0.1:1": True, "localhost:1": True}
    for host, here in (hosts | {"[::1]:1": True}).items():
        assert endpoint.on_this_machine(f"http://{host}/v1") is here


def without_servers(store: Path) -> None:
    """Rewrite the store as an earlier version wrote it."""
    entries = [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({name: entry[name] for name in entry if name not in ("server", "date")}) for entry in entries]
    store.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("earlier", ["another server", "an earlier version"])
def test_captions_of_another_server_are_not_published_as_this_ones(earlier, server, folders, tmp_path):
    with chat_server("the lamp is gone") as first:
        run(tmp_path, asked_of(first if earlier == "another server" else server))
    if earlier == "an earlier version":
        without_servers(tmp_path / "scratch/zero_shot.jsonl")
    server.asked.clear()
    with pytest.raises(OtherServerError, match="--reuse-answers") as refused:
        run(tmp_path, asked_of(server))
    assert refused.value.answers == 6
    assert server.asked == []
    own = asked_of(server).place(tmp_path / "scratch")
    assert earlier == "an earlier version" or not own.exists()
    reused = run(tmp_path, asked_of(server, reuse_answers=True))
    assert reused.folder != own
    assert server.asked == []
    assert predictions(run(tmp_path, asked_of(server, reuse_answers=False))) == bench.PREDICTIONS
    assert len(server.asked) == 6


def test_the_report_says_whose_answers_are_from_the_cache_and_from_when(server, folders, tmp_path, capsys):
    server.models = {"data": [{"id": "a/model", "root": "/weights", "max_model_len": 9}]}
    run(tmp_path, asked_of(server, limit=2))
    assert "from the cache" not in capsys.readouterr().out
    result = run(tmp_path, asked_of(server))
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
    server.default = Fault.HANG
    with pytest.raises(ConnectionError, match="nothing to 6 questions with two images within 1 s"):
        run(tmp_path, asked_of(server, timeout_s=1))
    assert len(server.asked) == 12
    assert not (tmp_path / "scratch/evaluated").exists()
