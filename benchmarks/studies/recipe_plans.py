"""What the recipes for models that do not lie here will take, computed, and their first ten steps on random weights.

    python -m benchmarks.studies.recipe_plans                  # benchmarks/results/recipe_plans.json

Parameters follow from the shape of the model alone. What is trained, and the bytes of a step, are counted on two
layers of the model's width with random weights, at two lengths of rows, in the stages of the recipe; both are straight
lines in layers and tokens. Nothing here is a measurement of the model itself, and no time is: a plan with times is
what `--dry_run true` prints where the model and its GPU are.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import RECIPE_PLANS_FILE, RESULTS, ROOT
from hf_linattn import patch_model
from hf_linattn.atomic_io import write_text
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.arguments import DISTILLATION, long_step, parse_arguments
from hf_linattn.training.memory_limits import gigabytes
from hf_linattn.training.pipeline import run_recipe
from hf_linattn.training.preparation import prepare
from hf_linattn.training.price import price_of

LAYERS, LENGTHS, STEPS = 2, (64, 128), 10
TOKENIZER = ROOT / "recipes" / "pretrained" / "llama"
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
# by recipe: the shape of its model, as in the config that it is published with
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b-24gb": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-8b-lora-24gb": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
BYTES = 2  # of a weight in bfloat16


@dataclass(frozen=True)
class Counted:
    """A stage on two layers: what is trained, and the bytes of a step beyond weights, gradients and moments."""

    trained: int
    tokens: int
    step_bytes: int


def config_of(name: str, **changes: Any) -> Any:
    """Return the config of a recipe's model, with other sizes where they are given."""
    shape = {**SHAPES[name], **changes}
    return AutoConfig.for_model(shape.pop("model_type"), max_position_embeddings=131_072, **shape)


def parameters(config: Any) -> int:
    """Return how many parameters a model of this shape has; none of them is made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def trained_parameters(name: str) -> int:
    """Return how many parameters a recipe trains: adapters and mechanisms of one layer, times the layers."""
    file = parse_arguments([f"recipes/models/{name}.yaml", "--use_cpu", "True"], DISTILLATION)
    one = AutoModelForCausalLM.from_config(config_of(name, num_hidden_layers=1, vocab_size=64), dtype=torch.bfloat16)
    options = file.distillation
    adapted = add_adapters(patch_model(one, **file.model.patch_arguments()), options.lora_rank or 0)
    return SHAPES[name]["num_hidden_layers"] * sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def in_words(name: str) -> str:
    """Return what a recipe's file says of the size of its model and of what is trained."""
    whole, trained = parameters(config_of(name)), trained_parameters(name)
    size, state = gigabytes(BYTES * whole), gigabytes(state_bytes(trained))
    return f"{whole:,} parameters, {size} in bfloat16; {trained:,} trained, {state} with gradients and moments."


