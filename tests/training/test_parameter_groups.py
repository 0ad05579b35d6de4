"""Rates and decays by group, and float32 masters of what is small in a model of 16 bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_linattn import patch_model
from hf_linattn.errors import OptionError
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.losses.attention_transfer import AttentionTransfer
from hf_linattn.training.losses.embeddings import EmbeddingDistillation, EmbeddingWeights
from hf_linattn.training.parameter_groups import cast_as_loaded, float32_masters, group_parameters
from hf_linattn.training.task import load_model
from hf_linattn.training.trainers import RecoveryTrainer
from tests.models import make_model
from tests.training.test_finetuning import make_data, make_training

RATES = {
    "mechanism_rate": 10.0, "attention_rate": 3.0, "head_rate": 1.0,
    "mechanism_weight_decay": 0.0, "attention_weight_decay": 0.5, "head_weight_decay": None,
}  # fmt: skip
HEADS = {
    "bert": {"bert.pooler.dense", "classifier"}, "roberta": {"classifier.dense", "classifier.out_proj"},
    "distilbert": {"pre_classifier", "classifier"}, "gpt2": {"score"},
}  # fmt: skip


@pytest.mark.parametrize("weight_decay", [0.2, 0.0])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_every_parameter_is_in_one_group_with_the_rate_of_its_place(tmp_path, architecture, lora, weight_decay):
    model = patch_model(make_model(architecture), "hedgehog")
    data = make_data(model)
    model = add_adapters(model, rank=2) if lora else model
    training = make_training(tmp_path, learning_rate=0.1, weight_decay=weight_decay, **RATES)
    optimizer = RecoveryTrainer(model, training, data).create_optimizer()
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(trained) == sum(len(group["params"]) for group in optimizer.param_groups)
    around = {"bert": "attention", "gpt2": ".attn.c_", "llama": "self_attn"}[architecture]
    for name, parameter in trained.items():
        rate, decay = found[id(parameter)]
        if "hf_linattn" in name:
            assert (rate, decay) == (pytest.approx(1.0), 0.0), name
        elif around in name and "LayerNorm" not in name:
            assert rate == pytest.approx(0.3) and decay == (0.0 if "bias" in name else 0.5), name
        else:
            assert rate == 0.1 and decay in (0.0, weight_decay) and not lora, name


def test_the_encoder_that_an_embedding_loss_holds_is_divided_and_attention_transfer_is_not():
    student, options = patch_model(make_model("bert", "Model"), "hedgehog"), SimpleNamespace(**RATES)
    taught = EmbeddingDistillation(student, make_model("bert", "Model"), None, EmbeddingWeights())
    optimizer = torch.optim.SGD(taught.parameters(), lr=0.1)
    group_parameters(optimizer, taught, options, ())
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in student.named_parameters():
        around = "attention" in name and "LayerNorm" not in name
        rate = 1.0 if "hf_linattn" in name else 0.3 if around else 0.1
        assert found[id(parameter)] == pytest.approx(rate), name
    transfer = AttentionTransfer(student)
    optimizer = torch.optim.SGD(transfer.parameters(), lr=0.1)
    group_parameters(optimizer, transfer, options, ())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("architecture", HEADS)
def test_head_and_pooler_have_a_rate_of_their_own(architecture, convert):
    model = make_model(architecture, "ForSequenceClassification")
    head = {f"{name}.{kind}" for name in HEADS[architecture] for kind in ("weight", "bias")}
    head &= {name for name, _ in model.named_parameters()}
    model = patch_model(model, "linear") if convert else model
    options = SimpleNamespace(**{**dict.fromkeys(RATES, 1.0), "head_rate": 5.0, "head_weight_decay": 0.7})
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD(names.values(), lr=0.1, weight_decay=1.0)
    group_parameters(optimizer, model, options, {name for name in names if "bias" not in name})
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in names.items():
        decay = 0.7 if name in head and "bias" not in name else 1.0
        assert found[id(parameter)] == (pytest.approx(0.5 if name in head else 0.1), decay), name


@pytest.mark.parametrize("targets", [None, ["q_proj", "up_proj", "lm_head"]])
def test_an_output_projection_that_is_not_tied_is_a_head_and_adapters_are_of_their_places(targets):
    model = patch_model(make_model("llama", tie_word_embeddings=False), "linear")
    model = model if targets is None else add_adapters(model, rank=2, target_modules=targets)
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(names.values(), lr=0.1)
    options = SimpleNamespace(**{**dict.fromkeys(RATES), "mechanism_rate": 1, "attention_rate": 3, "head_rate": 5})
    group_parameters(optimizer, model, options, ())
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rates = {"self_attn": 0.3, "lm_head": 0.5, "mlp": 0.1}
    seen = {place: {round(found[id(p)], 6) for name, p in names.items() if place in name} for place in rates}
    assert seen == {place: {rate} for place, rate in rates.items()}


def test_an_optimizer_of_other_tensors_is_refused():
    model, options = patch_model(make_model("gpt2"), "hedgehog"), SimpleNamespace(**RATES)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
    with pytest.raises(OptionError, match="need the optimizer to hold the model's own parameters"):
        group_parameters(other, model, options, ())
    group_parameters(other, model, SimpleNamespace(**{k: 1 if "rate" in k else None for k in RATES}), ())


def test_steps_smaller_than_a_rounding_add_up(tmp_path):
    """Norms of 1 move by 1e-4 a step, in bfloat16 none of which would arrive; what is left is bfloat16 again."""
    model = patch_model(make_model("llama", std=0.3).bfloat16(), "hedgehog")
    data = make_data(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"save_strategy": "no", "eval_strategy": "no", "weight_decay": 0.0, "warmup_steps": 0}
    training = make_training(tmp_path, lr_scheduler_type="constant", **options)
    fine_tune(model, data, training, tmp_path / "x", learning_rate=1e-4, max_steps=60)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(p.dtype == torch.bfloat16 for p in after.values())
    norms = [name for name in after if "norm" in name]
    assert norms and any(not torch.equal(after[name], before[name]) for name in norms)


def test_masters_are_vectors_and_mechanisms_and_are_gone_afterwards_also_after_an_error():
    model = patch_model(make_model("gpt2").bfloat16(), "hedgehog")
    names = list(model.state_dict())
    with pytest.raises(ZeroDivisionError), float32_masters(model):
        exact = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
        assert all(name.endswith(".original0") for name in exact)
        halves = [p for p in model.parameters() if p.dtype == torch.bfloat16]
        assert exact and halves and all(p.ndim > 1 for p in halves)
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        assert model.get_parameter("transformer.ln_f.parametrizations.weight.original0").grad.dtype == torch.float32
        1 / 0  # noqa: B018
    assert list(model.state_dict()) == names or sorted(model.state_dict()) == sorted(names)
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in model.parameters())


def test_a_tied_bias_stays_one_parameter_that_is_trained_and_saved_once(tmp_path):
    model = patch_model(make_model("bert", std=0.3).bfloat16(), "hedgehog")
    head, data = model.cls.predictions, make_data(model)
    assert head.bias is head.decoder.bias
    before, names = head.bias.detach().clone(), [name for name, _ in model.named_parameters()]
    with float32_masters(model):
        masters = {name for name, _ in model.named_parameters() if name.startswith("cls") and "bias" in name}
        parts = ("decoder", "transform.dense", "transform.LayerNorm")
        assert masters == {f"cls.predictions.{part}.parametrizations.bias.original0" for part in parts}
    assert [name for name, _ in model.named_parameters()] == names
    options = {"lr_scheduler_type": "constant", "warmup_steps": 0, "eval_steps": 1, "save_steps": 1}
    training = make_training(tmp_path, **options)  # a checkpoint is written, and read at the end
    fine_tune(model, data, training, tmp_path / "x", learning_rate=0.01, max_steps=2)
    assert head.bias is head.decoder.bias and head.bias.requires_grad and not torch.equal(head.bias, before)


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [("bert", "hedgehog"), ("gpt2", "hedgehog"), ("llama", "hedgehog"), ("gemma2", "hedgehog"), ("llama", "vq")],
)
def test_a_cast_model_is_the_one_that_is_loaded_in_that_dtype(tmp_path, architecture, mechanism):
    """Frequencies of rotary positions and other buffers that are not saved stay in float32; so do codes."""
    model = patch_model(make_model(architecture), mechanism)
    cast_as_loaded(model, torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.bfloat16)
    for named in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(loaded, named)()), dict(getattr(model, named)())
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
