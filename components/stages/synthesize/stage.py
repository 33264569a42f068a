"""synthesize: a dataset that can make itself is written to its root. Equal settings give equal bytes."""

from m3diff.datasets import DATASETS
from m3diff.settings.section import Section


def synthesize(reader: str, settings: Section) -> None:
    """Write a dataset to `settings.root`, by the generator of its reader.

    Raises:
        DataError: the root holds files of someone else.
    """
    generate = DATASETS[reader].generate
    assert generate is not None, "a rule of the parameters: only what can make itself is synthesized"
    generate(settings)
