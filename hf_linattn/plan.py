"""Plans: which mechanism serves which layers and heads of a model, and their JSON form in config.json."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .config import MechanismConfig, make_config, read_json, require
from .errors import CheckpointError, OptionError, UnknownNameError, did_you_mean

logger = logging.getLogger(__name__)

KEPT = "softmax"  # what serves the heads and layers that a plan leaves out, without any option
FORMAT_VERSION = 2  # added cross_attention; what has none is written as 1, which older versions read
ADDED = ("mechanism", "feature map")  # what other packages may register

LayerSpec = str | int | Iterable[int] | None
Plan = str | MechanismConfig | Mapping[str, Any] | Sequence[Mapping[str, Any]]

T = TypeVar("T")


@dataclass
class PatchConfig:
    """Which mechanism serves which attention layer.

    Attributes:
        layers: layer index -> options. A layer that is not listed keeps the original softmax attention.
        num_layers: how many self-attention layers the model has.
        cross: the same for the layers that attend to an encoder's tokens; None if all keep theirs.

    Examples:
        >>> from hf_linattn import PatchConfig
        >>> PatchConfig.from_plan({"linear": "1-2"}, num_layers=4).count
        2
    """

    layers: dict[int, MechanismConfig]
    num_layers: int
    cross: PatchConfig | None = None

    @property
    def converted(self) -> list[int]:
        """Which self-attention layers do not keep their softmax in all heads."""
        return sorted(index for index, layer in self.layers.items() if {*names_in_layer(layer)} != {KEPT})

    @property
    def count(self) -> int:
        """How many layers do not keep their softmax, those that attend to an encoder's tokens among them."""
        return len(self.converted) + (0 if self.cross is None else self.cross.count)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: layers with equal options are one group, and the format version is stamped."""
        groups: list[dict[str, Any]] = []
        for index, config in sorted(self.layers.items()):
            entry = entry_of(config)
            group = next((g for g in groups if {k: g[k] for k in entry} == entry), None)
            if group is None:
                groups.append({**entry, "layers": [index]})
            else:
                group["layers"].append(index)
        own = {"num_layers": self.num_layers, "groups": groups}
        if self.cross is None:
            return {"format_version": 1, **own}
        across = self.cross.to_dict()
        del across["format_version"]
        return {"format_version": FORMAT_VERSION, **own, "cross_attention": across}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PatchConfig:
        """Read the JSON form. A newer format or a malformed field raises `CheckpointError` naming it.

        Fields that a newer version added to this format are left out with a warning; options are not, as they decide
        what is computed.
        """
        version = _read(data, "format_version", int)
        if not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"format_version {version} is not one of 1 to {FORMAT_VERSION}, which this version reads; a larger one"
                " was written by a newer hf_linattn: run `pip install -U hf_linattn`"
            )
        if version == 1 or "cross_attention" not in data:
            return cls._read_layers(data, ("format_version",))
        config = cls._read_layers(data, ("format_version", "cross_attention"))
        across = cls._read_layers(_read(data, "cross_attention", dict), (), "cross_attention.")
        return dataclasses.replace(config, cross=across)

    @classmethod
    def _read_layers(cls, data: Mapping[str, Any], others: Collection[str], within: str = "") -> PatchConfig:
        """Read the fields that every kind of attention has; `others` are read elsewhere."""
        num_layers = _read(data, "num_layers", int, within)
        layers: dict[int, MechanismConfig] = {}
        _warn_of_unknown(data, (*others, "num_layers", "groups"), within)
        for number, group in enumerate(_read(data, "groups", list, within)):
            place = f"{within}groups[{number}]."
            name, options = _read(group, "mechanism", str, place), _read(group, "options", dict, place)
            config = _saved(name, options, place)
            _warn_of_unknown(group, ("mechanism", "options", "layers"), place)
            for index in parse_layers(_read(group, "layers", list, place), num_layers):
                if index in layers:
                    raise CheckpointError(f"hf_linattn.{place}layers names layer {index} again; save the model anew")
                layers[index] = config
        return cls(layers, num_layers)

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        num_layers: int,
        layers: LayerSpec = None,
        options: Mapping[str, Any] | None = None,
    ) -> PatchConfig:
        """Resolve the second argument of `patch_model` for a model with `num_layers` self-attention layers.

        Args:
            plan: a name, a mechanism config, a mapping name -> layers (or name -> {"layers": ..., option: ...}), or a
                list of {"mechanism": name, "layers": ..., "heads": ..., "options": {...}}, which may name a mechanism
                more than once. With "heads" it gets only these key/value heads of its layers, which become `by_head`.
            layers: for a name or config: which layers (see `parse_layers`); None is all of them.
            options: for a name: options of the mechanism.
        """
        options = dict(options or {})
        if isinstance(plan, Mapping | list | tuple):
            for name in ["layers"] * (layers is not None) + list(options):
                raise OptionError(f"a plan names its layers and options itself; remove the argument {name!r}")
            return cls(_resolve(plan, num_layers), num_layers)
        if isinstance(plan, MechanismConfig) and options:
            given = next(iter(options))
            raise OptionError(f"a mechanism config carries its options itself; remove the argument {given!r}")
        own = isinstance(plan, MechanismConfig)  # the caller's, who may go on with it
        config: Any = copy.deepcopy(plan) if own else make_config(plan, options)  # type: ignore[arg-type]
        return cls(dict.fromkeys(parse_layers(layers, num_layers), config), num_layers)


def _saved(name: str, options: Mapping[str, Any], place: str) -> MechanismConfig:
    """Return the config of a saved group; what comes from a package that is not there is named with that remedy."""
    try:
        return make_config(name, options, saved=True)
    except UnknownNameError as error:
        if error.kind not in ADDED:
            raise
        kind, unknown = error.kind, error.name
    remedy = (
        f"hf_linattn.{place.rstrip('.')} in config.json has it from another package, or from a newer hf_linattn;"
        " install that, or import the module that registers it, before loading"
    )
    # not the nearest names, which the weights do not fit; no ValueError, which AutoTokenizer would hide behind another
    raise UnknownNameError(kind, unknown, (), remedy=remedy)


def _read(data: object, name: str, kind: type[T], place: str = "") -> T:
    """Return one field of the JSON form, or raise `CheckpointError` naming it."""
    value = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(
            f"hf_linattn.{place}{name} in config.json must be of type {kind.__name__}, got {value!r};"
            " save the model again"
        )
    return value


def _warn_of_unknown(data: Mapping[str, Any], known: Collection[str], place: str = "") -> None:
    for name in data:
        if name not in known:
            logger.warning("config.json has hf_linattn.%s%s, which this version does not know: left out", place, name)


def parse_layers(spec: LayerSpec, num_layers: int) -> list[int]:
    """Return sorted layer indices from `None` (all), `3`, `"0-5"`, `"0-2,7"` or `[6, 7]`; negative ones count back.

    Every second layer is `"0-10:2"`.

    >>> parse_layers("0-2,-1", num_layers=12), parse_layers("0-6:2,11", num_layers=12)
    ([0, 1, 2, 11], [0, 2, 4, 6, 11])
    """
    return parse_indices(spec, num_layers, "layer", "the model has layers")


def parse_indices(spec: LayerSpec, count: int, kind: str, place: str) -> list[int]:
    """As `parse_layers` for `count` things of a kind; `place` is how a message says where they are."""
    if spec is None:
        return list(range(count))
    indices: set[int] = set()
    spec = spec.tolist() if hasattr(spec, "tolist") else spec  # of numpy and PyTorch
    parts = spec.split(",") if isinstance(spec, str) else spec if isinstance(spec, Iterable) else [spec]
    for part in parts:
        for index in _parse_range(part, spec, kind):
            if not -count <= index < count:
                raise OptionError(f"{kind}s {spec!r} names {kind} {index}, but {place} 0 to {count - 1}")
            indices.add(index % count)
    if not indices:
        raise OptionError(f"{kind}s must name at least one {kind}, got {spec!r}; leave it out for all {kind}s")
    return sorted(indices)


def _parse_range(part: object, spec: object, kind: str) -> range:
    """Return the indices of one part of a specification."""
    places, stepped, step = str(part).strip().partition(":")
    head, dash, tail = places.rpartition("-")
    try:
        first, last = (int(head), int(tail)) if dash and head else (int(places), int(places))
        indices = range(first, last + 1, int(step) if stepped else 1)
    except ValueError:
        indices = range(0)
    if not indices:
        raise OptionError(f"{kind}s must be like 3, '0-5', '0-10:2', '0-2,7' or [6, 7], got {spec!r}")
    return indices


class PlanEntry(NamedTuple):
    """One entry of a plan: a mechanism, its options and its places, "layers" or "heads" -> which; all if not given."""

    mechanism: str
    options: dict[str, Any]
    places: dict[str, LayerSpec]


ENTRY = {"mechanism": "performer", "layers": "0-5", "heads": "0-1", "options": {"num_features": 128}}  # all its fields


def read_entries(plan: Any, places: Sequence[str] = ("layers", "heads")) -> list[PlanEntry]:
    """Return the entries of a plan, which is a mapping or a list.

    places: the kinds of places that it may name. What a mapping has in place of an entry is the first of them.

    >>> read_entries({"performer": "0-5", "linear": {"heads": 0, "decay": "learned"}})[1]
    PlanEntry(mechanism='linear', options={'decay': 'learned'}, places={'heads': 0})
    >>> read_entries([{"mechanism": "performer", "layers": "0-5"}])
    [PlanEntry(mechanism='performer', options={}, places={'layers': '0-5'})]
    """
    if not isinstance(plan, Mapping):
        return [_read_entry(f"plan[{number}]", entry, places) for number, entry in enumerate(plan)]
    entries = []
    for name, value in plan.items():
        options = dict(value) if isinstance(value, Mapping) else {places[0]: value}
        entries.append(PlanEntry(name, options, {place: options.pop(place) for place in places if place in options}))
    return entries


def _read_entry(name: str, entry: Any, places: Sequence[str]) -> PlanEntry:
    known = ("mechanism", *places, "options")
    example = {field: ENTRY[field] for field in known}
    named = isinstance(entry, Mapping) and isinstance(entry.get("mechanism"), str)
    require(name, entry, named, f"a dict like {example}")
    for field in entry:
        if field not in known:
            raise OptionError(f"{name} has no field {field!r}{did_you_mean(str(field), known)}")
    options = entry.get("options", {})
    require(f"{name}['options']", options, isinstance(options, Mapping), "a dict of options of the mechanism")
    given = {place: entry[place] for place in places if entry.get(place) is not None}
    return PlanEntry(entry["mechanism"], dict(options), given)


def _resolve(plan: Mapping[str, Any] | Sequence[Any], num_layers: int) -> dict[int, MechanismConfig]:
    """Return layer -> its config, `by_head` where entries share the layer by its heads."""
    whole: dict[int, MechanismConfig] = {}
    shared: dict[int, list[PlanEntry]] = {}
    for entry in read_entries(plan):
        indices = parse_layers(entry.places.get("layers"), num_layers)
        config = None if "heads" in entry.places else make_config(entry.mechanism, entry.options)
        for index in indices:
            owners = [whole[index].mechanism] if index in whole else [x.mechanism for x in shared.get(index, ())]
            if index in whole or (owners and config is not None):
                raise OptionError(
                    f"the plan gives layer {index} to both {owners[0]!r} and {entry.mechanism!r}; name it once, or the"
                    " heads of each"
                )
            if config is None:
                shared.setdefault(index, []).append(entry)
            else:
                whole[index] = config
    by_head = {index: make_config("by_head", {"plan": heads_plan(entries)}) for index, entries in shared.items()}
    if not whole and not by_head:
        raise OptionError("the plan is empty; name at least one mechanism, for example {'performer': '0-5'}")
    return whole | by_head


def heads_plan(entries: Sequence[PlanEntry]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a plan over the heads of one layer as data: a dict, or a list if a mechanism is in it more than once."""
    if len({entry.mechanism for entry in entries}) == len(entries):
        return {entry.mechanism: {"heads": entry.places.get("heads"), **entry.options} for entry in entries}
    return [
        {"mechanism": entry.mechanism, "heads": entry.places.get("heads"), "options": entry.options}
        for entry in entries
    ]


