"""Build step that pyproject.toml cannot say: copy the folders beside the package into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ASSETS = ("engines", "triton_models")  # as in toolkit/kvtool/assets.py


class BuildWithAssets(build_py):
    """An editable install reads the folders where they stand; a wheel gets copies under kvtool/shipped/."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ASSETS:
            target = Path(self.build_lib) / "kvtool" / "shipped" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(name, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".gitkeep"))


setup(cmdclass={"build_py": BuildWithAssets})
