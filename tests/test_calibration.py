"""Calibration: only the mechanisms' own parameters move, towards softmax attention, and nothing is half-done."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from hf_linattn import (
    HfLinattnError,
    OptionError,
    PatchError,
    calibrate,
    choose_plan,
    get_mechanisms,
    layer_sensitivity,
    list_mechanisms,
    original_attention,
    patch_model,
)
from hf_linattn.attention_call import intercept_attention, interceptor_of
from hf_linattn.calibration import own_parameters, squared_errors
from hf_linattn.support.tiny import tiny_model as small_model
from hf_linattn.testing.models import ARCHITECTURES, positions_of, random_tokens, tiny_model
from tests.helpers import each_of, layer_errors, make_tokenizer, make_tokens
from tests.models import make_model
from tests.plan_search.retriever import make_retriever

LENGTH = 48
IDS = torch.arange(5, 9)[None]
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def make(architecture: str, mechanism: str = "hedgehog", dtype: torch.dtype = torch.float32, **options):
    model = tiny_model(architecture, architecture != "bert", dtype)
    return patch_model(model, mechanism, **options)


def make_batches(count: int = 3, batch: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": random_tokens(batch, LENGTH, seed=number)} for number in range(count)]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@each_architecture
@pytest.mark.parametrize("mechanism", ["hedgehog", "learned_exp"])
def test_unseen_text_is_nearer_to_softmax_and_only_own_parameters_moved(architecture, mechanism):
    model = make(architecture, mechanism)
    unseen = {"input_ids": random_tokens(8, LENGTH, seed=99)}
    own = {id(p) for several in own_parameters(get_mechanisms(model)).values() for p in several}
    before, errors_before = state(model), layer_errors(model, unseen)
    named = dict(model.named_parameters())
    result = calibrate(model, make_batches(batch=24), steps=10)
    assert list(result) == list(own_parameters(get_mechanisms(model)))
    assert all(len(errors) == 3 for errors in result.values())
    for error, earlier in zip(layer_errors(model, unseen), errors_before, strict=True):
        assert error < 0.97 * earlier
    for name, tensor in model.state_dict().items():
        moved = not torch.equal(tensor, before[name])
        assert moved == (name in named and id(named[name]) in own), name


@each_architecture
def test_every_layer_sees_what_the_original_model_makes(architecture):
    """The original's outputs come out, whatever the mechanisms would have said."""
    model, batch = make(architecture, "linear"), make_batches(1)[0]
    mechanisms = get_mechanisms(model)
    with torch.no_grad():
        with original_attention(model):
            expected = model(**batch).logits
        answers = {path: lambda call, m=m: call.run_softmax(m) for path, m in mechanisms.items()}
        with intercept_attention(mechanisms, answers):
            torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
        assert (model(**batch).logits - expected).abs().amax() > 1e-3
    assert all(interceptor_of(mechanism) is None for mechanism in mechanisms.values())


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_have_no_say(side):
    """The same rows with and without pads: the same error, the same fit."""
    tokens, pads = random_tokens(4, 31), torch.zeros(4, 9, dtype=torch.long)
    mask = torch.cat([torch.ones_like(tokens), pads], 1)
    ids = torch.cat([tokens, pads], 1)
    if side == "left":
        mask, ids = mask.flip(1), torch.cat([pads, tokens], 1)
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)}
    plain, other = (make("llama", dtype=torch.float64) for _ in range(2))
    one = calibrate(plain, [{"input_ids": tokens}], steps=2)
    two = calibrate(other, [padded], steps=2)
    for path, (error,) in one.items():
        assert two[path][0] == pytest.approx(error, rel=1e-6)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_squared_errors_are_those_of_real_tokens_row_by_row():
    output = torch.ones(2, 1, 2, 2)
    target = torch.tensor([[[2.0, 2.0], [7.0, 7.0]], [[1.0, 1.0], [1.0, 3.0]]])[:, None]
    mask = torch.tensor([[True, False], [True, True]])
    for real, expected in ((mask, [[2, 4], [8, 12]]), (None, [[74, 4], [106, 12]])):
        assert [x.tolist() for x in squared_errors(output, target, real)] == expected


def test_modes_gradients_and_flags_are_left_alone():
    model = make("gpt2").train()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    for parameter in parameters[1::2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    flags = [p.requires_grad for p in parameters]
    calibrate(model, make_batches(1), steps=2)
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in parameters] == flags
    assert all(p.grad is None for p in parameters[::2])
    assert all(bool((p.grad == 3.0).all()) for p in parameters[1::2])


