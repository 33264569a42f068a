"""`rescore`: what a fault says of the model that a person or the registry named."""

from pathlib import Path

from m3diff.commands.rescore import with_another_path
from m3diff.records.errors import Fault

LINK = Path("/scratch/out.model/checkpoint")
FOLDER = Path("/models/mine")


def test_a_path_is_replaced_wherever_a_field_of_a_fault_has_it():
    fault = Fault("files.unreadable", path=LINK / "config.json", command=f"`rm {LINK}`", names=[str(LINK)], value=3)
    assert with_another_path(fault, LINK, FOLDER) == Fault(
        "files.unreadable", path=FOLDER / "config.json", command=f"`rm {FOLDER}`", names=[str(FOLDER)], value=3
    )


def test_a_path_is_replaced_in_a_fault_that_is_the_cause_of_another():
    fault = Fault("scoring.tokenizer_failed", cause=Fault("files.unreadable", path=LINK, cause="no JSON"))
    replaced = with_another_path(fault, LINK, FOLDER)
    assert replaced.fields["cause"] == Fault("files.unreadable", path=FOLDER, cause="no JSON")


def test_a_fault_without_the_path_stays_as_it_is():
    fault = Fault("files.unreadable", path=Path("elsewhere"), cause="no JSON")
    assert with_another_path(fault, LINK, FOLDER) == fault
