"""What `make run` prints at its end."""

from types import SimpleNamespace

from infra.summary import headlines, summary

TOTAL = {
    "pairs": 480,
    "published_pairs": None,
    "CIDEr": 4.67036,
    "METEOR": None,
    "no_change_recall": 1,
    "intervals": {"CIDEr": {"low": 4.5, "high": 4.81}},
    "by_type": {},
}
OTHER = {"pairs": 240, "published_pairs": 3985, "CIDEr": 6.6, "intervals": {}}


def test_the_headline_protocol_of_each_dataset_is_shown_with_its_intervals():
    lines = list(headlines({"a/total": TOTAL, "a/semantic": OTHER, "b/semantic": OTHER}))
    assert lines == [
        "scores on a/total, 480 pairs; 95 % intervals over pairs",
        "  CIDEr                    4.6704   4.5000 to 4.8100",
        "  no_change_recall         1.0000",
        "",
        "scores on b/semantic, 240 pairs of 3985 that papers score; 95 % intervals over pairs",
        "  CIDEr                    6.6000",
        "",
    ]


def test_the_summary_says_scores_places_and_the_gates_words(tmp_path):
    (tmp_path / "metrics.json").write_text('{"protocols": {"a/total": {"pairs": 3, "CIDEr": 1.5, "intervals": {}}}}')
    params = SimpleNamespace(
        paths=SimpleNamespace(report=tmp_path, predictions=tmp_path), register_=SimpleNamespace(tracking_uri="store")
    )
    registration = SimpleNamespace(uri="models:/m/2", outcome="registered")
    text = summary(params, registration, "m version 2 refused: why")
    assert "  CIDEr                    1.5000\n" in text
    assert f"report       {tmp_path}/report.html\n" in text
    assert "model        models:/m/2 (registered) in store\n" in text
    assert "gate         m version 2 refused: why\n" in text
