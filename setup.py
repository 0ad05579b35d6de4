"""The C of csrc/, built for two instruction sets; the one that the processor has is loaded, neither is required."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("hf_linattn/csrc")
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


if __name__ == "__main__":
    setup(ext_modules=extensions())
