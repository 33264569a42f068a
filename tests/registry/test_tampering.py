"""Changes on MLflow's page or in its files never promote a version by mistake."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.provenance.git import commit_at, git
from m3diff.records.errors import DataError, Fault
from m3diff.registry.decisions import BRANCH, COUNT_TAG
from m3diff.registry.gate import faults_of_scores
from m3diff.registry.moves import find_lost_champion
from m3diff.registry.tracking import check_alive
from m3diff.registry.versions import SCORES
from m3diff.settings.section import ParamsError
from m3diff.stages.register.params import Promote
from tests.errors import Message, raises
from tests.registry.conftest import (
    PAIRS,
    PROTOCOL,
    Registry,
    Rescoring,
    make_scores,
    read_count_tag,
    recreate_model,
    versions_in_remedies,
)

GOOD = make_scores(5.0, seed=1)


def replaced(name: str, values: pa.Array) -> pa.Table:
    return GOOD.set_column(GOOD.column_names.index(name), name, values)


# Malformed files of scores: the table, and its faults
MALFORMED: dict[str, tuple[pa.Table, list[Fault]]] = {
    "ids are null": (
        replaced("id", pa.array([None] * PAIRS, pa.string())),
        [Fault("registry.scores_null", name="id", count=200, rows=200)],
    ),
    "one id is null": (
        replaced("id", pa.array([None, *GOOD["id"].to_pylist()[1:]])),
        [Fault("registry.scores_null", name="id", count=1, rows=200)],
    ),
    "ids are numbers": (
        replaced("id", pa.array(range(PAIRS))),
        [Fault("registry.scores_of_other_type", name="id", value="int64", expected="text")],
    ),
    "ids are equal": (
        replaced("id", pa.array(["a"] * PAIRS)),
        [Fault("registry.scores_ids_repeated", count=1, example="a")],
    ),
    "rows are there twice": (pa.concat_tables([GOOD, GOOD]), [Fault("registry.scores_ids_repeated", count=200)]),
    "no column id": (GOOD.drop_columns(["id"]), [Fault("registry.scores_column_missing", name="id")]),
    "no column protocol": (GOOD.drop_columns(["protocol"]), [Fault("registry.scores_column_missing", name="protocol")]),
    "no column at all": (
        pa.table({}),
        [Fault("registry.scores_column_missing", name="protocol"), Fault("registry.scores_column_missing", name="id")],
    ),
    "protocols are null": (
        replaced("protocol", pa.array([None] * PAIRS, pa.string())),
        [Fault("registry.scores_null", name="protocol", count=200, rows=200)],
    ),
    "protocols are numbers": (
        replaced("protocol", pa.array([1] * PAIRS)),
        [Fault("registry.scores_of_other_type", name="protocol", value="int64", expected="text")],
    ),
    "a column is there twice": (
        GOOD.append_column("id", GOOD["id"]),
        [Fault("registry.scores_column_repeated", name="id", count=2)],
    ),
    "a score is there twice": (
        GOOD.append_column("CIDEr", GOOD["CIDEr"]),
        [Fault("registry.scores_column_repeated", name="CIDEr", count=2)],
    ),
    "scores are text": (
        replaced("CIDEr", pa.array(["5.0"] * PAIRS)),
        [Fault("registry.scores_of_other_type", name="CIDEr", value="string", expected="numbers")],
    ),
    "scores are lists of several lengths": (
        replaced("CIDEr", pa.array([[5.0, 1.0, 1.0], [1.0], *[[1.0, 1.0]] * (PAIRS - 2)])),
        [Fault("registry.scores_lists_of_several_lengths", name="CIDEr", shortest=1, longest=3)],
    ),
    "scores are structures": (
        replaced("CIDEr", pa.array([{"a": 1.0}] * PAIRS)),
        [Fault("registry.scores_of_other_type", name="CIDEr", value="struct<a: double>", expected="numbers")],
    ),
    "no row": (GOOD.slice(0, 0), [Fault("registry.scores_empty")]),
}

# Files whose score is no number: the gate refuses them by its own rule
NO_NUMBERS: dict[str, pa.Table] = {
    "scores are NaN": replaced("CIDEr", pa.array([float("nan")] * PAIRS)),
    "one score is infinite": replaced("CIDEr", pa.array([np.inf, *[1.0] * (PAIRS - 1)])),
    "no column of the score": GOOD.drop_columns(["CIDEr"]),
}
SAMPLE = ("ids are null", "no column id", "a column is there twice", "scores are lists of several lengths", "no row")


@pytest.mark.parametrize("case", MALFORMED)
def test_each_fault_of_a_file_of_scores_is_named_by_column_and_rule(case, gate):
    table, expected = MALFORMED[case]
    faults = faults_of_scores(gate, table)
    assert [fault.code for fault in faults] == [fault.code for fault in expected]
    for fault, expected_fault in zip(faults, expected, strict=True):
        assert expected_fault.fields.items() <= fault.fields.items()


@pytest.mark.parametrize("table", [GOOD, *NO_NUMBERS.values()], ids=["good", *NO_NUMBERS])
def test_a_score_that_is_absent_or_no_number_is_no_fault_of_the_file(table, gate):
    assert faults_of_scores(gate, table) == []


@pytest.fixture
def gate() -> Promote:
    return Promote(protocol=PROTOCOL, metric="CIDEr", min_gain=0.0, confidence=0.95, guards={})


@pytest.mark.fault("S2", "23")
@pytest.mark.parametrize("case", SAMPLE)
@pytest.mark.parametrize("is_first", [True, False], ids=["the first", "a challenger"])
def test_a_malformed_file_of_scores_is_refused(is_first, case, registry):
    table, expected = MALFORMED[case]
    if not is_first:
        registry.grow(1.0)
    before = registry.aliases().get("champion")
    registry.add(table)
    decision = registry.decide()
    assert decision.outcome == "refused"
    for fault in expected:
        assert Message(fault.code, **fault.fields).in_text(decision.reason)
    assert registry.aliases().get("champion") == before


def stored_file(registry: Registry, version: int) -> Path:
    run = registry.client.get_run(registry.version(version).run_id or "").info
    return Path(run.artifact_uri.removeprefix("file://")) / SCORES


@pytest.mark.fault("S2", "T10")
@pytest.mark.parametrize("case", ["ids are null", "rows are there twice"])
def test_a_champion_with_a_malformed_file_of_scores_is_scored_again(case, registry, monkeypatch, capsys):
    registry.grow(1.0, test_set="new")
    pq.write_table(MALFORMED[case][0], stored_file(registry, 1))
    registry.add(2.0, seed=1, test_set="new")
    Rescoring(registry, monkeypatch)
    decision = registry.decide()
    assert decision.outcome == "promoted"
    assert decision.scored_again
    printed = capsys.readouterr().out
    for fault in MALFORMED[case][1]:
        assert Message(fault.code, **fault.fields).in_text(printed)


@pytest.mark.fault("S2", "T10")
@pytest.mark.parametrize("start", [4, -60, -8], ids=["in the data", "in the footer", "in its length"])
def test_a_file_of_scores_with_damaged_bytes_is_refused(start, registry):
    version = registry.add(1.0)
    file = stored_file(registry, version)
    content = bytearray(file.read_bytes())
    content[start : start + 4 if start + 4 else None] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert registry.decide().outcome == "refused"


# The champion is lost


def accept_by_hand(registry: Registry, reason: str) -> None:
    (version,) = set(versions_in_remedies(reason))
    assert registry.rollback(version, "accepted").target == version


@pytest.mark.fault("S2", "T9")
def test_after_the_model_was_deleted_no_version_becomes_champion_as_the_first(three):
    recreate_model(three)
    three.add(0.1)
    refused = [three.decide() for _ in range(2)]
    assert [decision.outcome for decision in refused] == ["refused", "refused"]
    fields = {"model": "m3diff", "recorded_model": "m3diff", "champion": 3, "since": three.entries()[2].decided_at}
    assert Message("registry.champion_elsewhere", **fields).in_text(refused[0].reason)
    assert "champion" not in three.aliases()
    assert three.record()[3:] == ["refused"], "recorded once"
    with raises(DataError, "registry.nothing_to_roll_back") as no_rollback:
        three.rollback()
    assert no_rollback.value.fields["fault"] == Fault("registry.champion_elsewhere", **fields)
    accept_by_hand(three, refused[0].reason)
    assert three.grow(0.05, 0.5) == ["refused", "promoted"], "the gate works on"


@pytest.mark.fault("S2", "T10")
def test_a_champion_without_its_alias_is_named_by_the_newest_version_that_is_left(three):
    decisions = three.entries()
    three.client.delete_registered_model_alias("m3diff", "champion")
    three.client.delete_model_version("m3diff", "3")
    command = "m3diff rollback --to 2 --why 'the alias was gone'"
    lost_alias = Fault("registry.alias_gone", model="m3diff", champion=3, version=2, command=command)
    assert find_lost_champion(three.client, decisions, "m3diff") == lost_alias
    for number in ("1", "2"):
        three.client.delete_model_version("m3diff", number)
    lost_champions = Fault("registry.champions_gone", model="m3diff", champion=3)
    assert find_lost_champion(three.client, decisions, "m3diff") == lost_champions


@pytest.mark.fault("S2", "T9")
def test_the_lost_champion_is_named_where_it_was_registered_again(rolled_back):
    recreate_model(rolled_back)
    rolled_back.add(2.0, dvc__checkpoint="of another")
    same = rolled_back.add(1.0, dvc__checkpoint="of 1.0")
    refused = rolled_back.decide(version=1)
    assert refused.outcome == "refused"
    assert versions_in_remedies(refused.reason) == [same, 1], "the champion of before comes first"


@pytest.mark.fault("S2", "T9")
def test_another_store_makes_no_champion_as_the_first(three, empty_store, tmp_path):
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    three.open(tmp_path)
    three.experiment = three.client.create_experiment("m3diff", artifact_location=(tmp_path / "other").as_uri())
    three.client.create_registered_model("m3diff")
    three.gate(guards={})
    three.add(0.1)
    assert three.decide().outcome == "refused"


def rename(registry: Registry, to: str) -> None:
    """The model is renamed on MLflow's page and in params.yaml."""
    registry.client.rename_registered_model("m3diff", to)
    register = registry.params.register_.model_copy(update={"model_name": to})
    registry.params = registry.params.model_copy(update={"register_": register})


