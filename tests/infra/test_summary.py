"""What `make run` prints at its end."""

import json
import sys
from types import SimpleNamespace

import pytest

from infra.summary import headlines, hushed, limits, summary

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
        "scores on a/total, 480 pairs; times 100, with 95 % intervals over pairs",
        "  CIDEr                   467.0   450.0 to 481.0",
        "  no_change_recall        100.0",
        "",
        "scores on b/semantic, 240 pairs of 3985 that papers score; times 100, with 95 % intervals over pairs",
        "  CIDEr                   660.0",
        "",
    ]


def write_base(folder, vocabulary):
    config = {"text_config": {"vocab_size": vocabulary}, "vision_config": {"image_size": 100}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_of_the_embedded_base_is_said_to_be_for_drawn_scenes_alone(tmp_path):
    text = "\n".join(limits(write_base(tmp_path, 597)))
    assert "MiniChange's scenes, drawn at 100 px" in text
    assert "its base knows 597 tokens. Your pairs need a real one" in text
    assert list(limits(write_base(tmp_path, 152_000))) == []


def summary_of(folder, report):
    write_base(folder, 597)
    (folder / "metrics.json").write_text('{"protocols": {"a/total": {"pairs": 3, "CIDEr": 1.5, "intervals": {}}}}')
    (folder / "report.json").write_text(report)
    params = SimpleNamespace(
        paths=SimpleNamespace(report=folder, predictions=folder, model=folder),
        train=SimpleNamespace(base=folder),
        register_=SimpleNamespace(tracking_uri="store"),
    )
    registration = SimpleNamespace(uri="models:/m/2", outcome="registered")
    return summary(params, registration, "m version 2 refused: why")


def test_the_summary_says_scores_places_and_the_gates_words(tmp_path):
    text = summary_of(tmp_path, '{"warnings": []}')
    assert "  CIDEr                   150.0\n" in text
    assert f"report       {tmp_path}/report.html\n" in text
    assert "model        models:/m/2 (registered) in store\n" in text
    assert "gate         m version 2 refused: why\n" in text
    assert "warning" not in text
    assert "good for     showing that" in text


def test_the_summary_says_what_training_warned_of(tmp_path):
    text = summary_of(tmp_path, '{"warnings": ["the module changes nothing: why."]}')
    assert "gate         m version 2 refused: why\nwarning      training: the module changes nothing: why.\n" in text


def test_a_model_trained_before_there_were_warnings_has_none(tmp_path):
    assert "warning" not in summary_of(tmp_path, "{}")


def test_what_tools_say_is_shown_only_where_they_fail(capsys):
    with hushed():
        print("a bar", file=sys.stderr)

    def fail():
        print("why", file=sys.stderr)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), hushed():
        fail()
    assert capsys.readouterr().err == "why\n"
