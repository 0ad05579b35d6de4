"""Programs for other inputs than their example, transformations of torch.func, forwards without numbers.

They are right, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hf_linattn import UnsupportedModeError, UnsupportedModelError, list_mechanisms, patch_model
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing.models import Case, random_tokens, tiny_model
from tests.helpers import KINDS, each_of

ANY_LENGTH = sorted(name for name in list_mechanisms() if MECHANISMS.get(name).any_length)
ARCHITECTURES = {"bidirectional": "bert", "causal": "llama"}
FORMS = [
    pytest.param(Case(name, ARCHITECTURES[mode], mode == "causal"), id=f"{name}-{mode}", marks=marks)
    for (name,), marks, _ in each_of(list_mechanisms())
    for mode in sorted(MECHANISMS.get(name).modes - {"cross"})
]


def marked(enough: Callable[[Case], bool]) -> list[Any]:
    """Return all forms, those marked exhaustive that are not enough."""
    rest = {True: [], False: [pytest.mark.exhaustive]}
    return [pytest.param(*x.values, id=x.id, marks=[*x.marks, *rest[enough(*x.values)]]) for x in FORMS]


OF_KINDS = marked(lambda case: case.mechanism in KINDS)
EACH_ONCE = marked(lambda case: case.causal or case.mechanism in KINDS or "causal" not in case.mechanism_class.modes)


CHOSEN_BY_VALUES = ("lsh", "learned_sparse")  # whose keys the data or the weights choose
EXPORTED = marked(lambda case: case.causal and case.mechanism in KINDS)


class Alone(nn.Module):
    """A mechanism whose output is all there is."""

    def __init__(self, case: Case):
        super().__init__()
        self.mechanism = case.make(torch.float32).eval()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mechanism(query, key, value, mask)[0]


class Logits(nn.Module):
    """A patched model whose logits are all there is."""

    def __init__(self, name: str, architecture: str):
        super().__init__()
        self.model = patch_model(tiny_model(architecture, architecture != "bert", torch.float32), name)

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        given = {"attention_mask": mask, "position_ids": positions}
        return self.model(input_ids=ids, use_cache=False, **{k: v for k, v in given.items() if v is not None}).logits


def make_mask(length: int) -> Tensor:
    """The first row is padded on the left and the second on the right."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, : length // 3] = mask[1, length - length // 4 :] = False
    return mask


def inputs(case: Case, length: int) -> tuple[Tensor, ...]:
    return *case.heads(length, dtype=torch.float32), make_mask(length)


def refused(case: Case) -> bool:
    return case.mechanism not in (*ANY_LENGTH, "by_head")


def check(case: Case, program: nn.Module, alone: nn.Module, *lengths: int) -> None:
    """Compare a program with the mechanism on other lengths and paddings."""
    for length in lengths:
        *heads, mask = inputs(case, length)
        for given in (mask, torch.ones_like(mask)):
            got, want = (x(*heads, given).transpose(1, 2)[given] for x in (program, alone))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", FORMS)
@torch.no_grad()
def test_a_traced_mechanism_is_right_for_other_inputs_or_refused(case):
    """Whatever the example was like: `torch.jit.trace` records one run."""
    alone = Alone(case)
    if refused(case):
        with pytest.raises(UnsupportedModeError, match=f"{case.mechanism!r} of layer 0 works by"):
            torch.jit.trace(alone, inputs(case, 70), check_trace=False)
    else:
        check(case, torch.jit.trace(alone, inputs(case, 70), check_trace=False), alone, 23, 150)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["bert", "llama"])
@torch.no_grad()
def test_a_traced_model_answers_other_paddings_than_its_example(architecture):
    model, ids, mask = Logits("linear", architecture), random_tokens(2, 21), make_mask(21)
    for example in (mask, torch.ones_like(mask)):
        program = torch.jit.trace(model, (ids, example), check_trace=False)
        for given in (mask, torch.ones_like(mask)):
            got, want = (x(ids, given)[given] for x in (program, model))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", [x for x in OF_KINDS if refused(*x.values)])