@pytest.mark.fault("S2", "T9")
def test_a_model_that_was_renamed_makes_no_champion_as_the_first_under_its_old_name(three):
    three.client.rename_registered_model("m3diff", "other")
    three.client.create_registered_model("m3diff")
    three.add(0.1)
    assert three.decide().outcome == "refused"


@pytest.mark.fault("S2", "T9")
def test_a_renamed_model_whose_alias_is_gone_makes_no_champion_as_the_first(three):
    three.add(0.1)
    rename(three, "other")
    for alias in three.client.get_registered_model("other").aliases:
        three.client.delete_registered_model_alias("other", alias)
    decision = three.decide(version=4)
    assert decision.outcome == "refused"
    fields = {"model": "other", "recorded_model": "m3diff", "champion": 3, "version": 3}
    assert Message("registry.champion_under_other_number", **fields).in_text(decision.reason)


@pytest.mark.fault("S2", "T9")
def test_an_alias_previous_tells_of_a_champion_that_no_record_has(registry):
    for cider in (1.0, 0.1):
        registry.add(cider)
    registry.point("previous", 1)
    refused = registry.decide()
    assert refused.outcome == "refused"
    assert versions_in_remedies(refused.reason) == [1, 2]
    assert Message("registry.alias_gone_previous_left", model="m3diff", version=1).in_text(refused.reason)


