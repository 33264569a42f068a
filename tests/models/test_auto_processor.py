"""The processor of the family `auto`, compared with the base's own processor on tiny bases of nine architectures."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_num2words_available, is_torchvision_available

from m3diff.models.auto_processor import CHOICES, TOKEN_INPUTS, TOKEN_TYPES, ChatTemplateProcessor, smaller_settings
from m3diff.models.cached_prompts import rope_positions
from m3diff.models.conformity import missing_members_of
from m3diff.models.contract import Processor
from m3diff.models.prepared import Prepared
from m3diff.models.stock_processor import PIL, StockProcessor
from m3diff.records.errors import DataError, ParamsError, ValueFault
from m3diff.records.sample import Turn
from tests.conftest import MadeOnce
from tests.errors import raises
from tests.tiers import slow_except
from tests.tiny import noise_image
from tests.tiny_vlm import (
    BASES,
    QWEN_TEMPLATE,
    QWEN_THINKING_TEMPLATE,
    TEMPLATES,
    lfm2_vl_processor,
    minichange_pairs,
    tiny_vlm,
    train_tokenizer,
)

CPU = torch.device("cpu")
QUICK = ("qwen3_vl", "gemma3")
EVERY_BASE = slow_except(BASES, *QUICK)
WITH_PIL = slow_except([name for name in BASES if name != "lfm2_vl"], *QUICK)
QUESTION = "What has changed from the first image to the second?"


class Dialogue(NamedTuple):
    """A dialogue as this project stores it, and as the messages that transformers takes.

    Attributes:
        images: the images.
        turns: the turns.
        messages: the content of each message. Users and assistants write by turns. "image" stands for the next image.
    """

    images: tuple[Image.Image, ...]
    turns: tuple[Turn, ...]
    messages: list[list[str]]


def dialogues() -> dict[str, Dialogue]:
    square_pair, wide_pair = (pair.images for pair in minichange_pairs()[:2])
    first_answer = minichange_pairs()[0].captions[0]
    return {
        "pair": Dialogue(square_pair, (Turn(QUESTION),), [["image", "image", QUESTION]]),
        "pair of two sizes": Dialogue(
            (square_pair[0], wide_pair[1]), (Turn(QUESTION),), [["image", "image", QUESTION]]
        ),
        "one image": Dialogue(wide_pair[:1], (Turn("What is it?"),), [["image", "What is it?"]]),
        "text": Dialogue((), (Turn("Say red."),), [["Say red."]]),
        "marks in the text": Dialogue(
            wide_pair,
            (Turn("What is in <image> that is not in <image>, and where?"),),
            [["What is in ", "image", " that is not in ", "image", ", and where?"]],
        ),
        "two turns": Dialogue(
            square_pair,
            (Turn(QUESTION, first_answer), Turn("Where?")),
            [["image", "image", QUESTION], [first_answer], ["Where?"]],
        ),
    }


def own_inputs(processor: ChatTemplateProcessor, dialogue: Dialogue) -> dict[str, Any]:
    """Return what the base's own processor makes of a dialogue in a single call."""
    images = iter(dialogue.images)
    messages = []
    for number, contents in enumerate(dialogue.messages):
        parts = []
        for content in contents:
            is_image = content == "image"
            parts.append({"type": "image", "image": next(images)} if is_image else {"type": "text", "text": content})
        messages.append({"role": "assistant" if number % 2 else "user", "content": parts})
    return dict(
        processor.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **processor.template,
        )
    )


Base = Callable[[str], Path]


@pytest.fixture
def base(made_once: MadeOnce) -> Base:
    """Return a function that writes a base once and returns its folder."""
    return lambda name: made_once(f"vlm_{name}", lambda folder: tiny_vlm(name, folder))


Load = Callable[..., ChatTemplateProcessor]


