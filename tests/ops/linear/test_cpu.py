"""The compiled operations against PyTorch's in float64, which `test_torch.py` checks."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_linattn.config import make_config
from hf_linattn.feature_maps import FEATURE_MAPS, FeatureMap
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.dispatch import Policy
from hf_linattn.ops.linear import cpu as linear_cpu
from hf_linattn.ops.linear.cpu_kernels import SEGMENT
from hf_linattn.ops.linear.interface import causal_linear_attention, linear_attention
from hf_linattn.ops.linear.types import CHUNK_SIZE, LinearCall, LinearState
from hf_linattn.ops.runtime import cpu as library
from hf_linattn.testing.counters import flops_of
from tests.helpers import assert_close
from tests.ops.feature_maps import elu_map, exp_map

HEADS, KV_HEADS, VALUE_DIM = 4, 2, 20
pytestmark = pytest.mark.usefixtures("products")
MAPS = [
    ("linear", {}), ("linear", {"feature_map": "relu"}), ("performer", {"num_features": 64}),
    ("performer", {"num_features": 27}), ("performer", {"kernel": "relu", "num_features": 32}),
    ("performer", {"kernel": "hyperbolic", "num_features": 21}), ("hedgehog", {}), ("hedgehog", {"feature_dim": 26}),
    ("t2r", {}), ("learned_exp", {"feature_dim": 37}),
]  # fmt: skip


def _layouts() -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Masks and sequence ids [2, 203]: sequences of many lengths, some in several chunks, a token at each end."""
    mask = torch.ones(2, 203, dtype=torch.bool)
    mask[0, :80], mask[1, 150:] = False, False
    lengths = torch.tensor([1, 64, 30, 2, 105, 1])
    ids = torch.stack([torch.arange(6).repeat_interleave(lengths), torch.arange(203) // 90])
    return {"plain": (None, None), "masked": (mask, None), "packed": (None, ids), "packed and masked": (mask, ids)}


LAYOUTS = _layouts()


@pytest.mark.covering(2)
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("feature_map", [elu_map, exp_map])
def test_outputs_states_and_all_gradients(variant, monkeypatch, feature_map, decay, masked, packed, continued):
    """Two parts of an odd length, grouped queries; a slow and a fast rate; what came before, if anything.

    Of two rows with several sequences one has an end where the first part ends.
    """
    monkeypatch.setattr(linear_cpu, "NATIVE_SIZE", CHUNK_SIZE * 9)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    length, dim, scaled = CHUNK_SIZE * 17 + 13, 7, decay or feature_map is exp_map
    heads = [draw(2, h, length, d).requires_grad_() for h, d in ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, VALUE_DIM))]
    rates = torch.tensor([0.02, 3.0], dtype=torch.float64, requires_grad=True)
    kv = draw(2, KV_HEADS, dim, VALUE_DIM + 1).abs().requires_grad_()
    log_max = draw(2, KV_HEADS) * scaled
    mask = torch.rand(2, length, generator=generator) > 0.3 if masked else None
    if masked:
        mask[0, :70], mask[1, -70:] = False, False
    places = torch.arange(length)
    ids = torch.stack([places // (CHUNK_SIZE * 3), places // (length - 9)]) if packed else None  # one without a key
    weights = draw(2, HEADS, length, VALUE_DIM), draw(*kv.shape)
    wanted = [*heads, *([rates] if decay else []), *([kv] if continued else [])]
    results = []
    for dtype in (torch.float64, torch.float32):
        rate = -rates.to(dtype)[None, :, None].expand(2, -1, length)
        rate = rate if mask is None else rate * mask[:, None]
        state = LinearState(kv.to(dtype), log_max.to(dtype)) if continued else None
        rate = rate if decay else None
        operands = [*(x.to(dtype) for x in heads), feature_map, feature_map, mask, ids, state, rate]
        output, after = causal_linear_attention(*operands, policy=Policy("auto"))
        with torch.no_grad():  # written in place
            inferred, _ = causal_linear_attention(*operands, policy=Policy("auto"))
        loss = (output * weights[0]).sum() + (after.kv * weights[1]).sum()
        results.append([output, inferred, *after, *torch.autograd.grad(loss, wanted)])
    assert variant
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 2e-4 * max(1.0, float(want.detach().abs().max())))


@pytest.mark.covering(2)
@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize(("name", "options"), MAPS)
def test_feature_maps(variant, name, options, decay, masked):
    """The C's own maps, which no gradient needs, in long calls and token by token; where every query sees all keys."""
    mask = torch.ones(2, 203, dtype=torch.bool)
    mask[0, :80], mask[1, 150:] = False, False  # one has no key in the first call
    mask = mask if masked else None
    parts = [slice(*ends) for ends in itertools.pairwise((0, 1, 70, 200, 201, 202, 203))]
    results = []
    for dtype in (torch.float64, torch.float32):
        heads = [x.to(dtype) for x in make_heads()]
        causal = make_mechanism(name, {**options, "decay": decay}, moved=True).to(dtype)
        both_ways = make_mechanism(name, {**options, "decay": decay}, causal=False, moved=True).to(dtype)
        state, outputs = None, []
        for part in parts:
            real = mask if mask is None else mask[:, part]
            output, state = causal(*(x[:, :, part] for x in heads), real, state=state)
            outputs.append(output)
        total = state.kv.double() * state.log_max.double().exp()[..., None, None]
        results.append([*outputs, total, both_ways(*heads, mask)[0]])
    # calls, each after it was seen to be there; what decays is read from both ends
    assert len(variant) == 2 * (len(parts) + 1) + (decay is not None)
    assert causal.maps[0].spec is not None
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 2e-5 * max(1.0, float(want.abs().max())))


