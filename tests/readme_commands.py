"""The README tried as a reader would, in a clone and in an empty folder with the wheel: `make readme`.

Every command and every block of Python runs in the README's order. A stand-in for the Hub answers names on it: with a
small untrained model of SmolLM2's shape, or with the one of `--model`, and then times are held to those of the page.
A command that takes hours by the README is made shorter by `SHORTER`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.hub_stand_in import Hub, Repository, hub_stand_in

ROOT = Path(__file__).resolve().parent.parent
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the model that the README names
SECONDS, MINUTES, HOURS = {"second": 1, "minute": 60}, 1200, 3600  # the last two: where no number is said
UNSAID, SLACK = 30, 1.5  # seconds of a command without a time; by what factor one may be late
INSTALLS, OF_A_CLONE = ("git ", "pip "), ("make ",)
SHORTER = (
    "--block_size 256 --gradient_accumulation_steps 1 --max_train_tokens 512 --max_validation_tokens 512"
    " --max_test_documents 1 --speed_lengths 256 --plan_steps 0"
)
BOOK = 1_500_000  # characters
# Python of the README is one session; each block is answered with its time on the processor, or with what went wrong
SESSION = """
import json, os, sys, time, traceback
answers, sys.stdout, names = sys.stdout, sys.stderr, {"__name__": "__main__"}
for line in sys.stdin:
    error = ""
    started = time.process_time()
    try:
        exec(compile(json.loads(line), "README.md", "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([time.process_time() - started, error]), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Step:
    """A command or a block of Python, and the seconds that the page gives it; None: it says nothing."""

    code: str
    python: bool
    seconds: int | None

    @property
    def in_hours(self) -> bool:
        return self.seconds == HOURS

    @property
    def name(self) -> str:
        return self.code if not self.python else f"Python: {self.code.splitlines()[-1]}"


@dataclass(frozen=True)
class Done:
    """How a step went: seconds of the clock and of the processor, and what it said if it failed."""

    step: Step
    wall: float
    cpu: float
    error: str

    def late(self) -> bool:
        return not self.step.in_hours and self.wall > SLACK * (self.step.seconds or UNSAID)


def steps(text: str) -> Iterator[Step]:
    """Yield what a reader of a page runs, in order."""
    for block in re.finditer(r"^```python\n(?P<python>[^`]*?)^```|^    (?P<line>\S[^\n]*)$", text, re.M):
        code = block["python"] or block["line"].split("     #")[0]
        said = re.search(r"# (?:(\d+) (second|minute)|(minutes|hours))", block[0])
        stated = said and (int(said[1]) * SECONDS[said[2]] if said[1] else MINUTES if said[3] == "minutes" else HOURS)
        yield Step(code, bool(block["python"]), stated)


class Place:
    """A folder with an environment in which a reader works."""

    def __init__(self, folder: Path, environment: Path, hub: Hub):
        self.folder = folder
        paths = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "VENV": str(environment)}
        client = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_" + "a" * 34, "HF_HUB_DISABLE_XET": "1"}
        unset = {"HF_HUB_OFFLINE", "MAKEFLAGS", "MAKELEVEL"}
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        self.environment = {**inherited, **paths, **client, "HF_HOME": str(environment / "hub")}
        self.session = subprocess.Popen(
            [environment / "bin" / "python", "-c", SESSION], cwd=folder, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def close(self) -> None:
        """End the session of Python."""
        self.session.terminate()
        self.session.wait()

    def run(self, step: Step) -> Done:
        """Run a step, a command of hours in its shorter form."""
        started, before = time.perf_counter(), children_time()
        if step.python:
            assert self.session.stdin is not None and self.session.stdout is not None
            print(json.dumps(step.code), file=self.session.stdin, flush=True)
            cpu, error = json.loads(self.session.stdout.readline())
            return Done(step, time.perf_counter() - started, cpu, error)
        command = f"{step.code} {SHORTER}" if step.in_hours else step.code
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        error = ended.stdout[-3000:] if ended.returncode else ""
        return Done(step, time.perf_counter() - started, children_time() - before, error)


def children_time() -> float:
    """Return the seconds on the processor of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def small_model(folder: Path) -> Path:
    """Save an untrained Llama that has SmolLM2's layers and key/value heads, as a plan names these."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    bundled = ROOT / "recipes" / "pretrained" / "llama"
    config = LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=30, num_attention_heads=3, num_key_value_heads=3,
        vocab_size=2048, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled).save_pretrained(folder)
    return folder


def serve(hub: Hub, model: Path) -> None:
    """Put a model's folder on the Hub under the README's name."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    hub.repositories[NAME] = Repository(files, commits=1)


def book(folder: Path) -> None:
    """Write the reader's text."""
    from hf_linattn.training.corpus import standard_library_corpus

    text = "\n".join(standard_library_corpus()["train"]["text"])
    (folder / "book.txt").write_text(text[:BOOK], encoding="utf-8")


def prepare(where: str, folder: Path, ready: Path | None, wheel: Path | None) -> tuple[Path, Path, list[Step]]:
    """Return the folder of a reader, his environment with the library in it, and what is left to run of the README."""
    found = [*steps((ROOT / "README.md").read_text(encoding="utf-8"))]
    installs = [step for step in found if not step.python and step.code.startswith(INSTALLS)]
    environment, place = ready or folder / "environment", folder / where
    if ready is None:
        venv.create(environment, with_pip=True)
    if where == "clone":
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
        left = [step for step in found if step not in installs or (ready is None and step.code.startswith("pip "))]
        (environment / ".for_runs").touch()  # the stamp of `make quickstart`: it is installed
    else:
        place.mkdir(parents=True)
        if ready is None:
            package = ["install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]"]
            subprocess.run([environment / "bin" / "pip", *package], check=True)
        left = [step for step in found if not step.code.startswith((*INSTALLS, *OF_A_CLONE))]
    book(place)
    return place, environment, left


def absolute(path: str) -> Path:
    """Return a path that means the same in every folder."""
    return Path(path).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["clone", "wheel"])
    parser.add_argument("--folder", type=absolute, default=ROOT / "build" / "readme", help="where; it is emptied")
    parser.add_argument("--model", type=absolute, help="the folder of the model that answers to the README's name")
    parser.add_argument("--wheel", type=absolute, help="the wheel that is installed")
    parser.add_argument("--environment", type=absolute, help="one that has the library; default: a new one")
    given = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # pip takes a checkout on it for the installed package
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    with hub_stand_in() as hub:
        serve(hub, given.model or small_model(given.folder / "model"))
        place, environment, left = prepare(given.where, given.folder, given.environment, given.wheel)
        failed = report(Place(place, environment, hub), left, timed=given.model is not None)
    sys.exit(failed)


def report(place: Place, left: list[Step], timed: bool) -> int:
    """Run the steps, show each with its times, and return 1 if one failed or was late."""
    table, wrong = Table("step", "page, s", "clock, s", "processor, s", ""), 0
    for step in left:
        done = place.run(step)
        late = timed and done.late()
        wrong |= bool(done.error) or late
        said = "small form" if step.in_hours else str(step.seconds or f"< {UNSAID}")
        row = [step.name, said, f"{done.wall:.0f}", f"{done.cpu:.0f}", "failed" if done.error else "late" * late]
        print(" | ".join(row), flush=True)
        table.add_row(*row)
        if done.error:
            print(done.error, file=sys.stderr)
            break
    place.close()
    Console().print(table)
    return int(wrong)


if __name__ == "__main__":
    main()
