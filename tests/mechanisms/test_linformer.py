"""What is particular to linformer: the paper's formula, trained weights, the slots of the causal form, any length."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DynamicCache

from hf_linattn import OptionError, UnknownNameError, UnsupportedModelError, get_mechanisms, patch_model
from hf_linattn.cache import state_bytes
from hf_linattn.config import make_config
from hf_linattn.ops import reference as naive
from hf_linattn.ops.slots import torch as by_slots
from hf_linattn.ops.slots.interface import segment_size
from hf_linattn.testing import Case, random_tokens, tiny_model

SCALING = 8**-0.5


def trained(case: Case, dtype: torch.dtype = torch.float64, size: float = 0.5, **options) -> torch.nn.Module:
    """Return a mechanism whose projections are no longer the initial ones."""
    mechanism = case.make(dtype, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return mechanism


def softmax(query, key, value) -> torch.Tensor:
    """Attention of one head without a mask: query [n, D], key, value [m, D]."""
    return (query @ key.T * SCALING).softmax(-1) @ value


def loop_over_tokens(mechanism, query, key, value, num_slots, block_size) -> torch.Tensor:
    """The causal form, one query at a time, its slots filled from nothing."""
    output = torch.zeros_like(query)
    e, f = mechanism.projections(key)
    for b, h, i in itertools.product(*map(range, query.shape[:3])):
        shared = h * key.shape[1] // query.shape[1]
        keys, values = key[b, shared], value[b, shared]
        done = i // block_size * block_size
        size = 1
        while size * num_slots < done:
            size *= 2
        parts = [slice(s, min(s + size, done)) for s in range(0, done, size)]
        assert len(parts) <= num_slots
        parts += [slice(j, j + 1) for j in range(done, i + 1)]
        slots = []
        for part in parts:
            write_key, write_value = ((keys[part] @ x[shared if len(x) > 1 else 0]).exp() for x in (e, f))
            mean_key = write_key @ keys[part] / write_key.sum()
            weight = (SCALING * query[b, h, i] @ mean_key).exp() * (part.stop - part.start)
            slots.append((weight, write_value @ values[part] / write_value.sum()))
        output[b, h, i] = sum(w * v for w, v in slots) / sum(w for w, _ in slots)
    return output


def loop_over_blocks(mechanism, query, key, value, num_slots, block_size) -> torch.Tensor:
    """The bidirectional form with exact blocks, one block at a time, every token written down with its slot."""
    output, n = torch.zeros_like(query), key.shape[2]
    e, f = mechanism.projections(key)
    size = 1
    while size * num_slots < n:
        size *= 2
    for b, h, first in itertools.product(*map(range, query.shape[:2]), range(0, n, block_size)):
        shared = h * key.shape[1] // query.shape[1]
        keys, values = key[b, shared], value[b, shared]
        block = slice(first, first + block_size)
        members: dict[tuple[str, int], list[int]] = {}
        for j in range(n):
            side = "before" if j < first else "own" if j < first + block_size else "behind"
            members.setdefault((side, j if side == "own" else j // size), []).append(j)
        slots = []
        for part in members.values():
            write_key, write_value = ((keys[part] @ x[shared if len(x) > 1 else 0]).exp() for x in (e, f))
            mean_key = write_key @ keys[part] / write_key.sum()
            weight = (SCALING * query[b, h, block] @ mean_key).exp() * len(part)
            slots.append((weight[:, None], write_value @ values[part] / write_value.sum()))
        output[b, h, block] = sum(w * v for w, v in slots) / sum(w for w, _ in slots)
    return output


@pytest.mark.parametrize(
    ("num_slots", "block_size", "sharing"),
    [(7, 16, "none"), (7, 4, "none"), (3, 4, "none"), (1, 2, "heads"), (8, 1, "kv"), (40, 8, "heads"), (5, 64, "kv")],
)
def test_exact_blocks_in_both_directions_are_the_loop_over_slots(num_slots, block_size, sharing):
    """Segments shorter than a block, as long and longer; trained weights; rows of several lengths, two sequences."""
    options = {"num_slots": num_slots, "block_size": block_size, "sharing": sharing, "exact_block": True}
    case = Case("linformer", "llama", False)
    mechanism = trained(case, **options)
    heads = case.heads(45, batch=3)
    mask = torch.ones(3, 45, dtype=torch.bool)
    mask[1, :30], mask[2, 5:] = False, False
    want = torch.zeros_like(heads[0])
    for row, real in enumerate(mask):
        alone = [x[row : row + 1, :, real] for x in heads]
        want[row, :, real] = loop_over_blocks(mechanism, *alone, num_slots, block_size)[0]
    got, _ = mechanism(*heads, mask)
    torch.testing.assert_close(got * mask[:, None, :, None], want, rtol=1e-10, atol=1e-10)
    ids = (torch.arange(45) >= 17).long().expand(3, -1)
    got, _ = mechanism(*heads, None, ids)
    for part in (slice(0, 17), slice(17, 45)):
        want = loop_over_blocks(mechanism, *(x[1:2, :, part] for x in heads), num_slots, block_size)
        torch.testing.assert_close(got[1:2, :, part], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_run_that_is_read_in_pieces_is_the_formula(monkeypatch, num_slots):
    """Runs of blocks that begin with an open segment, a block at a time: none but the first begins a row."""
    monkeypatch.setitem(by_slots.QUERIES, "cpu", 1)
    case = Case("linformer", "llama", True)
    mechanism, heads = trained(case, num_slots=num_slots, block_size=4), case.heads(61)
    want = naive.attend(mechanism.attention_matrix(*heads[:2]), heads[2])
    torch.testing.assert_close(mechanism(*heads)[0], want, rtol=1e-10, atol=1e-10)


def test_exact_blocks_take_no_columns():
    with pytest.raises(OptionError, match=r"positions_per_slot must be 1 with exact_block=True"):
        make_config("linformer", {"exact_block": True, "positions_per_slot": 2})


@pytest.mark.parametrize(
    ("num_slots", "block_size", "sharing"),
    [(7, 16, "none"), (3, 4, "none"), (1, 2, "heads"), (8, 1, "kv"), (40, 8, "heads"), (5, 64, "kv")],
)
def test_causal_form_is_the_loop_over_slots(num_slots, block_size, sharing):
    """Segments shorter than a block, as long and longer; trained weights; read at once, in parts and by token."""
    options = {"num_slots": num_slots, "block_size": block_size, "sharing": sharing}
    mechanism = trained(Case("linformer", "llama", True), **options)
    query, key, value = Case("linformer", "llama", True).heads(61, batch=1)
    want = loop_over_tokens(mechanism, query, key, value, num_slots, block_size)
    got, _ = mechanism(query, key, value)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for sizes in ([1] * 61, [40, 16, 1, 4], [5, 56]):
        state, parts, start = None, [], 0
        for size in sizes:
            span = slice(start, start + size)
            part, state = mechanism(query[:, :, span], key[:, :, span], value[:, :, span], None, None, state)
            parts.append(part)
            start += size
        torch.testing.assert_close(torch.cat(parts, 2), want, rtol=1e-10, atol=1e-10)


def test_rows_of_different_lengths_continue_each_at_its_own_place():
    """Rows end in different blocks with segments of different size, one is empty; then all read on."""
    case = Case("linformer", "llama", True, {"num_slots": 5, "block_size": 4})
    mechanism, lengths = trained(case), (0, 3, 4, 22, 90)
    query, key, value = case.heads(120, batch=5)
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    early, state = mechanism(*(x[:, :, :90] for x in (query, key, value)), mask)
    late, after = mechanism(*(x[:, :, 90:] for x in (query, key, value)), None, None, state)
    for row, length in enumerate(lengths):
        kept = torch.cat([torch.arange(length), torch.arange(90, 120)])
        want, alone = mechanism(*(x[row : row + 1, :, kept] for x in (query, key, value)))
        got = torch.cat([early[row : row + 1, :, :length], late[row : row + 1]], 2)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        for name, x, y in zip(after._fields, after, alone, strict=True):
            torch.testing.assert_close(x[row], y[0], msg=lambda text, name=name: f"{name}: {text}")


def test_trained_weights_see_no_future():
    """However large the future's keys are: their weights share no scale with those of the past."""
    mechanism = trained(Case("linformer", "gpt2", True), size=3.0, num_slots=3, block_size=4)
    query, key, value = Case("linformer", "gpt2", True).heads(100)
    want, _ = mechanism(query, key, value)
    for cut in (50, 63, 81):
        loud = torch.where(torch.arange(100) < cut, 1.0, 1000.0)[:, None]
        got, _ = mechanism(query * loud, key * loud, value * loud)
        torch.testing.assert_close(got[:, :, :cut], want[:, :, :cut], rtol=1e-12, atol=1e-12)


