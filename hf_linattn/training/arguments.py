"""Options of the recipes: dataclasses whose help texts are the documentation, read from flags, YAML files or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import HfArgumentParser, TrainingArguments

from hf_linattn.config import json_object, require, require_count
from hf_linattn.errors import OptionError
from hf_linattn.training.board import CommandLine
from hf_linattn.training.finetuning_arguments import FinetuningArguments
from hf_linattn.training.flags import flags_of, refusing, unknown_option
from hf_linattn.training.stage_options import check_stages

AUTO = "auto"  # value of `layers`
DTYPES = ("float32", "bfloat16", "float16", "auto")


@dataclass
class ModelArguments:
    """Which model is converted, and to what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint to convert: a folder or the name of a model on the Hub."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Its tokenizer, where it lies elsewhere."})
    dtype: str = field(
        default="float32", metadata={"help": "Of the weights while training and in the result; `auto`: as saved."}
    )
    mechanism: str | None = field(default=None, metadata={"help": "Name of the mechanism; `performer`, `linear`, ..."})
    mechanism_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Its options, as JSON (a mapping in YAML)."}
    )
    layers: str | None = field(
        default=None, metadata={"help": "Which layers, as `0-5` or `0-2,7`; `auto`: see softmax_share; default: all."}
    )
    softmax_share: float = field(
        default=0.25, metadata={"help": "With `layers auto`, at most this share, those that matter most, stay."}
    )
    plan: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'In the place of `mechanism`: JSON like `{"performer": "0-5", "linear": [6]}`.'},
    )
    chunk_feed_forward: int | None = field(
        default=None,
        metadata={"help": "Feed-forwards take so many tokens at a time, with less memory; default: all of a batch."},
    )
    row: str | None = field(
        default=None,
        metadata={"help": "Row of the board: its options override the file's, its name is put behind output_dir."},
    )
    board: str | None = field(default=None, metadata={"help": "YAML file of rows: name -> options."})

    def __post_init__(self) -> None:
        require("model_name_or_path", self.model_name_or_path, bool(self.model_name_or_path), "a folder or Hub name")
        require("dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        for name in ("mechanism_options", "plan"):
            given = getattr(self, name)
            setattr(self, name, None if given is None else json_object(name, given))
        require_count("chunk_feed_forward", self.chunk_feed_forward, optional=True)
        require("softmax_share", self.softmax_share, 0 <= self.softmax_share < 1, "at least 0 and below 1")
        if self.layers == AUTO:
            require("plan", self.plan, not self.plan, "absent where layers is 'auto'")
        if (self.mechanism is None) == (not self.plan):
            raise OptionError(
                f"give either mechanism or plan, got mechanism={self.mechanism!r} and plan={self.plan!r};"
                " for example --mechanism performer, or a --row of a board"
            )

    def patch_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `hf_linattn.patch_model`."""
        options: Any = self.mechanism_options or {}
        layers = None if self.layers == AUTO else self.layers
        chosen = {"mechanism": self.plan or self.mechanism, "layers": layers}
        return {**chosen, "chunk_feed_forward": self.chunk_feed_forward, **options}


@dataclass
class DataArguments:
    """Text to train and measure on; with no source given, the documentation of Python's standard library."""

    dataset_name: str | None = field(default=None, metadata={"help": "Name of a dataset on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training text: .txt, .md (one document), .json, .jsonl, .csv or .parquet."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Text that chooses learning rate and checkpoint; default: cut from training."}
    )
    test_file: str | None = field(
        default=None, metadata={"help": "Text of the reported perplexities; default: cut from training."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the dataset or file that holds the text."})
    label_column: str = field(
        default="label", metadata={"help": "Column of the classes, by number or name, if the model is a classifier."}
    )
    block_size: int = field(
        default=256, metadata={"help": "Tokens per training row and test window; a classifier's texts are cut to it."}
    )
    mlm_probability: float = field(
        default=0.15, metadata={"help": "Share of the tokens that a masked model predicts in training."}
    )
    eval_mlm_probability: float = field(
        default=0.15, metadata={"help": "The same in validation and test: perplexities compare at equal shares only."}
    )
    max_validation_tokens: int | None = field(default=None, metadata={"help": "Use only so many validation tokens."})
    max_test_documents: int | None = field(default=None, metadata={"help": "Use only so many test documents."})
    stride: int | None = field(
        default=None, metadata={"help": "Test windows of a causal model start this many tokens apart; default: half."}
    )

    def __post_init__(self) -> None:
        require("block_size", self.block_size, self.block_size >= 2, "at least 2")
        for name in ("mlm_probability", "eval_mlm_probability"):
            require(name, getattr(self, name), 0 < getattr(self, name) < 1, "between 0 and 1")
        for name in ("max_validation_tokens", "max_test_documents", "stride"):
            value = getattr(self, name)
            require(name, value, value is None or value > 0, "a positive number, or absent")
        require("stride", self.stride, (self.stride or 1) < self.block_size, f"below block_size={self.block_size}")


@dataclass
class RecipeArguments:
    """How much is trained and what is measured."""

    max_train_tokens: int = field(
        default=2_000_000,
        metadata={"help": "Tokens of each full run, over all its stages and epochs (not those of the search)."},
    )
    learning_rates: list[float] | None = field(
        default=None,
        metadata={
            "help": "Grid searched for control and recovered alike; default: 3e-4 1e-3 3e-3. One value: no search."
        },
    )
    control_learning_rates: list[float] | None = field(
        default=None, metadata={"help": "A grid of its own for the control."}
    )
    control_dir: str | None = field(
        default=None,
        metadata={"help": "Output folder of a run on the same tokens, whose control serves here too; empty: none."},
    )
    lr_search_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of each search run; default: 0.15 of max_train_tokens."}
    )
    kl_weight: float = field(
        default=0.0, metadata={"help": "Of the KL divergence from the original's predictions; control: none."}
    )
    hidden_weight: float = field(
        default=0.0, metadata={"help": "Of the relative squared error of all layers' hidden states; control: none."}
    )
    calibration_tokens: int = field(
        default=0,
        metadata={"help": "Training tokens on which the mechanisms are fitted, layer by layer, before training."},
    )
    speed_lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048, 4096],
        metadata={"help": "Lengths to time, where the position table allows them."},
    )
    fidelity_windows: int = field(
        default=0,
        metadata={"help": "Test windows on which generated text and accuracy by position are compared; causal only."},
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Start anew in an output_dir that holds another run's results."}
    )

    def __post_init__(self) -> None:
        self.searches_a_share = not self.lr_search_tokens  # messages speak of what was given
        self.lr_search_tokens = self.lr_search_tokens or int(0.15 * self.max_train_tokens)
        self.control_dir = self.control_dir or None  # a flag that takes back what a file says
        for name in ("learning_rates", "control_learning_rates"):
            rates = getattr(self, name)
            require(name, rates, rates is None or all(rate > 0 for rate in rates), "positive numbers")
        for name in ("kl_weight", "hidden_weight", "calibration_tokens", "fidelity_windows"):
            require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        lengths = self.speed_lengths
        require("speed_lengths", lengths, bool(lengths) and min(lengths) > 0, "positive numbers of tokens")


DEFAULT_LEARNING_RATES = [3e-4, 1e-3, 3e-3]


OF_SINGLE_LAYERS = ("transfer_output_weight", "transfer_weights_weight", "transfer_projected")


@dataclass
class DistillationArguments:
    """How the original teaches the converted model; all of it comes out of `max_train_tokens`."""

    transfer_tokens: int = field(
        default=0, metadata={"help": "Training tokens of attention transfer: layers learn what softmax does there."}
    )
    transfer_learning_rate: float = field(default=1e-2, metadata={"help": "Its peak learning rate."})
    transfer_output_weight: float = field(default=1.0, metadata={"help": "Of the relative error of layers' outputs."})
    transfer_weights_weight: float = field(
        default=1.0, metadata={"help": "Of the divergence from softmax's attention weights, where there are any."}
    )
    transfer_projected: bool = field(
        default=False, metadata={"help": "Compare outputs behind the layers' output projections."}
    )
    transfer_block_layers: int | None = field(
        default=None,
        metadata={"help": "Compare what comes out of blocks of so many layers; absent: each layer's attention."},
    )
    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train adapters of this rank and the mechanisms alone; absent: all weights, beside a copy."},
    )
    lora_alpha: float | None = field(default=None, metadata={"help": "Adapters count alpha / rank; default: 2 rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Of the adapters' inputs."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names as PEFT takes them; default: all projections around the attention."}
    )
    lora_mechanisms: bool = field(
        default=True, metadata={"help": "Train the mechanisms' parameters beside the adapters."}
    )
    ce_weight: float = field(default=1.0, metadata={"help": "Of the text's own cross-entropy."})
    temperature: float = field(default=1.0, metadata={"help": "Divides both models' logits in the KL divergence."})
    top_k: int | None = field(
        default=None, metadata={"help": "Compare the original's so many likeliest tokens, and all others as one."}
    )
    fading_teacher: bool = field(
        default=False, metadata={"help": "kl_weight and hidden_weight fall linearly to zero over the run."}
    )
    long_tokens: int = field(
        default=0, metadata={"help": "Training tokens of a last stage on longer rows, without a search."}
    )
    long_block_size: int | None = field(default=None, metadata={"help": "Tokens per row of that stage."})
    window_dropout: float = field(
        default=0.0,
        metadata={"help": "Probability, falling to 0, that a hybrid layer's window is shut for a training step."},
    )

    def __post_init__(self) -> None:
        for name in (
            "transfer_tokens", "transfer_output_weight", "transfer_weights_weight", "ce_weight", "long_tokens",
        ):  # fmt: skip
            require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("transfer_learning_rate", "temperature"):
            require(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        for name in ("lora_rank", "top_k", "transfer_block_layers"):
            given = getattr(self, name)
            require(name, given, given is None or given >= 1, "an integer >= 1, or absent")
        for name in ("lora_dropout", "window_dropout"):
            require(name, getattr(self, name), 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        some = bool(self.transfer_output_weight or self.transfer_weights_weight)
        require("transfer_output_weight", self.transfer_output_weight, some, "above 0 if transfer_weights_weight is 0")
        given, both = self.long_block_size, (self.long_block_size is None) == (not self.long_tokens)
        require("long_block_size", given, both, "given with long_tokens, and only so")
        if self.transfer_block_layers is not None:
            for f in (f for f in dataclasses.fields(self) if f.name in OF_SINGLE_LAYERS):
                given = getattr(self, f.name)
                require(f.name, given, given == f.default, "absent where transfer_block_layers is set")
        for name in ("lora_alpha", "lora_target_modules"):
            given = getattr(self, name)
            require(name, given, given is None or self.lora_rank is not None, "absent where lora_rank is")


class Arguments(NamedTuple):
    """The options of a run, by group."""

    model: ModelArguments
    data: DataArguments
    recipe: RecipeArguments
    training: FinetuningArguments
    distillation: DistillationArguments = DistillationArguments()


FINETUNING = (ModelArguments, DataArguments, RecipeArguments, FinetuningArguments)
DISTILLATION = (*FINETUNING, DistillationArguments)


def parse_arguments(argv: Sequence[str], kinds: Sequence[type] = FINETUNING) -> Arguments:
    """Read `[config.yaml] [--flag value ...]`; a flag overrides the same name in the file and in a row of the board.

    Args:
        kinds: the groups that may be set, `FINETUNING` or `DISTILLATION`.

    Raises:
        OptionError: an unknown name (the message has the nearest ones), a value out of range, an unreadable file.
        UnknownNameError: a row that the board lacks.

    >>> arguments = parse_arguments(
    ...     ["--model_name_or_path", "gpt2", "--mechanism", "linear", "--output_dir", "out", "--seed", "7"])
    >>> arguments.model.mechanism, arguments.data.block_size, arguments.training.seed
    ('linear', 256, 7)
    """
    known = {f.name for kind in kinds for f in dataclasses.fields(kind) if f.init}
    with refusing(argv):
        line = CommandLine(argv)
    flags = flags_of(line.options(), known) + line.flags
    parser = HfArgumentParser(kinds, allow_abbrev=False, exit_on_error=False, add_help=False)  # type: ignore[arg-type]
    with refusing(flags):
        *parsed, unknown = parser.parse_args_into_dataclasses(
            flags, return_remaining_strings=True, look_for_args_file=False
        )
    if unknown:
        raise unknown_option(unknown[0], known)
    arguments = Arguments(*parsed)
    check_stages(arguments.training)
    _check_together(arguments)
    return arguments


def _check_together(arguments: Arguments) -> None:
    """Settle what depends on several groups: the grid of learning rates and the length of the runs."""
    _, data, recipe, training, distillation = arguments
    if recipe.learning_rates and training.learning_rate:
        raise OptionError(
            f"learning_rate={training.learning_rate} and learning_rates={recipe.learning_rates} were both given;"
            " give one of them"
        )
    if not recipe.learning_rates:
        recipe.learning_rates = [training.learning_rate] if training.learning_rate else DEFAULT_LEARNING_RATES
    recipe.control_learning_rates = recipe.control_learning_rates or recipe.learning_rates
    if training.max_steps > 0:
        raise OptionError(f"max_steps={training.max_steps}: the length of a run is given by max_train_tokens instead")
    step = tokens_per_step(data, training)
    grids = (recipe.learning_rates, recipe.control_learning_rates)
    searched = recipe.lr_search_tokens if max(map(len, grids)) > 1 else None
    longer = distillation.long_block_size
    above = longer is None or longer > data.block_size
    require("long_block_size", longer, above, f"above block_size={data.block_size}")
    before = recipe.calibration_tokens + distillation.transfer_tokens + distillation.long_tokens
    share = "max_train_tokens, of which the search takes 0.15,"
    wanted = {
        "max_train_tokens": recipe.max_train_tokens - before,
        share if recipe.searches_a_share else "lr_search_tokens": searched,
        "transfer_tokens": distillation.transfer_tokens or None,
        "long_tokens": distillation.long_tokens or None,
    }
    for name, tokens in wanted.items():
        if tokens is not None and tokens < step:
            shared = f" ({before} of the other stages are part of it)" if name == "max_train_tokens" and before else ""
            raise OptionError(
                f"{name} leaves {tokens} tokens{shared}, less than one step of {step} tokens"
                f" (block_size={data.block_size} x global batch of {step // data.block_size}); raise it or lower"
                " block_size or per_device_train_batch_size"
            )


def tokens_per_step(data: DataArguments, training: TrainingArguments) -> int:
    """Return how many tokens one optimizer step sees, over all processes."""
    return data.block_size * training.train_batch_size * training.gradient_accumulation_steps * training.world_size


def options_table(kinds: Sequence[type] = FINETUNING) -> str:
    """Return the options as a Markdown table; those inherited from transformers' TrainingArguments are left out."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for kind in kinds:
        own = kind.__annotations__
        for option in (f for f in dataclasses.fields(kind) if f.name in own):
            factory = option.default_factory
            default = option.default if factory is dataclasses.MISSING else factory()
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            lines.append(
                f"| `--{option.name}` | {'' if shown is None else f'`{shown}`'} | {option.metadata['help']} |"
            )
    return "\n".join(lines)
