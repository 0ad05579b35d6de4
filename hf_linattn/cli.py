"""The command line: `hf-linattn --help`.

Every command takes `--json`, which prints one JSON document and nothing else on standard output. Exit codes: 0, 1 for
one of the library's own errors, 2 for a command line that cannot be read.
"""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from . import __version__, get_patch_config, is_patched, list_mechanisms, patch_model
from .config import json_object
from .errors import CheckpointError, DataError, OptionError
from .hub import MODEL_TYPE, load_checkpoint
from .mechanisms import MECHANISMS
from .ops.dispatch import DEFAULT_BACKEND
from .ops.runtime import cpu as library
from .plan import name_or_plan
from .reading import exit_with_one_line, read_tokenizer, reading

PACKAGES = (
    "torch", "transformers", "huggingface_hub", "safetensors", "accelerate", "datasets", "peft", "evaluate",
)  # fmt: skip
PROCESSORS: dict[str, Any] = {"tokenizer_config.json": AutoTokenizer, "preprocessor_config.json": AutoProcessor}
# --help too: a recipe lists its options itself
PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="hf-linattn", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Subquadratic attention for pretrained Hugging Face models: convert, recover, measure, publish.",
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Model = Annotated[str, typer.Argument(help="a folder, or the name of a model on the Hub")]
Options = Annotated[str, typer.Option(help='options of the mechanism, as JSON: \'{"num_features": 128}\'')]


@contextmanager
def told() -> Iterator[None]:
    """Turn an error, the library's own or of what it reads and writes, into one line and exit code 1."""
    try:
        with exit_with_one_line():
            yield
    except SystemExit as ended:
        if isinstance(ended.code, str):
            typer.echo(ended.code, err=True)
            raise typer.Exit(1) from ended
        raise


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what hundreds of small models would log off the screen for a while."""
    own, theirs = logging.getLogger("hf_linattn"), transformers.logging.get_verbosity()
    level = own.level
    own.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        own.setLevel(level)
        transformers.logging.set_verbosity(theirs)


def show(document: Any, as_json: bool, *shown: Any) -> None:
    """Print a JSON document, or what is to be shown in its place."""
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    console = Console()
    for part in shown:
        console.print(part, soft_wrap=isinstance(part, str))


# -- what there is ----------------------------------------------------------------------------------------------------


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List the mechanisms: their modes, their decoding state, when they equal softmax, their source."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "modes": sorted(MECHANISMS.get(name).modes),
            "constant_state": MECHANISMS.get(name).constant_state,
            "exact": MECHANISMS.get(name).limit.text,
            "source": MECHANISMS.get(name).citation,
        }
        for name in list_mechanisms()
    ]
    table = Table("mechanism", "modes", "decoding state", "exactness limit", "source")
    for row in rows:
        state = "constant" if row["constant_state"] else "grows"
        table.add_row(row["name"], ", ".join(row["modes"]), state, row["exact"], row["source"])
    show(rows, as_json, table)


@app.command()
def support(
    model_types: Annotated[list[str] | None, typer.Argument(help="model types such as qwen3; none: all")] = None,
    mechanism: Annotated[str, typer.Option(help="name of the mechanism to patch with")] = "linear",
    output: Annotated[Path | None, typer.Option(help="also write the JSON to this file")] = None,
    as_json: Json = False,
) -> None:
    """Patch a small random model of each architecture of transformers and say what holds."""
    from .support import architectures, check_architecture, support_table

    with told(), quiet():
        names = track(model_types or list(architectures()), "checking", console=Console(stderr=True), transient=True)
        found = [check_architecture(name, mechanism) for name in names]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    document = {**versions, "mechanism": mechanism, "architectures": [asdict(row) for row in found]}
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    counts = Counter(row.status for row in found).most_common()
    show(document, as_json, support_table(found), ", ".join(f"{count} {status}" for status, count in counts))


@app.command()
def env(as_json: Json = False) -> None:
    """Show versions and devices, for a bug report."""
    found: dict[str, Any] = {"hf_linattn": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["platform"] = platform.platform()
    found["cuda"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["threads"] = torch.get_num_threads()
    found["native"] = library.available()
    found["backend"] = DEFAULT_BACKEND
    table = Table("what", "value")
    for name, value in found.items():
        table.add_row(name, "not installed" if value is None else str(value))
    show(found, as_json, table)


# -- converting and recovering ----------------------------------------------------------------------------------------


@app.command()
def convert(
    model: Model,
    output: Annotated[Path, typer.Argument(help="folder that receives the converted model; absent or empty")],
    mechanism: Annotated[str, typer.Option(help='its name, or a plan as JSON: \'{"hybrid": "0-5", "linear": 6}\'')],
    options: Options = "{}",
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
    with told():
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


def load(model: str, **options: Any) -> PreTrainedModel:
    """Load a model; `CheckpointError` if it cannot be read."""
    with reading("model", model, "give a folder with a saved model, or the name of one on the Hub and a connection"):
        return load_checkpoint(model, **options)


def processors(model: str) -> dict[str, Any]:
    """Return what lies beside a model to make its inputs; the Auto classes invent a tokenizer where there is none."""
    return {
        file: auto_class.from_pretrained(model)
        for file, auto_class in PROCESSORS.items()
        if cached_file(model, file, _raise_exceptions_for_missing_entries=False) is not None
    }


@app.command(context_settings=PASSED_ON)
def finetune(context: typer.Context, as_json: Json = False) -> None:
    """Convert a model, fine-tune it on text and report: options or a YAML file, as for recipes/finetune.py."""
    recipe("finetune", context.args, as_json)


@app.command(context_settings=PASSED_ON)
def distill(context: typer.Context, as_json: Json = False) -> None:
    """Convert a model and have the original teach it: options or a YAML file, as for recipes/distill.py."""
    recipe("distill", context.args, as_json)


def recipe(command: str, flags: Sequence[str], as_json: bool) -> None:
    """Run a recipe; its own tables go to standard error if JSON is asked for."""
    with told():
        from .training import arguments, pipeline

        kinds = {"finetune": arguments.FINETUNING, "distill": arguments.DISTILLATION}[command]
        found = pipeline.main(flags, kinds, f"hf-linattn {command}", Console(stderr=as_json))
        if as_json:
            typer.echo(found.to_json())


# -- measuring --------------------------------------------------------------------------------------------------------


@app.command("eval")
def evaluate(
    model: Model,
    files: Annotated[list[Path], typer.Argument(help="text files, a document each")],
    max_length: Annotated[int, typer.Option(help="tokens per window")] = 512,
    stride: Annotated[int | None, typer.Option(help="by how many tokens windows advance; default: half")] = None,
    batch_size: Annotated[int, typer.Option(help="windows at once")] = 8,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a causal or masked language model, converted or not, on text files."""
    with told():
        from .evaluation import perplexity

        texts = [read_text(file) for file in files]
        loaded = on_device(load(model))
        found = perplexity(
            loaded, read_tokenizer("model", model), texts, max_length=max_length, stride=stride,
            batch_size=batch_size, progress=not as_json,
        )  # fmt: skip
    document = {"model": model, **found}
    show(document, as_json, f"perplexity {found['perplexity']:.4f} over {found['num_tokens']:,} tokens")


