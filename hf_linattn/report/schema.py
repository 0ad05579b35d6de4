"""The report of a recipe as typed data, and its JSON form `report.json`.

The JSON form has the fields of the dataclasses below under their own names, and beside them what follows from them
(`ratio`, `crossover_length`), for readers without this library.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_linattn

from ..atomic_io import write_text
from ..config import require
from ..errors import CheckpointError, did_you_mean
from ..evaluation import Fidelity, LongLosses, MemoryRow, SpeedRow, crossover_length
from ..evaluation.label_metrics import REGRESSION
from ..reading import reading
from ..training.run_folders import STAGES
from ..versions import installed_version
from .classifiers import MetricRow, ReadingRow
from .four_models import Accuracies, Perplexities, Scores, SquaredErrors
from .samples import TextSample

FORMAT_VERSION = 1
REPORT_FILE = "report.json"
EMBEDDING = "embedding"  # the problem of a model that makes embeddings
DISTANCES = (EMBEDDING, REGRESSION)  # problems whose loss is a distance, and no likelihood


@dataclass(frozen=True)
class Evaluation:
    """How the perplexities were measured: tokens per window, stride (None: no overlap), scored tokens or texts.

    problem: of a classifier, by transformers' name for it; `embedding` of an embedding model. document_tokens: how
    many of each document were read, num_documents: how many of these; None: all. answers: whether their answers
    alone were scored. held_out: whether the test split was cut from the training split.
    """

    max_length: int
    num_tokens: int
    stride: int | None = None
    problem: str | None = None
    document_tokens: int | None = None
    held_out: bool = False
    answers: bool = False
    num_documents: int | None = None


@dataclass(frozen=True)
class Training:
    """What recovered and control were trained with.

    Attributes:
        tokens: that all stages of recovered read together, an early end and rows seen again counted; in older
            reports those that were planned, of recovered and control each.
        recovered_learning_rate, control_learning_rate: the chosen peak learning rates.
        learning_rate_grid, control_learning_rate_grid: the learning rates that were tried for each.
        search_tokens: training tokens of each trial of the search.
        teaching: the options of calibration, transfer and distillation that were set, with those of adapters and of
            longer rows.
        saved_dtype: of the weights in the folder, as in the checkpoint that was converted; None in older reports.
        control: what of the control was trained: `full`, all weights, or `lora`, adapters; `none`: there is none.
        control_tokens: that the control read; None without one, and in older reports.
    """

    tokens: int
    recovered_learning_rate: float
    control_learning_rate: float | None
    learning_rate_grid: tuple[float, ...]
    control_learning_rate_grid: tuple[float, ...]
    search_tokens: int
    teaching: dict[str, Any] = field(default_factory=dict)
    control: str = "full"
    saved_dtype: str | None = None
    control_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, grid in (
            ("recovered_learning_rate", self.learning_rate_grid),
            ("control_learning_rate", self.control_learning_rate_grid or (None,)),
        ):
            rate = getattr(self, name)
            require(f"training.{name}", rate, rate in grid, f"one of {grid}")


@dataclass(frozen=True)
class Stage:
    """What the converted model came to after one stage of its recovery.

    Attributes:
        name: of the stage; "converted" is before the first.
        tokens, seconds: what the stage took; without the search for its learning rate.
        validation_loss: mean nats per predicted token of the validation split afterwards.
        tokens_per_second: of its steps, without evaluations; None: it trains in no steps, or the report is older.
        matrix_share: of the rate at which the machine multiplies large matrices, what its products reached.
    """

    name: str
    tokens: int
    seconds: float
    validation_loss: float
    tokens_per_second: float | None = None
    matrix_share: float | None = None


@dataclass(frozen=True)
class LongContext:
    """Losses on the same long documents of the test split; control: None where it was not kept."""

    recovered: LongLosses
    original: LongLosses
    control: LongLosses | None = None


@dataclass(frozen=True)
class WindowRow:
    """A window and sink tokens in place of the mechanism, in the same layers: what its state has to be worth.

    Attributes:
        window_size, num_sink_tokens: see `streaming_for`.
        state_bytes: of the decoding state of one sequence in these layers, in a bfloat16 model.
        trained: whether on the text, as the control; else the weights are the original's.
        perplexity, squared_error: on the test split; the one of the two that the report has.
    """

    window_size: int
    num_sink_tokens: int
    state_bytes: int
    trained: bool
    perplexity: float | None = None
    squared_error: float | None = None


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from: versions, device, dtype, seed, commit (None outside a checkout), command, date."""

    python: str
    torch: str
    transformers: str
    accelerate: str
    hf_linattn: str
    device: str
    num_threads: int
    dtype: str
    seed: int
    git_commit: str | None
    command: str
    date: str


