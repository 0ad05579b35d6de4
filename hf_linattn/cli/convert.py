"""`hf-linattn convert`: patch a checkpoint and save it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoProcessor, AutoTokenizer
from transformers.utils.hub import cached_file

from .. import get_patch_config, is_patched, patch_model
from ..config import json_object
from ..errors import OptionError
from ..plan import name_or_plan
from .common import Json, Model, exit_on_error, load, show

PROCESSORS: dict[str, Any] = {"tokenizer_config.json": AutoTokenizer, "preprocessor_config.json": AutoProcessor}


def convert(
    model: Model,
    output: Annotated[Path, typer.Argument(help="folder that receives the converted model; absent or empty")],
    mechanism: Annotated[str, typer.Option(help='its name, or a plan as JSON: \'{"hybrid": "0-5", "linear": 6}\'')],
    options: Annotated[str, typer.Option(help='options of the mechanism, as JSON: \'{"num_features": 128}\'')] = "{}",
    layers: Annotated[str | None, typer.Option(help="which layers, as 0-5 or 0-2,7; default: all")] = None,
    cross_attention: Annotated[
        str | None, typer.Option(help='mechanism of the layers across, or {"its name": {options}}; default: softmax')
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the weights; auto: as saved")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="largest file of weights")] = "5GB",
    as_json: Json = False,
) -> None:
    """Patch a checkpoint and save it, untrained: recover it with `finetune` or `distill`.

    `hf-linattn convert gpt2 my-model --mechanism hybrid` begins as good as its window; few others are usable so.

    Weights are read file by file into the one model in memory and written in shards.
    """
    with exit_on_error():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise OptionError(f"output={str(output)!r} is not an empty folder; give another path")
        loaded = load(model, dtype=dtype)
        if is_patched(loaded):
            raise OptionError(f"model={model!r} is converted already; give the original")
        across = None if cross_attention is None else name_or_plan("cross_attention", cross_attention)
        patch_model(
            loaded, name_or_plan("mechanism", mechanism), layers, cross_attention=across,
            **json_object("options", options),
        )  # fmt: skip
        beside = processors(model)  # before anything is written
        loaded.save_pretrained(output, max_shard_size=max_shard_size)
        for processor in beside.values():
            processor.save_pretrained(output)
    plan = get_patch_config(loaded)
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    document = {
        "output": str(output), "model_class": type(loaded).__name__, "layers": plan.num_layers,
        "converted_layers": len(plan.layers), "parameters": parameters, "processors": list(beside),
    }  # fmt: skip
    if plan.cross is not None:
        document |= {"cross_layers": plan.cross.num_layers, "converted_cross_layers": len(plan.cross.layers)}
    show(document, as_json, f"{len(plan.layers)} of {plan.num_layers} attention layers converted, saved to {output}")


def processors(model: str) -> dict[str, Any]:
    """Return what lies beside a model to make its inputs; the Auto classes invent a tokenizer where there is none."""
    return {
        file: auto_class.from_pretrained(model)
        for file, auto_class in PROCESSORS.items()
        if cached_file(model, file, _raise_exceptions_for_missing_entries=False) is not None
    }
