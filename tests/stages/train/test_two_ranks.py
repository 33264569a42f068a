"""A checkpoint of two workers is the state of both, and one that is not whole is never resumed from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.checkpoint import verify_manifest
from m3diff.stages.train.state import MOMENTS, checkpoints
from tests.stages.train.test_loop import one_worker, two_workers
from tests.stages.train.toy import recipe

FILES = {"weights.safetensors", *(f"{moment}.safetensors" for moment in MOMENTS)}


@pytest.mark.fault("B2")
@pytest.mark.slow
def test_two_workers_save_the_state_of_both_and_go_on_from_the_newest_that_is_whole(
    mixture: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    made = recipe(base, micro_batch=2, zero_stage=1, val_pairs=0)
    two, one = tmp_path / "two", tmp_path / "one"
    two_workers(made, mixture, two, saved=2)
    assert capfd.readouterr().out.count("no checkpoint of this run to go on from, so it starts at step 1 of 6") == 1
    one_worker(made, mixture, one, saved=2)
    before, newest = checkpoints(two)
    for got, want in zip(checkpoints(two), checkpoints(one), strict=True):
        assert got.name == want.name
        assert verify_manifest(got)["files"].keys() == FILES | {"curves.csv", "optimizer.json"}
        for file in FILES:
            ours, theirs = load_file(got / file), load_file(want / file)
            assert ours.keys() == theirs.keys()
            for name, whole in theirs.items():
                if not name.endswith("k_proj.bias"):  # its gradient is rounding alone
                    torch.testing.assert_close(ours[name], whole, rtol=1e-3, atol=2e-5, msg=f"{file} {name}")
    moments = newest / f"{MOMENTS[1]}.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1])
    capfd.readouterr()
    two_workers(made, mixture, two)
    told = capfd.readouterr()
    assert f"{newest.name} is damaged and removed" in told.err
    assert f"going on from {before.name}" in told.err
    assert told.out.count("resumed after step 2 of 6") == 1