def test_trained_weights_match_the_reference_and_get_gradients():
    for causal, sharing in itertools.product((True, False), ("none", "heads", "kv")):
        options = {"num_slots": 5, "block_size": 4, "sharing": sharing, "positions_per_slot": 2}
        mechanism = trained(Case("linformer", "llama", causal), **options)
        query, key, value = Case("linformer", "llama", causal).heads(61)
        mask = torch.ones(2, 61, dtype=torch.bool)
        mask[0, :9], mask[1, 3:] = False, False  # the second row has no more tokens than slots
        ids = (torch.arange(61) >= 40).long().expand(2, -1)
        got, _ = mechanism(query, key, value, mask, ids)
        matrix = mechanism.attention_matrix(query, key, mask, ids)
        want = torch.einsum("bhij,bhjd->bhid", matrix, value.repeat_interleave(2, 1))
        real = mask[:, None, :, None]
        torch.testing.assert_close(got * real, want * real)
        parameters = list(mechanism.parameters())
        weight = torch.randn(got.shape, dtype=torch.float64) * real
        want_grads = torch.autograd.grad((want * weight).sum(), parameters)
        assert all(grad.abs().sum() > 0 for grad in want_grads)
        for a, b in zip(torch.autograd.grad((got * weight).sum(), parameters), want_grads, strict=True):
            torch.testing.assert_close(a, b)


