"""Bytes against counting by hand, and against the growth that each kind of attention must show."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_linattn import original_attention, patch_model
from hf_linattn import transformers_bridge as bridge
from hf_linattn.errors import OptionError, PatchError, UnsupportedModelError
from hf_linattn.evaluation import measure_memory, peak_forward_bytes, state_bytes_by_length
from hf_linattn.evaluation.memory import LiveBytes

LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_DIM, POSITIONS = 3, 4, 2, 8, 64


def make_llama(**options):
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(options.pop("attn_implementation", "sdpa"))
    return model.to(**options)


def make_bert():
    config = BertConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        vocab_size=50,
    )
    return BertForMaskedLM(config)


def test_live_bytes_counted_by_hand():
    start = torch.zeros(10)
    with LiveBytes() as count:
        first = start + 1  # 40 bytes
        second = first.double()  # 80
        assert (count.live, count.peak) == (120, 120)
        del first
        assert (count.live, count.peak) == (80, 120)
        halves = second.view(2, 5), start[3:], second.t()  # no memory of their own
        second.add_(1)
        assert (count.live, count.peak) == (80, 120)
        third = torch.ones(5)  # 20
        del second
        assert count.live == 100  # its views keep the storage alive
        del halves
        assert (count.live, count.peak) == (20, 120)
        del third
        assert count.live == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_linear_is_constant_and_that_of_softmax_grows(dtype):
    rows = state_bytes_by_length(patch_model(make_llama(dtype=dtype), "linear"), [70, 5, 33])
    assert [row.length for row in rows] == [5, 33, 70]
    for row in rows:
        # float32 whatever the weights are: per key/value head a D x (D + 1) matrix and a scale
        assert row.patched == LAYERS * KEY_VALUE_HEADS * (HEAD_DIM * (HEAD_DIM + 1) + 1) * 4
        assert row.original == LAYERS * KEY_VALUE_HEADS * row.length * HEAD_DIM * 2 * dtype.itemsize


def test_peak_grows_with_the_length_and_not_with_its_square():
    """Twice the tokens: a linear model doubles, once one segment of the op counts little; N x N scores quadruple."""
    model = patch_model(make_llama(attn_implementation="eager"), "linear")
    short, long = (peak_forward_bytes(model, length) for length in (4096, 8192))
    assert 1.9 < long / short < 2.1
    with original_attention(model):
        eager_short, eager_long = (peak_forward_bytes(model, length) for length in (512, 1024))
    assert 3.5 < eager_long / eager_short < 4.1
    assert eager_long > HEADS * 1024**2 * 4 > 3 * short


def test_peak_is_repeatable_and_scales_with_the_batch():
    model = make_llama()  # a model that is not patched can be measured too
    single = peak_forward_bytes(model, 64)
    assert single == peak_forward_bytes(model, 64)
    assert 1.8 < peak_forward_bytes(model, 64, batch_size=2) / single < 2.1


def test_rows_hold_both_variants():
    model = patch_model(make_llama(attn_implementation="eager"), "linear")
    for row, state in zip(measure_memory(model, [32, 64]), state_bytes_by_length(model, [32, 64]), strict=True):
        assert (row.length, row.patched_state, row.original_state) == (state.length, state.patched, state.original)
        assert row.patched_peak == peak_forward_bytes(model, row.length)
        with original_attention(model):
            assert row.original_peak == peak_forward_bytes(model, row.length)
    assert row.original_peak != row.patched_peak
    assert bridge.get_implementation(model.config) == bridge.IMPLEMENTATION


def test_a_masked_model_has_no_state():
    model = patch_model(make_bert(), "linear")
    (row,) = measure_memory(model, [POSITIONS])
    assert row.patched_peak > 0 and row.patched_state is None and row.original_state is None
    with pytest.raises(UnsupportedModelError, match="does not decode"):
        state_bytes_by_length(model, [8])


def test_modes_are_left_alone():
    model = patch_model(make_llama(), "linear").train()
    measure_memory(model, [8])
    assert all(module.training for module in model.modules())


def test_lengths_out_of_range():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=POSITIONS, vocab_size=50))
    with pytest.raises(PatchError, match="not patched"):
        measure_memory(gpt2, [8])
    patch_model(gpt2, "linear")
    with pytest.raises(OptionError, match=f"has {POSITIONS} positions"):
        measure_memory(gpt2, [8, POSITIONS + 1])
    with pytest.raises(OptionError, match="length"):
        peak_forward_bytes(gpt2, 0)
