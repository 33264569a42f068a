"""A base's generation_config.json does not change captions, however the checkpoint is used."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from m3diff.commands.export.families import SHARED
from m3diff.commands.export.hub import write_model
from m3diff.models.checkpoint import ADAPTERS, export_checkpoint, read_manifest, verify_manifest, write_manifest
from m3diff.models.decoding import GENERATION_CONFIG_FILE, decoding_settings
from m3diff.models.generation import QUESTION, load_captioner
from m3diff.serving.caption import CaptionInput, answer_inputs
from m3diff.settings.load import load_params
from m3diff.stages.predict.stage import CaptionJob, load_model
from tests.family_cases import PUBLISHED_CASES, tiny
from tests.tiers import slow_except
from tests.tiny import BASE, colour_image, pair_inputs, tiny_checkpoint
from tests.toy import REPOSITORY

MAX_NEW_TOKENS = 8
PAIRS = 4
# Each is a generation_config.json of a published base, or one field of it
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.8},
    "Qwen2 chat": {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "temperature without sampling": {"temperature": 0.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 1},
    "encoder repetition penalty": {"encoder_repetition_penalty": 3.0},
    "beams": {"num_beams": 4, "length_penalty": -2.0, "early_stopping": True},
    "several answers": {"num_beams": 2, "num_return_sequences": 2},
    "short": {"max_new_tokens": 2},
    "least length": {"min_new_tokens": 6},
    "longest length": {"max_length": 3},
    "suppressed tokens": {"suppress_tokens": list(range(5, 400))},
    "suppressed first tokens": {"begin_suppress_tokens": list(range(5, 400))},
    "forbidden words": {"bad_words_ids": [[token] for token in range(5, 400)]},
    "forced first token": {"forced_bos_token_id": 7},
    "forced last token": {"forced_eos_token_id": 7},
    "bias": {"sequence_bias": [[[7], 100.0]]},
    "stop strings": {"stop_strings": ["e"]},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 3.0},
    "watermark": {"watermarking_config": {"bias": 50.0, "greenlist_ratio": 0.2}},
    "time limit": {"max_time": 1e-9},
    "answers as objects": {"return_dict_in_generate": True, "output_scores": True},
    "unknown field": {"chat_format": "chatml"},
}
EVERYTHING = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 1, "min_new_tokens": 6}


def add_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write settings to a folder's generation_config.json, and update its manifest."""
    file = folder / GENERATION_CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    if (folder / "manifest.json").is_file():
        facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
        write_manifest(folder, **facts)


def images_of_pairs() -> list[tuple[Any, Any]]:
    return [(colour_image(20 * number, (40, 30)), colour_image(20 * number + 1, (40, 30))) for number in range(PAIRS)]


def captions_of(folder: Path, base: Path | None = None) -> list[str]:
    return load_captioner(folder, MAX_NEW_TOKENS, base=base).caption(images_of_pairs())


def stock_captions(folder: Path, processor: Any) -> list[str]:
    """Return the captions of transformers' classes and their `generate`, called with only the length."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    inputs = pair_inputs(processor, images_of_pairs(), [QUESTION] * PAIRS)
    tokens = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
    return processor.decode(tokens[:, inputs["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a checkpoint whose base has no decoding settings, and its captions."""
    root = tmp_path_factory.mktemp("plain")
    base, settings = tiny("m3diff", root / "base")
    checkpoint = tiny_checkpoint(base, root / "checkpoint", settings)
    return checkpoint, captions_of(checkpoint)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_no_setting_of_a_checkpoint_changes_a_caption(name, plain, tmp_path):
    checkpoint, captions = plain
    copied = Path(shutil.copytree(checkpoint, tmp_path / "copied"))
    add_settings(copied, SETTINGS[name])
    assert captions_of(copied) == captions


@pytest.mark.parametrize("name", ["repetition penalty", "Qwen2 chat", "temperature without sampling", "short"])
def test_a_checkpoint_does_not_take_over_the_settings_of_its_base(name, tmp_path):
    base, settings = tiny("m3diff", tmp_path / "base")
    add_settings(base, SETTINGS[name] | {"eos_token_id": [592, 5]})
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    written = json.loads((checkpoint / GENERATION_CONFIG_FILE).read_text())
    assert decoding_settings(written) == {}
    assert written["eos_token_id"] == load_captioner(checkpoint).processor.end_id
    assert captions_of(checkpoint / ADAPTERS) == captions_of(checkpoint)