def test_exporting_what_goes_by_lengths_is_refused(case):
    sizes = torch.export.Dim("length", min=4, max=200)
    with pytest.raises(UnsupportedModeError, match=f"{case.mechanism!r} of layer 0 works by"):
        shapes = (*({2: sizes},) * 3, {1: sizes})
        torch.export.export(Alone(case), inputs(case, 16), dynamic_shapes=shapes, strict=False)


@pytest.mark.parametrize(
    ("name", "architecture", "length"),
    [("linear", "llama", 16), ("softmax", "llama", 70), pytest.param("gla", "bert", 70, marks=pytest.mark.exhaustive)],
)
@torch.no_grad()
def test_a_program_for_all_lengths_is_right_at_each(name, architecture, length):
    case = Case(name, architecture, architecture == "llama")
    alone, sizes = Alone(case), torch.export.Dim("length", min=4, max=700)
    shapes = (*({2: sizes},) * 3, {1: sizes})
    program = torch.export.export(alone, inputs(case, length), dynamic_shapes=shapes, strict=False).module()
    check(case, program, alone, 7, 64, 300)


@torch.no_grad()
def test_a_program_of_a_sliding_window_is_right_within_and_beyond_it():
    """Whether a window hides anything is a question of the length, which the program leaves open."""
    model, sizes = Logits("softmax", "mistral"), torch.export.Dim("length", min=3, max=60)
    program = torch.export.export(model, (random_tokens(2, 20),), dynamic_shapes=({1: sizes},), strict=False).module()
    assert model.model.config.sliding_window == 40
    for length in (5, 40, 41, 57):
        ids = random_tokens(2, length)
        torch.testing.assert_close(program(ids), model(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", EXPORTED)
@torch.no_grad()
def test_a_model_without_a_mask_exports_with_static_sizes(case):
    """Whatever goes by lengths: they are those of the program, and a model that counts positions packs nothing."""
    model, ids = Logits(case.mechanism, case.architecture), random_tokens(2, 70)
    if case.mechanism in CHOSEN_BY_VALUES:
        with pytest.raises(UnsupportedModeError, match="export cannot record"):
            torch.export.export(model, (ids,), strict=False)
        return
    program = torch.export.export(model, (ids,), strict=False).module()
    ids = ids.flip(1)
    torch.testing.assert_close(program(ids), model(ids), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "whole"), [("softmax", True), ("linear", True), ("local", False), ("lsh", False)])
@torch.no_grad()
def test_one_graph_is_right_or_fails_with_the_remedy(name, whole):
    model, ids, mask = Logits(name, "bert"), random_tokens(2, 12), make_mask(12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if whole:
        torch.testing.assert_close(compiled(ids, mask), model(ids, mask), rtol=1e-3, atol=1e-4)
        return
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leave out\s+fullgraph=True, export with strict=False"):
        compiled(ids, mask)


def test_positions_that_may_pack_rows_are_refused_by_what_goes_by_them():
    model, ids = Logits("hybrid", "llama"), random_tokens(2, 21)
    positions = torch.arange(21).remainder(9)[None]
    with pytest.raises(UnsupportedModeError, match="'hybrid' of layer 0 works by"):
        torch.export.export(model, (ids, None, positions), strict=False)


@pytest.mark.parametrize("case", FORMS)
def test_functional_gradients_are_those_of_backward(case):
    mechanism, heads = case.make(torch.float32).eval(), case.heads(70, dtype=torch.float32)

    def loss(*tensors: Tensor) -> Tensor:
        return mechanism(*tensors)[0].sin().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(*heads)
    want = torch.autograd.grad(loss(*(x.requires_grad_() for x in heads)), heads)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_codebook_that_is_written_is_refused_under_a_transformation():
    case = Case("vq", "llama", True)
    mechanism, (query, key, value) = case.make(torch.float32).train(), case.heads(70, dtype=torch.float32)
    with pytest.raises(UnsupportedModeError, match="writes down"):
        torch.func.grad(lambda x: mechanism(query, x, value)[0].sum())(key)


@pytest.mark.parametrize("mapped", ["num_kept", "pattern"])
@torch.no_grad()
def test_a_pattern_of_chosen_blocks_is_not_mapped_over(mapped):
    """As of models whose weights `torch.func.stack_module_state` stacks. A pattern that keeps all blocks may be."""
    case = Case("learned_sparse", "llama", True, {"block_size": 4, "reach": 3})
    heads = case.heads(21, dtype=torch.float32)
    for options in ({"top_blocks": 2}, {}):
        mechanism = case.make(torch.float32, **options).eval()
        own = torch.stack([getattr(mechanism, mapped)] * 2)

        def attend(x: Tensor, mechanism: nn.Module = mechanism) -> Tensor:
            return torch.func.functional_call(mechanism, {mapped: x}, heads)[0]

        if mapped == "num_kept" or options:
            with pytest.raises(UnsupportedModeError, match=r"nor torch\.func\.vmap map over"):
                torch.vmap(attend)(own)
            continue
        got, want = torch.vmap(attend)(own), mechanism(*heads)[0]
        torch.testing.assert_close(got, want.expand_as(got), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", EACH_ONCE)
def test_mapped_and_forward_derivatives_are_right_or_refused(case):
    mechanism, heads = case.make(torch.float32).eval(), case.heads(70, dtype=torch.float32)
    several = [torch.stack([x, -x.flip(2)]) for x in heads]
    want = [mechanism(*(x[i] for x in several))[0] for i in (0, 1)]
    try:
        got = torch.vmap(lambda *x: mechanism(*x)[0])(*several)
    except UnsupportedModeError as error:
        assert case.mechanism == "lsh" and "vmap cannot map over" in str(error)
    else:
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-3, atol=1e-4)
    output, slope = torch.func.jvp(lambda x: mechanism(heads[0], heads[1], x)[0], heads[2:], heads[2:])
    torch.testing.assert_close(slope, output, rtol=1e-3, atol=1e-4)  # outputs are linear in the values


# -- no numbers -------------------------------------------------------------------------------------------------------

# on the meta device, where weights have no values either; lsh has no C there, which alone gives a shape by itself
WORKS_BY_VALUES = {"lsh": "buckets that their values fall into", "learned_sparse": "blocks that its weights choose"}


def on_meta(model: nn.Module, given: dict[str, Tensor]) -> Any:
    return model.to("meta")(**{name: x.to("meta") for name, x in given.items()})


def faked(model: nn.Module, given: dict[str, Tensor]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return model(**{name: mode.from_tensor(x) for name, x in given.items()})


@pytest.mark.parametrize("run", [on_meta, faked])
@pytest.mark.parametrize("case", EACH_ONCE)
def test_a_model_gives_shapes_where_there_are_no_numbers(case, run):
    """Of padded rows of several blocks, and with the cache that a causal model makes."""
    model, given = case.model(torch.float32), {"input_ids": random_tokens(2, 150), "attention_mask": make_mask(150)}
    if run is on_meta and case.mechanism in WORKS_BY_VALUES:
        with pytest.raises(UnsupportedModeError, match=WORKS_BY_VALUES[case.mechanism]):
            run(model, given)
    else:
        assert run(model, given).logits.shape == (2, 150, model.config.vocab_size)


def test_a_mechanism_in_memory_under_a_model_without_memory_is_refused():
    model = tiny_model("bert", False, torch.float32).to("meta")
    ids = random_tokens(2, 9).to("meta")
    with pytest.raises(UnsupportedModelError, match=r"query_map\.weight.* in memory.*model\.to\('meta'\)"):
        patch_model(model, "hedgehog")(input_ids=ids)
    assert model.to("meta")(input_ids=ids).logits.shape[:2] == ids.shape


@torch.no_grad()
def test_a_program_that_is_recorded_without_numbers_keeps_its_mask():
    case = Case("linear", "bert", False)
    alone = Alone(case)
    check(case, make_fx(alone, tracing_mode="fake")(*inputs(case, 21)), alone, 21)
