"""Stage `synthesize`: generate a raw dataset from settings. The same settings always produce the same bytes."""

from m3diff.datasets import DATASETS
from m3diff.settings.section import Section


def synthesize(reader: str, settings: Section) -> None:
    """Write a generated dataset to `settings.root`.

    Args:
        reader: name of the reader whose generator is used.
        settings: settings of the generator.

    Raises:
        DataError: the root contains files that the generator did not write.
    """
    generate = DATASETS[reader].generate
    assert generate is not None, "the parameters allow only readers that have a generator"
    generate(settings)
