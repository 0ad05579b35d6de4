"""`hf-linattn convert`: patch a checkpoint and save it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import json_object
from ..errors import OptionError
from ..plan import name_or_plan
from .choosing import choose, in_words, save_beside
from .common import Json, Model, exit_on_error, load, show

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .. import ChosenPlan

PROCESSORS = {"tokenizer_config.json": "AutoTokenizer", "preprocessor_config.json": "AutoProcessor"}


def convert(
    model: Model,
    output: Annotated[Path, typer.Argument(help="folder that receives the converted model; absent or empty")],
    mechanism: Annotated[
        str | None, typer.Option(help='its name, or a plan as JSON: \'{"hybrid": "0-5", "linear": 6}\'')
    ] = None,
    options: Annotated[str, typer.Option(help='options of the mechanism, as JSON: \'{"num_features": 128}\'')] = "{}",
    layers: Annotated[str | None, typer.Option(help="which layers, as 0-5 or 0-2,7; default: all")] = None,
    keep: Annotated[
        str | None, typer.Option(help="choose a plan: the share (0.1) or number (9) of key/value heads left exact")
    ] = None,
    unit: Annotated[str, typer.Option(help="what keep counts: head or layer")] = "head",
    signal: Annotated[str, typer.Option(help="what keep chooses by: recall, divergence or both")] = "recall",
    search: Annotated[str, typer.Option(help="how: slope, gates, restore_one or one_at_a_time")] = "slope",
    text: Annotated[list[Path] | None, typer.Option(help="a text file for the divergence; may be given again")] = None,
    seed: Annotated[int, typer.Option(help="of the prompts that keep chooses by")] = 0,
    plan: Annotated[Path | None, typer.Option(help="a plan that was chosen before: its JSON file")] = None,
    cross_attention: Annotated[
        str | None, typer.Option(help='mechanism of the layers across, or {"its name": {options}}; default: softmax')
    ] = None,
    max_positions: Annotated[
        int | None,
        typer.Option("--max_positions", "--max-positions", help="tokens of the longest input; see extend_positions"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="of the weights; auto: as saved")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="largest file of weights")] = "5GB",
    as_json: Json = False,
) -> None:
    """Patch a checkpoint and save it, untrained: recover it with `finetune` or `distill`.

    `hf-linattn convert gpt2 my-model --keep 0.1` keeps the tenth of the heads exact that recalls what is far back, and
    gives all others a sliding window; the plan and its picture lie beside the model. `--mechanism hybrid` begins as
    good as its window; few others are usable so.

    Weights are read file by file into the one model in memory and written in shards.
    """
    with exit_on_error():
        from .. import ChosenPlan, patch_model

        _check_empty(output)
        _check_ways(mechanism, keep, plan, layers)
        loaded = _original(model, dtype, max_positions)
        across = None if cross_attention is None else name_or_plan("cross_attention", cross_attention)
        chosen = None if plan is None else ChosenPlan.load(plan)
        if keep is not None:
            chosen = choose(
                loaded, model, keep, mechanism=mechanism, options=options, texts=text or (), unit=unit, signal=signal,
                search=search, seed=seed, progress=not as_json,
            )  # fmt: skip
        if chosen is None:
            given = json_object("options", options)
            patch_model(loaded, name_or_plan("mechanism", mechanism or ""), layers, cross_attention=across, **given)
        else:
            patch_model(loaded, chosen, cross_attention=across)
        beside = processors(model, max_positions)  # before anything is written
        loaded.save_pretrained(output, max_shard_size=max_shard_size)
        for processor in beside.values():
            processor.save_pretrained(output)
        said = {} if chosen is None else save_beside(chosen, output)
    show({**_document(loaded, output), "processors": list(beside), **said}, as_json, *_words(loaded, output, chosen))


def _check_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OptionError(f"output={str(output)!r} is not an empty folder; give another path")


def _check_ways(mechanism: str | None, keep: str | None, plan: Path | None, layers: str | None) -> None:
    """Raise `OptionError` unless there is one way to a plan."""
    if plan is not None and (mechanism is not None or keep is not None):
        raise OptionError("plan names mechanisms and heads itself; leave mechanism and keep out")
    if mechanism is None and keep is None and plan is None:
        raise OptionError("mechanism is not given; name one, or have a plan chosen by keep, as --keep 0.1")
    if layers is not None and (keep is not None or plan is not None):
        raise OptionError(f"layers={layers!r} is for a mechanism alone; leave it out where keep or plan says them")


def _original(model: str, dtype: str, max_positions: int | None) -> PreTrainedModel:
    """Load a model that is not converted, with its positions extended if asked for."""
    from .. import extend_positions, is_patched

    loaded = load(model, dtype=dtype)
    if is_patched(loaded):
        raise OptionError(f"model={model!r} is converted already; give the original")
    return loaded if max_positions is None else extend_positions(loaded, max_positions)


def _document(model: PreTrainedModel, output: Path) -> dict[str, Any]:
    from .. import get_patch_config

    config = get_patch_config(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    document = {
        "output": str(output), "model_class": type(model).__name__, "layers": config.num_layers,
        "converted_layers": len(config.layers), "parameters": parameters,
    }  # fmt: skip
    if config.cross is not None:
        document |= {"cross_layers": config.cross.num_layers, "converted_cross_layers": len(config.cross.layers)}
    return document


def _words(model: PreTrainedModel, output: Path, chosen: ChosenPlan | None) -> list[str]:
    from .. import get_patch_config

    config = get_patch_config(model)
    done = f"{len(config.layers)} of {config.num_layers} attention layers converted, saved to {output}"
    return [done] if chosen is None else [in_words(chosen), done]


def processors(model: str, max_length: int | None = None) -> dict[str, Any]:
    """Return what lies beside a model to make its inputs; the Auto classes invent a tokenizer where there is none.

    max_length: tokens of the longest input; None: as the tokenizer says.
    """
    import transformers
    from transformers.utils.hub import cached_file

    found = {
        file: getattr(transformers, auto_class).from_pretrained(model)
        for file, auto_class in PROCESSORS.items()
        if cached_file(model, file, _raise_exceptions_for_missing_entries=False) is not None
    }
    for tokenizer in (getattr(processor, "tokenizer", processor) for processor in found.values()):
        if max_length is not None and hasattr(tokenizer, "model_max_length"):
            tokenizer.model_max_length = max_length
    return found