def test_a_bfloat16_model_is_fitted_in_float32_and_stays_bfloat16():
    model = make("llama", dtype=torch.bfloat16)
    unseen = {"input_ids": random_tokens(8, LENGTH, seed=99)}
    before = layer_errors(model, unseen)
    calibrate(model, make_batches(batch=24), steps=10)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(error < 0.97 * earlier for error, earlier in zip(layer_errors(model, unseen), before, strict=True))


@pytest.mark.parametrize("name", each_of(list_mechanisms()))
def test_no_mechanism_ends_worse_than_it_began_on_rows_held_out(name, caplog):
    """Of rows that have nothing in common; what is said of them is what is measured without it."""
    model, rows = make("llama", name), make_batches(1, batch=6)[0]["input_ids"]
    held_out = {"input_ids": rows[[1, 5]]}
    before, start = state(model), layer_errors(model, held_out)
    result = calibrate(model, [{"input_ids": rows[:3]}, {"input_ids": rows[3:]}], steps=4)
    mechanisms = get_mechanisms(model)
    assert bool(result) == any(list(m.parameters()) or m.prepares for m in mechanisms.values())
    assert result.keys() == result.held_out.keys()
    after = dict(zip(mechanisms, layer_errors(model, held_out), strict=True))
    for path, error in dict(zip(mechanisms, start, strict=True)).items():
        assert after[path] <= error * (1 + 1e-5) or path not in result
    for path, (error, found, taken) in result.held_out.items():
        assert error == pytest.approx(dict(zip(mechanisms, start, strict=True))[path], rel=1e-3, abs=1e-9)
        assert (found < error or not taken) and not (taken and path in caplog.text)
        assert taken or path in caplog.text or "layers are taken back" in caplog.text
        own = {n: x for n, x in model.state_dict().items() if n.startswith(path)}
        assert taken or all(torch.equal(x, before[n]) for n, x in own.items())


def test_a_fit_that_serves_other_rows_worse_is_undone(caplog):
    """Layer by layer: where the fit spoils a layer, it gets its parameters and buffers back, and it is named."""
    model = make("llama", "hedgehog")
    (spoilt, first), (fine, second) = get_mechanisms(model).items()
    before = state(model)

    def spoil(*_):
        with torch.no_grad():
            for parameter in first.parameters():
                parameter.mul_(-5.0)

    first.prepare = spoil
    result = calibrate(model, make_batches(2, batch=24), steps=10)
    assert not result.held_out[spoilt].taken and result.held_out[fine].taken
    assert result.held_out[spoilt].after >= result.held_out[spoilt].before
    assert spoilt in caplog.text and fine not in caplog.text
    for name, x in model.named_parameters():
        assert torch.equal(x, before[name]) != any(x is own for own in second.parameters()), name


def test_a_single_row_is_judged_by_itself():
    ((error, after, taken), *_) = calibrate(make("llama"), make_batches(1, batch=1), steps=5).held_out.values()
    assert taken and after < error


def test_a_shared_parameter_is_fitted_once():
    model = make("llama", "linformer", sharing="layers")
    first, *_ = get_mechanisms(model)
    assert list(calibrate(model, make_batches(1), steps=1)) == [first]


@pytest.mark.parametrize("mechanism", ["hedgehog", "vq"])
def test_nothing_is_half_done(mechanism):
    model = make("llama", mechanism)
    before = state(model)

    def batches():
        yield from make_batches(2)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        calibrate(model, batches(), steps=3)
    with pytest.raises(OptionError, match="batches must hold at least one batch, got none"):
        calibrate(model, [])
    with pytest.raises(OptionError, match="steps must be an integer >= 1, got 0"):
        calibrate(model, make_batches(1), steps=0)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(interceptor_of(mechanism) is None for mechanism in get_mechanisms(model).values())


