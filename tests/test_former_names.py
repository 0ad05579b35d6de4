"""Names that mechanisms and options had before: every way to give one takes them, with one warning for each."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from hf_linattn import OptionError, PatchConfig, get_patch_config, list_mechanisms, patch_model
from hf_linattn.config import FORMER_OPTIONS, make_config
from hf_linattn.errors import warn_of_former_name
from hf_linattn.hub import load_checkpoint
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.training.arguments.parsing import parse_arguments
from tests.helpers import logits_of, make_tokens
from tests.models import make_model
from tests.test_cli import answer

FORMER = {"sink": "one", "num_sinks": 2, "window_size": 5}
TODAY = {"sink_logit": "one", "num_sink_tokens": 2, "window_size": 5}


@pytest.fixture(autouse=True)
def unwarned():
    """As in a process of its own, whatever was asked for before."""
    warn_of_former_name.cache_clear()


@pytest.mark.parametrize(("former", "option"), FORMER_OPTIONS.items())
@pytest.mark.parametrize("name", list_mechanisms())
def test_every_mechanism_takes_the_former_name_of_an_option_that_it_has(name, former, option):
    known = MECHANISMS.get(name).config_class.__dataclass_fields__
    assert former not in known
    if option not in known:
        with pytest.raises(OptionError, match=f"mechanism '{name}' has no option '{former}'"):
            make_config(name, {former: None})
        return
    value = {"sink_logit": "one", "num_sink_tokens": 1}[option]
    with pytest.warns(FutureWarning, match=f"option '{former}' is now called '{option}'") as caught:
        assert make_config(name, {former: value}) == make_config(name, {option: value})
        assert make_config(name, {former: value}, saved=True).to_options()[option] == value
    assert len(caught) == 1


def test_both_names_of_an_option_at_once_are_refused():
    for given in ({"num_sinks": 2, "num_sink_tokens": 2}, {"num_sink_tokens": 2, "num_sinks": 3}):
        with pytest.raises(
            OptionError, match="'num_sinks' is a former name of the option 'num_sink_tokens'; give one"
        ):
            patch_model(make_model("llama"), "hybrid", **given)


def test_an_option_near_a_former_one_suggests_todays():
    with pytest.raises(OptionError, match="has no option 'num_sink'; did you mean num_sink_tokens"):
        make_config("streaming", {"num_sink": 1})


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ({"sinks": {"layers": 0, **FORMER}, "flash": 1}, {"streaming": {"layers": 0, **TODAY}, "mixed_chunk": 1}),
        (
            [{"mechanism": "random", "layers": 1, "options": {"sink": "one"}}],
            [{"mechanism": "random_blocks", "layers": 1, "options": {"sink_logit": "one"}}],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is now called:FutureWarning")
def test_plans_take_former_names_and_are_saved_with_todays(former, today, tmp_path):
    old, new = (patch_model(make_model("llama"), plan) for plan in (former, today))
    assert get_patch_config(old).to_dict() == get_patch_config(new).to_dict()
    assert torch.equal(logits_of(old, make_tokens(2, 20)), logits_of(new, make_tokens(2, 20)))
    old.save_pretrained(tmp_path)
    warn_of_former_name.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:.*is now called:FutureWarning")
def test_members_keep_the_names_they_are_given_by_which_their_weights_are_saved(tmp_path):
    members = {"flash": {"sink": "learned"}, "linear": {}}
    model = patch_model(make_model("llama"), "fusion", members=members)
    assert any("members.flash." in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    ids = make_tokens(2, 20)
    assert torch.equal(logits_of(load_checkpoint(tmp_path), ids), logits_of(model, ids))
    [config] = {id(x): x for x in get_patch_config(model).layers.values()}.values()
    assert list(config.members) == list(members) and config.members["flash"]["sink_logit"] == "learned"


def test_heads_can_be_given_by_both_names_of_a_mechanism():
    with pytest.warns(FutureWarning, match="'sinks' is now called 'streaming'"):
        model = patch_model(make_model("llama"), {"sinks": {"heads": 0}, "streaming": {"heads": 1}})
    assert logits_of(model, make_tokens(2, 20)).isfinite().all()


def test_the_json_form_of_before_is_read():
    group = {"mechanism": "sinks", "options": {**FORMER, "seed": 3}, "layers": [0, 1]}
    with pytest.warns(FutureWarning) as caught:
        config = PatchConfig.from_dict({"format_version": 1, "num_layers": 2, "groups": [group]})
    assert len(caught) == 3  # the mechanism and two options
    [written] = config.to_dict()["groups"]
    assert written["mechanism"] == "streaming" and written["options"].items() >= {**TODAY, "seed": 3}.items()


@pytest.mark.filterwarnings("ignore:.*is now called:FutureWarning")
def test_convert_takes_former_names(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "original")
    answer("convert", tmp_path / "original", tmp_path / "out", "--mechanism", "sinks", "--options", json.dumps(FORMER))
    [group] = json.loads((tmp_path / "out" / "config.json").read_text())["hf_linattn"]["groups"]
    assert group["mechanism"] == "streaming" and group["options"].items() >= TODAY.items()


@pytest.mark.filterwarnings("ignore:.*is now called:FutureWarning")
def test_recipes_take_former_names():
    flags = ["--model_name_or_path", "some/model", "--output_dir", "out", "--mechanism", "sinks"]
    arguments = parse_arguments([*flags, "--mechanism_options", json.dumps(FORMER)]).model.patch_arguments()
    today = patch_model(make_model("llama"), "streaming", **TODAY)
    assert get_patch_config(patch_model(make_model("llama"), **arguments)) == get_patch_config(today)