@pytest.mark.parametrize("case", slow_except(PUBLISHED_CASES, "m3diff", "blip2idc"))
def test_every_family_gives_the_captions_of_a_base_without_settings(case, tmp_path):
    texts = []
    for name, settings in (("with", EVERYTHING), ("without", {})):
        base, family_settings = tiny(case, tmp_path / name / "base")
        add_settings(base, settings)
        checkpoint = tiny_checkpoint(base, tmp_path / name / "checkpoint", family_settings)
        texts.append(captions_of(checkpoint))
        texts.append(captions_of(checkpoint / ADAPTERS))
    assert texts[0] == texts[2]
    assert texts[1] == texts[3]


def test_predict_caption_and_serve_load_the_same_greedy_model(plain, tmp_path):
    copied = Path(shutil.copytree(plain[0], tmp_path / "copied"))
    add_settings(copied, EVERYTHING)
    compute = load_params(REPOSITORY / "profiles/embedded.yaml").compute
    predicted = load_model(CaptionJob(copied, MAX_NEW_TOKENS, compute)).caption(images_of_pairs())
    pairs = []
    for number, (before, after) in enumerate(images_of_pairs()):
        files = [tmp_path / f"{number}{side}.png" for side in ("a", "b")]
        before.save(files[0])
        after.save(files[1])
        pairs.append(CaptionInput(str(number), tuple(files)))
    answers = answer_inputs(load_captioner(copied, MAX_NEW_TOKENS), pairs, None, 10_000)
    assert predicted == plain[1]
    assert [answer.caption for answer in answers] == plain[1]


@pytest.mark.parametrize("case", ["m3diff without a module", "blip2idc", "blip2idc on Qwen2"])
@pytest.mark.parametrize("export", ["checkpoint", "merged", "hub"])
def test_stock_generate_gives_the_captions_that_were_scored(case, export, tmp_path):
    base, settings = tiny(case, tmp_path / "base")
    add_settings(base, EVERYTHING)
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    family = read_manifest(checkpoint)["family"]
    folder = tmp_path / export
    if export == "merged":
        export_checkpoint(checkpoint, folder, adapters=False)
    if export == "hub":
        folder.mkdir()
        write_model(checkpoint, folder, SHARED[family], MAX_NEW_TOKENS, QUESTION)
    captioner = load_captioner(checkpoint, MAX_NEW_TOKENS)
    assert stock_captions(folder, captioner.processor) == captioner.caption(images_of_pairs())


def test_an_export_drops_the_settings_of_an_older_checkpoint(plain, tmp_path):
    older = Path(shutil.copytree(plain[0], tmp_path / "older"))
    add_settings(older, EVERYTHING)
    export_checkpoint(older, tmp_path / "out", adapters=False)
    assert decoding_settings(json.loads((tmp_path / "out" / GENERATION_CONFIG_FILE).read_text())) == {}
    assert verify_manifest(tmp_path / "out")["family"] == "m3diff"


def test_one_line_names_the_settings_that_are_dropped(plain, tmp_path, caplog):
    copied = Path(shutil.copytree(plain[0], tmp_path / "copied"))
    add_settings(copied, {"repetition_penalty": 1.05, "do_sample": True, "max_new_tokens": 3})
    with caplog.at_level(logging.WARNING, "m3diff.models.decoding"):
        captions_of(copied)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "m3diff.models.decoding"]
    assert str(copied / GENERATION_CONFIG_FILE) in line
    assert "repetition_penalty 1.05" in line
    assert "do_sample True" in line
    assert "max_new_tokens" not in line


def test_nothing_is_dropped_from_the_embedded_base_and_from_a_hub_folder(plain, tmp_path, caplog):
    write_model(plain[0], tmp_path, SHARED["m3diff"], MAX_NEW_TOKENS, QUESTION)
    assert decoding_settings(json.loads((BASE / GENERATION_CONFIG_FILE).read_text())) == {}
    assert decoding_settings(json.loads((tmp_path / GENERATION_CONFIG_FILE).read_text())).keys() == {"max_new_tokens"}
    caplog.clear()
    captions_of(plain[0])
    assert [record for record in caplog.records if record.name == "m3diff.models.decoding"] == []


def test_a_checkpoint_without_settings_keeps_the_bytes_of_its_generation_config(plain):
    written = json.loads((plain[0] / GENERATION_CONFIG_FILE).read_text())
    assert written == json.loads((plain[0].parent / "base" / GENERATION_CONFIG_FILE).read_text())


def test_a_repeated_question_is_encoded_once(plain, monkeypatch):
    captioner = load_captioner(plain[0], MAX_NEW_TOKENS)
    encode_prompt = captioner.processor.encode_prompt
    encoded = []

    def record(turns: Any, marks: Any) -> tuple[int, ...]:
        encoded.append(turns[-1].question)
        return encode_prompt(turns, marks)

    monkeypatch.setattr(captioner.processor, "encode_prompt", record)
    for question in ("What changed?", "What changed?", "Is it gone?"):
        captioner.caption(images_of_pairs(), question)
    assert encoded == ["What changed?", "Is it gone?"]
