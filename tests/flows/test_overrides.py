"""Parameters that change for one run only."""

from pathlib import Path

import pytest
import yaml

from m3diff.provenance.git import git, has_branch
from m3diff.settings.section import ParamsError
from tests.errors import raises
from tests.flows.conftest import opened, worktrees

SEED = Path("params.yaml")


# Overrides that cannot be written, with the code of the error
NOT_WRITTEN = {
    "train.epochs": "flows.override_without_value",
    "train.epochs.more=6": "flows.wrong_override",
    "train.epochs=[6": "flows.wrong_override",
}


# Overrides that the check of the parameters refuses, with a name in the message
NOT_ACCEPTED = {
    "trian.epochs=6": "'train'",
    "train.epochs=six": "train.epochs",
    "train.epohcs=6": "epohcs",
}


def test_an_override_that_cannot_be_written_is_refused_and_leaves_nothing(project):
    for override, code in NOT_WRITTEN.items():
        with raises(ParamsError, code, value=override), opened(overrides=[override]):
            pytest.fail("it began")
    assert worktrees() == []
    assert not has_branch("runs/one")


def test_an_override_of_a_wrong_parameter_is_refused_and_leaves_nothing(project):
    for override, name in NOT_ACCEPTED.items():
        with pytest.raises(ParamsError, match=name), opened(overrides=[override]):
            pytest.fail("it began")
    assert worktrees() == []
    assert not has_branch("runs/one")


def test_overrides_are_committed_and_keep_the_comments(project):
    with opened(overrides=["train.epochs=6", "promote.guards={CIDEr: 0.5}"]) as work:
        values = yaml.safe_load(SEED.read_text())
        assert values["train"]["epochs"] == 6
        assert values["promote"]["guards"] == {"CIDEr": 0.5}
        assert "Fractions are allowed." in SEED.read_text(), "the comments are gone"
        assert git("log", "-1", "--format=%s").endswith("train.epochs=6, promote.guards={CIDEr: 0.5}")
        assert work.tree == git("rev-parse", "HEAD^{tree}") != git("rev-parse", f"{work.commit}^{{tree}}")