def test_with_a_column_for_every_token_it_is_the_paper():
    """softmax(q (E K)^T) (F V) with E, F [k, n], here divided by the n / k tokens of a segment."""
    case = Case("linformer", "gpt2", False, {"num_slots": 6, "positions_per_slot": 5, "sharing": "none"})
    mechanism = trained(case)
    query, key, value = case.heads(30, batch=1)
    e, f = (x / 5 for x in mechanism.projections(key))
    got, _ = mechanism(query, key, value)
    for head in range(4):
        want = softmax(query[0, head], e[head] @ key[0, head], f[head] @ value[0, head])
        torch.testing.assert_close(got[0, head], want)


@pytest.mark.parametrize("length", [8, 9, 20, 31, 64, 100])
def test_untrained_slots_are_the_means_of_segments(length):
    """Tokens floor(j k / n) = s make up slot s, which weighs as much as they do."""
    case = Case("linformer", "gpt2", False, {"num_slots": 8, "positions_per_slot": 3})
    query, key, value = case.heads(length, batch=1)
    got, _ = case.make()(query, key, value)
    segments = [[j for j in range(length) if j * 8 // length == s] for s in range(8)]
    for head in range(4):
        keys, values = (torch.stack([x[0, head, s].mean(0) for s in segments]) for x in (key, value))
        weights = (query[0, head] @ keys.T * SCALING).exp() * torch.tensor([len(s) for s in segments])
        torch.testing.assert_close(got[0, head], weights @ values / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("causal", [False, True])
def test_up_to_k_tokens_are_exact_whatever_was_trained(causal):
    case = Case("linformer", "gpt2", causal, {"num_slots": 32, "block_size": 8})
    mechanism = trained(case, torch.float32)
    for length in (1, 7, 8, 31, 32):
        query, key, value = case.heads(length, dtype=torch.float32)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in (query, key, value)), is_causal=causal, scale=SCALING
        )
        torch.testing.assert_close(mechanism(query, key, value)[0].double(), want, rtol=0, atol=1e-5)
    query, key, value = case.heads(64, dtype=torch.float32)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=SCALING)
    assert (mechanism(query, key, value)[0] - exact).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_equal_keys_give_the_plain_average(causal):
    """A slot weighs as much as the tokens it stands for, also one that is filled in part."""
    case = Case("linformer", "gpt2", causal, {"num_slots": 7, "block_size": 8})
    query, key, value = case.heads(150)
    got, _ = case.make()(query, key[:, :, :1].expand_as(key), value)
    want = value.cumsum(2) / torch.arange(1, 151)[:, None] if causal else value.mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("sharing", "heads", "matrices"), [("none", 2, 2), ("heads", 1, 2), ("kv", 1, 1)])