def read_text(file: Path) -> str:
    """Read a document; `DataError` if it cannot be read as text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"files: {str(file)!r} cannot be read as text: {error}") from error


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="a converted model: a folder, or a name on the Hub")],
    lengths: Annotated[str, typer.Option(help="tokens, separated by commas")] = "512,1024,2048,4096",
    batch_size: Annotated[int, typer.Option(help="sequences at once")] = 1,
    repeats: Annotated[int, typer.Option(help="timed runs of each variant")] = 5,
    as_json: Json = False,
) -> None:
    """Time a converted model beside the same weights with their own attention, and count bytes."""
    with told():
        from .evaluation import measure_memory, measure_speed

        wanted = numbers("lengths", lengths)
        loaded = on_device(load(model))
        speed = measure_speed(loaded, wanted, batch_size=batch_size, repeats=repeats)
        memory = measure_memory(loaded, wanted)
    table = Table("tokens", "prefill, times faster", "decode, times faster", "state bytes", "original's")
    for row, held in zip(speed, memory, strict=True):
        decode = "-" if row.decode_speedup is None else f"{row.decode_speedup:.2f}"
        state = ["-" if b is None else f"{b:,}" for b in (held.patched_state, held.original_state)]
        table.add_row(f"{row.length:,}", f"{row.prefill_speedup:.2f}", decode, *state)
    document = {"model": model, "speed": [asdict(row) for row in speed], "memory": [asdict(row) for row in memory]}
    show(document, as_json, table)


def numbers(option: str, text: str) -> list[int]:
    """Return whole numbers given on the command line."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"{option} must be numbers separated by commas, got {text!r}") from error


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move a model to the GPU where there is one."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="output folder of a recipe")],
    as_json: Json = False,
) -> None:
    """Show what a recipe found out: the four models, and the way from converted to recovered."""
    with told():
        from .report import Report, four_model_table, stage_table

        found = Report.load(folder)
    show(json.loads(found.to_json()), as_json, four_model_table(found), stage_table(found))


# -- publishing -------------------------------------------------------------------------------------------------------


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="a converted model")],
    repository: Annotated[str, typer.Argument(help="user/name on the Hub; made if it is not there")],
    private: Annotated[bool, typer.Option(help="make it private")] = False,
    message: Annotated[str, typer.Option(help="of the commit")] = "Upload a model converted with hf_linattn",
    as_json: Json = False,
) -> None:
    """Upload a converted model in one commit, all of it or nothing; a recipe's report becomes its model card."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    unreachable: Any = HfHubHTTPError.__mro__[1]  # of the package with which the client of the Hub speaks HTTP
    with told():
        check_converted(folder)
        name_card(folder, repository)
        api = HfApi()
        try:
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message,
                ignore_patterns=["stages/**", "control/**", ".[0-9]*"],  # the last: of a write that was killed
            )  # fmt: skip
        except (unreachable, HFValidationError, OSError, RuntimeError) as error:  # the last: an upload broke off
            raise CheckpointError(f"repository={repository!r}: the Hub refused the upload: {error}") from error
    document = {"repository": repository, "commit": commit.oid, "url": commit.commit_url}
    show(document, as_json, f"pushed to {commit.commit_url}")


def name_card(folder: Path, repository: str) -> None:
    """Write the model card that follows from a recipe's report, which did not know the name; a person's own stays."""
    from .report import CARD_FILE, REPORT_FILE, Report, model_card, save_card

    if not (folder / REPORT_FILE).is_file():
        return
    found, card = Report.load(folder), folder / CARD_FILE
    if not card.exists() or card.read_text(encoding="utf-8") == str(model_card(found)):
        save_card(found, folder, repository)


def check_converted(folder: Path) -> None:
    """Raise `CheckpointError` unless a folder holds a converted model."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"folder={str(folder)!r} has no config.json; give the folder of a converted model")
    try:
        config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{str(file)!r} is not JSON ({error}); save the model again") from error
    if MODEL_TYPE not in config:
        raise CheckpointError(f"folder={str(folder)!r} holds a model that is not converted; run hf-linattn convert")