def test_softmax_pairs_of_any_spread(variant):
    """Logits that lie close together and a hundred apart: e^-x is the inverse of e^x only where float32 has it."""
    sizes = torch.logspace(-1, 1.5, 203, dtype=torch.float64)[
        torch.randperm(203, generator=torch.Generator().manual_seed(5))
    ]
    results = []
    for dtype in (torch.float64, torch.float32):
        mechanism = make_mechanism("hedgehog", {}, moved=True).to(dtype)
        heads = [(x.double() * sizes[:, None]).to(dtype) for x in make_heads()[:2]] + [make_heads()[2].to(dtype)]
        output, state = mechanism(*(x[:, :, :200] for x in heads))
        step, state = mechanism(*(x[:, :, 200:201] for x in heads), state=state)
        results.append([output, step, state.kv.double() * state.log_max.double().exp()[..., None, None]])
    assert len(variant) > 1
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 1e-5 * max(1.0, float(want.abs().max())))


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize(("name", "options"), MAPS)
def test_gradients_of_feature_maps(variant, name, options, decay, layout):
    """Of heads, maps and decays, through two calls and the state between them; the same bits without gradients."""
    compare_gradients(name, {**options, "decay": decay}, *LAYOUTS[layout], cut=70)
    assert len(variant) > 4