def test_sharing_sets_the_number_of_parameters(sharing, heads, matrices):
    options = {"sharing": sharing, "num_slots": 6, "positions_per_slot": 4}
    for causal, size in ((False, 6 * 24), (True, 8)):
        mechanism = Case("linformer", "llama", causal).make(**options)
        assert sum(p.numel() for p in mechanism.parameters()) == heads * matrices * size


def test_state_has_constant_size_per_key_value_head():
    model = patch_model(tiny_model("llama", True, torch.bfloat16), "linformer", num_slots=5, block_size=4)
    sizes = []
    for length in (3, 300):
        cache = DynamicCache()
        with torch.no_grad():
            model(random_tokens(2, length), past_key_values=cache, use_cache=True)
        state = cache.layers[0].state
        assert state.slot_key.shape == (2, 2, 5, 8) and state.key.shape == (2, 2, 4, 8)
        assert all(t.dtype == torch.float32 for t in state[:-1]) and state.length.tolist() == [length, length]
        sizes.append(state_bytes(cache))
    # layers, rows, heads; 5 slots of a key, a value and two weights, 4 tokens of a key and a value; the length
    assert sizes == [2 * 2 * (2 * (5 * 18 + 4 * 16) * 4 + 8)] * 2


def test_rows_have_the_segment_sizes_of_one_row():
    """Powers of two and their neighbours, also beyond the whole numbers of float32."""
    lengths = [0, *(max(2**power + more, 0) for power in (0, 3, 7, 24, 40, 60) for more in (-1, 0, 1))]
    for num_slots in (1, 7, 64):
        sizes = by_slots._segment_sizes(torch.tensor(lengths), num_slots)
        assert sizes.tolist() == [segment_size(length, num_slots) for length in lengths]