@pytest.fixture
def load(base: Base, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads the processor of a base."""

    def load_processor(name: str, folder: Path | None = None, **arguments: Any) -> ChatTemplateProcessor:
        folder = folder or base(name)
        config = transformers.AutoConfig.from_pretrained(base(name), trust_remote_code=False)
        if name == "smolvlm" and not is_num2words_available():
            # only videos use the package
            monkeypatch.setattr(processing_smolvlm, "num2words", str)
        if name == "lfm2_vl":
            stock = StockProcessor(lfm2_vl_processor(folder), PIL, video_file=None, has_image_file=True)
            return ChatTemplateProcessor(stock, folder, config.image_token_id)
        arguments = {"template": TEMPLATES.get(name)} | arguments
        return ChatTemplateProcessor.of_folder(str(folder), config, **arguments)

    return load_processor


@pytest.fixture
def qwen(load: Load) -> ChatTemplateProcessor:
    return load("qwen3_vl")


def copied(folder: Path, target: Path) -> Path:
    """Return a copy of a base that a test may change."""
    return Path(shutil.copytree(folder, target))


def image_tensors(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if name not in TOKEN_INPUTS}


def assert_equal_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_processor_has_all_members_of_the_protocol(qwen: ChatTemplateProcessor) -> None:
    assert missing_members_of(qwen, Processor) == []


# Prompts and images


@pytest.mark.parametrize("case", dialogues())
@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_prompt_and_its_images_are_those_of_the_bases_own_processor(load: Load, name: str, case: str) -> None:
    processor = load(name)
    dialogue = dialogues()[case]
    prepared = processor.prepare(dialogue.images)
    if case == "marks in the text" and not processor.places_images:
        with raises(ValueFault, "models.template_puts_images_first", value=2):
            processor.encode_prompt(dialogue.turns, prepared.marks)
        return
    expected = own_inputs(processor, dialogue)
    ids = processor.encode_prompt(dialogue.turns, prepared.marks)
    assert list(ids) == expected["input_ids"][0].tolist()
    assert_equal_tensors(prepared.tensors, image_tensors(expected))
    types = processor.token_types(torch.tensor([list(ids)]))
    for type_name in TOKEN_TYPES:
        if type_name in types or (type_name in expected and expected[type_name].any()):
            assert torch.equal(types[type_name], expected[type_name])


@pytest.mark.parametrize("name", EVERY_BASE)
def test_the_model_gives_the_logits_of_its_own_inputs_and_positions(load: Load, base: Base, name: str) -> None:
    processor = load(name)
    model = transformers.AutoModelForImageTextToText.from_pretrained(base(name), trust_remote_code=False).eval()
    dialogue = dialogues()["pair of two sizes"]
    prepared = processor.prepare(dialogue.images)
    ids = processor.encode_prompt(dialogue.turns, prepared.marks)
    images = processor.image_inputs(processor.collate([prepared]), CPU)
    inputs = own_inputs(processor, dialogue)
    if processor.token_type_name != "token_type_ids":
        inputs.pop("token_type_ids", None)  # of the tiny tokenizer's class; not of the published tokenizers
    positions = torch.arange(len(ids))[None]
    if hasattr(model.model, "get_rope_index"):
        positions = rope_positions(model.model, processor, ids, images)
    with torch.no_grad():
        expected = model(**inputs).logits
        logits = model(
            input_ids=torch.tensor([ids]),
            position_ids=positions,
            **processor.token_types(torch.tensor([list(ids)])),
            **images,
        ).logits
    assert logits.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY_BASE)
def test_image_sets_of_other_sizes_and_counts_are_collated_as_by_the_processor(load: Load, name: str) -> None:
    processor = load(name)
    image_sets = [minichange_pairs()[0].images, minichange_pairs()[1].images[:1]]
    texts = [processor.image_token * len(images) for images in image_sets]
    expected = processor.processor(text=texts, images=[list(s) for s in image_sets], padding=True, return_tensors="pt")
    collated = processor.collate([processor.prepare(images) for images in image_sets])
    assert_equal_tensors(collated, image_tensors(dict(expected)))


@pytest.mark.parametrize(("name", "padding"), [("pixel_values", 0), ("image_position_ids", -1)])
def test_tensors_of_other_sizes_are_padded_at_the_end(qwen: ChatTemplateProcessor, name: str, padding: int) -> None:
    small = Prepared({name: torch.ones(1, 2, 1, dtype=torch.int64)}, ("mark",))
    large = Prepared({name: torch.ones(2, 1, 3, dtype=torch.int64)}, ("mark", "mark"))
    collated = qwen.collate([small, large])[name]
    assert collated[0].tolist() == [[1, padding, padding], [1, padding, padding]]
    assert collated[1].tolist() == [[1, 1, 1], [padding, padding, padding]]
    assert collated.shape == (3, 2, 3)


def test_image_sets_without_images_are_left_out_of_a_batch(qwen: ChatTemplateProcessor) -> None:
    pair = qwen.prepare(minichange_pairs()[0].images)
    text = qwen.prepare(())
    assert qwen.collate([text]) == {}
    assert_equal_tensors(qwen.collate([text, pair, text]), pair.tensors)


def test_the_images_of_an_iterator_that_reuses_one_image_are_prepared(qwen: ChatTemplateProcessor) -> None:
    before, after = minichange_pairs()[0].images
    image = before.copy()

    def images() -> Any:
        yield image
        image.paste(after)
        yield image

    assert_equal_tensors(qwen.prepare(images()).tensors, qwen.prepare((before, after)).tensors)


@pytest.mark.parametrize("name", EVERY_BASE)
def test_no_image_has_more_tokens_than_the_largest_marks(load: Load, name: str) -> None:
    processor = load(name)
    for images in (1, 2):
        most_tokens = len(processor.encode_prompt((Turn(QUESTION),), processor.marks(images)))
        for width, height in ((8, 8), (64, 64), (90, 30), (40, 160), (300, 220), (150, 1000)):
            prepared = processor.prepare([noise_image(1, (width, height))] * images)
            assert len(processor.encode_prompt((Turn(QUESTION),), prepared.marks)) <= most_tokens


def test_the_largest_marks_are_made_from_small_images(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 16_777_216  # that of the published processor
    processor = load("qwen3_vl", settings={"max_pixels": limit})
    sizes = []
    own_prepare = processor.prepare

    def prepare(images: list[Image.Image]) -> Any:
        sizes.extend(image.size for image in images)
        return own_prepare(images)

    monkeypatch.setattr(processor, "prepare", prepare)
    assert processor.marks(2) == ("<|image_pad|>" * (limit // 32**2),) * 2
    assert max(width * height for width, height in sizes) < 100_000


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_pair_of_two_sizes_gets_one_grid_only_on_request(load: Load, name: str) -> None:
    processor = load(name)
    before = noise_image(1, (96, 96))
    after = noise_image(2, (128, 80))
    resized = after.resize(before.size, Image.Resampling.BICUBIC)
    assert_equal_tensors(processor.prepare((before, after)).tensors, image_tensors(own_pair(processor, before, after)))
    processor.one_grid = True
    prepared = processor.prepare((before, after))
    assert_equal_tensors(prepared.tensors, image_tensors(own_pair(processor, before, resized)))
    assert prepared.marks[0] == prepared.marks[1]


def own_pair(processor: ChatTemplateProcessor, before: Image.Image, after: Image.Image) -> dict[str, Any]:
    return own_inputs(processor, Dialogue((before, after), (), [["image", "image", QUESTION]]))


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_large_image_is_scaled_down_and_a_small_one_is_not(load: Load, name: str) -> None:
    if name == "lfm2_vl":
        pytest.skip("the stand-in for the image processor resizes without its methods")
    processor = load(name)
    large = noise_image(1, (400, 300))
    small = noise_image(2, (32, 32))
    _, scales = processor.prepare_with_scales((large, small))
    assert scales[0] < 0.7
    assert scales[1] >= 1


def test_the_scale_of_an_image_that_gets_the_grid_of_another_includes_both_resizes(load: Load) -> None:
    processor = load("qwen3_vl", one_grid=True)
    prepared, scales = processor.prepare_with_scales([noise_image(1, (64, 64)), noise_image(2, (128, 128))])
    assert prepared.tensors["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    assert scales == (1, 0.5)


def test_the_scale_is_unknown_if_the_processor_resizes_without_its_methods(load: Load) -> None:
    _, scales = load("lfm2_vl").prepare_with_scales([noise_image(1, (128, 128))])
    assert scales == (None,)


def test_the_scale_is_that_of_the_grid(qwen: ChatTemplateProcessor) -> None:
    prepared, (scale,) = qwen.prepare_with_scales([noise_image(1, (400, 300))])
    _, rows, columns = prepared.tensors["image_grid_thw"][0].tolist()
    assert scale == pytest.approx((rows * columns * 16 * 16 / (400 * 300)) ** 0.5)


@pytest.mark.parametrize("name", EVERY_BASE)
def test_image_tokens_are_counted_as_the_model_replaces_them(load: Load, name: str) -> None:
    processor = load(name)
    prepared = processor.prepare(minichange_pairs()[1].images)
    ids = processor.encode_prompt((Turn(QUESTION),), prepared.marks)
    count = sum(processor.tokenizer(mark)["input_ids"].count(processor.image_token_id) for mark in prepared.marks)
    assert processor.count_image_tokens(ids) == count > 0
    assert processor.count_image_tokens(processor.encode_prompt((Turn(QUESTION),), ())) == 0


@pytest.mark.parametrize("name", EVERY_BASE)
def test_the_blank_pair_is_black(load: Load, name: str) -> None:
    processor = load(name)
    black = Image.new("RGB", (64, 64))
    assert_equal_tensors(processor.blank_pair().tensors, processor.prepare((black, black)).tensors)


# Answers


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_prompt_with_its_answer_is_the_dialogue_of_the_template(load: Load, name: str) -> None:
    processor = load(name)
    answer = minichange_pairs()[0].captions[1]
    prompt = processor.encode_prompt((Turn(QUESTION),), ())
    text = processor.tokenizer.decode([*prompt, *processor.encode_answer(answer)])
    messages = []
    for role, content in (("user", QUESTION), ("assistant", answer)):
        messages.append({"role": role, "content": [{"type": "text", "text": content}]})
    rendered = processor.processor.apply_chat_template(messages, **processor.template)
    if name == "llava_onevision":  # its template asks otherwise than it writes an answer
        rendered = rendered.replace("assistant \n", "assistant\n")
    assert text == rendered.rstrip("\n")


def test_what_a_template_puts_before_an_answer_belongs_to_the_answer(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    blank = "{{ ' ' if m.role == 'assistant' else '' }}"
    template = QWEN_TEMPLATE.replace("{% if m.content is string %}", blank + "{% if m.content is string %}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    processor = load("qwen3_vl", folder)
    assert processor.tokenizer.decode(processor.encode_answer("yes")) == " yes<|im_end|>"
    assert processor.decode(torch.tensor([processor.encode_answer("yes")])) == ["yes"]


def test_an_answer_follows_the_text_that_the_template_asks_with(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    template = QWEN_TEMPLATE.replace("+m.role+'\n'", "+m.role+' \n'")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    processor = load("qwen3_vl", folder)
    assert processor.tokenizer.decode(processor.encode_answer("yes")) == "yes<|im_end|>"


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_generated_answer_is_decoded_without_its_end_token(load: Load, name: str) -> None:
    processor = load(name)
    tokens = torch.tensor([[*processor.encode_answer("the red box turned blue"), processor.pad_id]])
    assert processor.decode(tokens) == ["the red box turned blue"]


def test_the_template_places_images_except_those_of_llava_onevision(load: Load) -> None:
    assert load("qwen3_vl").places_images
    assert not load("llava_onevision").places_images


# Saving and loading


@pytest.mark.parametrize("name", WITH_PIL)
def test_a_saved_processor_gives_equal_inputs(load: Load, name: str, tmp_path: Path) -> None:
    processor = load(name, one_grid=True)
    processor.save_pretrained(tmp_path)
    reloaded = load(name, tmp_path, template=None)
    assert type(reloaded.processor) is type(processor.processor)
    assert reloaded.one_grid
    assert reloaded.processor.chat_template == processor.processor.chat_template
    dialogue = dialogues()["pair of two sizes"]
    prepared = processor.prepare(dialogue.images)
    assert reloaded.prepare(dialogue.images).marks == prepared.marks
    assert_equal_tensors(reloaded.prepare(dialogue.images).tensors, prepared.tensors)
    prompt = processor.encode_prompt(dialogue.turns, prepared.marks)
    assert reloaded.encode_prompt(dialogue.turns, prepared.marks) == prompt
    assert reloaded.encode_answer("yes") == processor.encode_answer("yes")


@pytest.mark.parametrize("name", WITH_PIL)
def test_transformers_loads_the_bases_own_classes_from_a_saved_folder(
    load: Load, base: Base, name: str, tmp_path: Path
) -> None:
    processor = load(name)
    shutil.copy(base(name) / "config.json", tmp_path)
    processor.save_stock(tmp_path)
    assert not (tmp_path / CHOICES).exists()
    for path in tmp_path.iterdir():
        assert "m3diff" not in path.read_text()
    image_processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend=PIL, trust_remote_code=False)
    assert type(image_processor) is type(processor.processor.image_processor)
    assert image_processor.to_dict() == processor.processor.image_processor.to_dict()
    needs_torchvision = "video_processor" in type(processor.processor).get_attributes()
    if needs_torchvision and not is_torchvision_available():
        configuration = json.loads((tmp_path / "processor_config.json").read_text())
        assert configuration["processor_class"] == type(processor.processor).__name__
        return
    own_processor = transformers.AutoProcessor.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(own_processor) is type(processor.processor)
    assert own_processor.chat_template == processor.processor.chat_template


@pytest.mark.parametrize("name", WITH_PIL)
def test_the_configuration_of_the_video_processor_is_kept(load: Load, base: Base, name: str, tmp_path: Path) -> None:
    load(name, settings={"do_convert_rgb": True}).save_pretrained(tmp_path)
    own_file = base(name) / "video_preprocessor_config.json"
    saved_file = tmp_path / own_file.name
    assert saved_file.is_file() == own_file.is_file()
    if own_file.is_file():
        assert saved_file.read_bytes() == own_file.read_bytes()
    configuration = json.loads((tmp_path / "processor_config.json").read_text())
    expected = BASES[name]().files
    nested = expected.get("processor_config.json", {}).get("video_processor")
    separate = expected.get("video_preprocessor_config.json") or expected.get("preprocessor_config.json")
    has_videos = "video_processor" in type(load(name).processor).get_attributes()
    assert configuration.get("video_processor") == ((nested or separate) if has_videos else None)


def test_settings_are_saved_with_the_processor(load: Load, tmp_path: Path) -> None:
    image = noise_image(1, (320, 320))
    load("qwen3_vl", settings={"max_pixels": 64 * 64}).save_pretrained(tmp_path)
    for file in ("processor_config.json", "preprocessor_config.json"):
        configuration = json.loads((tmp_path / file).read_text())
        assert configuration.get("image_processor", configuration)["size"]["longest_edge"] == 64 * 64
    reloaded = load("qwen3_vl", tmp_path)
    assert reloaded.prepare([image]).marks == ("<|image_pad|>" * 4,)
    assert load("qwen3_vl").prepare([image]).marks == ("<|image_pad|>" * 25,)


def test_arguments_of_the_template_are_saved_with_the_processor(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": QWEN_THINKING_TEMPLATE}))
    load("qwen3_vl", folder, template={"enable_thinking": False}).save_pretrained(tmp_path / "saved")
    shutil.copy(folder / "config.json", tmp_path / "saved")
    reloaded = load("qwen3_vl", tmp_path / "saved", template=None)
    assert reloaded.render_prompt((Turn("Why?"),), 0).endswith("<think>\n\n</think>\n\n")


def test_the_image_processor_for_pillow_is_used_and_no_class_is_changed(qwen: ChatTemplateProcessor) -> None:
    own_class = transformers.Qwen3VLProcessor
    assert type(qwen.processor) is own_class
    assert type(qwen.processor.image_processor) is transformers.Qwen2VLImageProcessorPil
    assert own_class.check_argument_for_proper_class is transformers.ProcessorMixin.check_argument_for_proper_class
    assert qwen.stock.backend == PIL


# Bad input


def test_videos_are_refused(qwen: ChatTemplateProcessor) -> None:
    with raises(ValueFault, "models.videos_not_taken"):
        qwen.processor(text=["<|video_pad|>"], videos=[torch.zeros(4, 3, 32, 32)])


def test_the_processor_of_another_model_is_refused(base: Base) -> None:
    config = transformers.AutoConfig.from_pretrained(base("qwen3_vl"), trust_remote_code=False)
    config.image_token_id = config.video_token_id
    folder = base("qwen3_vl")
    with raises(
        DataError, "models.processor_of_other_model", path=folder, value="<|image_pad|>", expected="<|video_pad|>"
    ):
        ChatTemplateProcessor.of_folder(str(folder), config)


def test_a_tokenizer_without_the_image_token_is_refused(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    train_tokenizer(["<|endoftext|>", "<|im_end|>"], "<|im_end|>", "<|endoftext|>").save_pretrained(folder)
    with raises(DataError, "models.tokenizer_without_image_token", path=folder, value="<|image_pad|>"):
        load("qwen3_vl", folder)


BAD_TEMPLATES = {
    "asks to think": (QWEN_THINKING_TEMPLATE, "models.template_asks_to_think"),
    "raises an error": ("{{ raise_exception('no system prompt') }}", "models.template_not_rendered"),
    "is not Jinja": ("{% if %}", "models.template_not_rendered"),
    "leaves out answers": ("{{ messages[0].content[0].text }}", "models.template_without_answers"),
    "ends answers with text": (
        "{% for m in messages %}{{m.content[0].text}} END {% endfor %}",
        "models.template_without_end",
    ),
}


@pytest.mark.parametrize(("template", "code"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_cannot_be_used_is_refused(
    load: Load, base: Base, tmp_path: Path, template: str, code: str
) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with raises(DataError, code, path=folder):
        load("qwen3_vl", folder)


def test_a_base_without_a_chat_template_is_refused(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "chat_template.json").unlink()
    with raises(DataError, "models.no_chat_template", path=folder):
        load("qwen3_vl", folder)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
def test_a_text_with_an_image_token_is_refused(qwen: ChatTemplateProcessor, token: str) -> None:
    text = f"what is {token}?"
    with raises(ValueFault, "models.text_with_image_token", value=token):
        qwen.encode_prompt((Turn(text),), ())
    with raises(ValueFault, "models.text_with_image_token", value=token):
        qwen.encode_prompt((Turn("What?", text), Turn("Where?")), ())
    with raises(ValueFault, "models.text_with_image_token", value=token):
        qwen.encode_answer(text)


@pytest.mark.parametrize("count", [0, 1])
def test_more_or_fewer_marks_than_images_are_refused(qwen: ChatTemplateProcessor, count: int) -> None:
    with raises(ValueFault, "models.marks_without_images", value=2, expected=count):
        qwen.encode_prompt((Turn("<image> or <image>?"),), qwen.marks(count))


def test_an_image_that_no_grid_fits_is_refused(qwen: ChatTemplateProcessor) -> None:
    images = [noise_image(1), noise_image(2, (1, 5000))]
    with raises(ValueFault, "models.image_without_grid", value=["40 x 40", "1 x 5000"]) as caught:
        qwen.prepare(images)
    assert "aspect ratio" in caught.value.fields["cause"]


def test_an_unknown_setting_is_refused(load: Load) -> None:
    with raises(ParamsError, "models.unknown_processor_setting", field="processor.max_pixel") as caught:
        load("qwen3_vl", settings={"max_pixel": 100})
    assert "max_pixels" in caught.value.fields["names"]
    assert "return_tensors" not in caught.value.fields["names"]


def test_a_setting_that_the_processor_always_replaces_is_refused(load: Load) -> None:
    with raises(ParamsError, "models.processor_setting_fixed", field="processor.do_pan_and_scan", expected=False):
        load("gemma3", settings={"do_pan_and_scan": True})
    load("gemma3", settings={"do_pan_and_scan": False})


def test_a_value_that_the_processor_refuses_is_a_fault_of_the_settings(load: Load) -> None:
    with raises(ParamsError, "models.processor_setting_refused", field="processor"):
        load("qwen3_vl", settings={"size": "large"})


@pytest.mark.parametrize("name", ["enable_thinkin", "tokenize", "enable"])
def test_an_argument_that_the_template_does_not_use_is_refused(
    load: Load, base: Base, tmp_path: Path, name: str
) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": QWEN_THINKING_TEMPLATE}))
    with raises(ParamsError, "models.unknown_template_argument", field=f"template.{name}"):
        load("qwen3_vl", folder, template={name: False})


@pytest.mark.parametrize("content", ["{}", "[]", '{"image_backend": "gpu", "one_grid": false}'])
def test_damaged_choices_are_refused(load: Load, base: Base, tmp_path: Path, content: str) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / CHOICES).write_text(content)
    with raises(DataError, "models.wrong_choices", path=folder / CHOICES):
        load("qwen3_vl", folder)


def test_a_folder_without_a_processor_is_refused(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "preprocessor_config.json").write_text('{"processor_class": "CLIPTokenizer"}')
    with raises(DataError, "models.no_processor_of_images", path=folder, value="CLIPTokenizer"):
        load("qwen3_vl", folder)


def test_a_tokenizer_of_sound_is_not_loaded_from_elsewhere(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / "audio_tokenizer_config.json").write_text('{"audio_tokenizer_class": "DacModel"}')
    with raises(DataError, "models.processor_part_not_supported", path=folder, value="audio_tokenizer"):
        load("qwen3_vl", folder)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_an_image_processor_that_needs_torchvision_says_so(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "preprocessor_config.json").write_text(json.dumps(BASES["lfm2_vl"]().files["preprocessor_config.json"]))
    with raises(DataError, "models.processor_needs_torchvision", path=folder, version=torch.__version__):
        StockProcessor.of_folder(folder)


@pytest.mark.skipif(is_num2words_available(), reason="num2words is installed")
def test_a_processor_that_needs_another_package_says_so(base: Base) -> None:
    with raises(DataError, "models.processor_needs_package", path=base("smolvlm")) as caught:
        StockProcessor.of_folder(base("smolvlm"))
    assert "num2words" in caught.value.fields["cause"]


def test_a_processor_that_does_not_represent_images_as_text_is_refused(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    configuration = {"processor_class": "BlipProcessor", "image_processor_type": "BlipImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(configuration))
    with raises(DataError, "models.processor_without_replacements", path=folder, value="BlipProcessor"):
        load("qwen3_vl", folder)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_class_of_processors_that_needs_torchvision_says_so(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "PixtralProcessor"}')
    with raises(DataError, "models.processor_needs_torchvision", path=tmp_path, version=torch.__version__):
        StockProcessor.of_folder(tmp_path)


def test_a_processor_that_changes_prompts_is_refused(load: Load, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    own_method = transformers.Qwen3VLProcessor.get_text_with_replacements

    def add_newline(self: Any, text: list[str], *arguments: Any, **keywords: Any) -> Any:
        return own_method(self, [prompt + "\n" for prompt in text], *arguments, **keywords)

    monkeypatch.setattr(transformers.Qwen3VLProcessor, "get_text_with_replacements", add_newline)
    with raises(DataError, "models.processor_changes_prompts", path=base("qwen3_vl"), value="Qwen3VLProcessor"):
        load("qwen3_vl")


@pytest.mark.parametrize("file", ["preprocessor_config.json", "video_preprocessor_config.json"])
@pytest.mark.parametrize("content", ["[1]", "{", '"text"'])
def test_a_damaged_configuration_is_refused(load: Load, base: Base, tmp_path: Path, file: str, content: str) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    (folder / file).write_text(content)
    with raises(DataError, "models.not_json", path=folder / file):
        load("qwen3_vl", folder)


def test_a_processor_whose_settings_do_not_work_is_refused(load: Load, base: Base, tmp_path: Path) -> None:
    folder = copied(base("qwen3_vl"), tmp_path / "base")
    configuration = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(configuration | {"patch_size": 0}))
    with raises(DataError, "models.processor_fails", path=folder):
        load("qwen3_vl", folder)


@pytest.mark.parametrize(
    ("name", "value", "smaller_values"),
    [
        ("max_pixels", 1024, [256, 512]),
        ("max_patches", 3, [1]),
        ("max_patches", 1, []),
        ("max_pixels", None, [100]),
        ("min_pixels", None, []),
        ("size", {"height": 64, "width": 32, "unit": "px"}, [{"height": 16, "width": 8}, {"height": 32, "width": 16}]),
        ("size", {}, []),
        ("grids", ["a", "b", "c"], [["a"]]),
        ("do_pan_and_scan", True, [False]),
        ("do_pan_and_scan", False, []),
        ("do_resize", True, []),
        ("resample", "bicubic", []),
    ],
)
def test_a_setting_is_tried_with_a_quarter_and_half_of_its_value(name, value, smaller_values):
    assert smaller_settings(name, value, pixels=6400) == smaller_values