def names_in_layer(layer: MechanismConfig) -> list[str]:
    """Return the mechanism of a layer, or those of its heads."""
    plan = getattr(layer, "plan", None) if layer.mechanism == "by_head" else None
    return [layer.mechanism] if plan is None else [entry.mechanism for entry in read_entries(plan, ("heads",))]


def softmax_beside_states(converted: Collection[int], sharing: Iterable[Collection[int]]) -> list[dict[str, Any]]:
    """Return the entries of layers that keep softmax and share keys with converted ones, of which the cache has none.

    `by_head` has its own keys there, in its state. sharing: groups of layers that attend to the keys of one of them.

    >>> softmax_beside_states([0, 1], [[1, 2], [3, 4]])
    [{'mechanism': 'by_head', 'options': {'plan': {'softmax': None}}, 'layers': [2]}]
    """
    beside = [set(group).difference(converted) for group in sharing if not set(group).isdisjoint(converted)]
    layers = sorted(set().union(*beside))
    exact = {"mechanism": "by_head", "options": {"plan": {KEPT: None}}}
    return [{**exact, "layers": layers}] if layers else []


def entry_of(config: MechanismConfig) -> dict[str, Any]:
    """Return the entry of a plan that gives all layers this config."""
    return {"mechanism": config.mechanism, "options": config.to_options()}


