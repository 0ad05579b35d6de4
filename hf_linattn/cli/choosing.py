"""How `hf-linattn convert` comes to a plan: one that is named, one from a file, or one that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import json_object, require
from ..errors import OptionError
from ..plan import Plan, name_or_plan, require_registered
from ..reading import read_tokenizer, require_file
from .common import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .. import ChosenPlan

PLAN_FILE, PICTURE_FILE = "plan.json", "plan.png"
AUTO, KEEP = "auto", "0.1"  # value of `plan` that has one chosen, and what it keeps by default
TEXT_LENGTH, TEXT_ROWS = 1024, 8  # of the texts that divergence is measured on


@dataclass(frozen=True)
class PlanRequest:
    """What the command line says of the plan; see the options of `hf-linattn convert`.

    One way to a plan is asked for, or `OptionError` is raised. What has a default says how a plan is chosen.
    """

    mechanism: str | None
    options: str
    layers: str | None
    keep: str | None
    plan: str | None
    unit: str = "head"
    signal: str = "recall"
    search: str = "slope"
    text: Sequence[Path] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.file is not None and (self.mechanism is not None or self.keep is not None):
            raise OptionError("plan names mechanisms and heads itself; leave mechanism and keep out")
        if self.mechanism is None and self.keep is None and self.plan is None:
            raise OptionError(
                "mechanism is not given; name one, or have a plan chosen: --plan auto, which is --keep 0.1"
            )
        if self.layers is not None and (self.keep is not None or self.plan is not None):
            given = f"layers={self.layers!r}"
            raise OptionError(f"{given} is for a mechanism alone; leave it out where keep or plan says them")
        options = json_object("options", self.options)
        require("options", options, not (options and self.file), "absent where plan is a file, which has them itself")
        if self.keep is None and self.plan != AUTO:
            for field in fields(self):
                value = getattr(self, field.name)
                fits = field.default in (MISSING, value)
                shown = list(map(str, value)) if field.name == "text" else value
                require(field.name, shown, fits, "absent where no plan is chosen; give keep, or plan auto")

    @property
    def file(self) -> str | None:
        """The file of a plan."""
        return None if self.plan == AUTO else self.plan

    def read(self) -> Plan | ChosenPlan | None:
        """Return the plan that is named or lies in a file, before a model is loaded; None: it is to be chosen.

        Raises:
            DataError: a file of text is not there.
            UnknownNameError: no mechanism has this name.
        """
        for file in self.text:
            require_file("text", file)
        if self.file is not None:
            from ..chosen_plan import read_plan_file

            return read_plan_file(Path(self.file), AUTO)
        options = json_object("options", self.options)
        if self.plan == AUTO or self.keep is not None:
            read_keep(self.keep or KEEP)
            require_registered(self.replacement())
            return None
        named: Plan = name_or_plan("mechanism", self.mechanism or "")
        if isinstance(named, str):
            layers = {} if self.layers is None else {"layers": self.layers}
            named = [{"mechanism": named, "options": options, **layers}]
        else:
            given = {"options": options or None, "layers": self.layers}
            for name, value in given.items():
                require(name, value, value is None, "absent where mechanism is a plan, which has them itself")
        require_registered(named)
        return named

    def replacement(self) -> dict[str, dict[str, Any]]:
        """Return what replaces heads where a plan is chosen, as a plan of all layers."""
        name = name_or_plan("mechanism", self.mechanism or "streaming")
        if not isinstance(name, str):
            expected = "the name of one mechanism where keep chooses the plan"
            raise OptionError(f"mechanism must be {expected}, got {self.mechanism!r}")
        return {name: json_object("options", self.options)}

    def choose(self, model: PreTrainedModel, name: str, progress: bool) -> ChosenPlan:
        """Choose a plan for a model that was loaded from `name`; `mechanism` is what replaces its heads.

        Raises:
            UnsupportedModelError: the model reads no text alone, by which it is chosen.
        """
        from .. import choose_plan
        from ..architecture import require_token_ids
        from ..config import make_config
        from ..mechanisms import MECHANISMS

        require_token_ids(model, "leave keep and plan auto out, and name a mechanism, and layers if not all")
        tokenizer = read_tokenizer("model", name)
        replace = self.replacement()
        ((name, options),) = replace.items()
        window = MECHANISMS.get(name).limit.window(make_config(name, options)) or 0
        return choose_plan(
            model, tokenizer, read_keep(self.keep or KEEP), replace=replace,
            batches=text_batches(tokenizer, self.text, model, window) if self.text else None, unit=self.unit,
            signal=self.signal, search=self.search, seed=self.seed, progress=progress,
        )  # fmt: skip


def read_keep(text: str) -> float | int:
    """Return a share or a number.

    >>> read_keep("0.1"), read_keep("9")
    (0.1, 9)
    """
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError as error:
        raise OptionError(f"keep must be a share like 0.1 or a number like 9, got {text!r}") from error


def text_batches(
    tokenizer: Any, texts: Sequence[Path], model: PreTrainedModel, window: int = 0
) -> list[dict[str, Any]]:
    """Return the first tokens of the longest texts as rows [1, N]; short ones do not show what a window loses."""
    from ..positions.tables import known_positions

    length = max(TEXT_LENGTH, 2 * window)
    size = min(length, known_positions(model) or length)
    batches = []
    for text in sorted(read_texts(texts, "text"), key=len, reverse=True)[:TEXT_ROWS]:
        options = {"truncation": True, "max_length": size, "return_tensors": "pt"}
        batches.append(dict(tokenizer(text, return_token_type_ids=False, **options).to(model.device)))
    return batches


def save_beside(plan: ChosenPlan, folder: Path) -> dict[str, Any]:
    """Write a plan and its picture into a folder; return where they lie."""
    from ..report import save_plan_picture

    saved = plan.save(folder / PLAN_FILE), save_plan_picture(plan, folder / PICTURE_FILE)
    return dict(zip(("plan", "picture"), map(str, saved), strict=True))


def choice(plan: ChosenPlan) -> dict[str, Any]:
    """Return what is said of a choice."""
    record = plan.record
    return {"kept": record.kept, "signal": record.signal, "reason": record.reason, "seconds": record.seconds}


def in_words(plan: ChosenPlan) -> str:
    """Return which heads stay exact, in one line."""
    record = plan.record
    places = " ".join(f"{layer}.{head}" for layer, head in record.kept)
    return (
        f"{record.num_kept} of {sum(record.heads)} key/value heads stay exact (layer.head): {places}; chosen by"
        f" {record.signal} ({record.search}) in {record.seconds:.0f} s"
    )
