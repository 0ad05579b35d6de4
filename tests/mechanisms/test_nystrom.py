"""What is particular to nystrom: the paper's formula at any length, its pseudo-inverse, the causal form, its state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from hf_linattn import OptionError, calibrate, get_mechanisms, patch_model
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS, AttentionLayer
from hf_linattn.ops.slots import nystrom
from hf_linattn.ops.slots.nystrom import pseudo_inverse
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.testing.counters import flops_of

SCALING = 8**-0.5
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def trained(case: Case, **options) -> torch.nn.Module:
    """Return a mechanism whose taps are not zero."""
    mechanism = case.make(**options)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
    return mechanism


def inverse_by_singular_values(matrix: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """The iteration, which keeps singular vectors and acts on each singular value alone."""
    u, s, vh = torch.linalg.svd(matrix)
    z = s / matrix.sum(0).max()
    for _ in range(num_iterations):
        x = s * z
        z = z * (13 - 15 * x + 7 * x**2 - x**3) / 4
    return vh.T @ torch.diag(z) @ u.T


def landmark_values(query, key, value, segments, num_iterations=6) -> torch.Tensor:
    """pinv(A) B V of one head: tensors [n, D], segments as slices."""
    queries, keys = (torch.stack([x[s].mean(0) for s in segments]) for x in (query, key))
    tokens = torch.tensor([s.stop - s.start for s in segments], dtype=torch.float64)
    a = (queries @ keys.T * SCALING + tokens.log()).softmax(-1)
    return inverse_by_singular_values(a, num_iterations) @ (queries @ key.T * SCALING).softmax(-1) @ value


def by_query(mechanism, query, key, value) -> torch.Tensor:
    """The causal form for one query of one head at a time, from nothing."""
    config, output = mechanism.config, torch.zeros_like(query)
    for b, h in itertools.product(*map(range, query.shape[:2])):
        shared = h * key.shape[1] // query.shape[1]
        q, k, v = query[b, h], key[b, shared], value[b, shared]
        taps = mechanism.taps[h].detach() if config.kernel_size else []
        for i in range(len(q)):
            done = i // config.block_size * config.block_size
            size = 1
            while size * config.num_landmarks < done:
                size *= 2
            full = done // size * size
            segments = [slice(s, s + size) for s in range(0, full, size)]
            values = v[:full]
            if size > 1 and full:
                values = landmark_values(q[:full], k[:full], v[:full], segments)
            rest = [slice(full, done)] * (done > full) + [slice(j, j + 1) for j in range(done, i + 1)]
            values = [*values, *(v[s].mean(0) for s in rest)]
            weights = [
                (SCALING * q[i] @ k[s].mean(0)).exp() * (s.stop - s.start) for s in (*segments, *rest)
            ]
            output[b, h, i] = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
            for t, tap in enumerate(reversed(taps)):
                output[b, h, i] += tap * v[i - t] if t <= i else 0.0
    return output


def in_parts(mechanism, heads, sizes, state=None) -> tuple[torch.Tensor, tuple]:
    parts = []
    for part in zip(*(x.split(sizes, 2) for x in heads), strict=True):
        output, state = mechanism(*part, None, None, state)
        parts.append(output)
    return torch.cat(parts, 2), state


@pytest.mark.parametrize(
    ("num_landmarks", "block_size", "kernel_size"),
    [(7, 8, 3), (3, 4, 0), (4, 4, 5), (1, 2, 1), (8, 1, 3), (40, 8, 9), (5, 32, 3), (6, 2, 0)],
)
def test_causal_form_is_the_loop_over_queries(num_landmarks, block_size, kernel_size):
    """Segments shorter than a block, as long and longer; read at once, in parts and by token."""
    options = {"num_landmarks": num_landmarks, "block_size": block_size, "kernel_size": kernel_size}
    mechanism = trained(Case("nystrom", "llama", True), **options)
    heads = Case("nystrom", "llama", True).heads(75, batch=1)
    want = by_query(mechanism, *heads)
    torch.testing.assert_close(mechanism(*heads)[0], want, **TIGHT)
    for sizes in ([1] * 75, [46, 16, 1, 12], [5, 70]):
        torch.testing.assert_close(in_parts(mechanism, heads, sizes)[0], want, **TIGHT)


def test_rows_of_different_lengths_continue_each_at_its_own_place():
    """Rows end in different blocks with segments of different size, one is empty; then all read on."""
    case = Case("nystrom", "llama", True, {"num_landmarks": 5, "block_size": 4, "kernel_size": 7})
    mechanism, lengths = trained(case), (0, 3, 4, 22, 22, 90)
    heads = case.heads(121, batch=6)
    mask = torch.arange(90) < torch.tensor(lengths)[:, None]
    early, state = mechanism(*(x[:, :, :90] for x in heads), mask)
    late, after = in_parts(mechanism, [x[:, :, 90:] for x in heads], [1, 2, 28], state)
    padded = mask[:, :31].flip(1)  # the same again, with pads on the left in the second call
    mixed, _ = mechanism(*(x[:, :, 90:] for x in heads), padded, None, state)
    for row, length in enumerate(lengths):
        kept = torch.cat([torch.arange(length), torch.arange(90, 121)])
        want, alone = mechanism(*(x[row : row + 1, :, kept] for x in heads))
        torch.testing.assert_close(torch.cat([early[row, :, :length], late[row]], 1), want[0], **TIGHT)
        for name, x, y in zip(after._fields, after, alone, strict=True):
            x, y = (F.pad(z, (0, 0, 0, 121 - z.shape[2])) if "past" in name else z for z in (x, y))
            torch.testing.assert_close(x[row], y[0], msg=lambda text, name=name: f"{name}: {text}")
        kept = torch.cat([torch.arange(length), 90 + padded[row].nonzero()[:, 0]])
        if len(kept):
            want, _ = mechanism(*(x[row : row + 1, :, kept] for x in heads))
            torch.testing.assert_close(mixed[row, :, padded[row]], want[0, :, length:], **TIGHT)


def test_the_last_of_packed_sequences_is_continued():
    """Sequences of a row begin anew, and the states of rows with pasts of different length are put together."""
    case = Case("nystrom", "llama", True, {"num_landmarks": 5, "block_size": 4, "kernel_size": 3})
    mechanism, heads, starts = trained(case), case.heads(71, batch=3), (0, 37, 55)
    ids = torch.stack([(torch.arange(60) >= start).long() for start in starts])
    _, state = mechanism(*(x[:, :, :60] for x in heads), None, ids)
    got, _ = mechanism(*(x[:, :, 60:] for x in heads), None, None, state)
    for row, start in enumerate(starts):
        want, _ = mechanism(*(x[row : row + 1, :, start:] for x in heads))
        torch.testing.assert_close(got[row], want[0, :, 60 - start :], **TIGHT)


def test_landmarks_see_no_future():
    """However large the future is: sums that are read at several times share no maximum with it."""
    case = Case("nystrom", "gpt2", True, {"num_landmarks": 6, "block_size": 4, "kernel_size": 5})
    mechanism, (query, key, value) = trained(case), case.heads(100)
    want, _ = mechanism(query, key, value)
    for cut in (25, 50, 63, 81):
        loud = torch.where(torch.arange(100) < cut, 1.0, 1000.0)[:, None]
        got, _ = mechanism(query * loud, key * loud, value * loud)
        torch.testing.assert_close(got[:, :, :cut], want[:, :, :cut], rtol=1e-12, atol=1e-12)


def test_the_past_is_read_at_the_ends_of_blocks_only():
    case = Case("nystrom", "gpt2", True, {"num_landmarks": 6, "block_size": 8})
    mechanism, heads = trained(case), case.heads(60)
    _, state = mechanism(*(x[:, :, :50] for x in heads))
    unread = state._replace(past_key=state.past_key * torch.nan, past_value=state.past_value * torch.nan)
    want, got = (in_parts(mechanism, [x[:, :, 50:] for x in heads], [1] * 10, s)[0] for s in (state, unread))
    assert torch.equal(got[:, :, :6], want[:, :, :6]) and got[:, :, 6:].isnan().all()


def test_reading_on_costs_as_much_at_any_place():
    """Old landmarks read new tokens alone; all are read anew only where segments grow."""
    case = Case("nystrom", "gpt2", True, {"num_landmarks": 8, "block_size": 16, "kernel_size": 0})
    mechanism, heads = case.make(torch.float32), case.heads(1024, batch=1, dtype=torch.float32)
    _, state = mechanism(*(x[:, :, :256] for x in heads))
    costs = []
    for end in (512, 1024):  # each time from where segments grow to where they grow again
        part, sizes = [x[:, :, end // 2 : end] for x in heads], [16] * (end // 32)
        costs.append(flops_of(lambda part=part, sizes=sizes, state=state: in_parts(mechanism, part, sizes, state)))
        _, state = mechanism(*part, None, None, state)
    assert costs[1] < 2.1 * costs[0]


def test_state_keeps_keys_and_a_fixed_number_of_slots():
    case = Case("nystrom", "llama", True, {"num_landmarks": 5, "block_size": 4, "kernel_size": 7})
    mechanism = case.make(torch.bfloat16)
    for length in (3, 51):
        _, state = mechanism(*case.heads(length, dtype=torch.bfloat16))
        assert state.past_key.shape == state.past_value.shape == (2, 2, length // 4 * 4, 8)
        assert state.mean_key.shape == (2, 2, 5, 8) and state.slot_value.shape == (2, 4, 5, 8)
        assert state.query.shape == (2, 4, 4, 8) and state.recent.shape == (2, 2, 6, 8)
        assert all(x.dtype == torch.float32 for x in state if x.is_floating_point())
        storages = {x.data_ptr(): x.untyped_storage().nbytes() for x in state}
        assert sum(storages.values()) <= sum(x.nbytes for x in state)  # no views of all that was read


@pytest.mark.parametrize(("length", "kernel_size"), [(17, 5), (31, 0), (61, 33), (64, 3), (100, 1)])
def test_bidirectional_form_is_the_formula_at_any_length(length, kernel_size):
    """Rows with pads on either side, of which one has fewer tokens than there are landmarks."""
    case = Case("nystrom", "llama", False, {"num_landmarks": 12, "kernel_size": kernel_size})
    mechanism, (query, key, value) = trained(case), case.heads(length, batch=4)
    mask = torch.ones(4, length, dtype=torch.bool)
    mask[1, : length // 5], mask[2, -(length // 7) :], mask[3, 9:] = False, False, False
    got, _ = mechanism(query, key, value, mask)
    for b, h in itertools.product(range(4), range(4)):
        q, k, v = query[b, h, mask[b]], key[b, h // 2, mask[b]], value[b, h // 2, mask[b]]
        n, values = len(q), v
        bounds = [next(j for j in range(n + 1) if j * 12 >= s * n) for s in range(13)] if n > 12 else range(n + 1)
        segments = [slice(*x) for x in itertools.pairwise(bounds)]
        if n > 12:
            values = landmark_values(q, k, v, segments)
        weights = torch.stack([(q @ k[s].mean(0) * SCALING).exp() * (s.stop - s.start) for s in segments], 1)
        want = weights @ values / weights.sum(1, keepdim=True)
        for i, t in itertools.product(range(n), range(kernel_size)):
            if 0 <= (j := i + t - kernel_size // 2) < n:
                want[i] += mechanism.taps[h, t].detach() * v[j]
        torch.testing.assert_close(got[b, h, mask[b]], want, **TIGHT)


@pytest.mark.parametrize("kernel_size", [None, 5])
@pytest.mark.parametrize(("batch", "heads", "init"), [(1, 1, "original"), (3, 4, "exact")])
def test_it_is_the_attention_of_transformers(batch, heads, init, kernel_size):
    """At the one length it was made for; its `original` start is one for all rows and heads, `exact` one for each."""
    width = 8 * heads
    config = NystromformerConfig(
        hidden_size=width, num_attention_heads=heads, num_landmarks=6, segment_means_seq_len=48,
        conv_kernel_size=kernel_size or 1, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.init_option, theirs.conv_kernel_size = init, kernel_size
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    layer = AttentionLayer(0, heads, heads, 8, False, SCALING, torch.device("cpu"), torch.float64)
    options = make_config("nystrom", {"num_landmarks": 6, "kernel_size": kernel_size or 0})
    ours = MECHANISMS.get("nystrom")(options, layer).double()
    if kernel_size:
        ours.load_state_dict({"taps": theirs.conv.weight[:, 0, :, 0]})
    states = torch.randn(batch, 48, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    projected = (f(states).unflatten(2, (heads, 8)).transpose(1, 2) for f in (theirs.query, theirs.key, theirs.value))
    got, _ = ours(*projected)
    torch.testing.assert_close(got.transpose(1, 2).flatten(2), theirs(states)[0], **TIGHT)


def test_a_row_does_not_depend_on_its_neighbours_however_few_the_iterations():
    """After few of them the start still shows, and the original's is shared."""
    for causal in (False, True):
        case = Case("nystrom", "gpt2", causal, {"num_landmarks": 6, "block_size": 8, "num_iterations": 2})
        query, key, value = case.heads(41)
        want, _ = case.make()(query, key, value)
        row, head = (torch.tensor([1.0, 30.0]).view(s) for s in ((2, 1, 1, 1), (1, 2, 1, 1)))
        head = head.repeat(1, 2, 1, 1)
        for loud, kept in ((row, (slice(0, 1), slice(None))), (head, (slice(None), slice(0, 4, 2)))):
            got, _ = case.make()(query * loud, key * loud, value)
            torch.testing.assert_close(got[kept], want[kept], rtol=1e-12, atol=1e-12)


