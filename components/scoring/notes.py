"""Collect notes about the scored texts: scripts, languages, and artefacts of models ("marks") in captions."""

from collections.abc import Iterable, Mapping, Sequence

from m3diff.scoring.language import note_foreign_references
from m3diff.scoring.marks import OTHER_SCRIPT, note_marks
from m3diff.scoring.metrics import Metric
from m3diff.scoring.protocols import ProtocolPairs, note_scripts, select_main_protocols


def note_texts(
    protocols: Sequence[ProtocolPairs],
    metrics: Mapping[str, Metric],
    predictions: Iterable[str],
    references: Iterable[str] = (),
) -> list[str]:
    """Return notes about the scripts and languages of the protocols' references, and about marks in texts.

    Args:
        metrics: the computed metrics by name.
        predictions, references: texts to search for marks.
    """
    notes = []
    for protocol in protocols:
        notes += note_scripts(protocol)
    notes += note_foreign_datasets(protocols, metrics)
    usual_marks = []
    if any(protocol.counts_characters for protocol in protocols):
        usual_marks.append(OTHER_SCRIPT)  # normal, because the references are in such a script
    notes += note_marks(predictions, without=usual_marks)
    notes += note_marks(references, "references", without=usual_marks)
    return notes


def note_foreign_datasets(protocols: Sequence[ProtocolPairs], metrics: Mapping[str, Metric]) -> list[str]:
    """Return a note for each dataset whose references are not in English although English metrics score them.

    The references are those of the dataset's first protocol that English metrics read.
    """
    notes = []
    for protocol in select_main_protocols(protocols):
        if not protocol.counts_characters:  # otherwise metrics for English are not computed
            references: list[str] = []
            for pair in protocol.select("texts").pairs:
                references += pair.references
            notes += note_foreign_references(protocol.dataset, references, metrics)
    return notes
