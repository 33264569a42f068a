"""A server that is not on the machine is a fault with a remedy, never a test left out."""

import pytest

from tests import servers


@pytest.mark.parametrize(
    ("server", "package"), [(servers.postgres, "install .* postgresql$"), (servers.ssh, "install .* openssh-server$")]
)
def test_a_program_that_is_missing_is_named_with_the_command_that_installs_it(server, package, monkeypatch):
    monkeypatch.setattr(servers.shutil, "which", lambda name, path: None)
    with pytest.raises(servers.MissingPackageError, match=package), server():
        pass
