"""A family whose classes lack a member is refused before training."""

from typing import Any

import pytest

from m3diff.models.conformity import check_family, missing_arguments
from m3diff.records.errors import ParamsError
from tests.errors import raises


class Config:
    """A configuration with all members of `ModelConfig`."""

    name_or_path = ""
    image_token_index = 1

    def image_tokens_of(self) -> None: ...
    def get_text_config(self) -> None: ...
    def from_folder(self) -> None: ...
    def for_published_base(self) -> None: ...


class Model:
    """A model with all members of `Model`."""

    generation_config = None
    config_class = Config
    config = Config()
    device = "cpu"

    def from_pretrained(self) -> None: ...
    def blank_images(self) -> None: ...
    def generate(self) -> None: ...
    def get_input_embeddings(self) -> None: ...
    def get_output_embeddings(self) -> None: ...
    def save_pretrained(self) -> None: ...
    def forward(self, input_ids, attention_mask, position_ids, tokens, use_cache, logits_to_keep) -> None: ...


class Processor:
    """A processor with all members of `Processor`."""

    tokenizer = None
    places_images = False
    pad_id = 0
    end_id = 1

    def of_folder(self) -> None: ...
    def prepare(self) -> None: ...
    def blank_pair(self) -> None: ...
    def marks(self) -> None: ...
    def encode_prompt(self) -> None: ...
    def encode_answer(self) -> None: ...
    def collate(self) -> None: ...
    def image_inputs(self) -> None: ...
    def token_types(self) -> None: ...
    def decode(self) -> None: ...
    def save_pretrained(self) -> None: ...


def test_classes_with_all_members_are_accepted():
    check_family("toy", Model(), Processor())


@pytest.mark.parametrize(
    ("owner", "member"),
    [
        (Config, "image_tokens_of"),
        (Config, "from_folder"),
        (Model, "generation_config"),
        (Model, "blank_images"),
        (Processor, "places_images"),
        (Processor, "decode"),
    ],
)
def test_a_class_without_a_member_is_refused(owner, member, monkeypatch):
    monkeypatch.delattr(owner, member)
    with raises(ParamsError, "models.member_missing", family="toy", value=owner.__name__, names=[member]):
        check_family("toy", Model(), Processor())


def test_a_forward_without_an_argument_is_refused(monkeypatch):
    def forward(self: Any, input_ids: Any, attention_mask: Any, position_ids: Any, logits_to_keep: Any) -> None: ...

    monkeypatch.setattr(Model, "forward", forward)
    with raises(ParamsError, "models.argument_missing", family="toy", value="Model", names=["tokens", "use_cache"]):
        check_family("toy", Model(), Processor())


def test_a_forward_that_passes_arguments_on_takes_all_of_them():
    def forward(input_ids: Any, **options: Any) -> None: ...

    assert missing_arguments(forward) == []
