"""Every kernel compiled for a GPU without one, all in one process; each file has a test that does so all ways."""

from __future__ import annotations

import json

from tests.ops.block_softmax import test_triton as block_softmax
from tests.ops.hybrid import test_triton_decode as hybrid_decode
from tests.ops.linear import test_triton as linear
from tests.ops.triton_cases import run, sizes_in
from tests.ops.window import test_triton as window
from tests.ops.window import test_triton_decode as window_decode

# how many kernels each file's program compiles
FILES = {block_softmax: 3, linear: 7, hybrid_decode: 2, window: 4, window_decode: 4}
WITHOUT = {linear, hybrid_decode, window_decode}  # some kernels need none: products of rows, copies
PROGRAM = """
import contextlib, io, json, sys

printed = []
for program in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(program, {"__name__": "__main__"})
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def test_every_kernel_compiles_for_a_gpu_and_fits_its_shared_memory():
    """99 KiB is what a program may have on the smallest of them, from Ampere on."""
    done = run(PROGRAM, "once", json.dumps([file.PROGRAM for file in FILES]))
    assert done.returncode == 0, done.stderr
    sizes = [sizes_in(json.loads(x)) for x in json.loads(done.stdout)]
    assert [len(x) for x in sizes] == list(FILES.values())
    for file, found in zip(FILES, sizes, strict=True):
        least = 0 if file in WITHOUT else 1
        assert all(least <= size <= 99 * 1024 for size in found), (file, found)
