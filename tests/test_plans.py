"""Plans that are lists: a mechanism more than once, other heads in other layers; saved, converted, read by recipes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_linattn import (
    CheckpointError,
    HfLinattnError,
    OptionError,
    PatchConfig,
    UnknownNameError,
    get_mechanisms,
    get_patch_config,
    patch_model,
    unpatch_model,
)
from hf_linattn.cli import app
from hf_linattn.config import make_config
from hf_linattn.plan import parse_layers
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.training.arguments import parse_arguments

NEAR, FAR = {"window_size": 5}, {"window_size": 11}
# of a model with two layers and four key/value heads: in the second layer local has two groups of heads
PLAN: list[dict[str, Any]] = [
    {"mechanism": "local", "heads": 0, "options": NEAR},
    {"mechanism": "local", "layers": 1, "heads": [1, 3], "options": FAR},
    {"mechanism": "performer", "layers": 0, "heads": "2-3", "options": {"num_features": 16}},
]
BY_HEAD = [{key: value for key, value in entry.items() if key != "layers"} for entry in PLAN[:2]]
REQUIRED = ["--model_name_or_path", "some/model", "--output_dir", "out"]


def survives_json(config: PatchConfig) -> bool:
    return PatchConfig.from_dict(json.loads(json.dumps(config.to_dict(), sort_keys=True))) == config


def test_a_mechanism_serves_layers_with_other_options():
    plan = [
        {"mechanism": "local", "layers": "0-1", "options": NEAR},
        {"mechanism": "linear", "layers": [2]},
        {"mechanism": "local", "layers": -1, "options": FAR},
    ]
    config = PatchConfig.from_plan(plan, num_layers=5)
    near, far = make_config("local", NEAR), make_config("local", FAR)
    assert config.layers == {0: near, 1: near, 2: make_config("linear", {}), 4: far}
    assert survives_json(config)
    assert PatchConfig.from_plan(config.to_dict()["groups"], num_layers=5) == config, "saved groups are a plan"


def test_a_list_says_what_a_mapping_says():
    listed = [
        {"mechanism": "performer", "layers": "0-2", "heads": "0-1", "options": {"num_features": 64}},
        {"mechanism": "local", "layers": "1-2", "heads": 2},
        {"mechanism": "linear", "layers": 3},
    ]
    mapped = {
        "performer": {"layers": "0-2", "heads": "0-1", "num_features": 64},
        "local": {"layers": "1-2", "heads": 2},
        "linear": 3,
    }
    assert PatchConfig.from_plan(listed, 4) == PatchConfig.from_plan(mapped, 4)
    assert PatchConfig.from_plan([{"mechanism": "linear"}], 4) == PatchConfig.from_plan("linear", 4)


def test_other_layers_have_other_heads():
    config = PatchConfig.from_plan(PLAN, num_layers=2)
    first = {"local": {"heads": 0, **NEAR}, "performer": {"heads": "2-3", "num_features": 16}}
    assert config.layers == {0: make_config("by_head", {"plan": first}), 1: make_config("by_head", {"plan": BY_HEAD})}
    assert survives_json(config)


def test_layers_that_a_plan_gives_softmax_are_not_converted():
    kept = [{"mechanism": "softmax", "layers": 1}, {"mechanism": "softmax", "layers": 2, "heads": "0-1"}]
    config = PatchConfig.from_plan([{"mechanism": "linear", "layers": 0, "heads": 1}, *kept], num_layers=4)
    assert (config.converted, config.count, len(config.layers)) == ([0], 1, 3)
    across = PatchConfig(config.layers, 4, cross=PatchConfig.from_plan({"linear": 0, "softmax": 1}, num_layers=2))
    assert across.count == 2


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_each_group_of_heads_has_its_own_options(causal):
    case = Case("by_head", "gpt2", causal, {"plan": BY_HEAD})
    heads = case.heads(45)
    got, _ = case.make()(*heads)
    owners = [("local", NEAR), ("local", FAR), ("softmax", {}), ("local", FAR)]
    for head, (name, options) in enumerate(owners):
        want, _ = Case(name, "gpt2", causal, options).make()(*heads)
        torch.testing.assert_close(got[:, head], want[:, head])


def test_a_patched_model_is_saved_loaded_and_restored(tmp_path):
    original, tokens = tiny_model("gpt2", True, torch.float32), random_tokens(2, 33)
    plan = [
        {"mechanism": "hedgehog", "heads": 0},
        {"mechanism": "hedgehog", "layers": 1, "heads": 2, "options": {"seed": 5}},
        {"mechanism": "local", "heads": 3, "options": NEAR},
    ]
    with torch.no_grad():
        want, keys = original(tokens).logits, list(original.state_dict())
        model = patch_model(original, plan)
        assert [list(x.members) for x in get_mechanisms(model).values()] == [
            ["hedgehog", "local", "softmax"], ["hedgehog", "hedgehog_2", "local", "softmax"],
        ]  # fmt: skip
        for mechanism in get_mechanisms(model).values():
            for parameter in mechanism.parameters():
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        changed = model(tokens).logits
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens).logits, changed)
        assert get_patch_config(loaded) == get_patch_config(model)
        stepwise = model.generate(tokens, max_new_tokens=4, do_sample=False)
        assert torch.equal(loaded.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False), stepwise)
        assert torch.equal(unpatch_model(model)(tokens).logits, want) and list(model.state_dict()) == keys


def test_cross_attention_takes_a_list():
    config = PatchConfig.from_plan([{"mechanism": "linear", "layers": 0}, {"mechanism": "linear", "layers": 1}], 2)
    assert config == PatchConfig.from_plan("linear", 2)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        ([], OptionError, "the plan is empty"),
        ([{"mechanism": "linaer"}], UnknownNameError, "unknown mechanism 'linaer'; did you mean linear"),
        ([{"mechanism": "linaer", "heads": 0}], UnknownNameError, "unknown mechanism 'linaer'; did you mean linear"),
        ([{"mechanism": "linear", "layers": 9}], OptionError, "names layer 9, but the model has layers 0 to 1"),
        ([{"mechanism": "linear", "heads": 4}], OptionError, "head 4, but layer 0 has the key/value heads 0 to 3"),
        (
            [{"mechanism": "local", "layers": "0-1"}, {"mechanism": "local", "layers": 1, "options": FAR}],
            OptionError,
            "layer 1 to both 'local' and 'local'; name it once, or the heads of each",
        ),
        (
            [{"mechanism": "local", "heads": 0}, {"mechanism": "linear", "layers": 1}],
            OptionError,
            "layer 1 to both 'local' and 'linear'; name it once, or the heads of each",
        ),
        (
            [{"mechanism": "local", "heads": "0-1"}, {"mechanism": "local", "heads": 1, "options": FAR}],
            OptionError,
            "key/value head 1 to both 'local' and 'local_2'; name it once",
        ),
        ([{"mechanism": "linear", "layer": 0}], OptionError, r"plan\[0\] has no field 'layer'; did you mean layers"),
        ([{"mechanism": "linear", "decay": "learned"}], OptionError, r"plan\[0\] has no field 'decay'"),
        ([{"mechanism": "local", "options": {"window": 3}}], OptionError, "no option 'window'; did you mean window_s"),
        ([{"mechanism": "local", "options": 3}], OptionError, r"plan\[0\]\['options'\] must be a dict of opt.*got 3"),
        ([{"mechanism": "local"}, {"layers": 1}], OptionError, r"plan\[1\] must be a dict like .*got {'layers': 1}"),
        (["linear"], OptionError, r"plan\[0\] must be a dict like .*got 'linear'"),
        ([{"mechanism": ["linear"], "heads": 0}], OptionError, r"plan\[0\] must be a dict like"),
    ],
)
def test_a_bad_list_is_named_and_changes_nothing(plan, error, message):
    model, tokens = tiny_model("gpt2", True), random_tokens(1, 9)
    want = model(tokens).logits
    with pytest.raises(error, match=message):
        patch_model(model, plan)
    assert torch.equal(model(tokens).logits, want)


@pytest.mark.parametrize(
    ("entry", "error"),
    [(3, OptionError), ({"mechanism": "linaer", "heads": 0}, UnknownNameError), ({"heads": 0}, OptionError)],
)
def test_a_damaged_list_in_a_checkpoint_is_an_error_of_this_library(entry, error):
    data = PatchConfig.from_plan(PLAN, 2).to_dict()
    group = next(group for group in data["groups"] if isinstance(group["options"]["plan"], list))
    group["options"]["plan"].append(entry)
    with pytest.raises(error) as caught:
        PatchConfig.from_dict(json.loads(json.dumps(data)))
    assert isinstance(caught.value, HfLinattnError) and not isinstance(caught.value, CheckpointError)


# -- the command line -------------------------------------------------------------------------------------------------


def test_convert_takes_a_list(tmp_path):
    tiny_model("gpt2", True, torch.float32).save_pretrained(tmp_path / "original")
    places = [str(tmp_path / "original"), str(tmp_path / "converted")]
    done = CliRunner().invoke(app, ["convert", *places, "--mechanism", json.dumps(PLAN), "--json"])
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(places[1])
    assert get_patch_config(loaded) == PatchConfig.from_plan(PLAN, 2)
    wrong = CliRunner().invoke(app, ["convert", places[0], str(tmp_path / "other"), "--mechanism", "[{]"])
    assert wrong.exit_code == 1 and "mechanism must be a JSON object, got '[{]'" in wrong.output


def test_recipes_take_a_list_from_a_flag_and_from_a_file(tmp_path):
    from_flag = parse_arguments([*REQUIRED, "--plan", json.dumps(PLAN)])
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"model_name_or_path": "some/model", "output_dir": "out", "plan": PLAN}))
    for arguments in (from_flag, parse_arguments([str(file)])):
        assert arguments.model.patch_arguments()["mechanism"] == PLAN
    for wrong in ("[3]", "3", "linear"):
        with pytest.raises(OptionError, match=r"plan must be a JSON object"):
            parse_arguments([*REQUIRED, "--plan", wrong])


@pytest.mark.parametrize("spec", [torch.tensor(1), torch.tensor([1])], ids=["number", "row"])
def test_layers_may_be_numbers_of_a_tensor(spec):
    assert parse_layers(spec, 4) == [1]
