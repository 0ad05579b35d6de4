"""The faults R1 to R13 that other libraries have or had, as tests that every mechanism here must pass.

Where an invariant has every mechanism, one of each kind is tried here, and the others by `make test-exhaustive`.

Each test would fail for the library its docstring names. R1 has more in mechanisms/test_block_sparse.py, R7 to R9 in
mechanisms/test_lsh.py, R10 in mechanisms/test_performer.py and the invariants.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hf_linattn import list_mechanisms, patch_model
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.mechanisms.block_sparse import BlockSparseMechanism
from hf_linattn.testing import Case, random_tokens, tiny_model
from tests.helpers import each_of, generate, one_of_each_kind, pad

NAMES = list_mechanisms()
# small enough that inputs of 70 tokens are not exact
SMALL = {
    "block_size": 8, "window_size": 11, "num_slots": 7, "bucket_size": 6, "num_buckets": 4, "group_size": 16,
    "num_summary": 3, "window_blocks": 1, "num_random": 2, "num_blocks": 2, "reach": 2,
    "num_global": 5,
}  # fmt: skip
LENGTH = 70
MODES = [False, True]
each_name = pytest.mark.parametrize("name", each_of(NAMES))
each_kind_of_name = pytest.mark.parametrize("name", one_of_each_kind(NAMES))


def make_case(name: str, causal: bool, architecture: str = "llama") -> Case:
    """A mechanism that has only one form has that one, whatever is asked for."""
    known, modes = MECHANISMS.get(name).config_class.__dataclass_fields__, MECHANISMS.get(name).modes
    causal = causal if len(modes) == 2 else "causal" in modes
    return Case(name, architecture, causal, {key: value for key, value in SMALL.items() if key in known})


@pytest.mark.parametrize("causal", MODES)
@pytest.mark.parametrize("name", ["random_blocks", "bigbird"])
def test_r1_evaluation_sees_the_random_blocks_of_training_and_each_key_once(name, causal):
    """transformers' BigBird in evaluation: every random block is block 0, which weighs r + 1 times too much."""
    case = make_case(name, causal)
    query, key, value = case.heads(LENGTH, size=0.0)
    mechanism = case.make()
    outputs = [mechanism.train(mode)(query, key, value)[0] for mode in (True, False)]
    assert torch.equal(*outputs)
    seen = mechanism.attention_matrix(query, key)
    count = (seen > 0).sum(-1, keepdim=True)
    assert (count[:, :, -1] < LENGTH).all()
    torch.testing.assert_close(seen, (seen > 0).double() / count)  # all scores are equal, and so are all weights
    torch.testing.assert_close(outputs[0], seen @ value.repeat_interleave(2, 1))


@each_kind_of_name
def test_r2_a_short_input_changes_nothing_for_a_long_one(name):
    """transformers' BigBird switches to full attention at the first short input, for good."""
    case = make_case(name, causal=False)
    first, second = case.model(), case.model()
    with torch.no_grad():
        first(random_tokens(1, 3))
        assert torch.equal(first(random_tokens(2, LENGTH)).logits, second(random_tokens(2, LENGTH)).logits)


@each_kind_of_name
def test_r3_a_decoder_sees_no_future(name):
    """transformers' block-sparse BigBirdForCausalLM: the last token changes all earlier logits."""
    model, tokens = make_case(name, True, "bert").model(), random_tokens(2, LENGTH)
    changed = tokens.clone()
    changed[:, -1] = 2 + (changed[:, -1] - 1) % 50
    with torch.no_grad():
        difference = (model(tokens).logits - model(changed).logits).abs().amax(-1)
    assert difference[:, :-1].max() < 1e-9 and difference[:, -1].min() > 1e-3


@pytest.mark.parametrize("causal", MODES)
@each_kind_of_name
def test_r4_and_r12_padding_on_both_sides_at_once_is_ignored(name, causal):
    """transformers' Nyströmformer crashes on a mask; a pad before the first token stays visible in LSG."""
    case = make_case(name, causal)
    heads = case.heads(LENGTH, batch=1)
    mechanism = case.make()
    want, _ = mechanism(*heads)
    padded = [torch.nn.functional.pad(x, (0, 0, 19, 7), value=40.0) for x in heads]
    mask = torch.nn.functional.pad(torch.ones(1, LENGTH, dtype=torch.bool), (19, 7))
    got, _ = mechanism(*padded, mask)
    torch.testing.assert_close(got[:, :, 19:-7], want, rtol=1e-9, atol=1e-9)


@each_name
def test_r5_every_length_keeps_its_shape(name):
    """transformers' Nyströmformer gives back two rows for one at twice its length, and crashes at others."""
    case = make_case(name, causal=False)
    mechanism = case.make(torch.float32)
    for batch, length in ((1, 1), (1, 63), (1, 64), (3, 65), (1, 128), (2, 129)):
        query, key, value = case.heads(length, batch, torch.float32)
        assert mechanism(query, key, value)[0].shape == query.shape


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_kind_of_name
def test_r6_models_in_half_precision_run(name, dtype):
    """transformers' Nyströmformer mixes in a float32 identity and crashes."""
    model = make_case(name, causal=False).model(dtype)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 50:] = 0
    logits = model(random_tokens(2, LENGTH), attention_mask=mask).logits
    assert logits.dtype == dtype and torch.isfinite(logits).all()


