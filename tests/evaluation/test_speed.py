"""Timing against a clock that the test turns: what is counted, in which order, and per what."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_linattn import original_attention, patch_model
from hf_linattn import transformers_bridge as bridge
from hf_linattn.errors import OptionError, PatchError
from hf_linattn.evaluation import SpeedRow, Spread, crossover_length, measure_speed, speed

POSITIONS = 48
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=POSITIONS, vocab_size=50, bos_token_id=0, eos_token_id=0
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
        )
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=POSITIONS,
            vocab_size=50,
        )
    ),
}


@pytest.fixture
def patched_llama():
    return patch_model(MODELS["llama"](), "linear")


@pytest.fixture
def watch(monkeypatch):
    """Make every forward of a model take a known time; return what was run: (attention, tokens, cached before)."""

    def attach(model, seconds):
        forwards, clock = [], [0.0]
        monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

        def before(module, args, kwargs):
            assert not module.training and not torch.is_grad_enabled()
            name = "patched" if bridge.get_implementation(module.config) == bridge.IMPLEMENTATION else "original"
            cache = kwargs.get("past_key_values")
            forwards.append((name, kwargs["input_ids"].shape[1], None if cache is None else cache.get_seq_length()))
            clock[0] += seconds(name, len(forwards))

        model.register_forward_pre_hook(before, with_kwargs=True)
        return forwards

    return attach


def test_speeds_are_per_token_and_per_variant(patched_llama, watch):
    watch(patched_llama, lambda name, _: {"patched": 0.5, "original": 2.0}[name])
    rows = measure_speed(patched_llama, [40, 20], batch_size=3, repeats=2, decode_tokens=4)
    assert [row.length for row in rows] == [20, 40]
    for row in rows:
        assert row.patched_prefill.median == pytest.approx(3 * row.length / 0.5)
        assert row.original_prefill.median == pytest.approx(3 * row.length / 2.0)
        assert row.patched_decode.median == pytest.approx(500)
        assert row.original_decode.median == pytest.approx(2000)
        assert (row.prefill_speedup, row.decode_speedup) == (pytest.approx(4), pytest.approx(4))
        assert row.original_attention == "sdpa"


def test_median_and_spread_without_the_warmup(patched_llama, watch):
    # warm-up: forwards 1 and 2; then patched and original in turn
    durations = [100, 100, 1, 2, 4, 2, 2, 8]
    watch(patched_llama, lambda _, count: durations[count - 1])
    (row,) = measure_speed(patched_llama, [8], repeats=3, warmup=1, decode_tokens=0)
    assert row.patched_prefill == Spread(8 / 2, 8 / 4, 8 / 1)
    assert row.original_prefill == Spread(8 / 2, 8 / 8, 8 / 2)
    assert row.patched_decode is None and row.decode_speedup is None


def test_variants_take_turns_each_with_its_own_cache(patched_llama, watch):
    forwards = watch(patched_llama, lambda *_: 1.0)
    measure_speed(patched_llama, [10], repeats=2, warmup=1, decode_tokens=3)
    prefill, fill, decode = forwards[:6], forwards[6:8], forwards[8:]
    assert prefill == [("patched", 10, None), ("original", 10, None)] * 3
    assert fill == [("patched", 10, 0), ("original", 10, 0)]
    steps = {name: [(name, 1, 10), (name, 1, 11), (name, 1, 12)] for name in ("patched", "original")}
    assert decode == (steps["patched"] + steps["original"]) * 3  # every repeat starts at the same length again


def test_only_the_last_logits_are_computed(patched_llama):
    shapes = []
    patched_llama.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    measure_speed(patched_llama, [16], repeats=1, decode_tokens=2)
    assert set(shapes) == {1}


def test_decoding_leaves_room_in_the_position_table(watch):
    model = patch_model(MODELS["gpt2"](), "linear")
    forwards = watch(model, lambda *_: 1.0)
    rows = measure_speed(model, [POSITIONS], repeats=1, decode_tokens=5)
    assert rows[0].patched_decode is not None
    assert max(tokens + (cached or 0) for _, tokens, cached in forwards) == POSITIONS


def test_a_masked_model_has_no_decoding_time():
    (row,) = measure_speed(patch_model(MODELS["bert"](), "performer"), [POSITIONS], repeats=1)
    assert row.patched_prefill.minimum > 0 and row.patched_decode is None and row.original_decode is None


def test_names_the_attention_it_compares_with():
    model = MODELS["llama"]()
    model.set_attn_implementation("eager")
    (row,) = measure_speed(patch_model(model, "linear"), [8], repeats=1, decode_tokens=0)
    assert row.original_attention == "eager"


def test_model_is_as_before(patched_llama):
    patched_llama.train()
    before = torch.get_rng_state()
    measure_speed(patched_llama, [8], repeats=1, decode_tokens=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in patched_llama.modules())
    assert bridge.get_implementation(patched_llama.config) == bridge.IMPLEMENTATION
    with original_attention(patched_llama):
        assert bridge.get_implementation(patched_llama.config) == "sdpa"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lengths": [8, POSITIONS + 1]}, f"{POSITIONS + 1} tokens.*has {POSITIONS} positions"),
        ({"lengths": [0, 8]}, "lengths"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [8], "repeats": 0}, "repeats"),
        ({"lengths": [8], "batch_size": 0}, "batch_size"),
        ({"lengths": [8], "warmup": -1}, "warmup"),
        ({"lengths": [8], "decode_tokens": POSITIONS}, "decode_tokens"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message, watch):
    model = patch_model(MODELS["gpt2"](), "linear")
    forwards = watch(model, lambda *_: 1.0)
    with pytest.raises(OptionError, match=message):
        measure_speed(model, **options)
    assert not forwards


def test_an_unpatched_model_has_nothing_to_compare():
    with pytest.raises(PatchError, match="not patched"):
        measure_speed(MODELS["llama"](), [8])


@pytest.mark.parametrize(
    "speedups, expected",
    [
        ({}, None),
        ({256: 2.0}, 256),
        ({256: 0.5}, None),
        ({256: 0.5, 512: 1.5, 1024: 3.0}, 512),
        ({256: 1.5, 512: 0.9, 1024: 3.0}, 1024),  # faster at first, but not from there on
        ({256: 1.5, 512: 3.0, 1024: 1.0}, None),
    ],
)
def test_crossover(speedups, expected):
    rows = [
        SpeedRow(length, 1, Spread.of([100 * speedup]), Spread.of([100.0]))
        for length, speedup in reversed(speedups.items())
    ]
    assert crossover_length(rows) == expected
