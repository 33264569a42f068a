"""The list of versions: what MLflow has of each, and the table for the terminal."""

import re

from mlflow.store.entities import PagedList

from m3diff.registry.versions import format_table, iterate_pages, list_models


def test_each_version_is_listed_with_aliases_scores_run_and_lineage_newest_first(registry):
    register = registry.params.register_
    registry.add(git__commit="a" * 40, git__dirty="true", dvc__checkpoint="c1", prefect__flow_run="f1")
    registry.add(git__commit="b" * 40, git__dirty="false")
    registry.point("champion", 1)
    registry.point("archive", 1)
    run = registry.client.get_run(registry.version(1).run_id)
    for name, value in (("toy/all/CIDEr", 1.25), ("toy/part/CIDEr", 9.0)):
        registry.client.log_metric(run.info.run_id, name, value)
    newer_row, older_row = list_models(register, "toy/all", ["CIDEr", "SPICE"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d", older_row.pop("registered"))
    assert older_row == {
        "version": 1,
        "aliases": ["archive", "champion"],
        "scores": {"CIDEr": 1.25},
        "weights_bytes": 0,
        "commit": "a" * 40,
        "dirty": True,
        "run": run.info.run_name,
        "flow_run": "f1",
        "checkpoint": "c1",
    }
    assert newer_row["version"] == 2
    assert newer_row["aliases"] == ["challenger"]
    assert newer_row["scores"] == {}
    assert newer_row["dirty"] is False


def test_the_results_of_a_search_are_those_of_all_its_pages():
    pages = {None: PagedList([1, 2], "second"), "second": PagedList([], "third"), "third": PagedList([3], None)}

    def search(condition: str, page_token: str | None = None) -> PagedList[int]:
        assert condition == "all"
        return pages.pop(page_token)

    assert list(iterate_pages(search, "all")) == [1, 2, 3]


ROW = {"version": 1, "aliases": ["archive", "champion"], "registered": "2026-01-02 03:04", "scores": {"CIDEr": 1.254}}
ROW |= {"weights_bytes": 1_234_000_000, "commit": "a" * 40, "dirty": True, "run": "small"}
BARE_ROW = ROW | {"aliases": [], "scores": {}, "commit": None, "run": None}


def test_the_table_has_scores_times_100_and_a_plus_for_uncommitted_changes():
    head, full, committed, bare, *_ = format_table(
        [ROW, ROW | {"dirty": False}, BARE_ROW], "toy/all", ["CIDEr"]
    ).splitlines()
    assert head.split() == ["version", "aliases", "registered", "CIDEr", "weights", "commit", "run"]
    assert " ".join(full.split()) == "1 archive, champion 2026-01-02 03:04 125.4 1.23 GB aaaaaaaa+ small"
    assert " aaaaaaaa " in committed
    assert " ".join(bare.split()) == "1 – 2026-01-02 03:04 – 1.23 GB – –"


def test_without_versions_the_table_says_how_to_register_one():
    assert "m3diff register" in format_table([], "toy/all", ["CIDEr"])
