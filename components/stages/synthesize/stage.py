"""Stage `synthesize`: generate a raw dataset from settings. The same settings always produce the same bytes."""

from m3diff.datasets import DATASETS
from m3diff.settings.section import Section


def synthesize(reader: str, settings: Section) -> None:
    """Generate a dataset and write its images and tables to `settings.root`, in the layout that the reader reads.

    Args:
        reader: name of the reader whose generator is used.
        settings: settings of the generator.

    Raises:
        DataError: the root contains files that the generator did not write.
    """
    generate = DATASETS[reader].generate
    # `check_generators` in `m3diff.settings.rules` refuses parameters with another reader
    assert generate is not None, "the parameters allow only readers that have a generator"
    generate(settings)
