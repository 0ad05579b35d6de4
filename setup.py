"""The C of csrc/, built for two instruction sets; the one that the processor has is loaded, neither is required."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("hf_linattn/csrc")
RECIPES, LEFT_OUT = Path("recipes"), ("pretrained", "adapters", "__pycache__")
PACKAGE = "hf_linattn.ops.runtime"  # which loads them, see its cpu.py
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-mfma", "-mf16c"]
VARIANTS = {"_avx512": ["-mavx512f", "-mavx512dq"], "_avx2": ["-mavx2"]}


def extensions() -> list[Extension]:
    """Return one extension for each instruction set, of all sources."""
    sources, headers = (sorted(map(str, CSRC.rglob(pattern))) for pattern in ("*.c", "*.h"))
    return [
        Extension(
            f"{PACKAGE}.{name}", sources, depends=headers, extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-fopenmp"], optional=True,
        )
        for name, flags in VARIANTS.items()
    ]  # fmt: skip


class BuildApart(build_ext):
    """Keeps the objects of each instruction set in a folder of its own, as the two are compiled side by side."""

    def build_extension(self, ext: Extension) -> None:
        apart = copy.copy(self)
        apart.build_temp = str(Path(self.build_temp, ext.name))
        build_ext.build_extension(apart, ext)


class BuildWithRecipes(build_py):
    """Puts the files of recipes/ into the package; a checkout reads them where they lie, once."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "hf_linattn", "recipes")
            shutil.copytree(RECIPES, target, dirs_exist_ok=True, ignore=only_yaml)


def only_yaml(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: all files but the YAML ones, and the bundled models."""
    return [name for name in names if not (name.endswith(".yaml") or Path(folder, name).is_dir()) or name in LEFT_OUT]


if __name__ == "__main__":
    setup(
        ext_modules=extensions(), cmdclass={"build_ext": BuildApart, "build_py": BuildWithRecipes},
        options={"build_ext": {"parallel": len(VARIANTS)}},
    )  # fmt: skip