@pytest.mark.fault("S2")
@pytest.mark.parametrize("is_first", [True, False], ids=["the first", "a challenger"])
@pytest.mark.parametrize("value", [None, ""], ids=["removed", "emptied"])
def test_a_version_whose_test_set_is_not_known_is_refused(value, is_first, registry):
    if not is_first:
        registry.grow(1.0)
        registry.client.delete_model_version_tag("m3diff", "1", "test_set.sha256")
    version = str(registry.add(5.0, seed=1))
    if value is None:
        registry.client.delete_model_version_tag("m3diff", version, "test_set.sha256")
    else:
        registry.client.set_model_version_tag("m3diff", version, "test_set.sha256", value)
    decision = registry.decide()
    assert decision.outcome == "refused"
    assert "'test_set.sha256'" in decision.reason


# MLflow's tag of the record

FORMS: dict[str, Callable[[str], str]] = {
    "words": lambda commit: "by hand",
    "nothing": lambda commit: "",
    "a number alone": lambda commit: "3",
    "a short commit": lambda commit: f"3 {commit[:7]}",
    "a commit alone": lambda commit: commit,
    "a number of letters": lambda commit: f"three {commit}",
    "a number with a zero before it": lambda commit: f"03 {commit}",
    "a blank before it": lambda commit: f" 3 {commit}",
    "another number": lambda commit: f"2 {commit}",
    "a commit in capitals": lambda commit: f"3 {commit.upper()}",
}