@dataclass(frozen=True)
class Report:
    """All that a recipe found out about one conversion.

    Attributes:
        base_model: name or path of the pretrained model.
        mechanism: name of the mechanism, or names joined by "+" for a mixed plan.
        options: its options as they were given; the plan, if there was one.
        data: the data set, or the files, that it was trained and tested on.
        dataset_name, dataset_config_name: the names of the data set and its configuration on the Hub; None for files.
        perplexity: of a classifier that of the right class; None for a regression.
        squared_error: of a regression, in place of the perplexity; older reports have exp of it there.
        accuracy: of classifiers; None for language models.
        metrics: of classifiers, those that were chosen; of embedding models, what they find.
        readings: the original on documents longer than its table.
        stages: the way from converted to recovered.
        sensitivity: KL of the predictions, in nats per token, when one layer alone is converted, layer by layer; empty
            unless the layers were chosen by it.
        fidelity: generated text and accuracy by position beside the original's; None where it was not measured.
        long_context: loss by position and by distance of recurrence; None where it was not measured.
        speed, memory: one row per length; empty where it was not measured.
        constant_bytes: of the decoding state of one sequence in the converted layers, in a bfloat16 model; None where
            it grows with the context, or there is none.
        windows: what windows of as many bytes come to; with a shared control, that of its run, too.
        samples: a few test texts and what the models make of them.
    """

    base_model: str
    mechanism: str
    data: str
    perplexity: Perplexities | None
    evaluation: Evaluation
    training: Training
    provenance: Provenance
    options: dict[str, Any] = field(default_factory=dict)
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    squared_error: SquaredErrors | None = None
    accuracy: Accuracies | None = None
    metrics: tuple[MetricRow, ...] = ()
    readings: tuple[ReadingRow, ...] = ()
    stages: tuple[Stage, ...] = ()
    sensitivity: tuple[float, ...] = ()
    fidelity: Fidelity | None = None
    long_context: LongContext | None = None
    speed: tuple[SpeedRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    constant_bytes: int | None = None
    windows: tuple[WindowRow, ...] = ()
    samples: tuple[TextSample, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def scores(self) -> Scores:
        """What the four models are compared by: perplexities, or the squared errors of a regression."""
        found = self.squared_error or self.perplexity
        if found is None:
            raise CheckpointError("report has neither perplexity nor squared_error; write the report again")
        return found

    @property
    def ratio(self) -> float:
        """Score of the recovered model over the better of original and control."""
        return self.scores.ratio

    @property
    def crossover_length(self) -> int | None:
        """The smallest measured length from which on the patched prefill stays faster; None if it does not."""
        return crossover_length(self.speed)

    @property
    def has_state(self) -> bool:
        """Whether bytes of decoding state were measured; masked models have none."""
        return any(row.patched_state is not None for row in self.memory)

    @property
    def decodes(self) -> bool:
        """Whether the time of a token was measured; masked models have none."""
        return any(row.patched_decode is not None and row.original_decode is not None for row in self.speed)

    def to_json(self) -> str:
        """Return the JSON form, the inverse of `from_json`."""
        data = dataclasses.asdict(self) | {name: derive(self) for name, derive in DERIVED.items()}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read the JSON form.

        Raises:
            CheckpointError: not JSON, a newer format, or a field that is missing, unknown or of another type.
            OptionError: a value out of its range.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(f"the report is not JSON ({error}); write it again with Report.save") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"the report is a JSON {type(data).__name__}, not an object; write it again")
        version = data.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"format_version {version} was written by a newer hf_linattn than this one, which reads up to"
                f" {FORMAT_VERSION}; run `pip install -U hf_linattn`"
            )
        return _read(cls, {name: value for name, value in data.items() if name not in DERIVED}, "report")

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write `report.json` into a directory, which is made if needed; whole or not at all. Return its path."""
        text = self.to_json()
        return write_text(Path(directory) / REPORT_FILE, text)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], option: str = "directory") -> Report:
        """Read the `report.json` of a directory; see `from_json`. option: how errors call the directory."""
        path = Path(directory) / REPORT_FILE
        begun = Path(directory, STAGES).is_dir() and not path.is_file()
        going_on = "its run is not finished: give the command of its recipe again, which goes on with it"
        with reading(option, directory, going_on if begun else "give the output directory of a recipe"):
            text = path.read_text(encoding="utf-8")
        return cls.from_json(text)


# written for readers of the JSON form, and computed again when it is read
DERIVED: dict[str, Callable[[Report], Any]] = {
    "ratio": lambda report: report.ratio,
    "crossover_length": lambda report: report.crossover_length,
}


def collect_provenance(
    seed: int, command: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Provenance:
    """Return the versions, device and commit of this process; `device` and `dtype` are those of the measured model."""
    return Provenance(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        accelerate=installed_version("accelerate") or "not installed",
        hf_linattn=hf_linattn.__version__,
        device=_device_name(torch.device(device)),
        num_threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        seed=seed,
        git_commit=_git_commit(),
        command=command,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    return str(device)


def _git_commit() -> str | None:
    """Return the commit of the checkout this file is part of, with `-dirty` if it was changed since; else None."""
    here = Path(__file__).resolve()
    command = ["git", "-C", str(here.parent)]
    try:
        # an installed package may lie inside a checkout that it has nothing to do with
        subprocess.run([*command, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        described = [*command, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(described, check=True, capture_output=True, text=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no checkout
        return None


def _read(kind: Any, value: Any, path: str) -> Any:
    """Return `value`, which came out of JSON, as the annotated type `kind`; errors name the field by its `path`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # only X | None occurs
        return None if value is None else _read(next(a for a in arguments if a is not type(None)), value, path)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, _expect(Mapping, value, path), path)
    if origin is tuple:
        items = _expect(Sequence, value, path)
        return tuple(_read(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if kind is float and type(value) is int:
        return float(value)
    return _expect(origin or kind, value, path)


def _read_dataclass(kind: Any, data: Mapping[str, Any], path: str) -> Any:
    annotations = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise CheckpointError(f"{path} has an unknown field {name!r}{did_you_mean(name, known)}")
    for name, f in known.items():
        if name not in data and f.default is f.default_factory is dataclasses.MISSING:  # else older than the field
            raise CheckpointError(f"{path} lacks the field {name!r}; write the report again")
    return kind(**{name: _read(annotations[name], data[name], f"{path}.{name}") for name in known if name in data})


def _expect(kind: type, value: Any, path: str) -> Any:
    """Return `value` if it is a `kind`, where a bool is no number and a string no list."""
    confused = (isinstance(value, bool) and kind is not bool) or (isinstance(value, str) and kind is not str)
    if confused or not isinstance(value, kind):
        raise CheckpointError(f"{path} must be a {kind.__name__}, got {value!r}; write the report again")
    return value
