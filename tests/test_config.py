"""Plans over layers, options, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hf_linattn import (
    CheckpointError,
    DataError,
    HfLinattnError,
    MechanismConfig,
    OptionError,
    PatchConfig,
    UnknownNameError,
    list_mechanisms,
)
from hf_linattn.config import make_config
from hf_linattn.evaluation import embed, fidelity, long_losses, perplexity, whole_windows
from hf_linattn.plan import FORMAT_VERSION, parse_layers
from tests.helpers import make_tokenizer
from tests.models import make_model


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [3]),
        (-1, [7]),
        ("0-5", [0, 1, 2, 3, 4, 5]),
        ("0-2,7", [0, 1, 2, 7]),
        (" 1 , 3-4 ", [1, 3, 4]),
        ("0-1,-1", [0, 1, 7]),
        ([7, 6, 6], [6, 7]),
        (range(2), [0, 1]),
        (["0-1", 5], [0, 1, 5]),
    ],
)
def test_layers_are_parsed(spec, expected):
    assert parse_layers(spec, num_layers=8) == expected


@pytest.mark.parametrize("number", [np.asarray, lambda x: torch.from_numpy(np.array(x))], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", list_mechanisms())
def test_numbers_of_other_packages_are_options_like_others(name, number):
    options = make_config(name, {}).to_options()
    plain = {option: value for option, value in options.items() if type(value) in (int, float)}
    config = make_config(name, {option: number(value)[()] for option, value in plain.items()})
    assert json.dumps(config.to_options()) == json.dumps(options)
    inside = make_config("hybrid", {"linear_options": {"feature_dim": number(8)[()]}, "window_size": number(4)[()]})
    assert json.loads(json.dumps(inside.to_options()))["linear_options"] == {"feature_dim": 8}


@pytest.mark.parametrize("spec", [8, -9, "6-8", [0, 8]])
def test_a_layer_out_of_range_is_named(spec):
    with pytest.raises(OptionError, match=r"names layer (8|-9), but the model has layers 0 to 7"):
        parse_layers(spec, num_layers=8)


@pytest.mark.parametrize("spec", ["", "a", "1-b", [1.5], "1.5", [None], 2.0, True, object(), "5-3", "0,5-3"])
def test_a_malformed_layer_specification_is_refused(spec):
    with pytest.raises(OptionError, match="layers"):
        parse_layers(spec, num_layers=8)


def test_no_layers_at_all_are_refused():
    with pytest.raises(OptionError, match="at least one layer"):
        parse_layers([], num_layers=8)


PLANS = [
    ("performer", dict.fromkeys(range(4), "performer")),
    ({"performer": "0-1", "softmax": [2, 3]}, {0: "performer", 1: "performer", 2: "softmax", 3: "softmax"}),
    ({"performer": {"layers": -1, "num_features": 9}}, {3: "performer"}),
    ({"linear": None}, dict.fromkeys(range(4), "linear")),
]


@pytest.mark.parametrize(("plan", "expected"), PLANS)
def test_plans_are_resolved_and_survive_json(plan, expected):
    config = PatchConfig.from_plan(plan, num_layers=4)
    assert {index: layer.mechanism for index, layer in config.layers.items()} == expected
    assert PatchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_options_reach_their_layers_only():
    config = PatchConfig.from_plan({"performer": {"layers": [0], "num_features": 9}, "linear": [1]}, num_layers=3)
    assert config.layers == {0: make_config("performer", {"num_features": 9}), 1: make_config("linear", {})}
    given = PatchConfig.from_plan(make_config("performer", {"kernel": "relu"}), num_layers=3, layers="1-2")
    assert {index: layer.kernel for index, layer in given.layers.items()} == {1: "relu", 2: "relu"}


def test_equal_layers_are_one_group():
    groups = PatchConfig.from_plan({"performer": [0, 2], "linear": 1}, num_layers=3).to_dict()["groups"]
    assert [(group["mechanism"], group["layers"]) for group in groups] == [("performer", [0, 2]), ("linear", [1])]


@pytest.mark.parametrize(
    ("plan", "arguments", "error", "message"),
    [
        ({}, {}, OptionError, "the plan is empty"),
        ({"performer": "0-2", "softmax": [2, 3]}, {}, OptionError, "layer 2 to both 'performer' and 'softmax'"),
        ({"performer": []}, {}, OptionError, "at least one layer"),
        ({"performer": "0"}, {"layers": [1]}, OptionError, "remove the argument 'layers'"),
        ({"performer": "0"}, {"options": {"seed": 1}}, OptionError, "remove the argument 'seed'"),
        ({"perfomer": "0"}, {}, UnknownNameError, "did you mean performer"),
        ({"performer": {"layers": 0, "num_feature": 9}}, {}, OptionError, "did you mean num_features"),
        ("performer", {"options": {"num_feature": 9}}, OptionError, "no option 'num_feature'; did you mean num_feat"),
        ("performer", {"options": {"kernel": "softmx"}}, UnknownNameError, "kernel 'softmx'; did you mean softmax"),
        ("linear", {"options": {"feature_map": "elo"}}, UnknownNameError, "feature map 'elo'; did you mean elu"),
        (None, {}, UnknownNameError, "unknown mechanism None"),
        (3, {}, UnknownNameError, "unknown mechanism 3"),
    ],
)
def test_a_bad_plan_is_refused(plan, arguments, error, message):
    with pytest.raises(error, match=message):
        PatchConfig.from_plan(plan, num_layers=4, **arguments)


def test_a_config_takes_no_further_options():
    with pytest.raises(OptionError, match="remove the argument 'seed'"):
        PatchConfig.from_plan(make_config("linear", {}), num_layers=4, options={"seed": 1})


NEVER = (math.nan, math.inf, -math.inf, 2**63, 10**40)  # values of no number
COUNTS = [("num_features", value) for value in (0, -3, 1.5, True, "8", None)]
COUNTS += [("redraw_interval", value) for value in (0, -1, 2.5, True)]


def values_out_of_range(name: str) -> list[tuple[str, object]]:
    """Options of a mechanism, each with a value that it cannot have."""
    fields = dataclasses.fields(make_config(name, {}))
    numbers = [
        field.name
        for field in fields
        if field.name != "seed" and any(x in str(field.type) for x in ("int", "float")) and "dict" not in field.type
    ]
    flags = [field.name for field in fields if isinstance(field.default, bool)]
    return [
        *(("seed", value) for value in (-1, 1.5, "0", None, True, 2**63, 10**40)),
        *((option, value) for option in numbers for value in NEVER),
        *((option, value) for option in flags for value in (1, None, "no", {})),
        *(COUNTS if name == "performer" else []),
    ]


@pytest.mark.parametrize("name", list_mechanisms())
def test_a_value_out_of_range_names_the_option_and_the_value(name):
    for option, value in values_out_of_range(name):
        with pytest.raises(OptionError, match=re.escape(option) + " must be .*got " + re.escape(repr(value))):
            make_config(name, {option: value})


@pytest.mark.parametrize("name", list_mechanisms())
def test_options_of_every_mechanism_are_documented_json(name):
    config = make_config(name, {"seed": 5})
    assert isinstance(config, MechanismConfig) and config.mechanism == name
    assert make_config(name, json.loads(json.dumps(config.to_options()))) == config
    assert all(field.metadata.get("help") for field in dataclasses.fields(config))


GROUP = {"mechanism": "linear", "options": {}, "layers": [0]}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": FORMAT_VERSION + 1}, r"format_version 3 .*newer"),
        ({"format_version": None}, "format_version in config.json must be of type int, got None"),
        ({"format_version": "1"}, "format_version in config.json must be of type int, got '1'"),
        ({"format_version": 0}, "format_version 0"),
        ({"num_layers": "four"}, "num_layers"),
        ({"num_layers": None}, "num_layers"),
        ({"groups": None}, "groups"),
        ({"groups": "linear"}, "groups"),
        ({"groups": [3]}, "groups"),
        ({"groups": [{**GROUP, "layers": [9]}]}, "layer 9"),
        ({"groups": [{**GROUP, "layers": None}]}, "layers"),
        ({"groups": [GROUP, GROUP]}, "layer 0"),
        ({"groups": [{**GROUP, "options": None}]}, "options"),
        ({"groups": [{**GROUP, "options": {"sed": 1}}]}, "'sed'"),
        ({"groups": [{**GROUP, "mechanism": "linaer"}]}, r"mechanism 'linaer'; .*groups\[0\] in config.json has"),
        ({"groups": [{"mechanism": "linear", "layers": [0]}]}, "options"),
    ],
)
def test_a_damaged_json_form_names_the_field(change, named):
    data = {**PatchConfig.from_plan("linear", num_layers=2).to_dict(), **change}
    with pytest.raises(HfLinattnError, match=named):
        PatchConfig.from_dict(data)


@pytest.mark.parametrize("missing", ["format_version", "num_layers", "groups"])
def test_a_missing_field_is_named(missing):
    data = PatchConfig.from_plan("linear", num_layers=2).to_dict()
    del data[missing]
    with pytest.raises(CheckpointError, match=missing):
        PatchConfig.from_dict(data)


def read_by_everything(texts: object) -> list[Callable[[], object]]:
    """What takes texts beside `calibrate`, which `tests/test_calibration.py` asks, and haystacks."""
    model, tokenizer = make_model("gpt2"), make_tokenizer()
    return [
        lambda: whole_windows(tokenizer, texts, 2),
        lambda: perplexity(model, tokenizer, texts, max_length=8),
        lambda: long_losses(model, tokenizer, texts, length=8),
        lambda: fidelity(model, model, tokenizer, texts),
        lambda: embed(make_model("bert").bert, tokenizer, texts),
    ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("w5 w6", r"texts must be a sequence of texts, got one string; pass \[text\]"),
        (["w5 w6", 3], "texts must be a sequence of texts, got 3; pass strings in a list"),
        (None, "texts must be a sequence of texts, got None; pass strings in a list"),
    ],
)
def test_one_string_is_no_sequence_of_texts(texts, message):
    for read in read_by_everything(texts):
        with pytest.raises(DataError, match=message):
            read()
