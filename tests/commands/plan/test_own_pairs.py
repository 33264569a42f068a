"""The plan of one's own pairs before there is a mixture: their annotation files, as ingest and convert take them."""

import json
from dataclasses import replace

import pytest

from m3diff.commands.plan import make_plan
from m3diff.commands.plan.find_workload import workload_of_datasets
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.params import MixtureSource
from tests.commands.plan.conftest import convert_section, entries
from tests.errors import raises
from tests.toy import REPOSITORY

QUESTIONS = REPOSITORY / "profiles" / "questions.yaml"
CONVERT = convert_section(questions=QUESTIONS)


@pytest.fixture
def photographs(tmp_path):
    """60 pairs of two captions each, of which 48 train; one of these has an empty caption, one the same twice."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    rows = []
    for number in range(60):
        captions = [f"cup {number} is gone", f"somebody took cup {number} from the table"]
        rows.append(
            {
                "before": f"before/{number}.png",
                "after": f"after/{number}.png",
                "captions": captions,
                "split": "train" if number < 48 else "test",
            }
        )
    rows[0]["captions"][1] = ""
    rows[1]["captions"][1] = rows[1]["captions"][0]
    (folder / "pairs.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def own_entries(photographs):
    return entries("photographs=pairs", root=photographs, options={"manifest": "pairs.json"})


def test_the_pairs_and_captions_that_train_are_counted_without_an_image(own_entries):
    workload = workload_of_datasets(own_entries, CONVERT)
    assert workload.counts_by_dataset == {"photographs": (48, 94)}
    assert workload.groups[0].pairs_by_references == {1: 2, 2: 46}
    assert "photographs" in workload.origin


@pytest.mark.parametrize(
    ("source", "pairs", "references"),
    [
        pytest.param(MixtureSource(weight=2), 96, 188, id="each pair twice"),
        pytest.param(MixtureSource(max_pairs=10, references_per_question=1), 10, 10, id="caps"),
        pytest.param(MixtureSource(samples="joined"), 48, 48, id="joined"),
    ],
)
def test_weights_and_caps_of_convert_apply(own_entries, source, pairs, references):
    convert = CONVERT.model_copy(update={"sources": {"photographs": source}})
    assert workload_of_datasets(own_entries, convert).counts_by_dataset == {"photographs": (pairs, references)}


def test_the_plan_has_their_steps(run, own_entries, tmp_path):
    planned = replace(run(mixture=tmp_path / "none"), entries=own_entries, convert=CONVERT)
    plan = make_plan(planned)
    assert plan.workload.pairs == 48
    assert plan.workload.references == 94
    assert plan.steps_per_epoch == 24  # sequences of one caption, four a step


def test_they_are_counted_beside_published_datasets(own_entries):
    workload = workload_of_datasets(own_entries | entries("iedit"), CONVERT)
    assert workload.counts_by_dataset == {"photographs": (48, 94), "iedit": (3_061, 3_061)}
    assert workload.max_references(None) is None, "of published counts only sums are known"
    assert workload.prompt_tokens == pytest.approx(29)
    assert workload.reference_tokens == pytest.approx(15)


def test_a_folder_that_is_missing_is_left_out_of_the_counts_and_named(own_entries, tmp_path):
    both_entries = {**own_entries, **entries("gone=pairs", root=tmp_path / "gone")}
    workload = workload_of_datasets(both_entries, CONVERT)
    assert list(workload.counts_by_dataset) == ["photographs"]
    assert workload.origin.endswith("; without gone")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda folder: (folder / "pairs.json").write_text("["), "pairs.json", id="a damaged table"),
        pytest.param(lambda folder: (folder / "pairs.json").unlink(), "pairs.json", id="no table"),
        pytest.param(lambda folder: (folder / "pairs.json").write_text("[]"), "photographs", id="no row"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_reason_and_the_remedy(own_entries, photographs, damage, reason):
    damage(photographs)
    with raises(ParamsError, "plan.no_counts_but_unread_files", names=["photographs"]) as refused:
        workload_of_datasets(own_entries, CONVERT)
    assert reason in str(refused.value.fields["cause"])
    assert refused.value.fault.remedy


def test_a_mixture_of_another_run_is_not_counted_in_their_place(run, own_entries):
    plan = make_plan(replace(run(), entries=own_entries, convert=CONVERT))
    assert plan.workload.counts_by_dataset == {"photographs": (48, 94)}
    assert "another run, with a, b" in plan.workload.origin
