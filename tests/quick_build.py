"""The C for this processor, built within seconds in a copy of the checkout: with sanitizers, or after a change to it.

    python -m tests.quick_build build/asan --sanitize

What is built is what setup.py says, with less optimisation. A checkout that is worked in wants its own build back, so
`make test-asan` and `make mutants` do this in a copy.
"""

from __future__ import annotations

import logging
import runpy
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from pathlib import Path

import torch

from hf_linattn.ops.runtime.cpu import VARIANTS

SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1"]


def build(root: Path, *more_flags: str) -> Path:
    """Build the variant for this processor in the checkout `root`, return its file; other variants are removed.

    Raises:
        subprocess.CalledProcessError: the compiler found an error.
    """
    variant = VARIANTS[torch.backends.cpu.get_cpu_capability()]
    with chdir(root):
        made = runpy.run_path("setup.py")["extensions"]()
    (module,) = (x for x in made if x.name.endswith(f".{variant}"))
    flags = [x for x in module.extra_compile_args if not x.startswith("-O")] + ["-O1", "-fPIC", *more_flags]
    library = root / Path(*module.name.split(".")).with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    for old in library.parent.glob("*.so"):
        old.unlink()

    def compiled(source: str) -> str:
        target = str((root / source).with_suffix(".o"))
        subprocess.run(["cc", *flags, "-c", str(root / source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, module.sources))
    subprocess.run(["cc", "-shared", *flags, *objects, *module.extra_link_args, "-o", str(library)], check=True)
    return library


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.info("built %s", build(Path(sys.argv[1]), *(SANITIZED if "--sanitize" in sys.argv[2:] else [])))
