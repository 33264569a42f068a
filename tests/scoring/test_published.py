"""The scores that papers print."""

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.scoring.published import find_published_rows, published_rows

TOTAL = Protocol("total", published_pairs=7970)
TWO_TYPES = Protocol("semantic", published_pairs=None, change_types=("color", "move"))
BY_TYPE = {
    protocol.change_types[0]: protocol
    for protocol in DATASETS["clevr_change"].protocols
    if len(protocol.change_types) == 1
}


def test_each_change_type_of_clevr_change_has_its_own_figures():
    ciders = {
        change_type: find_published_rows("clevr_change", protocol, is_main_protocol=False)[-1].scores["CIDEr"]
        for change_type, protocol in BY_TYPE.items()
    }
    assert ciders == {"color": 152.31, "material": 137.0, "add": 135.6, "drop": 133.1, "move": 99.8}


def test_the_main_protocol_has_the_figures_of_its_benchmark():
    rows = find_published_rows("clevr_change", TOTAL, is_main_protocol=True)
    assert rows != []
    assert rows == published_rows("clevr_change")


def test_another_protocol_has_no_figures_of_the_headline():
    assert find_published_rows("clevr_change", TOTAL, is_main_protocol=False) == []
    assert find_published_rows("clevr_change", TWO_TYPES, is_main_protocol=False) == []


def test_a_protocol_has_no_figures_of_another_benchmark():
    assert find_published_rows("spot_the_diff", BY_TYPE["color"], is_main_protocol=False) == []


def test_a_row_whose_epoch_was_chosen_on_the_test_split_says_so():
    rows = published_rows("clevr_change")
    assert [row.method for row in rows if row.chosen_on_test] == ["CLIP4IDC"]