def test_inference_mode_around_it_changes_nothing():
    found = []
    for mode in (torch.enable_grad, torch.inference_mode):
        model = make("llama")
        with mode():
            errors = calibrate(model, [{**x, "attention_mask": x["input_ids"] > 0} for x in make_batches(1)], steps=3)
        found.append((dict(errors), state(model)))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_what_was_loaded_inside_inference_mode_is_refused(tmp_path):
    make("llama").save_pretrained(tmp_path)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"made inside torch.inference_mode\(\).*load the model outside of it"):
        calibrate(model, make_batches(1))


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fully_shard], ids=["ddp", "fsdp2"])
def test_a_model_that_is_shared_among_processes_is_refused(wrap):
    """Each process would fit its copy to its own batches, and nothing would make them equal again."""
    model = make("llama")
    before = state(model)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        wrapped = wrap(model)
        with pytest.raises(OptionError, match="call calibrate before the model is wrapped"):
            calibrate(wrapped, make_batches(1))
    finally:
        distributed.destroy_process_group()
    if wrap is not fully_shard:
        torch.testing.assert_close(state(model), before, rtol=0, atol=0)


def test_an_unpatched_model_is_refused():
    with pytest.raises(PatchError, match="not patched"):
        calibrate(tiny_model("gpt2", True), make_batches(1))


@torch.no_grad()
def _break_when_it_has_moved(mechanism):
    """Have a mechanism answer with NaN as soon as its parameters are not where they were."""
    first, forward = mechanism.log_decay_rate.clone(), mechanism.forward

    def answer(*heads, **options):
        output, state = forward(*heads, **options)
        moved = not torch.equal(mechanism.log_decay_rate, first)
        return (output * torch.nan if moved else output), state

    mechanism.forward = answer
    return first


def test_a_layer_whose_trial_step_is_not_finite_goes_back_and_the_others_keep_their_fits(caplog):
    model, alone = make("llama", "linear", decay="learned"), make("llama", "linear", decay="learned")
    (path, broken), (other, _) = get_mechanisms(model).items()
    first = _break_when_it_has_moved(broken)
    batches = make_batches(2)
    calibrate(alone, batches, steps=5)
    result = calibrate(model, batches, steps=5)
    assert torch.equal(broken.log_decay_rate, first)
    fitted = get_mechanisms(alone)[other].log_decay_rate
    assert torch.equal(get_mechanisms(model)[other].log_decay_rate, fitted)
    assert len(result[path]) == len(result[other]) == 2
    warnings = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert [f"layer 0 to batch {number} " in text for number, text in enumerate(warnings, start=1)] == [True] * 2


def test_an_input_that_is_not_finite_names_layer_and_batch_and_leaves_all_as_it_was():
    model = make("llama", "linear", decay="learned")
    before = state(model)
    batches = make_batches(2)
    embedded = model.get_input_embeddings()(batches[1].pop("input_ids")).detach()
    batches[1]["inputs_embeds"] = embedded.clone()
    batches[1]["inputs_embeds"][0, 3] = torch.nan
    with pytest.raises(OptionError, match="layer 0 cannot be fitted to batch 2, of which its error is nan"):
        calibrate(model, batches, steps=2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def make_words() -> nn.Module:
    """A GPT-2 of 64 positions that reads words."""
    return patch_model(make_model("gpt2", std=0.3), "hedgehog")


def test_texts_are_tokenised_into_whole_rows_and_fitted_like_batches():
    text = " ".join(f"w{5 + i * i % 90}" for i in range(3 * 64 + 20))
    ids = torch.tensor([5 + i * i % 90 for i in range(3 * 64)]).view(3, 64)
    by_batches, by_texts = make_words(), make_words()
    expected = calibrate(by_batches, [{"input_ids": ids}], steps=2)
    found = calibrate(by_texts, [text], tokenizer=make_tokenizer(), steps=2)
    assert found == expected and found.held_out == expected.held_out
    tensors = zip(state(by_batches).values(), state(by_texts).values(), strict=True)
    assert all(torch.equal(one, other) for one, other in tensors)


@pytest.mark.parametrize(
    ("asked", "terminal", "shown"), [(None, True, 1), (None, False, 0), (True, False, 1), (False, True, 0)]
)
def test_progress_is_shown_where_a_person_reads(asked, terminal, shown, capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: terminal)
    calibrate(make_words(), [{"input_ids": torch.arange(5, 9)[None]}], steps=1, progress=asked)
    assert ("calibrate:" in capsys.readouterr().err) == shown


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (["w5 w6"], {}, r"dicts of tensors, got str; give texts with tokenizer="),
        ([{"input_ids": [5, 6]}], {}, r"got 'input_ids' as a list; .*return_tensors='pt'"),
        (["w5 w6"], {"tokenizer": make_tokenizer()}, r"no document has the 64 tokens of one row"),
        ("w5 w6", {"tokenizer": make_tokenizer()}, r"texts must be .*, got one string; pass \[text\]"),
        ([{"input_ids": IDS}], {"tokenizer": make_tokenizer()}, r"texts must be .*, got \{'input_ids'.*; pass str"),
        (None, {"tokenizer": make_tokenizer()}, r"dicts of tensors, got None; give texts with tokenizer="),
        (["w5 w6"], {"tokenizer": 3}, r"tokenizer must be the model's, which reads texts, got 3"),
    ],
    ids=["text", "lists", "short", "string", "no texts", "none", "no tokenizer"],
)
def test_what_is_no_batch_is_refused_by_name(batches, options, message):
    model = make_words()
    before = state(model)
    with pytest.raises(HfLinattnError, match=message):
        calibrate(model, batches, **options)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": [[5, 6]]}, "batches must hold dicts of tensors, got 'input_ids' as a list"),
        ({"input_ids": np.ones((1, 9), int)}, "batches must hold dicts of tensors, got 'input_ids' as an array"),
        ({"input_ids": torch.arange(5, 9)}, r"input_ids of batches must be \[rows, tokens\], .* got \[4\]"),
        ({"input_ids": torch.zeros(0, 4).long()}, r"input_ids of batches must be .* one of each, got \[0, 4\]"),
        ({"input_ids": torch.tensor([[5, 30]])}, r"batches hold token 30, which is beyond the 30 of the model"),
        ({"input_ids": torch.tensor([[5, -100]])}, r"batches hold token -100, and tokens begin at 0; fill rows with"),
        ({"input_ids": torch.ones(2, 4)}, r"input_ids of batches must be int64 or int32, got torch.float32"),
        (
            {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 5)},
            r"attention_mask of batches must be \[2, 4\], as input_ids are, got \[2, 5\]",
        ),
    ],
    ids=["lists", "numpy", "row", "empty", "vocabulary", "negative", "numbers", "mask"],
)
def test_what_no_model_reads_is_refused_wherever_batches_are_taken(batch, message):
    refused_wherever_batches_are_taken([batch], message)


