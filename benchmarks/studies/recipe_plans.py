"""What the recipes for models that do not lie here will take, computed, and their first ten steps on random weights.

    python -m benchmarks.studies.recipe_plans                  # benchmarks/results/recipe_plans.json

Parameters follow from the shape of the model alone. What is trained, and the bytes of a step, are counted on two
layers of the model's width with random weights, at two lengths of rows, in the stages of the recipe; both are straight
lines in layers and tokens. Of one recipe they are counted at its whole depth as well, with rows of 2,048 tokens: what
`--dry_run true` prints as its memory. Matrix products are left out where bytes are counted, which are the same without
them. Nothing here is a measurement of the model itself, and no time is: a plan with times is what `--dry_run true`
prints where the model and its GPU are.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import RECIPE_PLANS_FILE, RESULTS, ROOT
from benchmarks.tables.memory import PEAKS
from hf_linattn import patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.dtypes import is_fast
from hf_linattn.memory_errors import gigabytes
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.arguments import DISTILLATION, long_step, parse_arguments
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
WHOLE, WHOLE_LENGTH, WHOLE_BATCHES = "llama-3.2-1b-24gb", 2048, (1, 8)  # what is counted at its whole depth


@dataclass(frozen=True)
class Counted:
    """A stage on two layers: what is trained, and the bytes of a step beyond weights, gradients and moments."""

    trained: int
    tokens: int
    step_bytes: int


class ProductsLeftOut(TorchDispatchMode):
    """Matrix products and exact attention give zeros, at once: for counting bytes, which do not depend on numbers.

    >>> with ProductsLeftOut():
    ...     (torch.ones(2, 3) @ torch.ones(3, 2)).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            left, right = args[-2:]
            return left.new_zeros(*left.shape[:-1], right.shape[-1])
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, value = args[0], args[2]
            # laid out as the kernel does: [B, N, H, D], looked at as [B, H, N, D]
            output = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).transpose(1, 2)
            return output, query.new_zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        return func(*args, **(kwargs or {}))


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


def random_model(name: str, folder: Path, **changes: Any) -> Path:
    """Save a model of a recipe's shape with random weights, and a tokenizer of few words; `changes` of its config."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_model(name: str, folder: Path) -> Path:
    """Save two layers of a model's width that know no more words than the tokenizer has."""
    words = len(AutoTokenizer.from_pretrained(TOKENIZER))
    return random_model(name, folder, num_hidden_layers=LAYERS, vocab_size=words)


def recipe_file(name: str) -> Path:
    """Return the file of a recipe."""
    return ROOT / "recipes" / "models" / f"{name}.yaml"


def without_longer_rows(name: str, folder: Path) -> Path:
    """Write a recipe without its last stage, and return the file."""
    options = yaml.safe_load(recipe_file(name).read_text(encoding="utf-8"))
    shorter = {option: value for option, value in options.items() if not option.startswith("long_")}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**shorter, "board": str(ROOT / options["board"])}), encoding="utf-8")
    return file


def run_of(recipe: Path, model: Path, out: Path, **changes: Any) -> Any:
    """Return the run of a recipe on that model, with what the changes say."""
    options = {
        "model_name_or_path": model, "output_dir": out, "dataset_name": "", "max_validation_tokens": 4096,
        "max_test_documents": 2, "position_windows": 0, "fidelity_windows": 0, "speed_lengths": 32, "use_cpu": True,
        "disable_tqdm": True, "calibration_tokens": 0, **changes,
    }  # fmt: skip
    flags = [str(recipe), *(part for key, x in options.items() for part in (f"--{key}", str(x)))]
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
    with ProductsLeftOut():
        run = run_of(recipe_file(name), model, out, plan_steps=2, **stages(name, 2, length))
        price = price_of(run)
    weights = sum(p.nbytes for p in run.load().parameters())
    found = {}
    for stage in price.stages:
        row, rows = stage.rows
        copies = 2 if stage.name == "long_training" else 1  # there a copy of the original teaches
        found[stage.name] = Counted(
            stage.trained, row * rows, stage.peak_bytes - copies * weights - state_bytes(stage.trained)
        )
    return found


