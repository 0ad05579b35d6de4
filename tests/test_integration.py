"""A patched model is an ordinary transformers model: generation, training, PEFT, precision, pipelines."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, pipeline

from hf_linattn import get_mechanisms, is_patched, list_mechanisms, patch_model, unpatch_model
from hf_linattn.calibration import own_parameters
from hf_linattn.mechanisms import MECHANISMS
from tests.helpers import (
    KINDS,
    OPTIONS,
    assert_close,
    each_once,
    each_with,
    generate,
    logits_of,
    loss_gradients,
    make_patched,
    make_tokenizer,
    make_tokens,
    pad,
    take_steps,
)
from tests.models import ARCHITECTURES, SPINE, make_model

each_family = pytest.mark.parametrize("name", SPINE)
each_generator = pytest.mark.parametrize("name", ["gpt2", "llama"])
each_patch = pytest.mark.parametrize(("name", "mechanism"), each_with(SPINE, list_mechanisms()))
each_mechanism = pytest.mark.parametrize(("name", "mechanism"), each_once(SPINE, list_mechanisms()))
each_continuous_mechanism = pytest.mark.parametrize(
    ("name", "mechanism"), each_once(SPINE, [name for name in list_mechanisms() if MECHANISMS.get(name).continuous])
)
each_kind_of_patch = pytest.mark.parametrize(("name", "mechanism"), each_once(SPINE, KINDS))
each_generating_patch = pytest.mark.parametrize(("name", "mechanism"), each_once(["gpt2", "llama"], KINDS))

# -- generation: with a cache as without ------------------------------------------------------------------------------

WAYS = {
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"num_return_sequences": 3, "do_sample": True},
}


@pytest.mark.covering(1)
@each_generating_patch
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_way_of_generating_is_the_same_with_a_cache(name, mechanism, way):
    model = make_patched(name, mechanism)
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 4, seed=1)[0]], 0)
    sequences = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"attention_mask": mask, "max_new_tokens": 4, "pad_token_id": 0, **WAYS[way]}
        sequences.append(model.generate(ids, use_cache=use_cache, **options))
    assert sequences[0].tolist() == sequences[1].tolist()
    assert sequences[0].shape[1] == 13


@pytest.mark.covering(1)
@each_generating_patch
@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1, 7, 1)])
@torch.no_grad()
def test_a_returned_cache_is_continued(name, mechanism, chunks):
    """In steps, in chunks of several tokens, and by generate."""
    model, ids = make_patched(name, mechanism), make_tokens(2, 14)
    expected = logits_of(model, ids)
    cache, start = None, 0
    for length in chunks:
        output = model(ids[:, start : start + length], past_key_values=cache, use_cache=True)
        assert_close(output.logits, expected[:, start : start + length])
        cache, start = output.past_key_values, start + length
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
    whole = model.generate(ids, use_cache=False, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.tolist() == whole.tolist()


@each_generator
@torch.no_grad()
def test_a_left_padded_cache_is_continued(name):
    model = make_patched(name)
    rows = [make_tokens(1, length, seed=length)[0] for length in (14, 10)]
    ids, mask = pad(rows, 0)
    result = model.generate(
        ids[:, :9], attention_mask=mask[:, :9], max_new_tokens=1, pad_token_id=0, return_dict_in_generate=True
    )
    tokens, logits = generate(model, ids, attention_mask=mask, past_key_values=result.past_key_values)
    expected_tokens, expected_logits = generate(model, ids, attention_mask=mask, use_cache=False)
    assert tokens.tolist() == expected_tokens.tolist()
    assert_close(logits, expected_logits)


@pytest.mark.covering(1)
@each_generating_patch
def test_a_prefill_in_pieces_gives_the_same(name, mechanism):
    """Of a padded batch, too; the first piece of its second row is padding alone."""
    model = make_patched(name, mechanism)
    ids, mask = pad([make_tokens(1, 9)[0], make_tokens(1, 4, seed=1)[0]], 0)
    tokens, logits = generate(model, ids, 3, attention_mask=mask, prefill_chunk_size=4)
    expected_tokens, expected_logits = generate(model, ids, 3, attention_mask=mask, use_cache=False)
    assert tokens.tolist() == expected_tokens.tolist()
    assert_close(logits, expected_logits)


# -- training ---------------------------------------------------------------------------------------------------------


def make_dataset(rows=8, length=12):
    ids = make_tokens(rows, length).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * length] * rows})


def make_trainer(model, directory, **options):
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", seed=1, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=make_dataset(), eval_dataset=make_dataset(4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("name", "mechanism"), each_with(SPINE, ["linear", "hybrid", "softmax"]))
def test_trainer_trains(tmp_path, name, mechanism, adapted):
    """To it a model is a loss and gradients, which the next test has of every mechanism."""
    model = make_patched(name, mechanism)
    trained = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")) if adapted else model
    trainer = make_trainer(trained, tmp_path, max_steps=4)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert is_patched(model)


@each_kind_of_patch
def test_steps_lower_the_loss(name, mechanism):
    model = make_patched(name, mechanism)
    losses = take_steps(model, 4)
    assert losses[-1] < losses[0] and is_patched(model)


@each_family
def test_an_interrupted_run_is_resumed_identically(tmp_path, name):
    """Also the directions drawn during training: their schedule is part of the checkpoint."""
    options = {"num_features": 8, "redraw_interval": 2}
    make = lambda: patch_model(make_model(name), "performer", **options)  # noqa: E731
    unbroken, first, second = make(), make(), make()
    make_trainer(unbroken, tmp_path / "a", max_steps=6).train()
    trainer = make_trainer(first, tmp_path / "b", max_steps=6)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 3
    trainer.train()
    saved = str(tmp_path / "b" / "checkpoint-3")
    make_trainer(second, tmp_path / "b", max_steps=6).train(resume_from_checkpoint=saved)
    for key, tensor in unbroken.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key]), key


# its mask is trained: without gradients, as in a reentrant checkpoint's first pass, torch takes a kernel of its own
ROUNDED = {"learned_sparse": {"rtol": 1e-5, "atol": 1e-6}}


@pytest.mark.covering(1)
@each_mechanism
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(name, mechanism, reentrant):
    model, ids = make_patched(name, mechanism).train(), make_tokens(2, 9)
    expected = loss_gradients(model, ids)
    calls = [m.calls for m in get_mechanisms(model).values()]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = loss_gradients(model, ids)
    assert [m.calls for m in get_mechanisms(model).values()] == [3 * n for n in calls]  # it was really recomputed
    assert actual.keys() == expected.keys()
    tolerance = ROUNDED.get(mechanism, {"rtol": 0, "atol": 0})
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], **tolerance, msg=key)


@each_patch
def test_every_attention_weight_gets_a_gradient(name, mechanism):
    model = make_patched(name, mechanism)
    found = loss_gradients(model, make_tokens(2, 9))
    paths = tuple(get_mechanisms(model))
    weights = [key for key, p in model.named_parameters() if key.startswith(paths) and p.dim() > 1]
    if MECHANISMS.get(mechanism).limit.equal is not None:  # exact on so short an input, whatever its parameters are
        weights = [key for key in weights if ".hf_linattn." not in key]
    assert weights and all(found[key].abs().sum() > 0 for key in weights)


# -- PEFT -------------------------------------------------------------------------------------------------------------


@each_kind_of_patch
def test_lora_trains_and_merges(tmp_path, name, mechanism):
    model, ids = make_patched(name, mechanism), make_tokens(2, 9)
    frozen = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = logits_of(model, ids)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapters = [p for p in wrapped.parameters() if p.requires_grad]
    take_steps(wrapped, 2)
    assert adapters and all(p.grad is None or p.grad.isfinite().all() for p in adapters)
    adapted = logits_of(wrapped.eval(), ids)
    assert not torch.allclose(adapted, before, atol=1e-2)
    with wrapped.disable_adapter():
        assert torch.equal(logits_of(wrapped, ids), before)
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_patched(name, mechanism), tmp_path / "adapter").eval()
    assert_close(logits_of(loaded, ids), adapted)
    merged = wrapped.merge_and_unload()
    assert is_patched(merged)
    assert_close(logits_of(merged, ids), adapted, tolerance=1e-3)
    assert merged.state_dict().keys() == frozen.keys()


@each_kind_of_patch
def test_peft_trains_the_mechanisms_own_parameters_where_modules_to_save_names_them(tmp_path, name, mechanism):
    model, ids = make_patched(name, mechanism), make_tokens(2, 9)
    frozen = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = logits_of(model, ids)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", modules_to_save=["hf_linattn"]))
    assert torch.equal(logits_of(wrapped.eval(), ids), before)
    own = own_parameters(get_mechanisms(wrapped))
    assert all(p.requires_grad for several in own.values() for p in several)
    with torch.no_grad():
        for parameter in (p for several in own.values() for p in several):
            parameter.add_(0.3 * torch.randn_like(parameter))
    trained = logits_of(wrapped, ids)
    with wrapped.disable_adapter():
        assert torch.equal(logits_of(wrapped, ids), before)
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make_patched(name, mechanism), tmp_path / "adapter").eval()
    assert torch.equal(logits_of(loaded, ids), trained)
    merged = wrapped.merge_and_unload()
    assert_close(logits_of(merged, ids), trained)
    assert merged.state_dict().keys() == frozen.keys()
    assert unpatch_model(merged) is merged


def test_layers_that_share_parameters_share_those_that_peft_trains(tmp_path):
    model, ids = patch_model(make_model("bert"), "linformer", sharing="layers", num_slots=4).eval(), make_tokens(2, 9)
    before = logits_of(model, ids)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", modules_to_save=["hf_linattn"]))
    assert torch.equal(logits_of(wrapped.eval(), ids), before)
    first, _ = get_mechanisms(wrapped).values()
    with torch.no_grad():
        first.key_projection.mul_(torch.rand_like(first.key_projection))
    merged = wrapped.merge_and_unload()
    after = logits_of(merged, ids)
    assert not torch.allclose(after, before)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits_of(AutoModelForMaskedLM.from_pretrained(tmp_path).eval(), ids), after)


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@each_continuous_mechanism
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_computes_nearly_the_same(name, mechanism, dtype):
    model, ids = make_patched(name, mechanism), make_tokens(2, 9)
    expected = logits_of(model, ids)
    logits = logits_of(model.to(dtype), ids)
    assert logits.dtype == dtype
    error = (logits - expected).abs().mean() / expected.std()
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-5}[dtype]


@each_continuous_mechanism
def test_autocast_trains_close_to_float32(name, mechanism):
    model, ids = make_patched(name, mechanism), make_tokens(2, 9)
    expected = loss_gradients(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(model, ids)
        actual = loss_gradients(model, ids)
    assert (logits - logits_of(model, ids)).abs().mean() < 0.1 * logits.std()
    for key in expected:
        assert actual[key].dtype == torch.float32 and actual[key].isfinite().all()
    together = [torch.cat([g[key].flatten() for key in expected]) for g in (actual, expected)]
    assert torch.cosine_similarity(*together, dim=0) > 0.95


# -- pipelines --------------------------------------------------------------------------------------------------------


@each_generating_patch
def test_text_generation_pipeline_in_a_batch_equals_one_by_one(name, mechanism):
    run = pipeline("text-generation", model=make_patched(name, mechanism), tokenizer=make_tokenizer())
    texts = ["w7 w8 w9 w10 w11", "w40", "w12 w90 w33"]
    options = {"max_new_tokens": 5, "do_sample": False}
    together = run(texts, batch_size=3, **options)
    answers = [result[0]["generated_text"] for result in together]
    assert answers == [run(text, **options)[0]["generated_text"] for text in texts]
    assert all(len(answer.split()) > len(text.split()) for answer, text in zip(answers, texts, strict=True))


PIPELINES = {
    "fill-mask": ("bert", None, "w7 [MASK] w9"),
    "text-classification": ("bert", "ForSequenceClassification", "w7 w8 w9"),
    "token-classification": ("bert", "ForTokenClassification", "w7 w8 w9"),
    "feature-extraction": ("llama", "Model", "w7 w8 w9"),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_other_pipelines_run(task):
    name, head, text = PIPELINES[task]
    patched, original = make_patched(name, head=head), make_model(name, head)
    answer, plain = (pipeline(task, model=model, tokenizer=make_tokenizer())(text) for model in (patched, original))
    assert answer and answer != plain
    assert [m.calls for m in get_mechanisms(patched).values()] == [1, 1]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_copied_model_is_independent(name):
    model, ids = make_patched(name), make_tokens(2, 9)
    before = logits_of(model, ids)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(logits_of(model, ids), before)
    assert OPTIONS["performer"]["num_features"] == next(iter(get_mechanisms(copied).values())).config.num_features