def test_what_holds_no_batches_is_refused_wherever_batches_are_taken():
    refused_wherever_batches_are_taken(5, "batches must hold dicts of tensors, got 5; give")


def refused_wherever_batches_are_taken(batches, message):
    patched = patch_model(make_retriever(), "hedgehog")
    for take in (
        lambda: choose_plan(make_retriever(), None, 1, signal="divergence", batches=batches),
        lambda: calibrate(patched, batches),
        lambda: layer_sensitivity(patched, batches),
    ):
        with pytest.raises(OptionError, match=message):
            take()


def test_options_that_a_batch_has_for_the_model_do_not_meet_ours():
    ids = make_tokens(2, 40) % 30
    batch = {"input_ids": ids, "labels": ids, "use_cache": True}
    choose_plan(make_retriever(), None, 1, signal="divergence", batches=[batch], replace={"local": {"window_size": 3}})
    assert calibrate(patch_model(make_retriever(), "hedgehog"), [batch], steps=1)


def test_batches_of_pads_alone_fit_nothing():
    model, ids = make_words(), make_tokens(2, 9)
    pads, before = {"input_ids": ids, "attention_mask": torch.zeros_like(ids)}, state(model)
    with pytest.raises(OptionError, match="at least one batch with real tokens, got attention masks of zeros"):
        calibrate(model, [pads, pads])
    assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())
    assert calibrate(model, [pads, {"input_ids": ids}], steps=1)


def test_a_model_without_numbers_is_refused():
    model = patch_model(make_retriever(), "hedgehog").to("meta")
    batches = [{"input_ids": make_tokens(2, 40) % 30}]
    for take in (
        lambda: choose_plan(make_retriever().to("meta"), None, 1, signal="divergence", batches=batches),
        lambda: layer_sensitivity(model, batches),
    ):
        with pytest.raises(OptionError, match="LlamaForCausalLM is on the meta device, where nothing can be measured"):
            take()


def test_a_layer_that_runs_twice_has_one_error_for_each_batch():
    model, batches = patch_model(small_model("albert"), "hedgehog"), [{"input_ids": make_tokens(4, 9)}] * 3
    assert [len(errors) for errors in calibrate(model, batches, steps=1).values()] == [3]
