"""Rollback to an earlier champion."""

import subprocess

import pytest

from m3diff.provenance.git import user_and_host
from m3diff.records.errors import DataError
from m3diff.registry.decisions import read_decisions
from tests.errors import raises
from tests.registry.conftest import Registry
from tests.tiers import slow_except


def play(registry: Registry, story: str) -> None:
    """Perform the steps of a story, one per line, and check the results after `->`.

    Steps are `add CIDEr`, `promote [VERSION] [again]`, `rollback [VERSION]`, `set ALIAS VERSION`, `drop ALIAS` and
    `delete VERSION`. The result of a promotion is its outcome and a part of its reason. The result of a rollback is the
    new champion or the code of the error. `aliases` and `record` compare the aliases and the outcomes on record, from
    the fourth on.
    """
    for line in story.strip().splitlines():
        act, _, expected = (part.strip() for part in line.partition("->"))
        name, *words = act.split()
        number = next((int(word) for word in words if word.isdecimal()), None)
        outcome, _, reason = expected.partition(": ")
        if name == "add":
            registry.add(float(words[0]))
        elif name == "set":
            registry.point(words[0], int(words[1]))
        elif name == "drop":
            registry.client.delete_registered_model_alias("m3diff", words[0])
        elif name == "delete":
            registry.client.delete_model_version("m3diff", words[0])
        elif name == "promote":
            decision = registry.decide(number, "again" in words)
            assert decision.outcome == outcome, (line, decision)
            assert reason in decision.reason, (line, decision)
        elif name == "aliases":
            aliases = {alias: version for alias, version in registry.aliases().items() if alias != "challenger"}
            assert ", ".join(f"{alias} {version}" for alias, version in sorted(aliases.items())) == expected
        elif name == "record":
            assert ", ".join(registry.record()[3:]) == expected
        elif outcome == "refused":
            with raises(DataError, f"registry.{reason}"):
                registry.rollback(number)
        else:
            assert registry.rollback(number, "it says no").target == int(outcome), line


STORIES = {
    "there and back": """
        rollback    -> 2
        aliases     -> champion 2, previous 1
        promote     -> refused: m3diff promote --again
        promote 3   -> refused: (it says no)
        record      -> rolled back, refused
        promote again -> promoted
        aliases     -> champion 3, previous 2
        promote     -> unchanged
        rollback    -> 2
        rollback    -> 1
        aliases     -> champion 1
        rollback    -> refused: no_earlier_champion
        record      -> rolled back, refused, promoted, rolled back, rolled back
    """,
    "again lets the gate judge, and other versions are judged as usual": """
        add 2.5
        set champion 4
        promote 4   -> unchanged
        rollback 3  -> 3
        promote 4   -> refused: m3diff promote --again
        promote 4 again -> refused: gain
        rollback    -> 2
        add 2.6
        promote     -> promoted
        aliases     -> champion 5, previous 2
        rollback    -> 2
        aliases     -> champion 2, previous 1
    """,
    "a rollback to a given version also rolls back the versions in between": """
        rollback 9  -> refused: no_such_version
        rollback 3  -> refused: is_champion_already
        record      ->
        rollback 1  -> 1
        aliases     -> champion 1
        promote 2   -> refused: m3diff promote --again
        promote 3   -> refused: m3diff promote --again
    """,
    "previous skips a version that was deleted": """
        add 4.0
        promote     -> promoted
        delete 2
        rollback    -> 3
        aliases     -> champion 3, previous 1
    """,
    "a rollback by hand is noticed and holds": """
        set champion 2
        promote     -> refused: m3diff promote --again
        aliases     -> champion 2, previous 2
        record      -> moved elsewhere, refused
    """,
    "a worse model does not become champion if the alias is missing": """
        drop champion
        add 0.1
        promote     -> refused: m3diff rollback --to 3 --why 'the alias was gone'
        promote     -> refused: m3diff rollback --to 4 --why 'accepted without a comparison'
        aliases     -> previous 2
        record      -> moved elsewhere, refused
        rollback    -> refused: nothing_to_roll_back
        rollback 3  -> 3
        promote     -> refused
        add 4.0
        promote     -> promoted
        rollback    -> 3
    """,
    "an accepted version can be rolled back, and without champions the reason says what to do": """
        drop champion
        add 0.1
        rollback 4  -> 4
        aliases     -> champion 4, previous 3
        rollback    -> 3
        delete 1
        delete 2
        delete 3
        add 2.0
        promote     -> refused: m3diff rollback --to 5 --why 'accepted without a comparison'
        rollback 5  -> 5
        promote     -> unchanged
    """,
}


@pytest.mark.fault("S2", "T10")
@pytest.mark.parametrize(
    "story",
    slow_except(
        STORIES,
        "there and back",
        "previous skips a version that was deleted",
        "a rollback by hand is noticed and holds",
    ),
)
def test_rollbacks_and_promotions_in_sequence(three, story):
    play(three, STORIES[story])


def test_a_rollback_is_recorded_shared_and_outlives_the_model(three, tmp_path):
    subprocess.run(["git", "init", "-q", "--bare", "remote.git"], check=True)
    subprocess.run(["git", "config", "m3diff.runs", str(tmp_path / "remote.git")], check=True)
    done = three.rollback(why="it says no to every pair")
    assert done.action == "rollback"
    assert done.champion_before == 3
    assert done.target == 2
    assert done.previous == 1
    assert done.author == user_and_host()
    assert str(done) == "m3diff: champion 3 -> 2, rolled back: it says no to every pair"
    three.point("champion", 1)
    three.decide()
    noticed = three.entries()[4]
    assert noticed.action == "noticed"
    assert noticed.champion_before == 2
    assert noticed.target == 1
    assert noticed.outcome == "moved elsewhere"
    assert " version 1," in noticed.reason
    three.client.delete_registered_model("m3diff")
    assert three.entries()[3] == done
    assert read_decisions(tmp_path / "remote.git") == three.entries()


def test_a_champion_from_before_the_record_is_rolled_back_too(registry):
    for score in (1.0, 2.0):
        registry.add(score)
    play(registry, "rollback -> refused: nothing_to_roll_back\nset champion 2\nset previous 1\nrollback -> 1")
    play(registry, "aliases -> champion 1\npromote -> refused: m3diff promote --again")


def test_a_rollback_to_a_version_that_never_was_champion_keeps_an_earlier_one(three):
    never_champion = three.add(0.1)
    assert three.rollback(never_champion).previous == 2, "the champion of now is rolled back"
    assert three.aliases()["previous"] == 2