def test_pseudo_inverse_converges():
    """Of regular matrices, of one without full rank, and beside rows and columns of zeros."""
    generator = torch.Generator().manual_seed(0)
    regular = (torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64) + 4 * torch.eye(9)).softmax(-1)
    singular = regular.clone()
    singular[..., 4, :] = singular[..., 5, :]
    padded = F.pad(regular, (0, 2, 0, 2))
    for matrix in (regular, singular, padded):
        errors = [(pseudo_inverse(matrix, n) - torch.linalg.pinv(matrix)).abs().max() for n in (1, 3, 15)]
        assert errors[0] > errors[1] > 1e-6 and errors[2] < 1e-9
    assert not pseudo_inverse(padded, 15)[..., 9:, :].any() and not pseudo_inverse(padded, 15)[..., 9:].any()
    assert not pseudo_inverse(torch.zeros(4, 4), 6).any()


@pytest.mark.parametrize("causal", [False, True])
def test_up_to_m_tokens_are_exact(causal):
    """Causally up to m completed ones: the queries of the block behind them see all keys as they are, too."""
    case = Case("nystrom", "llama", causal, {"num_landmarks": 32, "block_size": 8})
    mechanism = case.make(torch.float32)
    for length in (1, 7, 31, 32, *([40] if causal else [])):
        heads = case.heads(length, dtype=torch.float32)
        want = F.scaled_dot_product_attention(
            *(x.double() for x in heads), is_causal=causal, scale=SCALING, enable_gqa=True
        )
        torch.testing.assert_close(mechanism(*heads)[0].double(), want, rtol=0, atol=1e-5)
    heads = case.heads(64, dtype=torch.float32)
    exact = F.scaled_dot_product_attention(*heads, is_causal=causal, scale=SCALING, enable_gqa=True)
    assert (mechanism(*heads)[0] - exact).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_equal_queries_and_keys_give_the_plain_average(causal):
    """A slot weighs as much as the tokens it stands for, also one that is filled in part."""
    case = Case("nystrom", "gpt2", causal, {"num_landmarks": 7, "block_size": 8, "num_iterations": 12})
    query, key, value = (x[:, :, :1].expand_as(x) if i < 2 else x for i, x in enumerate(case.heads(150)))
    got, _ = case.make()(query, key, value)
    want = value.cumsum(2) / torch.arange(1, 151)[:, None] if causal else value.mean(2, keepdim=True).expand_as(value)
    torch.testing.assert_close(got, want)