@pytest.mark.covering(2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize("name", ["linear", "performer", "hedgehog"])
def test_gradients_over_several_segments(variant, name, decay, packed):
    """The same where the backward pass goes on from states that were kept; sequences end where segments do, or not."""
    length, cut = 2 * SEGMENT + 77, 33
    mask, ids = torch.ones(2, length, dtype=torch.bool), None
    mask[0, :50], mask[1, SEGMENT:-60] = False, False  # the second has no key for more than a segment
    if packed:
        lengths = torch.tensor([cut, SEGMENT, 1, SEGMENT + 2, 41])
        ids = torch.stack([torch.arange(5).repeat_interleave(lengths), torch.arange(length) // (SEGMENT + 5)])
    compare_gradients(name, {"decay": decay}, mask, ids, cut, length)
    assert len(variant) > 4


def compare_gradients(name, options, mask, ids, cut, length=203):
    """Read two parts, the second from `cut` on, and compare gradients in float32 with those in float64."""
    parts, generator = [slice(None, cut), slice(cut, None)], torch.Generator().manual_seed(3)
    weight = torch.randn(2, HEADS, length, 24, dtype=torch.float64, generator=generator)
    results = []
    for dtype in (torch.float64, torch.float32):
        mechanism = make_mechanism(name, options, moved=True).to(dtype).train()
        heads = [x.to(dtype).requires_grad_() for x in make_heads(length)]

        def read(mechanism=mechanism, heads=heads):
            state, outputs = None, []
            for part in parts:
                real, own = (None if x is None else x[:, part] for x in (mask, ids))
                output, state = mechanism(*(x[:, :, part] for x in heads), real, own, state=state)
                outputs.append(output)
            return torch.cat(outputs, dim=2), state

        output, state = read()
        with torch.no_grad():
            assert torch.equal(read()[0], output)
        loss = (output * weight).sum() + (state.kv * torch.arange(state.kv.numel()).cos().view_as(state.kv)).sum()
        wanted = {**dict(zip("qkv", heads, strict=True)), **dict(mechanism.named_parameters())}
        results.append(dict(zip(wanted, torch.autograd.grad(loss, wanted.values()), strict=True)))
    for place, want in results[0].items():
        tolerance = 1e-3 if "decay" in place else 5e-5  # a small difference of large sums
        assert_close(results[1][place].double(), want, tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize(("name", "options"), MAPS)
def test_gradients_where_every_query_sees_all_keys(variant, name, options, decay, layout):
    """Of heads, maps and decays; the same bits without gradients."""
    compare_two_way_gradients(name, {**options, "decay": decay}, *LAYOUTS[layout])
    assert len(variant) > 4


@pytest.mark.covering(2)
@pytest.mark.parametrize("decay", [None, "learned"])
@pytest.mark.parametrize("lengths", [(600, 600), (100, 1100)])
def test_gradients_of_long_sequences_read_both_ways(variant, lengths, decay):
    """Each sequence goes on from its own states, not from those of one that is read before or after it."""
    ids = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    ids = torch.stack([ids, ids.flip(0)])
    compare_two_way_gradients("hedgehog", {"decay": decay}, None, ids, length=ids.shape[1])
    assert len(variant) > 4


def compare_two_way_gradients(name, options, mask, ids, length=203):
    """Compare gradients in float32 with those in float64 where every query sees all keys."""
    results = []
    for dtype in (torch.float64, torch.float32):
        mechanism = make_mechanism(name, options, causal=False, moved=True).to(dtype).train()
        heads = [x.to(dtype).requires_grad_() for x in make_heads(length)]
        output, _ = mechanism(*heads, mask, ids)
        with torch.no_grad():
            assert torch.equal(mechanism(*heads, mask, ids)[0], output)
        weight = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        wanted = {**dict(zip("qkv", heads, strict=True)), **dict(mechanism.named_parameters())}
        gradients = torch.autograd.grad((output * weight).sum(), wanted.values())
        results.append(dict(zip(wanted, gradients, strict=True)))
    for place, want in results[0].items():
        tolerance = 1e-3 if "decay" in place else 5e-5  # a small difference of large sums
        assert_close(results[1][place].double(), want, tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("name", ["t2r", "learned_exp"])
def test_a_map_of_which_a_part_is_trained(variant, name, trained):
    """PEFT trains biases alone, if asked."""
    results = []
    for dtype in (torch.float64, torch.float32):
        mechanism = make_mechanism(name, {}, moved=True).to(dtype).train()
        wanted = [x.requires_grad_(place.endswith(trained)) for place, x in mechanism.named_parameters()]
        output, _ = mechanism(*(x.to(dtype) for x in make_heads()))
        results.append(torch.autograd.grad(output.sin().sum(), [x for x in wanted if x.requires_grad]))
    assert len(variant) > 1 and len(results[0]) > 1
    for want, got in zip(*results, strict=True):
        assert want.abs().max() > 0.01
        assert_close(got.double(), want, 5e-5 * max(1.0, float(want.abs().max())))


@torch.no_grad()
def test_the_default_dtype_of_a_script_changes_nothing(variant):
    mechanism, heads, (mask, _) = make_mechanism("performer", {}), make_heads(), LAYOUTS["masked"]
    want, _ = mechanism(*heads, mask)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        got, _ = mechanism(*heads, mask)
    finally:
        torch.set_default_dtype(default)
    assert variant and torch.equal(got, want)


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature_map", [elu_map, exp_map])
def test_given_features_whose_weights_decay_both_ways(variant, feature_map, layout):
    """Outputs and the gradients of heads and rates."""
    mask, ids = LAYOUTS[layout]
    rates, results = torch.tensor([0.02, 3.0], dtype=torch.float64, requires_grad=True), []
    for dtype in (torch.float64, torch.float32):
        heads = [x.to(dtype).requires_grad_() for x in make_heads()]
        decay = -rates.to(dtype)[None, :, None].expand(2, -1, 203)
        decay = decay if mask is None else decay * mask[:, None]
        output = linear_attention(*heads, feature_map, feature_map, mask, ids, decay, policy=Policy("auto"))
        results.append([output, *torch.autograd.grad(output.sin().sum(), [*heads, rates])])
    assert variant
    for want, got in zip(*results, strict=True):
        assert_close(got.double(), want, 2e-4 * max(1.0, float(want.detach().abs().max())))


def test_every_map_is_tested():
    tested = {type(make_mechanism(name, options).maps[0]) for name, options in MAPS}
    known = {kind for kind in map(FEATURE_MAPS.get, FEATURE_MAPS.names())}
    assert {kind for kind in known if kind.spec is not FeatureMap.spec} == tested


@pytest.mark.parametrize("name", ["linear", "performer"])
def test_the_future_does_not_come_through_and_nothing_overflows(variant, name):
    """Whatever follows, even a thousand times larger, the outputs before it are the same bits."""
    mechanism = make_mechanism(name, {})
    heads = [torch.randn(1, h, 131, 24) for h in (HEADS, KV_HEADS, KV_HEADS)]
    with torch.no_grad():
        want, _ = mechanism(*heads)
        for place in (1, 63, 64, 100):
            changed = [torch.cat([x[:, :, :place], 1000 * x[:, :, place:]], dim=2) for x in heads]
            got, state = mechanism(*changed)
            assert torch.equal(got[:, :, :place], want[:, :, :place])
            assert got.isfinite().all() and state.kv.isfinite().all()


def test_a_row_without_keys_is_zero_and_has_no_gradient(variant):
    heads = [torch.randn(2, h, 70, 24, requires_grad=True) for h in (HEADS, KV_HEADS, KV_HEADS)]
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[0], mask[1, :66] = False, False
    output, _ = make_mechanism("performer", {})(*heads, key_padding_mask=mask)
    assert not output[0].any() and not output[1, :, :66].any() and output[1, :, 66:].abs().gt(0).all()
    for gradient in torch.autograd.grad(output.square().sum(), heads):
        assert gradient.isfinite().all() and not gradient[0].any() and not gradient[1, :, :66].any()
        assert gradient[1, :, 66:].any()


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "options"), MAPS)
def test_a_row_that_begins_with_pads_alone_forgets_nothing_later(variant, name, options, packed):
    """Pads, then keys, then keys of which the other row's are hidden; packed, pads are the last of two sequences."""
    mechanism, heads = make_mechanism(name, options), make_heads()
    mask, ends = torch.ones(2, 203, dtype=torch.bool), (0, 70, 140, 203)
    mask[0, :70], mask[1, 140:] = False, False
    ids = torch.arange(203).ge(20).long().expand(2, -1) if packed else None
    want, _ = mechanism.double()(*(x.double() for x in heads), mask, ids)
    mechanism, state, parts = mechanism.float(), None, []
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        here = None if number == 1 else mask[:, start:end]
        own = ids[:, start:end] if packed and not number else None
        part, state = mechanism(*(x[:, :, start:end] for x in heads), here, own, state)
        parts.append(part)
    real = mask[:, None, :, None]
    assert_close((torch.cat(parts, dim=2) * real).double(), want * real, 1e-5)


def test_what_it_cannot_do_is_left_to_others(variant):
    query = torch.randn(1, 2, 5, 3)
    reason = lambda x: linear_cpu.unsupported(LinearCall(x, x, x, elu_map, elu_map))  # noqa: E731
    assert reason(query) is None
    assert reason(query.double()) == "float64" and reason(query.to("meta")) == "heads on 'meta'"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)  # two sequences: three of the five would have nothing to do
        assert reason(query) == "fewer rows times heads than half of the threads"
    finally:
        torch.set_num_threads(threads)


def test_without_a_build_it_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not library.available()
    mechanism = make_mechanism("linear", {})
    heads = [torch.randn(1, h, 131, 24) for h in (HEADS, KV_HEADS, KV_HEADS)]
    got, _ = mechanism(*heads)
    mechanism.backend = "torch"
    assert torch.equal(got, mechanism(*heads)[0])


@pytest.mark.parametrize(
    ("causal", "backward", "of_query", "of_key", "pairs"),
    [(True, False, 1, 1, 2), (False, False, 1, 1, 0), (False, True, 2, 2, 0)],
)
def test_products_that_are_counted_are_those_there_are(variant, causal, backward, of_query, of_key, pairs):
    """Of a state with what a query or a key has; of a query with a key, or their weight with a value, half of all in a
    chunk, as the others are of the future."""
    size, length = 24, 512
    mechanism = make_mechanism("linear", {}, causal)
    heads = [torch.randn(1, h, length, size, requires_grad=backward) for h in (HEADS, KV_HEADS, KV_HEADS)]
    output, _ = mechanism(*heads)
    count = flops_of(output.sum().backward if backward else lambda: mechanism(*heads))
    chunk = 64 if library.has_matrix_unit() else 32  # with as few features as these the tests only go by it
    assert count == 2 * length * size * (HEADS * (of_query * size + pairs * chunk / 2) + KV_HEADS * of_key * size)


def test_its_products_are_about_as_many_as_those_of_pytorch(variant):
    """So that costs are seen to grow as they do; these have all pairs of a chunk, and longer chunks."""
    mechanism = make_mechanism("performer", {})
    heads = [torch.randn(1, h, 512, 24) for h in (HEADS, KV_HEADS, KV_HEADS)]
    counts = []
    for backend in ("torch", "auto"):
        mechanism.backend = backend
        with torch.no_grad():
            counts.append(flops_of(lambda: mechanism(*heads)))
    assert 0.6 < counts[1] / counts[0] < 1.1


def make_heads(length: int = 203):
    """Heads as models give them: [B, N, H, D] in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, heads, 24) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]


def make_mechanism(name: str, options: dict, causal: bool = True, moved: bool = False):
    """Return a mechanism, its parameters `moved` away from where they start."""
    layer = AttentionLayer(
        index=0, num_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=24, causal=causal, scaling=24**-0.5,
        device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    mechanism, generator = MECHANISMS.get(name)(make_config(name, options), layer), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters() if moved else ():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return mechanism.eval()
