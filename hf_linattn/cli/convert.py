"""`hf-linattn convert`: patch a checkpoint, fit what is new in it, and save it with its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..mechanism_table import with_option
from .choosing import PlanRequest
from .common import CALIBRATION_TOKENS, CalibrationTokens, Json, Model, exit_on_error, show
from .completion import mechanism_names
from .conversion import Wanted, run

Output = Annotated[Path, typer.Argument(help="folder that receives the converted model; absent or empty")]
PLAN_HELP = 'its name, or a plan as JSON: \'{"hybrid": "0-5", "linear": 6}\''
Mechanism = Annotated[str | None, typer.Option(help=PLAN_HELP, autocompletion=mechanism_names)]
Options = Annotated[str, typer.Option(help='options of the mechanism, as JSON: \'{"num_features": 128}\'')]
Layers = Annotated[str | None, typer.Option(help="which layers, as 0-5, 0-10:2 or 0-2,7; default: all")]
PlanFile = Annotated[
    str | None,
    typer.Option(help="a JSON file with a plan, or auto: choose one that keeps a tenth of the heads exact, or --keep"),
]
Keep = Annotated[
    str | None, typer.Option(help="choose a plan: the share (0.1) or number (9) of key/value heads left exact")
]
Unit = Annotated[str, typer.Option(help="what keep counts: head or layer")]
Signal = Annotated[str, typer.Option(help="what keep chooses by: recall, divergence or both")]
Search = Annotated[str, typer.Option(help="how: slope, gates, restore_one or one_at_a_time")]
Text = Annotated[
    list[Path] | None,
    typer.Option(help="a text file for the divergence, also where recall cannot choose; may be given again"),
]
Seed = Annotated[int, typer.Option(help="of the prompts that keep chooses by")]
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(help="a text file that the new attention is fitted on, in seconds to minutes; may be given again"),
]
CrossAttention = Annotated[
    str | None,
    typer.Option(help='mechanism between decoder and encoder, or {"name": {options}} as JSON; default: softmax'),
]
MaxPositions = Annotated[
    int | None,
    typer.Option("--max_positions", "--max-positions", help="tokens of the longest input; see extend_positions"),
]
Dtype = Annotated[str, typer.Option(help="of the weights: bfloat16, float16 or float32; auto: as saved")]
ShardSize = Annotated[str, typer.Option(help="largest file of weights")]
Length = Annotated[
    int | None,
    typer.Option(help="tokens after which the decoding state is measured; 0: not; default: 2048, if it is causal"),
]
BaseModel = Annotated[str | None, typer.Option(help="name of the original on the Hub, for the card of a folder")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done and written, and write nothing")]


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # of the click that typer brings or needs


class ConvertCommand(TyperCommand):
    """The command, which says of an option that it lacks and mechanisms have how that is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        given = list(args)  # which reading empties
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            flag = getattr(error, "option_name", None)
            if flag is not None and (owners := with_option(option := flag.lstrip("-").replace("-", "_"))):
                owners.sort(key=lambda owner: owner not in given)  # the one that is asked for comes first
                named = ", ".join(owners[:3]) + (", ..." if owners[3:] else "")
                shown = json.dumps({option: value_of(flag, given)})
                error.message += f", which is one of the mechanisms {named}: give --options '{shown}'"
            raise


def value_of(flag: str, words: list[str]) -> Any:
    """Return the value that a command line has for a flag, as JSON has it; True: it stands alone.

    >>> value_of("--size", ["--size", "8"]), value_of("--sizes", ["--sizes=[8]"]), value_of("--on", ["--on"])
    (8, [8], True)
    """
    place = next(i for i, word in enumerate(words) if word.partition("=")[0] == flag)
    after = words[place + 1] if words[place + 1 :] and not words[place + 1].startswith("--") else "true"
    text = words[place].partition("=")[2] or after
    try:
        return json.loads(text)
    except ValueError:
        return text


def convert(
    model: Model, output: Output, mechanism: Mechanism = None, options: Options = "{}", layers: Layers = None,
    plan: PlanFile = None, keep: Keep = None, unit: Unit = "head", signal: Signal = "recall", search: Search = "slope",
    text: Text = None, seed: Seed = 0, calibrate: Calibrate = None,
    calibration_tokens: CalibrationTokens = CALIBRATION_TOKENS, cross_attention: CrossAttention = None,
    max_positions: MaxPositions = None, dtype: Dtype = "auto", max_shard_size: ShardSize = "5GB",
    length: Length = None, base_model: BaseModel = None, dry_run: DryRun = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Patch a checkpoint and save it with a model card, untrained: recover it with `finetune` or `distill`.

    `hf-linattn convert gpt2 my-model --plan auto` keeps the tenth of the heads exact that recalls what is far back and
    gives all others a sliding window; the plan and its picture lie beside the model. `--mechanism hybrid --calibrate
    book.txt` fits a mechanism of constant state to the original's attention. `--dry-run` says first what would come.

    Weights are read file by file into the one model in memory and written in shards.
    """
    with exit_on_error():
        request = PlanRequest(mechanism, options, layers, keep, plan, unit, signal, search, text or (), seed)
        done = run(Wanted(
            model, output, request, calibrate or (), calibration_tokens, cross_attention, max_positions, dtype,
            max_shard_size, length, base_model, dry_run, progress=not as_json,
        ))  # fmt: skip
    show(done.document, as_json, *done.words)
