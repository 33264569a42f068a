"""The stage `synthesize`: splits share no scene, and a larger training split leaves the other splits unchanged."""

import json
from pathlib import Path

from m3diff.datasets.minichange.scene import MiniChange
from m3diff.records.files import sha256
from m3diff.stages.synthesize.stage import synthesize

SMALL = {"seed": 5, "scenes": {"train": 6, "val": 2, "test": 3}, "image_px": 32, "references": 2}
SMALL |= {"multi_change_share": 0.2, "oversample_types": []}


def make(root: Path, **changes) -> dict[str, str]:
    """Generate a dataset and return the digest of each file."""
    synthesize("minichange", MiniChange.model_validate(SMALL | {"root": root} | changes))
    return {str(path.relative_to(root)): sha256(path) for path in sorted(root.rglob("*")) if path.is_file()}


def test_splits_share_no_scene_and_more_training_scenes_leave_held_out_ones_alone(tmp_path):
    small_dataset = make(tmp_path / "few")
    splits = {"train": [5, 6, 7, 8, 9, 10], "val": [3, 4], "test": [0, 1, 2]}
    assert list(json.loads((tmp_path / "few/splits.json").read_text()).items()) == list(splits.items())
    for file in ("change_captions.json", "no_change_captions.json"):
        captions = json.loads((tmp_path / "few" / file).read_text())
        assert list(captions) == [f"CLEVR_default_{number:06d}.png" for number in range(11)]
        assert {len(texts) for texts in captions.values()} == {2}, "as many references as asked for"
    large_dataset = make(tmp_path / "more", scenes=SMALL["scenes"] | {"train": 9})
    held_out = json.loads((tmp_path / "more/splits.json").read_text())
    assert held_out["val"] == splits["val"]
    assert held_out["test"] == splits["test"]
    images = {file: digest for file, digest in small_dataset.items() if file.endswith(".png")}
    assert len(images) == 3 * 11
    assert images.items() <= large_dataset.items()
    other_dataset = make(tmp_path / "other", seed=6)
    for file in ("change_captions.json", *images):
        assert other_dataset[file] != small_dataset[file], "another seed draws other scenes"