def count_whole(recipe: Path, model: Path, out: Path, batch: int, length: int) -> dict[str, int]:
    """Return the peak that the plan of a recipe prints for each stage, with a batch of rows."""
    tokens = batch * length
    options: dict[str, Any] = {
        "block_size": length, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": batch, "transfer_tokens": 2 * tokens, "max_train_tokens": 4 * tokens,
        "max_validation_tokens": max(4096, tokens), "control": "none", "plan_steps": 2,
    }  # fmt: skip
    with ProductsLeftOut():
        stages_found = price_of(run_of(recipe, model, out, **options)).stages
    return {stage.name: stage.peak_bytes for stage in stages_found}


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
    """Take a recipe through all its stages, ten steps of the main one, and return the training losses.

    In float32 on a processor that has no instructions for products of bfloat16.
    """
    dtype = "bfloat16" if is_fast(torch.bfloat16, torch.device("cpu")) else "float32"
    options = stages(name, STEPS, LENGTHS[0])
    run = run_of(recipe_file(name), model, out, plan_steps=0, logging_steps=1, dtype=dtype, **options)
    run.directory.open(run.options)
    run_recipe(run)
    trained = [stage for stage in run.results if "history" in run.results[stage]]
    return {stage: [x["loss"] for x in run.results[stage]["history"] if "loss" in x] for stage in trained}


def plan_and_parameters(name: str, folder: Path) -> dict[str, Any]:
    """Return the size of a recipe's model, and what each of its stages takes, computed from two layers."""
    model, number = small_model(name, folder / "model"), parameters(config_of(name))
    counted = {length: count(name, model, folder / "out", length) for length in LENGTHS}
    return {"parameters": number, "weight_bytes": BYTES * number, "stages": plan_of(name, counted)}


def tried(name: str, folder: Path) -> dict[str, Any]:
    """Return the losses of a recipe's first steps, on two layers."""
    return {"first_steps": first_steps(name, small_model(name, folder / "model"), folder / "run")}


def whole_depth(name: str, folder: Path, batch: int) -> dict[str, Any]:
    """Return the peaks of a recipe without its last stage, on all its layers, with that many rows in a batch."""
    model, recipe = random_model(name, folder / "whole"), without_longer_rows(name, folder)
    return {f"{PEAKS}{batch}x{WHOLE_LENGTH}": count_whole(recipe, model, folder / "out", batch, WHOLE_LENGTH)}


PARTS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "plan": plan_and_parameters,
    "first_steps": tried,
    **{f"depth_{batch}": functools.partial(whole_depth, batch=batch) for batch in WHOLE_BATCHES},
}


def main(
    recipes: Annotated[list[str] | None, typer.Argument(help="of which; default: all")] = None,
    parts: Annotated[list[str] | None, typer.Option("--part", help=f"of {', '.join(PARTS)}; default: all")] = None,
    output: Annotated[Path, typer.Option(help="the result file")] = RESULTS / RECIPE_PLANS_FILE,
) -> None:
    """Compute and try the recipes, and write what came of it beside what the file has of others."""
    document = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"recipes": {}}
    wanted = [(name, part) for name in recipes or SHAPES for part in parts or PARTS]
    for name, part in tqdm([pair for pair in wanted if "depth" not in pair[1] or pair[0] == WHOLE]):
        with tempfile.TemporaryDirectory() as folder:
            found = PARTS[part](name, Path(folder))
        document["recipes"].setdefault(name, {}).update(found)
        source = "benchmarks.studies.recipe_plans"
        document["provenance"] = collect_provenance(torch.device("cpu"), torch.bfloat16, source)
        write_json(output, document)


if __name__ == "__main__":
    typer.run(main)