def test_trained_taps_match_the_reference_and_get_gradients():
    for causal in (True, False):
        case = Case("nystrom", "llama", causal, {"num_landmarks": 5, "block_size": 4, "kernel_size": 7})
        mechanism, (query, key, value) = trained(case), case.heads(61)
        mask = torch.ones(2, 61, dtype=torch.bool)
        mask[0, :9], mask[1, 3:] = False, False  # the second row has no more tokens than landmarks
        ids = (torch.arange(61) >= 40).long().expand(2, -1)
        got, _ = mechanism(query, key, value, mask, ids)
        matrix = mechanism.attention_matrix(query, key, mask, ids)
        want = torch.einsum("bhij,bhjd->bhid", matrix, value.repeat_interleave(2, 1))
        weight = torch.randn(got.shape, dtype=torch.float64) * mask[:, None, :, None]
        torch.testing.assert_close(got * weight, want * weight)
        grads = [torch.autograd.grad((x * weight).sum(), mechanism.taps)[0] for x in (want, got)]
        assert (grads[0].abs().sum(1) > 0).all()
        torch.testing.assert_close(*grads)


def test_calibration_fits_the_taps():
    model = patch_model(tiny_model("llama", False, torch.float32), "nystrom", num_landmarks=4, kernel_size=5)
    errors = calibrate(model, [{"input_ids": random_tokens(2, 60, seed)} for seed in (0, 0)], steps=10)
    assert all(after < before for before, after in errors.values())
    assert all(mechanism.taps.abs().sum() > 0 for mechanism in get_mechanisms(model).values())


def test_parts_of_any_size_come_to_the_same(monkeypatch):
    """What is worked on at a time is a matter of speed."""
    for causal in (False, True):
        case = Case("nystrom", "llama", causal, {"num_landmarks": 5, "block_size": 4})
        mechanism, heads = case.make(), case.heads(90)
        monkeypatch.setattr(nystrom, "SCORES", {"cpu": 2**20})
        want, _ = mechanism(*heads)
        for scores in (1, 700):
            monkeypatch.setattr(nystrom, "SCORES", {"cpu": scores})
            torch.testing.assert_close(mechanism(*heads)[0], want, **TIGHT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks must be an integer >= 1, got 0"),
        ({"num_iterations": 1.5}, "num_iterations must be an integer >= 1, got 1.5"),
        ({"kernel_size": 4}, "kernel_size must be odd, or 0 for no convolution, got 4"),
        ({"kernel_size": -1}, "kernel_size must be an integer >= 0, got -1"),
        ({"block_size": 48}, "block_size must be a power of two, got 48"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        make_config("nystrom", options)
