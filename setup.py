"""What pyproject.toml cannot say: a wheel holds the profiles, which a checkout has at its top."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithProfiles(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copytree("profiles", Path(self.build_lib) / "m3diff" / "_profiles", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithProfiles})
