"""What `hf-linattn convert` says in the end: what was done, or would be, and what to do next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ..adapter_config import base_of
from ..console_table import console_table
from ..plan import PatchConfig

if TYPE_CHECKING:
    from ..cards import Conversion

CONFIGS = ("config.json", "configuration_hf_linattn.py", "README.md")  # written beside the weights
INDEX = "model.safetensors.index.json"  # of weights in several files
TEXT, HELD_OUT = "text.txt", "test.txt"  # where none was given; that nothing was fitted to or chosen by
# Auto class -> how a model of it is measured; recipes recover the same ones
MEASURED_BY = {
    "AutoModelForCausalLM": "hf-linattn eval {output} {held_out} --suite language --original {model}",
    "AutoModelForMaskedLM": "hf-linattn eval {output} {held_out}",
    "AutoModelForSequenceClassification": None,
    "SentenceTransformer": "hf-linattn eval {output} test.jsonl --original {model}",
}
# and what they learn from: a text, or rows with labels
ROWS = "--train_file train.jsonl --validation_file validation.jsonl --test_file test.jsonl"
TAUGHT_BY = {"AutoModelForSequenceClassification": ROWS, "SentenceTransformer": ROWS}


def words(
    document: dict[str, Any], conversion: Conversion, model: str, calibrate: Sequence[Path], texts: Sequence[Path]
) -> list[Any]:
    """Return what is shown of a conversion, done or not; calibrate, texts: files that it was given."""
    from ..cards import in_bytes

    state, fitted, output = document["state"], document.get("calibration"), document["output"]
    said: list[Any] = [attention_table(document)]
    if state is not None:
        own, softmax = in_bytes(state["patched"]), in_bytes(state["original"])
        said.append(f"decoding state after {state['length']:,} tokens: {own}, softmax's {softmax}")
    if fitted is not None:
        tokens = f"{fitted['tokens']:,} tokens of {', '.join(file.name for file in calibrate)}"
        said.append(
            f"calibrated on {tokens} in {fitted['seconds']:.0f} s: the fit was taken in {fitted['taken']} of"
            f" {fitted['layers']} layers" if document["written"] else f"to be calibrated on {tokens}"
        )  # fmt: skip
    done = f"{document['converted_layers']} of {document['layers']} attention layers converted"
    if not document["written"]:
        size, count = in_bytes(document["weight_bytes"]), document["weight_files"]
        several = [f"{count} files model-*.safetensors ({size})", INDEX]
        weights = [f"model.safetensors ({size})"] if count == 1 else several
        files = ", ".join([*weights, *document["files"]])
        return [*said, f"{done}; to be written to {output}: {files}", "nothing was written (--dry-run)"]
    text = str(next(iter([*calibrate, *texts]), TEXT))
    steps = next_steps(conversion, model, output, text, plan_options(document, conversion.patches[""]))
    return [*said, f"{done}, saved to {output}: UNTRAINED", *map(escape, steps)]


def attention_table(document: dict[str, Any]) -> Table:
    """Return which attention serves which layers."""
    table = console_table("attention", "layers", box=None, pad_edge=False)
    for row in document["attention"]:
        table.add_row(escape(row["attention"]), row["layers"])
    return table


def next_steps(conversion: Conversion, model: str, output: str, text: str, plan: str) -> list[str]:
    """Return the commands that measure and recover what was converted; plan: the options that ask for it again."""
    if conversion.loader not in MEASURED_BY:
        return ["train and measure it with your own code; the recipes take language models, classifiers and"
                " embedding models"]
    quoted = {name: shlex.quote(x) for name, x in {"model": model, "output": output, "text": text}.items()}
    measure = MEASURED_BY[conversion.loader]
    data = TAUGHT_BY.get(conversion.loader, f"--train_file {quoted['text']}")
    recover = f"hf-linattn distill --model_name_or_path {quoted['model']} {plan} {data} --output_dir"
    steps = [f"recover: {recover} {quoted['output']}-recovered"]
    if base_of("model", model) is not None:
        steps = ["to recover it, merge the adapter into its model, save that, and convert it; recipes take no adapter"]
    return [*([] if measure is None else [f"measure: {measure.format(**quoted, held_out=HELD_OUT)}"]), *steps]


def plan_options(document: dict[str, Any], config: PatchConfig) -> str:
    """Return the options of a recipe that ask for the same plan: by its file where there is one.

    Added positions come with rows that reach them: what no row reaches is not trained.
    """
    from ..cards import changed_options

    groups = config.to_dict()["groups"]
    plan = [{**group, "options": changed_options(group["mechanism"], group["options"])} for group in groups]
    most = document.get("max_positions")
    longer = f" --max_positions {most} --block_size {most}" if most else ""
    if "plan" in document:
        return f"--plan {shlex.quote(document['plan'])}{longer}"
    if len(plan) == 1 and len(plan[0]["layers"]) == config.num_layers and not plan[0]["options"]:
        return f"--mechanism {plan[0]['mechanism']}{longer}"
    return f"--plan {shlex.quote(json.dumps(plan))}{longer}"


def without_place(word: str, model: str) -> str:
    """Return a word of a command as a card shows it to all: of a path on this machine, its last part alone.

    model: the word that names the original, which may be a folder.

    >>> [without_place(word, "me/gpt2") for word in ("/models/gpt2", "--plan=../mine.json", "me/gpt2")]
    ['gpt2', '--plan=mine.json', 'me/gpt2']
    """
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    place = Path(value)
    here = place.is_absolute() or ".." in place.parts or (value == model and place.is_dir())
    return f"{option}{equals}{place.name}" if here and place.name else word