@pytest.mark.fault("T14")
@pytest.mark.parametrize("form", FORMS)
def test_a_tag_of_decisions_that_is_not_ours_is_an_error_and_not_overwritten(form, rolled_back):
    value = FORMS[form](str(commit_at(BRANCH)))
    rolled_back.client.set_registered_model_tag("m3diff", COUNT_TAG, value)
    aliases = rolled_back.aliases()
    last_commit = commit_at(BRANCH)
    for decide in (rolled_back.decide, lambda: rolled_back.decide(again=True), lambda: rolled_back.rollback(to=2)):
        record_here = Fault("registry.decisions_here", count=3, commit=commit_at(BRANCH))
        with raises(DataError, "registry.edited_tag", model="m3diff", tag=COUNT_TAG, value=value, record=record_here):
            decide()
    assert rolled_back.aliases() == aliases
    assert commit_at(BRANCH) == last_commit
    assert read_count_tag(rolled_back) == value
    rolled_back.client.delete_registered_model_tag("m3diff", COUNT_TAG)
    assert "m3diff promote --again" in rolled_back.decide().reason
    assert read_count_tag(rolled_back) == f"4 {commit_at(BRANCH)}"


@pytest.mark.fault("T14")
def test_an_edited_tag_does_not_hide_that_the_record_is_gone(rolled_back):
    rolled_back.client.set_registered_model_tag("m3diff", COUNT_TAG, "3")
    git("update-ref", "-d", BRANCH)
    rolled_back.point("challenger", 2)
    with raises(DataError, "registry.edited_tag", record=Fault("registry.no_decisions_here")):
        rolled_back.decide()
    assert rolled_back.aliases()["champion"] == 1


# The alias `previous`


def drop_previous(registry: Registry) -> None:
    registry.client.delete_registered_model_alias("m3diff", "previous")


PREVIOUS: dict[str, tuple[Callable[[Registry], object], int]] = {
    "its alias was deleted": (drop_previous, 2),
    "its version was deleted": (lambda registry: registry.client.delete_model_version("m3diff", "2"), 1),
    "it was set on the champion": (lambda registry: registry.point("previous", 3), 2),
    "it was set on another version": (lambda registry: registry.point("previous", 1), 1),
}


@pytest.mark.fault("T10")
@pytest.mark.parametrize("case", PREVIOUS)
def test_a_rollback_without_previous_takes_the_newest_earlier_champion_on_record(case, three):
    change, to = PREVIOUS[case]
    change(three)
    assert three.rollback(why="bad").target == to
    assert three.aliases()["champion"] == to
    assert three.decide(version=3).outcome == "refused", "it was rolled back"


@pytest.mark.fault("T10")
def test_a_version_that_was_rolled_back_is_no_earlier_champion(rolled_back):
    """There is no champion before version 1. Version 2 was champion after it and was rolled back."""
    with raises(DataError, "registry.no_earlier_champion", model="m3diff"):
        rolled_back.rollback()
    assert rolled_back.aliases()["champion"] == 1


# The server of MLflow redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_of_mlflow_is_not_followed_and_its_target_named(status):
    paths: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.send_header("Location", "/elsewhere/health")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with raises(ParamsError, "registry.redirected", value=address, status=status, address=f"{address}/elsewhere"):
            check_alive(address)
    finally:
        server.shutdown()
        server.server_close()
    assert paths == ["/health"]
