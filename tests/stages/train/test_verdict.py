"""The warning at the end of a training that has learned nothing."""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import Fault
from m3diff.stages.train.params import ENOUGH_STEPS
from m3diff.stages.train.stage import nothing_learned_warning
from m3diff.stages.train.verdict import TrainingEnd, can_judge_captions, entropy_of_tokens, judge_learning
from tests.stages.train.toy import recipe
from tests.toy import REPOSITORY

TOKENIZER = REPOSITORY / "data/00_base/tokenizer.json"
END = TrainingEnd(steps=180, epochs=3.0, loss=4.39, val_cider=0.0, model="small")
REMEDIES = [Fault("train.try_another_base"), Fault("train.try_higher_rates", field="models.small.rates")]


def write_split(folder: Path, references: list[str], dataset: str = "toy") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "dataset": [dataset] * len(references),
        "record": [f"{dataset}/{number}" for number in range(len(references))],
        "answer": references,
    }
    pq.write_table(pa.table(rows), folder / f"{dataset}.parquet")


@pytest.fixture
def mixture(tmp_path):
    references = ["the red ball moved", "a big star moved", "the cup is gone", "nothing changed", "a ball left", "one"]
    write_split(tmp_path / "train", references)
    write_split(tmp_path / "val", references)
    return tmp_path


def judge(mixture, caption_val_pairs=32, **changes):
    end = TrainingEnd(**(vars(END) | changes))
    return judge_learning(end, mixture, TOKENIZER, caption_val_pairs)


def test_captions_that_share_nothing_with_their_references_are_a_warning(mixture):
    warning = judge(mixture)
    assert warning.code == "train.nothing_learned"
    assert warning.fields["steps"] == 180
    assert warning.fields["loss"] == 4.39
    assert warning.fields["evidence"] == Fault("train.captions_share_nothing", value=0.0)
    assert warning.fields["remedies"] == [Fault("train.try_more_steps", epochs=10, steps=ENOUGH_STEPS), *REMEDIES]


@pytest.mark.parametrize(
    ("figures", "evidence"),
    [({"val_cider": 0.0}, "train.captions_share_nothing"), ({"val_loss": 20.0}, "train.loss_of_frequencies")],
    ids=["captions", "loss of validation"],
)
def test_a_run_is_judged_by_its_captions_or_else_by_its_validation_loss(figures, evidence, mixture, tmp_path):
    parameters = recipe(TOKENIZER.parent, scratch=tmp_path, caption_val_pairs=5, epochs=3)
    figures = {"steps": 180, "loss": 0.5, "val_loss": None, "val_cider": None} | figures
    warning = nothing_learned_warning(parameters.cfg, parameters.compute, figures, mixture)
    assert warning is not None
    assert warning.fields["evidence"].code == evidence
    more_steps, _, higher_rates = warning.fields["remedies"]
    assert more_steps.fields["epochs"] == 10
    assert higher_rates.fields["field"] == "models.tiny.rates"


def test_a_run_whose_training_loss_fell_has_learned(mixture, tmp_path):
    parameters = recipe(TOKENIZER.parent, scratch=tmp_path)
    figures = {"steps": 180, "loss": 0.5, "val_loss": None, "val_cider": None}
    assert nothing_learned_warning(parameters.cfg, parameters.compute, figures, mixture) is None


def test_more_steps_are_no_remedy_for_a_long_run(mixture):
    assert judge(mixture, steps=5000).fields["remedies"] == REMEDIES


def test_captions_that_share_words_with_their_references_are_enough(mixture):
    assert judge(mixture, val_cider=0.4, loss=20.0) is None


@pytest.mark.parametrize(
    ("loss", "warns"), [pytest.param(20.0, True, id="worse than guessing"), pytest.param(0.5, False, id="better")]
)
def test_without_captions_the_loss_decides(mixture, loss, warns):
    assert (judge(mixture, val_cider=None, loss=loss) is not None) == warns


def test_captions_of_too_few_pairs_decide_nothing(mixture):
    assert judge(mixture, caption_val_pairs=4, val_cider=0.0, loss=0.5) is None


def test_captions_of_five_pairs_are_enough(mixture):
    assert judge(mixture, caption_val_pairs=5, val_cider=0.0, loss=0.5).code == "train.nothing_learned"


def test_references_that_are_all_the_same_have_no_cider(tmp_path):
    write_split(tmp_path, ["nothing changed"] * 8)
    assert not can_judge_captions(tmp_path, 32)


def test_captioned_pairs_are_counted_by_dataset(tmp_path):
    write_split(tmp_path, ["one", "two", "three", "four"], "first")
    write_split(tmp_path, ["five", "six", "seven", "eight"], "second")
    assert can_judge_captions(tmp_path, 3)
    assert not can_judge_captions(tmp_path, 2)


def test_the_entropy_is_that_of_tokens_and_ends(tmp_path):
    write_split(tmp_path, ["ball", "ball"])
    tokens = ids("ball")
    assert len(set(tokens)) == len(tokens)
    assert entropy_of_tokens(tmp_path, TOKENIZER) == pytest.approx(math.log(len(tokens) + 1)), "each as often as an end"


def test_a_split_without_references_has_no_entropy_and_no_captions_to_judge(tmp_path):
    write_split(tmp_path, [])
    assert entropy_of_tokens(tmp_path, TOKENIZER) is None
    assert not can_judge_captions(tmp_path, 32)


def ids(text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("tokenizer", [TOKENIZER, Path("none")], ids=["no reference", "no tokenizer"])
def test_what_cannot_be_judged_is_not(mixture, tokenizer):
    folder = mixture / "empty" if tokenizer is TOKENIZER else mixture
    end = TrainingEnd(**(vars(END) | {"val_cider": None, "loss": 20.0}))
    assert judge_learning(end, folder, tokenizer, 32) is None
