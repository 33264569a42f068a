"""Run the tests of this folder with one thread."""

from tests.tiny import one_thread  # noqa: F401  # pytest finds it by its name
