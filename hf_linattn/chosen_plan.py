"""ChosenPlan: a plan for `patch_model` with the reasons for it, saved as JSON."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .atomic_io import write_text
from .errors import CheckpointError, PatchError
from .mechanisms import AttentionLayer
from .plan import Plan, read_plan, require_registered, softmax_beside_states
from .reading import reading

FORMAT_VERSION = 1
LISTS = ("plan", "heads", "kept", "scores", "sharing")  # fields of the JSON
PLAN_SUFFIX = ".json"  # how the name of a file that holds a plan ends


@dataclass(frozen=True)
class PlanRecord:
    """How a plan was chosen, and for which model.

    Attributes:
        model: its class. heads: key/value heads of each self-attention layer, as many numbers as it has layers.
        unit: `"head"` or `"layer"`. kept: [layer, key/value head] of what stays exact.
        replace: the config of the others, {"mechanism": name, "options": {...}}.
        scores: layer by layer those of its key/value heads, or of the layer alone; larger is more worth keeping.
        search, signal: what was used. reason: why the signal is not the one that was asked for; else empty.
        seed: of the prompts. seconds: what the choice took. examples: what it looked at -> how many of these.
        options: the other options of the search.
        sharing: groups of layers that attend to the keys of one of them.
    """

    model: str
    heads: list[int]
    unit: str
    kept: list[list[int]]
    replace: dict[str, Any]
    scores: list[list[float]]
    search: str
    signal: str
    reason: str = ""
    seed: int = 0
    seconds: float = 0.0
    examples: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sharing: list[list[int]] = field(default_factory=list)

    @property
    def num_kept(self) -> int:
        """How many key/value heads stay exact."""
        return len(self.kept)


class ChosenPlan(list[dict[str, Any]]):
    """A plan over layers and key/value heads, as `patch_model` takes it, and the `record` of its choice.

    Args:
        entries: those of the plan, as in a list that `patch_model` takes.
        record: how the plan was chosen, and for which model.

    Examples:
        >>> from hf_linattn import ChosenPlan
        >>> from hf_linattn.chosen_plan import PlanRecord
        >>> record = PlanRecord("LlamaForCausalLM", [2, 2], "head", [[1, 0]], {"mechanism": "linear", "options": {}},
        ...     [[0.1, 0.2], [0.9, 0.3]], "slope", "recall")
        >>> ChosenPlan.of(record)
        [{'mechanism': 'linear', 'options': {}, 'layers': [0]}, {'mechanism': 'linear', 'options': {}, 'layers': [1], 'heads': [1]}]
    """  # noqa: E501  an output of a doctest is one line

    record: PlanRecord

    def __init__(self, entries: Sequence[Mapping[str, Any]], record: PlanRecord):
        super().__init__(dict(entry) for entry in entries)
        self.record = record

    @classmethod
    def of(cls, record: PlanRecord) -> ChosenPlan:
        """Return the plan in which `record.kept` stay softmax and `record.replace` serves all other heads."""
        kept: dict[int, set[int]] = {}
        for layer, head in record.kept:
            kept.setdefault(layer, set()).add(head)
        places: dict[tuple[int, ...], list[int]] = {}  # heads to replace -> layers
        for layer, count in enumerate(record.heads):
            replaced = tuple(head for head in range(count) if head not in kept.get(layer, ()))
            places.setdefault(replaced, []).append(layer)
        exact = set(places.pop((), ()))
        entries = []
        for heads, layers in places.items():
            whole = all(len(heads) == record.heads[layer] for layer in layers)
            named = {} if whole else {"heads": list(heads)}
            entries.append({**copy.deepcopy(record.replace), "layers": layers, **named})
        converted = set(range(len(record.heads))) - exact
        return cls(entries + softmax_beside_states(converted, record.sharing), record)

    def keeping(self, kept: Sequence[list[int]], **options: Any) -> ChosenPlan:
        """Return the plan of the same choice in which other [layer, key/value head] stay exact.

        options: of the search, that would have come to it.
        """
        options = {**self.record.options, **options}
        return ChosenPlan.of(replace(self.record, kept=sorted(kept), options=options))

    def require_layers(self, layers: Sequence[AttentionLayer]) -> None:
        """Raise `PatchError` unless these have the key/value heads that the plan was chosen for."""
        heads, wanted = [layer.num_key_value_heads for layer in layers], self.record.heads
        if heads != wanted:
            raise PatchError(
                f"the plan was chosen for {self.record.model} with {_counts(wanted)}, and this model has"
                f" {_counts(heads)}; choose one for it with choose_plan(model, tokenizer)"
            )

    def to_json(self) -> str:
        """Return plan and record as JSON text."""
        document = {"format_version": FORMAT_VERSION, "plan": list(self), **asdict(self.record)}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ChosenPlan:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: the text is something else, or a newer version wrote it.
        """
        with reading("plan", _start(text), "give what ChosenPlan.to_json wrote"):
            document = json.loads(text)
        if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
            version = document.get("format_version") if isinstance(document, dict) else None
            raise CheckpointError(
                f"plan: format_version must be {FORMAT_VERSION}, got {version!r}; give what ChosenPlan.to_json wrote"
            )
        document = {"sharing": [], **document}  # which came later
        names = [f.name for f in fields(PlanRecord)]
        if missing := [name for name in ("plan", *names) if name not in document]:
            raise CheckpointError(f"plan: the field {missing[0]!r} is missing; give what ChosenPlan.to_json wrote")
        for name in LISTS:
            given = document[name]
            if not isinstance(given, list) or (name == "plan" and not all(isinstance(x, dict) for x in given)):
                expected = "a list of entries" if name == "plan" else "a list"
                raise CheckpointError(
                    f"plan: the field {name!r} must be {expected}, got {given!r}; give what ChosenPlan.to_json wrote"
                )
        read = cls(document["plan"], PlanRecord(**{name: document[name] for name in names}))
        try:
            agrees = cls.of(read.record) == read
        except (TypeError, ValueError):  # no pairs in `kept`, no mapping in `replace`
            agrees = False
        if not agrees:
            raise CheckpointError(
                "plan: the fields 'kept', 'heads', 'replace' and 'sharing' do not come to the entries in 'plan', so"
                " something was changed by hand; give the entries alone, as a list, or what ChosenPlan.to_json wrote"
            )
        return read

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_json` to a file, whole or not at all."""
        return write_text(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ChosenPlan:
        """Read what `save` wrote; `CheckpointError` if that cannot be read."""
        with reading("path", path, "give a file that ChosenPlan.save wrote"):
            text = Path(path).read_text(encoding="utf-8")
        return cls.from_json(text)


def read_plan_file(path: Path, *others: str) -> Plan | ChosenPlan:
    """Return what a JSON file has: a plan as `ChosenPlan.save` writes it, or as `patch_model` takes it.

    others: what may be given in place of a file, for the error.

    Raises:
        CheckpointError: it cannot be read, or is of a newer version. OptionError: it holds no plan.
    """
    remedy = "give " + ", or ".join([*others, "a JSON file with a plan, as plan.json beside a model made by --keep"])
    with reading("plan", path, remedy):
        text = path.read_text(encoding="utf-8-sig")  # of Notepad, too
        content = json.loads(text)
    if isinstance(content, dict) and "format_version" in content:
        return ChosenPlan.from_json(text)
    plan = read_plan("plan", text)
    require_registered(plan)
    return plan


def _counts(heads: Sequence[int]) -> str:
    """Say how many layers and heads a model has.

    >>> _counts([3, 3]), _counts([2, 4])
    ('2 layers of 3 key/value heads', '2 layers of 2 to 4 key/value heads')
    """
    least, most = min(heads), max(heads)
    return f"{len(heads)} layers of {least if least == most else f'{least} to {most}'} key/value heads"


def _start(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."
