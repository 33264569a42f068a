"""Scripts without spaces between words are scored by characters, under names that say so, down to the gate."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.compare import compare
from m3diff.commands.score import score
from m3diff.commands.score.report import ScoreReport
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.registry.gate import compare_with_champion, has_comparable_scores, judge_without_champion
from m3diff.scoring.characters import is_without_spaces, tokenise_characters
from m3diff.scoring.metrics import choose_metrics
from m3diff.scoring.metrics.java import tokenise
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.run import compute_metrics, explain_absent_word_scores
from m3diff.stages.register.params import Promote
from m3diff.stages.train.validation import cider
from tests.errors import raises
from tests.scoring import bench

LIMIT_S = 120
WORDS = {"树": "tree", "灯": "lamp", "不": "not", "没": "now", "有": "has", "见": "seen", "了": "gone", "车": "car"}
CHINESE = [("树不见了", "树不见了"), ("树没有了", "树不见了"), ("灯不见了", "灯不见了"), ("车不见了", "车没有了")]


def in_english(text: str) -> str:
    return " ".join(WORDS[sign] for sign in text)


ENGLISH = [(in_english(caption), in_english(reference)) for caption, reference in CHINESE]


def tokens_of(*texts: str) -> list[str]:
    tokens = tokenise_characters(texts, lambda texts_of_words: tokenise(texts_of_words, LIMIT_S))
    return [tokens[text] for text in texts]


TOKENS = {
    "Chinese": ("树不见了", "树 不 见 了"),
    "spaces within": ("树 不见了", "树 不 见 了"),
    "ideographic space": ("树　不见了", "树 不 见 了"),
    "zero-width space": ("树\u200b不见了", "树 不 见 了"),
    "full stop": ("树不见了。", "树 不 见 了"),
    "comma": ("树不见了，路变宽了", "树 不 见 了 路 变 宽 了"),
    "brackets": ("「树」不见了！", "树 不 见 了"),
    "mixed with words and numbers": ("新增了3栋building", "新 增 了 3 栋 building"),
    "upper case": ("新增Building", "新 增 building"),
    "full-width digits": ("２栋", "2 栋"),
    "decimal": ("3.5米", "3.5 米"),
    "traditional": ("樹不見了", "樹 不 見 了"),
    "rare Han": ("𠮷家", "𠮷 家"),
    "variation selector": ("葛\U000e0100城", "葛 城"),
    "Japanese": ("木がなくなりました", "木 が な く な り ま し た"),
    "Japanese long vowel": ("ビルが", "ビ ル が"),
    "half-width katakana": ("ﾋﾞﾙ", "ビ ル"),
    "iteration mark": ("人々", "人 々"),
    "Thai with marks": ("ต้นไม้", "ต้ น ไ ม้"),
    "Lao": ("ບໍ່ມີ", "ບໍ່ ມີ"),
    "Khmer": ("ដើម", "ដើ ម"),
    "Burmese": ("သစ်ပင်", "သ စ် ပ င်"),
    "Tibetan without the dot between syllables": ("ཤིང་", "ཤི ང"),
    "Korean has words": ("나무가 사라졌다", "나무가 사라졌다"),
    "English": ("The tree is gone.", "the tree is gone"),
    "empty": ("", ""),
    "punctuation alone": ("。", ""),
}


def test_each_character_is_a_token_and_other_words_stay_whole():
    texts = [text for text, _ in TOKENS.values()]
    assert dict(zip(TOKENS, tokens_of(*texts), strict=True)) == {name: tokens for name, (_, tokens) in TOKENS.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("树不见了", True),
        ("新增了3栋building", True),
        ("a sign reads 出口 now", False),
        ("나무가 사라졌다", False),
        ("дерево исчезло", False),
        ("पेड़ गायब हो गया", False),
        ("اختفت الشجرة", False),
        ("cây đã biến mất", False),
        ("the café is gone", False),
        ("", False),
        ("。", False),
    ],
)
def test_a_reference_is_without_spaces_if_characters_outnumber_words(text, expected):
    assert is_without_spaces(text) is expected


def scored(folder: Path, pairs: list[tuple[str, Any]]) -> ScoreReport:
    """The report on (prediction, reference or references), by `m3diff score`."""
    folder.mkdir(exist_ok=True)
    predictions = [{"image_id": number, "caption": caption} for number, (caption, _) in enumerate(pairs)]
    annotations = [
        {"image_id": number, "caption": text}
        for number, (_, references) in enumerate(pairs)
        for text in ([references] if isinstance(references, str) else references)
    ]
    content = {"images": [{"id": number} for number in range(len(pairs))], "annotations": annotations}
    bench.write_json(folder / "predictions.json", predictions)
    bench.write_json(folder / "references.json", content)
    return score(folder / "predictions.json", references=folder / "references.json")


@pytest.mark.slow(13)  # METEOR's Java program
def test_characters_score_as_words_do_to_the_last_digit(tmp_path):
    chinese = scored(tmp_path / "zh", CHINESE)
    english = scored(tmp_path / "en", ENGLISH)
    for name in ("CIDEr", "ROUGE-L", "BLEU-1", "BLEU-4"):
        assert chinese.scores[f"{name}-char"] == english.scores[name]
        assert chinese.scores[name] is None
        assert f"{name}-char" in chinese.absent[name]
    assert english.scores.keys() == {"CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"}
    assert "METEOR" in chinese.absent
    assert chinese.headline == "CIDEr-char"


def test_captions_that_are_equal_up_to_spaces_score_as_equal(tmp_path):
    spaced = [(" ".join(caption), reference) for caption, reference in CHINESE]
    assert scored(tmp_path / "a", spaced).scores == scored(tmp_path / "b", CHINESE).scores


def test_the_report_says_how_captions_are_counted_and_calls_no_letter_a_mark(tmp_path):
    report = scored(tmp_path / "zh", CHINESE)
    text = "\n".join(report.lines())
    assert "4 of 4 references" in text
    assert "tokenizer: characters" in text
    assert not any("letters of another script" in note for note in report.notes)


@pytest.mark.slow(13)  # METEOR's Java program
@pytest.mark.parametrize(
    ("chinese", "english", "by_characters"), [(1, 0, True), (1, 9, True), (1, 10, False), (0, 10, False)]
)
def test_a_set_counts_characters_from_a_tenth_of_its_references_on_and_says_so(
    chinese, english, by_characters, tmp_path
):
    report = scored(tmp_path / "s", [("树没有了", "树不见了")] * chinese + [("a tree", "a lamp")] * english)
    assert report.counts_characters is by_characters
    assert ("CIDEr-char" in report.scores) is by_characters
    assert any("no spaces between words" in note for note in report.notes) is (chinese > 0)


@pytest.mark.slow(12)  # METEOR's Java program
def test_a_model_that_answers_in_chinese_to_english_references_is_scored_by_words(tmp_path):
    report = scored(tmp_path / "s", [("树不见了", "the tree is gone"), ("灯不见了", "the lamp is gone")])
    assert report.scores["CIDEr"] == 0
    assert any("letters of another script" in note for note in report.notes)


# The stage


def write_run(root: Path, monkeypatch: pytest.MonkeyPatch, is_chinese: bool = True) -> tuple[bench.Folders, Any]:
    """A run of evaluate; in Chinese the model is right of two pairs, and of the others wrong in one character."""
    if is_chinese:
        references = {name: f"第{name}棵{sign}不见了" for name, sign in zip("012345", "树灯车房桥路", strict=True)}
        records = [(name, types, [references[name]]) for name, types, _ in bench.RECORDS]
        captions = {
            f"toy/{name}": text.replace("不", "没") if int(name) > 1 else text for name, text in references.items()
        }
        monkeypatch.setattr(bench, "RECORDS", records)
        monkeypatch.setattr(bench, "PREDICTIONS", captions)
    folders = bench.write(root)
    metrics = ["CIDEr", "ROUGE-L", "BLEU", "METEOR", "change_accuracy"]
    return folders, bench.run(folders, root / "out", metrics=metrics)


def test_evaluate_writes_scores_of_characters_to_every_file(tmp_path, monkeypatch, capsys):
    _, report = write_run(tmp_path, monkeypatch)
    scores = report.protocols["toy/test"]
    assert 0.5 < scores.scores["ROUGE-L-char"] < 1
    assert 1 < scores.scores["CIDEr-char"] < 10
    assert scores.scores["CIDEr"] is None
    assert scores.scores["METEOR"] is None
    headline = json.loads((tmp_path / "out" / "headline.json").read_text())["toy/test"]
    assert headline.keys() >= {"BLEU-4-char", "ROUGE-L-char", "CIDEr-char"}
    table = pq.read_table(tmp_path / "out" / "scores.parquet")
    assert table["CIDEr-char"].null_count == 0
    assert table["CIDEr"].null_count == table.num_rows
    assert "toy/test: 6 of 6 references have no spaces between words" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<dt>CIDEr-char</dt>" in page
    assert '<div class="tile"><dt>CIDEr</dt>' not in page
    assert "<dt>CIDEr</dt><dd>Absent." in page
    assert "each character counts as a word" in page


@pytest.mark.slow(13)  # METEOR's Java program
def test_evaluate_of_english_has_the_names_and_columns_that_it_had(tmp_path, monkeypatch):
    write_run(tmp_path, monkeypatch, is_chinese=False)
    assert "-char" not in (tmp_path / "out" / "metrics.json").read_text()
    assert "-char" not in (tmp_path / "out" / "headline.json").read_text()
    assert not any(name.endswith("-char") for name in pq.read_table(tmp_path / "out" / "scores.parquet").column_names)


def test_compare_shows_scores_of_characters_and_refuses_files_of_other_tokens(tmp_path, monkeypatch):
    folders, _ = write_run(tmp_path, monkeypatch)
    out = tmp_path / "out"
    tables = compare(out, out, folders.records, folders.clean, tmp_path / "page.html")
    names = [row.name for row in tables["toy/test"].rows]
    assert "CIDEr-char" in names
    assert "CIDEr" not in names
    older = pq.read_table(out / "scores.parquet")
    word_columns = [name for name in older.column_names if not name.endswith("-char")]
    older = older.select(word_columns).set_column(
        word_columns.index("CIDEr"), "CIDEr", pa.array([0.0] * older.num_rows)
    )
    (tmp_path / "older").mkdir()
    pq.write_table(older, tmp_path / "older" / "scores.parquet")
    for first_folder, second_folder in ((tmp_path / "older", out), (out, tmp_path / "older")):
        files = {"path": tmp_path / "older" / "scores.parquet", "other": out / "scores.parquet"}
        with raises(DataError, "compare.tokens_differ", protocol="toy/test", **files):
            compare(first_folder, second_folder, folders.records, folders.clean, tmp_path / "page.html")


@pytest.mark.slow(26)  # METEOR's Java program
def test_a_chinese_and_an_english_dataset_in_a_run_each_have_their_own_scores():
    protocol = Protocol("test", published_pairs=None)
    english = [bench.pair(caption, [reference], [], f"en{n}") for n, (caption, reference) in enumerate(ENGLISH)]
    chinese = [bench.pair(caption, [reference], [], f"zh{n}") for n, (caption, reference) in enumerate(CHINESE)]
    protocols = [ProtocolPairs("en", protocol, english), ProtocolPairs("zh", protocol, chinese)]
    metrics = choose_metrics(["CIDEr", "METEOR"])
    together = compute_metrics(metrics, protocols, {}, None, LIMIT_S)
    alone = compute_metrics(metrics, protocols[:1], {}, None, LIMIT_S)
    assert together["en/test"] == alone["en/test"]
    assert together["en/test"].groups["all"].keys() == {"CIDEr", "METEOR", "CIDEr_shuffled"}
    assert together["zh/test"].groups["all"]["CIDEr-char"] == together["en/test"].groups["all"]["CIDEr"]
    assert together["zh/test"].groups["all"]["METEOR"] is None


# The gate

PAIRS = 200


def gate(**changes: Any) -> Promote:
    section = {"protocol": "d/test", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "guards": {}}
    return Promote(**section | changes)


def scores_file(**columns: Any) -> pa.Table:
    ids = [f"d/{number:04d}" for number in range(PAIRS)]
    types = {name: pa.array(values, pa.float64()) for name, values in columns.items()}
    return pa.table({"protocol": ["d/test"] * PAIRS, "id": ids, **types})


def of_characters(cider: float, rouge: float = 0.5, seed: int = 0) -> pa.Table:
    noise = np.random.default_rng(seed).random(PAIRS) / 10
    empty = [None] * PAIRS
    return scores_file(**{
        "CIDEr": empty, "CIDEr-char": cider + noise, "ROUGE-L": empty, "ROUGE-L-char": rouge + noise, "METEOR": empty,
    })  # fmt: skip


@pytest.mark.parametrize("metric", ["CIDEr", "CIDEr-char"])
def test_the_gate_decides_by_the_score_of_characters_and_names_it(metric):
    verdict = compare_with_champion(
        gate(metric=metric, guards={"ROUGE-L": 0.1}), of_characters(2.0), of_characters(1.0, seed=1)
    )
    assert verdict.outcome == "promoted"
    assert "CIDEr-char" in verdict.reason
    assert verdict.gain == pytest.approx(1.0, abs=0.05)
    assert verdict.guards.keys() == {"ROUGE-L-char"}
    assert compare_with_champion(gate(metric=metric), of_characters(1.0), of_characters(2.0)).outcome == "refused"
    assert judge_without_champion(gate(metric=metric), of_characters(1.0)).reason.count("CIDEr-char") == 1


def test_a_guard_of_characters_refuses_a_worse_model():
    verdict = compare_with_champion(
        gate(guards={"ROUGE-L": 0.1}), of_characters(2.0, rouge=0.2), of_characters(1.0, rouge=0.5)
    )
    assert verdict.outcome == "refused"
    assert "ROUGE-L-char" in verdict.reason


def test_a_guard_that_reads_english_alone_is_refused_by_name():
    verdict = compare_with_champion(gate(guards={"METEOR": 0.1}), of_characters(2.0), of_characters(1.0))
    assert verdict.outcome == "refused"
    assert "METEOR" in verdict.reason


def test_a_champion_that_was_scored_by_words_is_scored_again():
    by_words = scores_file(CIDEr=[0.0] * PAIRS)
    assert not has_comparable_scores(gate(), of_characters(2.0), by_words)
    assert compare_with_champion(gate(), of_characters(2.0), by_words).outcome == "refused"
    assert has_comparable_scores(gate(), of_characters(2.0), of_characters(1.0))
    assert has_comparable_scores(gate(), by_words, by_words)


# Training


def test_a_metric_that_reads_no_words_has_its_score_without_them_too():
    metrics = choose_metrics(["CIDEr", "METEOR", "pixel_threshold"])
    results = explain_absent_word_scores(metrics)
    assert list(results) == ["CIDEr", "METEOR"]
    assert set(results["METEOR"].absent) == {"METEOR"}


def test_the_best_checkpoint_is_chosen_by_characters_too():
    references = [[meant] for _, meant in CHINESE]
    captions = [caption for caption, _ in CHINESE]
    english = cider([[in_english(meant)] for _, meant in CHINESE], [in_english(text) for text in captions])
    assert cider(references, captions) == english
    assert cider(references, [" ".join(text) for text in captions]) == english
