"""The way back: which version is champion after it, what is not promoted again, and how far it goes."""

import os
import subprocess
import sys

import pytest
import yaml

from m3diff.provenance.git import who
from m3diff.records.errors import DataError
from m3diff.registry import versions
from m3diff.registry.decisions import champions, decisions
from tests.registry.conftest import scores
from tests.toy import REPOSITORY


@pytest.fixture
def three(registry):
    """Versions 1, 2 and 3 were champion one after the other."""
    for score in (1.0, 2.0, 3.0):
        registry.add(scores(score))
        registry.decide()
    assert registry.aliases() == {"challenger": 3, "champion": 3, "previous": 2}
    return registry


def test_the_previous_champion_is_champion_again_and_the_record_says_who_when_and_why(three):
    done = three.rollback(why="it says no to every pair")
    assert three.aliases() == {"challenger": 3, "champion": 2, "previous": 1}
    assert three.entries()[-1] == done
    assert (done.action, done.from_, done.to, done.previous) == ("rollback", 3, 2, 1)
    assert (done.who, done.why) == (who(), "it says no to every pair")
    assert str(done) == "m3diff: champion 3 -> 2, rolled back: it says no to every pair"


def test_a_second_rollback_goes_further_back_and_never_forward_to_the_bad_version(three):
    three.rollback()
    three.rollback()
    assert three.aliases() == {"challenger": 3, "champion": 1}
    with pytest.raises(DataError, match="no earlier champion is known.*m3diff rollback --to VERSION"):
        three.rollback()
    assert three.aliases()["champion"] == 1
    assert three.record()[-2:] == ["rolled back", "rolled back"]


@pytest.mark.fault("S2")
def test_a_rolled_back_version_is_not_promoted_again_unless_asked(three):
    done = three.rollback(why="it says no to every pair")
    refused = three.decide()
    assert (refused.outcome, refused.challenger, refused.champion) == ("refused", 3, 2)
    assert refused.reason == (
        f"{done.who} rolled it back at {done.at} (it says no to every pair); to let the gate judge it all the same: "
        "m3diff promote --again"
    )
    three.decide(version=3)
    assert three.record()[3:] == ["rolled back", "refused"], "the same refusal is one entry"
    assert three.aliases()["champion"] == 2
    again = three.decide(again=True)
    assert (again.outcome, again.champion) == ("promoted", 2)
    assert three.aliases() == {"challenger": 3, "champion": 3, "previous": 2}
    assert three.decide().outcome == "unchanged"


def test_again_asks_the_gate_and_does_not_replace_it(three):
    three.add(scores(2.5))
    three.point("champion", 4)
    three.decide()
    three.rollback(to=3)
    assert three.decide(version=4).reason.startswith(f"{who()} rolled it back")
    assert "its lower bound does not exceed 0" in three.decide(version=4, again=True).reason


def test_other_versions_are_judged_as_ever_after_a_rollback(three):
    three.rollback()
    three.add(scores(2.5))
    assert three.decide().outcome == "promoted"
    assert three.aliases() == {"challenger": 4, "champion": 4, "previous": 2}
    three.rollback()
    assert three.aliases() == {"challenger": 4, "champion": 2, "previous": 1}


def test_a_named_version_is_taken_and_what_is_skipped_over_counts_as_taken_back(three):
    three.rollback(to=1)
    assert three.aliases() == {"challenger": 3, "champion": 1}
    assert sorted(champions(decisions(), "m3diff").taken_back) == [2, 3]
    assert three.decide(version=2).reason.startswith(f"{who()} rolled it back")


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (9, "model 'm3diff' has no version '9'; there are .3, 2, 1"),
        (3, "version 3 of 'm3diff' is the champion already"),
    ],
)
def test_a_rollback_to_nothing_is_refused_and_not_recorded(three, to, words):
    with pytest.raises(DataError, match=words):
        three.rollback(to=to)
    assert len(three.record()) == 3


def test_previous_skips_a_version_that_was_deleted(three):
    three.add(scores(4.0))
    three.decide()
    three.client.delete_model_version("m3diff", "2")
    three.rollback()
    assert three.aliases() == {"challenger": 4, "champion": 3, "previous": 1}
    versions.put_alias(three.client, "m3diff", "previous", 2)  # as a move does that was recorded before the deletion
    assert three.aliases() == {"challenger": 4, "champion": 3}


def test_previous_set_by_hand_to_a_bad_version_is_not_followed(three):
    three.rollback()
    three.point("previous", 3)
    with pytest.raises(DataError, match=f"names version 3, which {who()} rolled back at"):
        three.rollback()


def test_a_champion_from_before_the_record_is_rolled_back_too_and_none_is_where_there_is_none(registry):
    for score in (1.0, 2.0):
        registry.add(scores(score))
    with pytest.raises(DataError, match="there is nothing to roll back"):
        registry.rollback()
    registry.point("champion", 2)
    registry.point("previous", 1)
    registry.rollback()
    assert registry.aliases() == {"challenger": 2, "champion": 1}
    assert registry.decide().reason.startswith(f"{who()} rolled it back")


@pytest.mark.fault("S2")
def test_a_rollback_by_hand_is_noticed_and_holds(three):
    three.point("champion", 2)
    refused = three.decide()
    assert refused.outcome == "refused"
    assert refused.reason.startswith("it was found rolled back at")
    assert three.aliases()["champion"] == 2
    noticed = three.entries()[3]
    assert (noticed.action, noticed.from_, noticed.to, noticed.outcome) == ("noticed", 3, 2, "moved elsewhere")
    assert "the alias 'champion' names version 2, and no decision of this record moved it there" in noticed.why
    assert three.record()[3:] == ["moved elsewhere", "refused"]


def test_the_record_outlives_the_registered_model(three):
    three.rollback()
    three.client.delete_registered_model("m3diff")
    assert three.record() == ["first", "promoted", "promoted", "rolled back"]


def test_decisions_go_to_the_remote_that_git_config_names(three, tmp_path):
    subprocess.run(["git", "init", "-q", "--bare", "remote.git"], check=True)
    subprocess.run(["git", "config", "m3diff.runs", str(tmp_path / "remote.git")], check=True)
    three.rollback()
    assert decisions(tmp_path / "remote.git") == three.entries()
    three.decide()
    assert [entry.outcome for entry in decisions(tmp_path / "remote.git")][3:] == ["rolled back", "refused"]


@pytest.mark.slow(15)
def test_the_command_takes_seconds_and_loads_no_torch(three):
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    values["register"]["tracking_uri"] = three.params.register_.tracking_uri
    (three.root / "params.yaml").write_text(yaml.safe_dump(values))
    program = (
        "import sys; from m3diff.__main__ import main; code = main(['rollback', '--why', 'too slow']); "
        "import m3diff.registry.promote; assert 'torch' not in sys.modules; sys.exit(code)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    after = os.times()
    assert (done.returncode, done.stdout) == (0, "m3diff: champion 3 -> 2, rolled back: too slow\n"), done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 10
    assert three.aliases()["champion"] == 2
