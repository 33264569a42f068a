"""Small folders as people have them, in tests/data/folders: tables as files, images drawn beside them."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from m3diff.commands.inspect import check
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from tests.errors import Message
from tests.layouts import save_picture

FOLDERS = Path(__file__).parents[2] / "data/folders"


def draw_numbered_images(root: Path) -> None:
    """Two pairs of images: 0.png and 0_2.png, 1.png and 1_2.png."""
    for number in range(2):
        save_picture(root / f"{number}.png", number)
        save_picture(root / f"{number}_2.png", number, 99)


def draw_images_in_folders(root: Path, *folders: str) -> None:
    """Four images in each of the folders, p and q by default: p/0.png and q/0.png are a pair."""
    for number in range(4):
        for shade, folder in enumerate(folders or ("p", "q")):
            save_picture(root / folder / f"{number}.png", number, 90 * shade)


def draw_images_of_two_cameras(root: Path) -> None:
    """The images in p and q, and pairs in two folders whose names do not tell which is before."""
    draw_images_in_folders(root)
    draw_images_in_folders(root, "cam_l", "cam_r")


def draw_no_images(root: Path) -> None:
    """Leave the folder without images."""


def draw_image_in_other_folder(root: Path) -> None:
    """The numbered images, and another 0.png in a folder below."""
    draw_numbered_images(root)
    save_picture(root / "a b/0.png", 7)


@dataclass(frozen=True)
class FolderCase:
    """A folder that a user may have.

    name: of the folder in tests/data/folders; an empty or missing one has no table.
    lines: texts and messages that `m3diff data check` says of it.
    draw: draws the images that a user would have in it.
    """

    name: str
    lines: tuple[str | Message, ...] = ()
    draw: Callable[[Path], None] = draw_images_in_folders

    def write(self, root: Path) -> Path:
        """Write the folder, its files over its images."""
        root.mkdir(parents=True)
        self.draw(root)
        if (FOLDERS / self.name).is_dir():
            shutil.copytree(FOLDERS / self.name, root, dirs_exist_ok=True)
        return root

    def __str__(self) -> str:
        return self.name


def check_folder(root: Path, entry: Mapping[str, Any] | None = None) -> tuple[bool, str]:
    """Whether a folder can be used, and the text of the check. An entry makes it a dataset of params.yaml."""
    entries = {"own": DatasetEntry.model_validate(entry)} if entry else {}
    try:
        lines, is_sound = check(root, entries)
    except DataError as error:
        return False, str(error)
    return is_sound, "\n".join(lines)


def printed_entries(output: str) -> list[dict[str, Any]]:
    """The entries for params.yaml that a check prints."""
    lines = output[output.index("ingest.datasets in params.yaml:") :].split("\n")[1:]
    return [next(iter(yaml.safe_load(line).values())) for line in lines if line.startswith("    ")]


def count_lines(output: str) -> list[str]:
    """The lines of a check that count pairs, references and images."""
    return [line for line in output.split("\n") if re.match("  (train|val|test|images) ", line)]
