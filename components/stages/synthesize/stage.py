"""synthesize: a dataset that can make itself is written to its root. Equal settings give equal bytes."""

from m3diff.datasets import DATASETS
from m3diff.settings.section import ParamsError, Section


def synthesize(name: str, reader: str, settings: Section) -> None:
    """Write the dataset `name` of `params.yaml` to `settings.root`, by the generator of its reader.

    Raises:
        ParamsError: the reader's dataset cannot make itself, or the settings are another generator's.
        DataError: the root holds files of someone else.
    """
    generator = DATASETS[reader].generate if reader in DATASETS else None
    if generator is None:
        able = ", ".join(each for each, spec in DATASETS.items() if spec.generate)
        raise ParamsError(f"synthesize.{name}: {reader!r} cannot make itself; remove the entry, or choose from {able}")
    if not isinstance(settings, generator.settings):
        raise ParamsError(f"synthesize.{name}: expected {generator.settings.__name__}, found {type(settings).__name__}")
    generator.generate(settings)
