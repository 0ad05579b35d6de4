"""The fits of all layers together: taken where the whole model is closer to softmax, beyond the length fitted."""

from __future__ import annotations

import math

import pytest
import torch

from hf_linattn import calibrate, get_mechanisms, original_attention, patch_model
from hf_linattn.held_out import Split
from hf_linattn.support.tiny import tiny_model as small_model
from hf_linattn.testing.models import random_tokens, tiny_model
from hf_linattn.whole_model import mean_ratio, one_by_one
from tests.helpers import make_tokens
from tests.models import make_model

ROWS, LENGTH = 24, 12
OPTIONS = {"linear": {"decay": "learned"}, "hybrid": {"window_size": 3}, "gated_deltanet": {"rotation": "kept"}}
HELD_OUT = range(1, ROWS, 4)


def make(architecture, mechanism="hedgehog", **options):
    model = tiny_model(architecture, architecture not in ("bert", "bart"), torch.float64)
    return patch_model(model, mechanism, **options).eval()


def make_batches(**extra):
    ids = random_tokens(ROWS, LENGTH, seed=3)
    return [{"input_ids": x, **{name: y[:8] for name, y in extra.items()}} for x in ids.split(8)]


@torch.no_grad()
def states_of(model, inputs):
    return model.base_model(**inputs).last_hidden_state


def error_on(model, readings):
    """Return the error of the last hidden states over rows and tokens that count, by the definition."""
    error = size = 0.0
    for inputs, counted in readings:
        with original_attention(model):
            target = states_of(model, inputs)
        difference = states_of(model, inputs) - target
        error += float(difference[counted].square().sum())
        size += float(target[counted].square().sum())
    return error / size


def readings_of(batches, counted):
    return [(batch, counted) for batch in batches]


