"""Names: found, suggested, never taken twice."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, make_dataclass
from inspect import signature
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linattn import (
    OptionError,
    PatchError,
    UnknownNameError,
    get_mechanisms,
    get_patch_config,
    is_patched,
    list_mechanisms,
    patch_model,
    register_mechanism,
)
from hf_linattn import registry as registry_module
from hf_linattn.cards import changed_options
from hf_linattn.config import MechanismConfig, make_config
from hf_linattn.errors import warn_of_former_name
from hf_linattn.mechanisms import MECHANISMS, Mechanism, SequenceMechanism
from hf_linattn.mechanisms.linear import LinearConfig, LinearMechanism
from hf_linattn.plan import PatchConfig
from hf_linattn.registry import FORMER_MECHANISMS, RESERVED, Registry
from tests.helpers import logits_of, make_tokens
from tests.models import make_model


@pytest.fixture
def own_mechanisms(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(MECHANISMS, "_entries", {name: MECHANISMS.get(name) for name in list_mechanisms()})


def make_registry(**options):
    registry = Registry("shape", **options)

    @registry.register("square")
    class Square:
        pass

    return registry, Square


def test_an_entry_is_found_and_listed_in_order():
    registry, square = make_registry()
    registry.register("circle")(type("Circle", (), {}))
    assert registry.get("square") is square
    assert registry.names() == ["circle", "square"]


@pytest.mark.parametrize("name", ["sqare", "SQUARE", None, 3, ["square"]])
def test_an_unknown_name_raises_with_the_names_there_are(name):
    registry, _ = make_registry()
    with pytest.raises(UnknownNameError, match=r"unknown shape .*square") as raised:
        registry.get(name)
    assert repr(name) in str(raised.value)
    assert isinstance(raised.value, LookupError)


def test_the_nearest_name_is_suggested():
    with pytest.raises(UnknownNameError, match=r"unknown mechanism 'perfomer'; did you mean performer\?"):
        MECHANISMS.get("perfomer")


def test_a_taken_name_is_refused_and_stays_with_its_holder():
    registry, square = make_registry()
    with pytest.raises(OptionError, match=r"'square' is already registered by .*Square"):
        registry.register("square")(type("Other", (), {}))
    assert registry.get("square") is square


def test_a_name_of_the_package_is_taken_before_it_was_imported(tmp_path, monkeypatch):
    made = "from hf_linattn.registry import Registry\nSHAPES = Registry('shape', package='own_shapes')\n"
    square = "from own_shapes import SHAPES\n@SHAPES.register('square')\nclass Square: ...\n"
    (tmp_path / "own_shapes").mkdir()
    for name, text in (("__init__", made), ("square", square)):
        (tmp_path / "own_shapes" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    registry = importlib.import_module("own_shapes").SHAPES
    with pytest.raises(OptionError, match=r"'square' is already registered by own_shapes.square.Square"):
        registry.register("square")(type("Mine", (), {}))
    assert registry.names() == ["square"]


def test_a_reloaded_class_replaces_itself():
    registry, square = make_registry()
    again = type("Square", (), {"__module__": square.__module__, "__qualname__": square.__qualname__})
    registry.register("square")(again)
    assert registry.get("square") is again


class Point:
    """An entry point that loads what it is made with."""

    dist = SimpleNamespace(name="some-shapes")

    def __init__(self, name, load=lambda: Registry):
        self.name, self.value, self.load = name, f"shapes:{name}", load


@pytest.fixture
def with_points(monkeypatch):
    """Return a function that makes a registry of a square and of entry points."""

    def make(*points):
        monkeypatch.setattr(registry_module, "entry_points", lambda group: points if group == "shapes" else [])
        return make_registry(entry_point_group="shapes")[0]

    return make


def test_entry_points_of_other_distributions_are_found(with_points):
    registry = with_points(Point("pentagon"))
    assert registry.names() == ["pentagon", "square"]
    assert registry.get("pentagon") is Registry


@pytest.mark.parametrize(
    ("name", "load", "reason"),
    [
        ("torn", lambda: importlib.import_module("no_such_module"), "ModuleNotFoundError: No module named 'no_such"),
        ("made", lambda: Registry("other"), "OptionError: a shape must be a class, got <"),
        ("square", lambda: Registry, "OptionError: shape 'square' is already registered by .*Square"),
    ],
)
def test_an_entry_point_that_is_broken_is_named_and_takes_no_other_away(with_points, name, load, reason):
    registry = with_points(Point(name, load), Point("pentagon"))
    message = rf"shape '{name}' is left out: 'shapes:{name}' of some-shapes cannot be loaded \({reason}"
    with pytest.warns(RuntimeWarning, match=message):
        assert registry.names() == ["pentagon", "square"]


def test_a_module_that_registers_entries_may_look_others_up(with_points):
    registry = with_points(Point("pentagon", lambda: registry.get("square")))
    assert registry.get("pentagon") is registry.get("square")


def test_a_thread_waits_while_another_fills_the_table(with_points):
    loading, go_on = Event(), Event()

    def load():
        loading.set()
        go_on.wait(10)
        return Registry

    registry = with_points(Point("pentagon", load))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(registry.names)
        assert loading.wait(10)
        second = threads.submit(registry.names)
        wait([second], timeout=0.1)
        go_on.set()
        assert second.result() == first.result() == ["pentagon", "square"]


def test_a_table_that_could_not_be_filled_is_filled_at_the_next_look(monkeypatch):
    registry, square = make_registry()
    monkeypatch.setattr(registry, "_package", "no_such_package")
    for _ in range(2):
        with pytest.raises(ImportError, match="no_such_package"):
            registry.names()
    monkeypatch.setattr(registry, "_package", None)
    assert registry.get("square") is square


def test_an_entry_point_gives_a_mechanism_its_name_without_a_decorator(own_mechanisms, monkeypatch):
    mine = type("Mine", (LinearMechanism,), {"config_class": dataclass(type("MineConfig", (LinearConfig,), {}))})
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [Point("mine", lambda: mine)])
    monkeypatch.setattr(MECHANISMS, "_discovered", False)
    model = patch_model(make_model("bert"), "mine")
    assert {type(made) for made in get_mechanisms(model).values()} == {mine}
    assert {config.mechanism for config in get_patch_config(model).layers.values()} == {"mine"}


def test_a_third_partys_mechanism_is_patched_in(own_mechanisms):
    @dataclass
    class FirstValueConfig(MechanismConfig):
        pass

    @register_mechanism("first_value")
    class FirstValue(Mechanism):
        config_class = FirstValueConfig
        modes = frozenset({"bidirectional"})

        def bidirectional_attention(self, query, key, value, key_padding_mask, sequence_ids):
            return value[:, :, :1].expand(-1, -1, query.shape[2], -1)

    assert "first_value" in list_mechanisms()
    ids = make_tokens(2, 7)
    before = logits_of(make_model("bert"), ids)
    assert not torch.equal(logits_of(patch_model(make_model("bert"), "first_value"), ids), before)


def test_a_parent_and_its_child_are_built_as_themselves(own_mechanisms):
    def register() -> type[Mechanism]:
        @dataclass
        class MyConfig(LinearConfig):
            pass

        return register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": MyConfig}))

    kinds = {"linear": LinearMechanism, "mine": register()}
    kinds["mine"] = register()  # as a notebook's cell that runs again
    for name, kind in kinds.items():
        assert {type(made) for made in get_mechanisms(patch_model(make_model("bert"), name)).values()} == {kind}


@pytest.mark.parametrize(
    ("parent", "owner"), [(LinearMechanism, "LinearConfig, .*'linear'"), (Mechanism, "MechanismConfig, .*every")]
)
def test_a_config_class_of_another_mechanism_is_refused(own_mechanisms, parent, owner):
    with pytest.raises(OptionError, match=f"'mine' has the config_class {owner}.*`class MineConfig"):
        register_mechanism("mine")(type("Mine", (parent,), {}))
    assert "mine" not in list_mechanisms()
    assert (LinearConfig.mechanism, MechanismConfig.mechanism) == ("linear", "")


@pytest.mark.parametrize("name", ["my.linear", "", "keys", 3])
def test_a_name_that_no_module_can_have_is_refused(own_mechanisms, name):
    config = type("MineConfig", (LinearConfig,), {})
    with pytest.raises(OptionError, match=f"a mechanism cannot have the name {name!r}, .*choose another"):
        register_mechanism(name)(type("Mine", (LinearMechanism,), {"config_class": config}))
    assert config.mechanism == "linear" and name not in list_mechanisms()


def test_an_option_that_plans_and_patch_model_have_is_refused(own_mechanisms):
    taken = {name for name, given in signature(patch_model).parameters.items() if given.kind is not given.VAR_KEYWORD}
    assert {*RESERVED} == {*taken, "heads"}
    for name in RESERVED:
        config = make_dataclass("MineConfig", [(name, int, 2)], bases=(LinearConfig,))
        with pytest.raises(OptionError, match=f"mechanism 'mine' has the option {name!r}, .*give it another name"):
            register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": config}))
    assert "mine" not in list_mechanisms()


def test_what_is_no_mechanism_is_refused(own_mechanisms):
    with pytest.raises(OptionError, match="'mine' is to be a subclass of Mechanism whose config_class is a dataclass"):
        register_mechanism("mine")(type("Mine", (), {}))
    with pytest.raises(OptionError, match="config_class is a dataclass on MechanismConfig, got Mine with"):
        register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": dict}))
    assert "mine" not in list_mechanisms()


def test_options_of_what_is_no_dataclass_are_refused(own_mechanisms):
    config = type("MineConfig", (LinearConfig,), {"__annotations__": {"scale": float}, "scale": 1.0})
    with pytest.raises(OptionError, match=r"MineConfig names scale, .* not decorated with @dataclass; decorate it"):
        register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": config}))
    assert "mine" not in list_mechanisms()


@pytest.mark.parametrize(
    ("base", "method"), [(Mechanism, "bidirectional_attention"), (SequenceMechanism, "bidirectional_sequences")]
)
def test_a_method_that_is_not_written_is_named(own_mechanisms, base, method):
    config = dataclass(type("MineConfig", (MechanismConfig,), {}))
    register_mechanism("mine")(type("Mine", (base,), {"config_class": config}))
    with pytest.raises(NotImplementedError, match=f"'mine': Mine has no method {method}, which layer 0 calls"):
        logits_of(patch_model(make_model("bert"), "mine"), make_tokens(2, 7))


def test_an_option_without_a_default_is_asked_for_and_named_in_cards(own_mechanisms):
    config = make_dataclass("MineConfig", [("rate", float)], bases=(LinearConfig,), kw_only=True)
    register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": config}))
    with pytest.raises(OptionError, match="mechanism 'mine' needs the option 'rate'; give it a value"):
        patch_model(make_model("llama"), "mine")
    model = patch_model(make_model("llama"), "mine", rate=0.5)
    assert changed_options("mine", get_patch_config(model).layers[0].to_options()) == {"rate": 0.5}


def test_what_a_config_makes_of_its_options_is_none_of_them(own_mechanisms, tmp_path):
    derived = [("twice", int, field(init=False, default=0))]
    config = make_dataclass("MineConfig", derived, bases=(LinearConfig,))
    register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": config}))
    patch_model(make_model("llama"), "mine").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "twice" not in get_patch_config(loaded).layers[0].to_options()


def test_an_option_that_no_config_file_can_hold_is_refused(own_mechanisms):
    config = make_dataclass("MineConfig", [("kind", object, torch.float32)], bases=(LinearConfig,))
    register_mechanism("mine")(type("Mine", (LinearMechanism,), {"config_class": config}))
    model = make_model("llama")
    with pytest.raises(OptionError, match=r"the option 'kind' of mechanism 'mine' is torch\.float32, which no saved"):
        patch_model(model, "mine")
    assert not is_patched(model)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_tensor_that_a_checkpoint_leaves_out_is_refused(own_mechanisms, kind):
    """A model that is loaded would have whatever was in memory."""

    class Mine(LinearMechanism):
        config_class = make_dataclass("MineConfig", [], bases=(LinearConfig,))

        def __init__(self, config, layer):
            super().__init__(config, layer)
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(2), persistent=False)
            else:
                self.scale = torch.ones(2)

    register_mechanism("mine")(Mine)
    model = make_model("llama")
    with pytest.raises(PatchError, match="mechanism 'mine' has the tensor 'scale', which a checkpoint leaves out"):
        patch_model(model, "mine")
    assert not is_patched(model)


def test_a_config_that_is_changed_afterwards_changes_no_patched_model(tmp_path):
    config = make_config("local", {"window_size": 4})
    plan = PatchConfig.from_plan(config, 2)
    models = [patch_model(make_model("llama"), given) for given in (config, plan)]
    config.window_size = plan.layers[0].window_size = 16
    for model in models:
        assert {x.config.window_size for x in get_mechanisms(model).values()} == {4}
    get_mechanisms(models[0])["model.layers.0.self_attn"].config.window_size = 16
    with pytest.raises(PatchError, match=r"options of the mechanisms of .* were changed after patch_model"):
        models[0].save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unwarned():
    """Warnings of former names come once in a process, whatever test asked first."""
    warn_of_former_name.cache_clear()


@pytest.mark.parametrize(("former", "name"), FORMER_MECHANISMS.items())
def test_a_former_name_is_found_with_one_warning_and_not_listed(unwarned, former, name):
    with pytest.warns(FutureWarning, match=f"mechanism '{former}' is now called '{name}'") as caught:
        assert MECHANISMS.get(former) is MECHANISMS.get(name)
        assert MECHANISMS.get(former) is MECHANISMS.get(name)
    assert len(caught) == 1
    assert former not in list_mechanisms() and name in list_mechanisms()


@pytest.mark.parametrize(("former", "name"), FORMER_MECHANISMS.items())
def test_a_model_patched_by_a_former_name_is_described_by_todays(former, name):
    model, ids = patch_model(make_model("llama"), former), make_tokens(2, 9)
    assert {config.mechanism for config in get_patch_config(model).layers.values()} == {name}
    assert torch.equal(logits_of(model, ids), logits_of(patch_model(make_model("llama"), name), ids))
    plan = get_patch_config(patch_model(make_model("llama"), {former: 0, "linear": 1}))
    assert [config.mechanism for config in plan.layers.values()] == [name, "linear"]


def test_a_name_near_a_former_one_suggests_todays():
    with pytest.raises(UnknownNameError, match=r"'flsh'; did you mean mixed_chunk or lsh\?") as raised:
        MECHANISMS.get("flsh")
    assert "flash" not in str(raised.value)


def test_a_former_name_is_taken():
    with pytest.raises(OptionError, match="'flash' is a former name of 'mixed_chunk'; choose another name for "):
        MECHANISMS.register("flash")(Mechanism)
