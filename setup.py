"""Installs `clip_train`, `launcher` and `clip_tools`, as pyproject.toml says.

The recipes, DeepSpeed's base configurations and batch scripts, which a checkout has at its top, go
into `clip_train`; `clip_train.places.shipped` finds them in both.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "ds_configs", "slurm")


class BuildWithShippedFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in SHIPPED:
            shutil.copytree(
                Path(__file__).parent / folder,
                Path(self.build_lib, "clip_train", folder),
                ignore=shutil.ignore_patterns("__pycache__"),
                dirs_exist_ok=True,
            )


setup(cmdclass={"build_py": BuildWithShippedFiles})