@each_kind_of_name
def test_r7_rows_of_a_batch_decode_as_they_would_alone(name):
    """transformers' Reformer decodes every row of a batch with the states of row 0."""
    model = make_case(name, causal=True).model()
    rows = [random_tokens(1, length, seed=length)[0] for length in (27, 9)]
    ids, mask = pad(rows, 0)
    _, logits = generate(model, ids, 3, attention_mask=mask)
    for row, got in zip(rows, logits, strict=True):
        _, alone = generate(model, row[None], 3, attention_mask=torch.ones(1, len(row), dtype=torch.long))
        torch.testing.assert_close(got, alone[0], rtol=1e-9, atol=1e-9)


@each_name
def test_r8_and_r10_no_past_output_follows_large_later_keys(name):
    """Reformers choose past keys by the future; performer-pytorch's key maximum lets the future in, by 58 %."""
    case = make_case(name, causal=True)
    query, key, value = case.heads(LENGTH)
    mechanism = case.make()
    before, _ = mechanism(query, key, value)
    scale = torch.ones(LENGTH, 1, dtype=torch.float64)
    scale[-9:] = 8.0
    after, _ = mechanism(query * scale, key * scale, value * scale)
    torch.testing.assert_close(after[:, :, :-9], before[:, :, :-9], rtol=1e-12, atol=1e-12)
    assert (after - before)[:, :, -9:].abs().max() > 0.1


@each_kind_of_name
def test_r9_the_global_random_state_is_left_alone(name):
    """transformers' Reformer reseeds all of torch in every forward."""
    model = tiny_model("llama", True)
    before = torch.random.get_rng_state()
    patch_model(model, name).train()(random_tokens(1, 9))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("causal", MODES)
@each_kind_of_name
def test_r10_pads_have_no_part_in_the_denominator(name, causal):
    """performer-pytorch: 32 tokens shrink to 0.78, 0.69, 0.67 of their norm beside 32, 96, 224 pads."""
    case = make_case(name, causal)
    heads = case.heads(32, batch=1)
    mechanism = case.make()
    want, _ = mechanism(*heads)
    for pads in (32, 96, 224):
        padded = [torch.nn.functional.pad(x, (0, 0, 0, pads)) for x in heads]
        got, _ = mechanism(*padded, torch.arange(32 + pads)[None] < 32)
        torch.testing.assert_close(got[:, :, :32], want, rtol=1e-9, atol=1e-9)


@each_name
def test_r11_the_past_matters(name):
    """xformers' causal FAVOR summed over the wrong dimension: no token ever saw another."""
    case = make_case(name, causal=True)
    query, key, value = case.heads(LENGTH)
    mechanism = case.make()
    before, _ = mechanism(query, key, value)
    value[:, :, : LENGTH // 2] += 1.0
    change = (mechanism(query, key, value)[0] - before)[:, :, LENGTH // 2 :].abs()
    assert change[:, :, 0].min() > 1e-3  # the next token sees some of it at once


@pytest.mark.exhaustive  # tests of pushing and of loading elsewhere start processes, too
def test_r12_the_library_imports_and_patches_in_a_process_of_its_own():
    """lsg-converter cannot be imported with transformers after 4.45."""
    program = (
        "import hf_linattn, transformers as t\n"
        "model = t.BertModel(t.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,"
        " intermediate_size=16, vocab_size=50))\n"
        "print(hf_linattn.patch_model(model, 'longformer')(**model.dummy_inputs).last_hidden_state.shape[-1])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "16", done.stderr


@pytest.mark.parametrize("causal", MODES)
@pytest.mark.parametrize("name", [n for n in NAMES if issubclass(MECHANISMS.get(n), BlockSparseMechanism)])
def test_r12_which_keys_are_seen_does_not_depend_on_the_dtype(name, causal):
    """LSG counts positions in the model's dtype: above 256, bfloat16 tells neighbours no longer apart."""
    case = Case(name, "llama", causal)
    query, key, _ = case.heads(600, batch=1, size=0.01)
    seen = [case.make(d).attention_matrix(query.to(d), key.to(d)) > 0 for d in (torch.bfloat16, torch.float64)]
    if MECHANISMS.get(name).continuous:
        assert torch.equal(*seen)
    rows = torch.arange(600)
    assert all(pattern[:, :, rows, rows].all() for pattern in seen)
    assert not causal or not any(pattern.triu(1).any() for pattern in seen)


@pytest.mark.covering(1)
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
@each_kind_of_name
def test_r13_the_mask_of_a_batch_arrives(name, architecture):
    """An attention function registered without a mask function sees None: padded rows are wrong, silently."""
    model = make_case(name, architecture != "bert", architecture).model()
    short, long = random_tokens(1, 40, seed=1)[0], random_tokens(1, LENGTH)[0]
    ids, mask = pad([short, long], 0, side="right")
    with torch.no_grad():
        got, want = model(ids, attention_mask=mask).logits[0, :40], model(short[None]).logits[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
