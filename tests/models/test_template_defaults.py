"""Arguments that are written into a chat template act as if they were passed to it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from m3diff.models.auto_processor import ChatTemplateProcessor
from m3diff.models.template_defaults import jinja_literal, with_defaults
from m3diff.records.sample import Turn
from tests.auto_cases import load_processor
from tests.tiny_vlm import QWEN_TEMPLATE, QWEN_THINKING_TEMPLATE, tiny_vlm

QUESTION = "What changed?"
CONTENT = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
MESSAGES = [{"role": "user", "content": CONTENT}]
TEMPLATES = {
    "a thought": QWEN_THINKING_TEMPLATE,
    "a blank line first": "\n" + QWEN_THINKING_TEMPLATE,
    "blanks first": "   " + QWEN_THINKING_TEMPLATE,
    "a comment first": "{# of the base #}\n" + QWEN_THINKING_TEMPLATE,
    "a default": "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}\n"
    + QWEN_THINKING_TEMPLATE,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen3_5", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(base)


def render(tokenizer: Any, template: str, **arguments: Any) -> str:
    return tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, add_generation_prompt=True, tokenize=False, **arguments
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_with_defaults_renders_as_with_these_arguments(tokenizer: Any, name: str) -> None:
    template = TEMPLATES[name]
    expected = render(tokenizer, template, enable_thinking=False)
    assert expected != render(tokenizer, template)
    assert render(tokenizer, with_defaults(template, {"enable_thinking": False})) == expected


def test_an_argument_of_a_call_replaces_the_default(tokenizer: Any) -> None:
    template = with_defaults(QWEN_THINKING_TEMPLATE, {"enable_thinking": False})
    assert render(tokenizer, template, enable_thinking=True) == render(tokenizer, QWEN_THINKING_TEMPLATE)


@pytest.mark.parametrize(
    "value", [True, None, 2, -0.5, "a 'b' \"c\"\n\\n é 😀", ["a", 1], {"a": [None, False]}], ids=repr
)
def test_a_value_reaches_the_template_unchanged(tokenizer: Any, value: Any) -> None:
    template = "{{ argument == expected }} {{ argument }}"
    text = with_defaults(template, {"argument": value})
    assert render(tokenizer, text, expected=value) == f"True {value}"
    assert jinja_literal(None) == "none"


def test_the_defaults_of_a_new_training_come_first_and_are_written_once(tokenizer: Any) -> None:
    trained = with_defaults(QWEN_THINKING_TEMPLATE, {"enable_thinking": False})
    assert with_defaults(trained, {"enable_thinking": False}) == trained
    assert render(tokenizer, with_defaults(trained, {"enable_thinking": True})).endswith("<think>\n")


def test_a_template_without_arguments_is_unchanged() -> None:
    assert with_defaults(QWEN_TEMPLATE, {}) == QWEN_TEMPLATE


def test_transformers_renders_the_prompts_of_the_training_from_a_saved_folder(base: Path, tmp_path: Path) -> None:
    processor: ChatTemplateProcessor = load_processor("qwen3_5", base)
    own_template = transformers.AutoTokenizer.from_pretrained(base).chat_template
    trained_prompt = processor.render_prompt((Turn(QUESTION),), 2)
    processor.save_pretrained(tmp_path)
    saved_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = saved_tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert prompt == trained_prompt
    assert prompt == render(saved_tokenizer, own_template, enable_thinking=False)
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_a_training_that_starts_from_a_saved_folder_keeps_the_defaults(base: Path, tmp_path: Path) -> None:
    processor = load_processor("qwen3_5", base)
    processor.save_pretrained(tmp_path)
    shutil.copy(base / "config.json", tmp_path)
    config = transformers.AutoConfig.from_pretrained(base)
    started = ChatTemplateProcessor.of_folder(str(tmp_path), config, template={})
    assert started.render_prompt((Turn(QUESTION),), 2) == processor.render_prompt((Turn(QUESTION),), 2)
