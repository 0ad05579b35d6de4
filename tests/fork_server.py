"""A process that has imported PyTorch and transformers once, and runs pytest in forks of itself, in any checkout.

What a fork imports of the checkout is its own, so that each sees the files as they are when it starts.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# what tests and library import of others; nothing of this checkout
IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils", "transformers.generation",
    "transformers.trainer", "transformers.pipelines", "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "peft", "datasets", "hypothesis", "pytest", "xdist", "rich.table",
)  # fmt: skip


class ForkServer:
    """Runs pytest in forks, one at a time; a context manager."""

    def __enter__(self) -> ForkServer:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = ""  # what no mutant changes is compiled once
        command = [sys.executable, str(Path(__file__))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()

    def run(self, tree: Path, arguments: list[str], seconds: float) -> tuple[int | None, str]:
        """Return pytest's status, or minus the signal that ended it, or None after `seconds`; and its output."""
        assert self.process.stdin is not None and self.process.stdout is not None
        order = {"tree": str(tree), "arguments": arguments, "seconds": seconds, "output": str(tree.parent / "output")}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        status = json.loads(self.process.stdout.readline())
        return status, Path(order["output"]).read_text(encoding="utf-8", errors="replace")


def _test(order: dict[str, Any]) -> None:
    """Be the fork: its output goes to a file, and processes that tests start find the same checkout."""
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, number)
    os.setsid()
    os.chdir(order["tree"])
    sys.path[0] = os.environ["PYTHONPATH"] = order["tree"]
    os._exit(int(importlib.import_module("pytest").main(order["arguments"])))


def _status(fork: int, seconds: float) -> int | None:
    """Wait for a fork, kill it and what it started after `seconds`, return its exit status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(fork, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print while they are imported is no answer
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        fork = os.fork()
        if fork == 0:
            _test(order)
        print(json.dumps(_status(fork, order["seconds"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
