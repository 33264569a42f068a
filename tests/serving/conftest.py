"""Ray Serve's batches without Ray."""

import pytest
from ray.serve import batching


@pytest.fixture(autouse=True)
def no_replica_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's queue compares its size with the replica that it is in; in a test it is in none."""
    name = "_warn_if_max_batch_size_exceeds_max_ongoing_requests"
    monkeypatch.setattr(batching._BatchQueue, name, lambda self: None)