def plan_as_data(plan: Plan) -> Any:
    """Return a plan as JSON has it: a name as it is, a mechanism config as a list of one entry.

    >>> plan_as_data("linear"), plan_as_data({"linear": range(2)})
    ('linear', {'linear': [0, 1]})
    """
    if isinstance(plan, MechanismConfig):
        return [entry_of(plan)]
    return json.loads(json.dumps(plan, default=lambda x: dict(x) if isinstance(x, Mapping) else places_as_data(x)))


def places_as_data(places: Any) -> Any:
    """Return the layers or heads of a plan as JSON has them: integers of NumPy and PyTorch are `int`, others lists.

    >>> places_as_data(range(2)), places_as_data("0-5")
    ([0, 1], '0-5')
    """
    if isinstance(places, str | bool):
        return places
    try:
        return operator.index(places)
    except TypeError:
        return [places_as_data(place) for place in places] if isinstance(places, Iterable) else places


def read_plan(name: str, value: Any) -> Any:
    """Return a plan that is given as it is or as JSON text; `OptionError` if it is neither.

    >>> read_plan("plan", '[{"mechanism": "performer", "layers": "0-5"}]')
    [{'mechanism': 'performer', 'layers': '0-5'}]
    """
    shapes = 'a JSON object like {"performer": "0-5"} or a list like [{"mechanism": "performer", "layers": "0-5"}]'
    content = read_json(name, value, Mapping | list, shapes)
    if isinstance(content, Mapping):
        return dict(content)
    require(name, value, all(isinstance(entry, Mapping) for entry in content), shapes)
    return content


def name_or_plan(name: str, value: str) -> Any:
    """Return the name of a mechanism as it is, and JSON text as the plan that it is.

    >>> name_or_plan("mechanism", "performer"), name_or_plan("mechanism", '{"performer": "0-5"}')
    ('performer', {'performer': '0-5'})
    """
    return read_plan(name, value) if value.lstrip().startswith(("{", "[")) else value


def require_registered(plan: Any) -> None:
    """Raise `UnknownNameError` or `OptionError` where no such mechanism is, or not with these options.

    A model need not be there: layers and heads are not looked at.
    """
    for entry in [PlanEntry(plan, {}, {})] if isinstance(plan, str) else read_entries(plan):
        make_config(entry.mechanism, entry.options)