def small_model(name: str, folder: Path) -> Path:
    """Save two layers of a model's width with random weights, and a tokenizer of few words."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    config = config_of(name, num_hidden_layers=LAYERS, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_of(name: str, model: Path, out: Path, **changes: Any) -> Any:
    """Return the run of a recipe on that model, with what the changes say."""
    options = {
        "model_name_or_path": model, "output_dir": out, "dataset_name": "", "max_validation_tokens": 4096,
        "max_test_documents": 2, "position_windows": 0, "fidelity_windows": 0, "speed_lengths": 32, "use_cpu": True,
        "disable_tqdm": True, "calibration_tokens": 0, **changes,
    }  # fmt: skip
    flags = [f"recipes/models/{name}.yaml", *(part for key, x in options.items() for part in (f"--{key}", str(x)))]
    return prepare(parse_arguments(flags, DISTILLATION), "recipe_plans", flags)


def stages(name: str, steps: int, length: int) -> dict[str, Any]:
    """Return options for some steps of the main training and two of each other, one batch to a step."""
    file = parse_arguments([f"recipes/models/{name}.yaml", "--use_cpu", "True"], DISTILLATION)
    tokens = file.training.per_device_train_batch_size * length
    longer = file.distillation.long_block_size is not None
    total = (steps + 2) * tokens + (4 * tokens if longer else 0)
    options: dict[str, Any] = {"block_size": length, "gradient_accumulation_steps": 1, "transfer_tokens": 2 * tokens}
    long: dict[str, Any] = {"long_block_size": 2 * length, "long_tokens": 4 * tokens} if longer else {}
    return {**options, **long, "max_train_tokens": total}


def count(name: str, model: Path, out: Path, length: int) -> dict[str, Counted]:
    """Return what the stages of a recipe count, with rows of a length; the last stage has rows of twice it."""
    run = run_of(name, model, out, plan_steps=2, **stages(name, 2, length))
    weights = sum(p.nbytes for p in run.load().parameters())
    found = {}
    for stage in price_of(run).stages:
        row, rows = stage.rows
        copies = 2 if stage.name == "long_training" else 1  # there a copy of the original teaches
        found[stage.name] = Counted(
            stage.trained, row * rows, stage.peak_bytes - copies * weights - state_bytes(stage.trained)
        )
    return found


def state_bytes(trained: int) -> int:
    """Return the bytes of parameters that are trained, their gradients and two moments, in float32."""
    return 4 * 4 * trained


def extrapolated(name: str, short: Counted, long: Counted, tokens: int, copies: int) -> dict[str, int]:
    """Return what a stage takes on the whole model, with that number of tokens in a batch."""
    config = config_of(name)
    slope = (long.step_bytes - short.step_bytes) / (long.tokens - short.tokens)
    inputs = (config.num_hidden_layers - LAYERS) * config.hidden_size * BYTES  # of a token, one state for each layer
    trained = short.trained * config.num_hidden_layers // LAYERS
    weights = BYTES * parameters(config)
    step = round(short.step_bytes + (tokens - short.tokens) * slope + tokens * inputs)
    return {
        "trained_parameters": trained, "tokens_at_once": tokens, "copies_of_the_weights": copies,
        "step_bytes": step, "peak_bytes": copies * weights + state_bytes(trained) + step,
    }  # fmt: skip


def plan_of(name: str, counted: dict[int, dict[str, Counted]]) -> dict[str, dict[str, int]]:
    """Return what each stage of a recipe takes, computed."""
    file = parse_arguments([f"recipes/models/{name}.yaml", "--use_cpu", "True"], DISTILLATION)
    batch, long_batch = file.training.per_device_train_batch_size * file.data.block_size, long_step(file)[0]
    at_once = {"long_training": long_batch * (file.distillation.long_block_size or 0)}
    short, long = (counted[length] for length in LENGTHS)
    copies = {"long_training": 2}
    return {
        stage: extrapolated(name, found, long[stage], at_once.get(stage, batch), copies.get(stage, 1))
        for stage, found in short.items()
    }


def first_steps(name: str, model: Path, out: Path) -> dict[str, list[float]]:
    """Take a recipe through all its stages, ten steps of the main one, and return the training losses."""
    run = run_of(name, model, out, plan_steps=0, logging_steps=1, **stages(name, STEPS, LENGTHS[0]))
    run.directory.open(run.options)
    run_recipe(run)
    trained = [stage for stage in run.results if "history" in run.results[stage]]
    return {stage: [x["loss"] for x in run.results[stage]["history"] if "loss" in x] for stage in trained}


def main(
    recipes: Annotated[list[str] | None, typer.Argument(help="of which; default: all")] = None,
    output: Annotated[Path, typer.Option(help="the result file")] = RESULTS / RECIPE_PLANS_FILE,
) -> None:
    """Compute and try the recipes, and write what came of it beside what the file has of others."""
    document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"recipes": {}}
    for name in tqdm(recipes or list(SHAPES)):
        with tempfile.TemporaryDirectory() as folder:
            model = small_model(name, Path(folder) / "model")
            counted = {length: count(name, model, Path(folder) / "out", length) for length in LENGTHS}
            losses = first_steps(name, model, Path(folder) / "run")
        number = parameters(config_of(name))
        document["recipes"][name] = {
            "parameters": number, "weight_bytes": BYTES * number, "stages": plan_of(name, counted),
            "first_steps": losses,
        }  # fmt: skip
        source = "benchmarks.studies.recipe_plans"
        document["provenance"] = collect_provenance(torch.device("cpu"), torch.bfloat16, source)
        write_text(output, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
