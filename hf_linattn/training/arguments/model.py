"""Options: which model is converted, and to what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_linattn.chosen_plan import PLAN_SUFFIX, ChosenPlan, read_plan_file
from hf_linattn.config import json_object, require, require_count
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.plan import read_plan
from hf_linattn.plan_search import SEARCHES, SIGNALS, UNITS
from hf_linattn.reading import require_place
from hf_linattn.recipe_files import BUNDLED

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
        default="float32",
        metadata={"help": "Of the weights while training; `auto`: as saved. The result has that of the checkpoint."},
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
    layer_search: str | None = field(
        default=None,
        metadata={
            "help": "With `layers auto`: choose_plan's `slope`, `gates`, `restore_one` or `one_at_a_time`; absent:"
            " by what converting each layer alone costs."
        },
    )
    layer_unit: str = field(
        default="layer", metadata={"help": "With `layer_search`, what stays: a `layer`, or a key/value `head`."}
    )
    layer_signal: str = field(
        default="recall",
        metadata={"help": "With `layer_search`: `recall` of generated prompts, `divergence` on the text, or `both`."},
    )
    plan: dict[str, Any] | str | list[dict[str, Any]] | None = field(
        default=None,
        metadata={
            "help": 'In place of `mechanism`: a file, as the plan.json that `convert --keep` writes, or JSON like'
            ' `{"performer": "0-5", "linear": [6]}` or like'
            ' `[{"mechanism": "performer", "layers": "0-5", "heads": 0, "options": {}}]`.'
        },
    )
    chunk_feed_forward: int | None = field(
        default=None,
        metadata={"help": "Feed-forwards take that many tokens at a time, with less memory; default: all of a batch."},
    )
    max_positions: int | None = field(
        default=None,
        metadata={"help": "Tokens of the longest input, if positions end before; see `extend_positions`."},
    )
    row: str | None = field(
        default=None,
        metadata={"help": "Row of the board: its options override the file's, its name is put behind output_dir."},
    )
    board: str | None = field(default=None, metadata={"help": "YAML file of rows: name -> options."})

    def __post_init__(self) -> None:
        require("model_name_or_path", self.model_name_or_path, bool(self.model_name_or_path), "a folder or Hub name")
        if str(self.model_name_or_path).startswith(BUNDLED) and not Path(str(self.model_name_or_path)).exists():
            raise CheckpointError(
                f"model_name_or_path={self.model_name_or_path!r} is a small model that the repository alone has; run"
                " this in a clone of it, or give another model"
            )
        if self.tokenizer_name:
            require_place("tokenizer_name", self.tokenizer_name)
        require("dtype", self.dtype, self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        for name, read in {"mechanism_options": json_object, "plan": given_plan}.items():
            given = getattr(self, name)
            setattr(self, name, None if given is None else read(name, given))
        self.keep_record(self.plan)
        require_count("chunk_feed_forward", self.chunk_feed_forward, optional=True)
        require_count("max_positions", self.max_positions, optional=True)
        require("softmax_share", self.softmax_share, 0 <= self.softmax_share < 1, "at least 0 and below 1")
        searches = (None, *SEARCHES) if self.layers == AUTO else (None,)
        expected = f"one of {', '.join(SEARCHES)}, with layers 'auto', or absent"
        require("layer_search", self.layer_search, self.layer_search in searches, expected)
        for name, known in {"layer_unit": UNITS, "layer_signal": SIGNALS}.items():
            given = getattr(self, name)
            require(name, given, given in known, f"one of {', '.join(known)}")
            usual = type(self).__dataclass_fields__[name].default
            require(name, given, given == usual or self.layer_search is not None, "absent where layer_search is")
        if self.layers == AUTO:
            require("plan", self.plan, not self.plan, "absent where layers is 'auto'")
        if (self.mechanism is None) == (not self.plan):
            raise OptionError(
                f"give either mechanism or plan, got mechanism={self.mechanism!r} and plan={self.plan!r};"
                " for example --mechanism performer, or a --row of a board"
            )

    def keep_record(self, plan: Any) -> None:
        """Have a plan that is a `ChosenPlan` checked against the model; as an option it is a list of its entries."""
        self._chosen = plan if isinstance(plan, ChosenPlan) else None  # no field: options are copied and saved as data
        self.plan = self.plan if self._chosen is None else list(self._chosen)

    def patch_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `hf_linattn.patch_model`."""
        options: Any = self.mechanism_options or {}
        layers = None if self.layers == AUTO else self.layers
        plan = self._chosen if self._chosen == self.plan else self.plan  # a run settles those that were left open
        named = {"mechanism": plan or self.mechanism, "layers": layers}
        return {**named, "chunk_feed_forward": self.chunk_feed_forward, **options}


def given_plan(name: str, value: Any) -> Any:
    """Return a plan that is given as it is, as JSON, or as a JSON file; an empty one is for others to refuse."""
    if not (isinstance(value, str) and value.endswith(PLAN_SUFFIX)):
        return read_plan(name, value)
    found: Any = read_plan_file(Path(value), "JSON")
    return dict(found) if isinstance(found, dict) else found