def test_segment_size_is_the_smallest_power_of_two_that_fits():
    for num_slots, tokens in itertools.product((1, 3, 7, 256), range(0, 1000, 7)):
        size = segment_size(tokens, num_slots)
        assert size & (size - 1) == 0 and -(-tokens // size) <= num_slots
        assert size == 1 or -(-tokens // (size // 2)) > num_slots


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_slots": 0}, OptionError, "num_slots must be an integer >= 1, got 0"),
        ({"positions_per_slot": 1.5}, OptionError, "positions_per_slot must be an integer >= 1, got 1.5"),
        ({"block_size": 48}, OptionError, "block_size must be a power of two, got 48"),
        ({"sharing": "head"}, UnknownNameError, "did you mean heads"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        make_config("linformer", options)


@pytest.mark.parametrize("causal", [False, True])
def test_layers_share_one_projection_through_training_copies_and_saving(causal, tmp_path):
    options = {"num_slots": 7, "block_size": 8, "sharing": "layers"}
    model = patch_model(tiny_model("llama", causal, torch.float32), "linformer", **options)
    names = [name for name, _ in model.named_parameters() if "hf_linattn" in name]
    assert names == ["model.layers.0.self_attn.hf_linattn.key_projection"]
    tokens = random_tokens(2, 70)
    copied = copy.deepcopy(model)
    first, second = get_mechanisms(model).values()
    copies = list(get_mechanisms(copied).values())
    shared = first.key_projection
    assert second.projections(shared)[0].data_ptr() == shared.data_ptr()
    assert copies[1].projections(shared)[0].data_ptr() == copies[0].key_projection.data_ptr() != shared.data_ptr()
    with torch.no_grad():
        shared += torch.randn(shared.shape)
    want = model(tokens).logits
    assert (want - copied(tokens).logits).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path) if causal else None
    if loaded is not None:
        assert torch.equal(loaded(tokens).logits, want)
    # both layers teach it: the gradient is the sum of what each would get with a projection of its own
    want.sin().sum().backward()
    alone = patch_model(tiny_model("llama", causal, torch.float32), "linformer", **{**options, "sharing": "kv"})
    own = [m.key_projection for m in get_mechanisms(alone).values()]
    with torch.no_grad():
        for x in own:
            x.copy_(shared)
    alone(tokens).logits.sin().sum().backward()
    assert all(x.grad.abs().max() > 0 for x in own)
    torch.testing.assert_close(shared.grad, own[0].grad + own[1].grad, rtol=1e-3, atol=1e-4)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard_layers(model, mesh) -> None:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)


def shard_flat(model, mesh) -> None:
    """Leave of each parameter of the first layer what FSDP1 does, once that layer has run."""

    def release(layer, *call):
        for parameter in get_mechanisms(model)["model.layers.0.self_attn"].parameters():
            parameter.data = parameter.data.new_empty(0)

    model.model.layers[0].register_forward_hook(release)


def shard_by_zero3(model, mesh) -> None:
    """Mark parameters as DeepSpeed does, which gathers what is read."""
    for parameter in model.parameters():
        parameter.ds_status = "available"


SHARED = {"num_slots": 7, "block_size": 8, "sharing": "layers"}
IN_PLANS = {
    "linformer": ("linformer", SHARED),
    "by_head": ("by_head", {"plan": {"linformer": {"heads": [0], **SHARED}}}),
    "fusion": ("fusion", {"members": {"linformer": SHARED, "linear": {}}}),
}


@pytest.mark.parametrize("shard", [shard_layers, shard_flat, shard_by_zero3])
@pytest.mark.parametrize("name", IN_PLANS)
def test_one_projection_of_layers_that_are_sharded_apart_is_refused_by_name(name, shard, mesh):
    mechanism, options = IN_PLANS[name]
    model, tokens = patch_model(tiny_model("llama", True, torch.float32), mechanism, **options), random_tokens(2, 70)
    shard(model, mesh)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 read weights of layer 0, .* sharing='kv' or 'heads'"):
        model(tokens)


@pytest.mark.parametrize("sharing", ["layers", "kv"])
def test_projections_that_are_whole_when_they_are_read_train_under_fsdp(sharing, mesh):
    options = {**SHARED, "sharing": sharing}
    model, tokens = patch_model(tiny_model("llama", True, torch.float32), "linformer", **options), random_tokens(2, 70)
    want = model(tokens).logits
    fully_shard(model, mesh=mesh) if sharing == "layers" else shard_layers(model, mesh)
    got = model(tokens).logits
    got.sum().backward()
    torch.testing.assert_close(got, want)


def test_layers_of_different_options_share_nothing():
    plan = {"linformer": {"layers": [0], "sharing": "layers", "num_slots": 7}}
    model = patch_model(tiny_model("gpt2", True), plan)
    assert [name for name, _ in model.named_parameters() if "hf_linattn" in name] == [
        "transformer.h.0.attn.hf_linattn.key_projection"
    ]
