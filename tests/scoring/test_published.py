from m3diff.datasets import DATASETS
from m3diff.scoring.published.published import BY_TYPE, chosen_on_test, published_rows, published_rows_by_type


def test_every_benchmark_with_a_published_protocol_has_rows():
    parts = [part.part for spec in DATASETS.values() for part in spec.published]
    assert [part for part in parts if not published_rows(part)] == ["emu_edit", "syned"], "no figures are known"
    assert published_rows("minichange") == []


def test_a_result_that_several_papers_print_is_there_once_as_the_first_printed_it():
    rows = {row.method: row for row in published_rows("iedit") if row.method in ("CLIP4IDC", "NCT")}
    assert [row.method for row in published_rows("iedit")].count("CLIP4IDC") == 1
    assert rows["NCT"].source == rows["CLIP4IDC"].source == "OmniDiff (arXiv 2503.11093v2)"
    assert rows["NCT"].scores["SPICE"] == 12.7  # a later paper does not print it
    for benchmark in ("spot_the_diff", "clevr_change", "iedit"):
        found = [(row.method, row.scores["CIDEr"]) for row in published_rows(benchmark)]
        assert len(set(found)) == len(found)


def test_a_figure_is_under_its_own_score_and_one_that_is_not_printed_is_none():
    (row,) = [row for row in published_rows("spot_the_diff") if row.method == "SMART"]
    assert row.scores == {"BLEU-4": None, "METEOR": 13.5, "ROUGE-L": 31.6, "CIDEr": 39.4, "SPICE": 19.0}
    assert (row.venue, row.source) == ("TPAMI'24", "OmniDiff (arXiv 2503.11093v2)")


def test_a_method_whose_epoch_was_chosen_on_the_test_split_has_the_evidence():
    assert "CIDEr on the test loader" in (chosen_on_test("CLIP4IDC", "clevr_change") or "")
    assert chosen_on_test("SCORER", "clevr_change") is None  # on val
    assert chosen_on_test("CLIP4IDC", "iedit") is None
    marked = [row.method for row in published_rows("spot_the_diff") if row.chosen_on_test]
    assert marked == ["CLIP4IDC"]


def test_cider_by_change_type_is_that_of_its_own_column():
    types = {one.change_types[0] for one in DATASETS["clevr_change"].protocols if one.change_types}
    assert types == set(BY_TYPE)
    ours = {kind: published_rows_by_type("clevr_change", kind)[-1].scores["CIDEr"] for kind in BY_TYPE}
    assert ours == {"color": 152.31, "material": 137.0, "add": 135.6, "drop": 133.1, "move": 99.8}
    assert published_rows_by_type("spot_the_diff", "color") == published_rows_by_type("clevr_change", "total") == []