@pytest.mark.parametrize("mechanism", ["linear", "hedgehog", "hybrid", "gated_deltanet"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_causal_model_reads_rows_held_out_as_they_are_and_end_to_end(architecture, mechanism):
    """Six rows of 12 tokens, four at a time: one of 48, and two are left over."""
    model = make(architecture, mechanism, **OPTIONS.get(mechanism, {}))
    joined = random_tokens(ROWS, LENGTH, seed=3)[list(HELD_OUT)][:4].reshape(1, -1)
    readings = [
        readings_of(make_batches(), (torch.arange(8) % 4 == 1, slice(None))),
        [({"input_ids": joined}, (slice(None), slice(None)))],
    ]
    before = [error_on(model, several) for several in readings]
    result = calibrate(model, make_batches(), steps=3)
    after = [error_on(model, several) for several in readings]
    if not result.whole:  # no layer is closer by itself
        assert after == before
        return
    assert [error.before for error in result.whole] == pytest.approx(before, rel=1e-6)
    assert [error.after for error in result.whole] == pytest.approx(after, rel=1e-6)
    assert math.prod(after) <= math.prod(before) * (1 + 1e-6) and max(torch.tensor(after) / torch.tensor(before)) < 1.1
    assert {error.taken for error in result.whole} == {after != before}


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_padded_rows_are_read_as_they_are_and_pads_do_not_count(architecture):
    model = make(architecture)
    mask = torch.ones(8, LENGTH, dtype=torch.long)
    mask[::2, 7:] = 0
    mask[1, 9:] = 0  # of a row held out
    batches = make_batches(attention_mask=mask)
    rows = torch.zeros(8, LENGTH, dtype=torch.bool)
    rows[1::4] = True
    readings = readings_of(batches, rows & mask.bool())
    before = error_on(model, readings)
    (whole,) = calibrate(model, batches, steps=3).whole
    assert whole.before == pytest.approx(before, rel=1e-6)
    assert whole.after == pytest.approx(error_on(model, readings), rel=1e-6) and whole.after <= whole.before


def test_of_an_encoder_decoder_the_tokens_of_the_decoder_count():
    model = make("bart")
    decoder = torch.ones(8, 7, dtype=torch.long)
    decoder[1, 4:] = 0
    extra = {"attention_mask": torch.ones(8, LENGTH).long(), "decoder_input_ids": random_tokens(8, 7, seed=4)}
    batches = make_batches(**extra, decoder_attention_mask=decoder)
    rows = torch.zeros(8, 7, dtype=torch.bool)
    rows[1::4] = True
    before = error_on(model, readings_of(batches, rows & decoder.bool()))
    assert calibrate(model, batches, steps=2).whole[0].before == pytest.approx(before, rel=1e-6)


def right_within_its_rows(mechanism, rows=1):
    """Have a fitted mechanism answer as softmax does to the tokens of `rows` rows, and wrongly behind."""
    first, forward = mechanism.log_decay_rate.detach().clone(), mechanism.forward
    softmax = next(iter(get_mechanisms(make("llama", "softmax")).values()))

    def answer(*heads, **options):
        output, state = forward(*heads, **options)
        exact = softmax(*heads, keep_state=False)[0] + output - output.detach()  # with a gradient, to move by
        if torch.equal(mechanism.log_decay_rate, first):
            return 1.1 * exact, state
        return torch.cat([exact[:, :, : rows * LENGTH], -exact[:, :, rows * LENGTH :]], 2), state

    mechanism.forward = answer


@pytest.mark.parametrize("mask", [None, torch.ones(8, LENGTH).long(), "one pad"])
def test_fits_that_are_right_at_their_own_length_alone_are_undone(mask, caplog):
    """Not where rows have pads: those cannot be read end to end."""
    model = make("llama", "linear", decay="learned")
    mechanisms = get_mechanisms(model)
    for mechanism in mechanisms.values():
        right_within_its_rows(mechanism)
    before = [m.log_decay_rate.detach().clone() for m in mechanisms.values()]
    padded = isinstance(mask, str)
    if padded:
        mask = torch.ones(8, LENGTH).long()
        mask[0, -1] = 0
    result = calibrate(model, make_batches() if mask is None else make_batches(attention_mask=mask), steps=2)
    kept = [torch.equal(m.log_decay_rate, x) for m, x in zip(mechanisms.values(), before, strict=True)]
    assert all(found.after < found.before for found in result.held_out.values())
    assert kept == [not padded] * 2 and [error.taken for error in result.whole] == [padded] * (1 if padded else 2)
    assert [found.taken for found in result.held_out.values()] == [padded] * 2
    assert ("the fits of the first 2 of 2 layers are taken back" in caplog.text) != padded


@pytest.mark.parametrize("spoilt", [0, 1])
def test_the_last_layers_keep_their_fits_where_the_first_lead_astray(spoilt):
    """And none do where the last layer does."""
    model = make("llama", "linear", decay="learned")
    mechanisms = list(get_mechanisms(model).values())
    for place, mechanism in enumerate(mechanisms):
        right_within_its_rows(mechanism, rows=1 if place == spoilt else 4)
    before = [m.log_decay_rate.detach().clone() for m in mechanisms]
    result = calibrate(model, make_batches(), steps=2)
    expected = [False, spoilt == 0]
    assert [found.taken for found in result.held_out.values()] == expected
    assert [not torch.equal(m.log_decay_rate, x) for m, x in zip(mechanisms, before, strict=True)] == expected
    assert [error.taken for error in result.whole] == [spoilt == 0] * 2


def test_rows_end_to_end_stay_within_the_positions():
    model = patch_model(make_model("gpt2"), "hedgehog")  # of 64
    batches = [{"input_ids": random_tokens(8, 40, seed=number)} for number in range(2)]
    assert len(calibrate(model, batches, steps=1).whole) == 1


def test_embeddings_in_place_of_tokens_are_read_one_by_one():
    model = make("llama")
    embedded = model.get_input_embeddings()(random_tokens(8, LENGTH, seed=3)).detach()
    batches = [{"input_ids": None, "inputs_embeds": embedded}]
    counted = (torch.arange(8) % 4 == 1, slice(None))
    before = error_on(model, [(batches[0], counted)])
    assert calibrate(model, batches, steps=2).whole[0].before == pytest.approx(before, rel=1e-6)


def test_a_model_without_last_hidden_states_is_judged_layer_by_layer_alone():
    model = patch_model(small_model("clip"), "hedgehog")
    pixels = torch.randn(4, 3, model.config.vision_config.image_size, model.config.vision_config.image_size)
    result = calibrate(model, [{"input_ids": make_tokens(4, 9), "pixel_values": pixels}], steps=2)
    assert result.whole == () and any(found.taken for found in result.held_out.values())


def test_of_fits_none_is_kept_that_costs_a_tenth_at_either_length():
    assert mean_ratio([0.2, 0.21], [0.4, 0.2]) == pytest.approx(math.sqrt(0.5 * 1.05))
    assert mean_ratio([0.0, 0.23], [0.4, 0.2]) == mean_ratio([0.1, math.nan], [0.4, 0.2]) == math.inf
    assert mean_ratio([1e-9, 0.1], [1e-12, 0.2]) == pytest.approx(math.sqrt(0.5)), "errors of rounding are alike"
    assert mean_ratio([0.1, 0.1], [math.nan, 0.1]) == 0


def test_rows_held_out_are_read_alone_where_a_batch_is_nothing_but_rows():
    split, ids = Split(), random_tokens(3, LENGTH, seed=3)
    split.sizes, split.held_out = [3], [[1]]
    (reading,) = one_by_one([{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], split)
    assert {name: x.tolist() for name, x in reading.inputs.items()} == {
        "input_ids": ids[[1]].tolist(), "attention_mask": [[1] * LENGTH],
    }  # fmt: skip
    assert (reading.size, list(reading.rows)) == (1, [0])
    for positions in (torch.zeros(3, 3, LENGTH), torch.zeros(1, LENGTH)):  # of pictures; of all rows
        (reading,) = one_by_one([{"input_ids": ids, "position_ids": positions.long()}], split)
        assert reading.inputs["input_ids"] is ids and (reading.size, reading.rows) == (3, [1])
