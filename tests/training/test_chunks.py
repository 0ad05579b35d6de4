"""Losses by chunks of positions: the same numbers as with all logits at once, without having them all."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM

from hf_linattn import chunked_sums, patch_model
from hf_linattn.chunked_sums import sum_by_chunks
from hf_linattn.support.tiny import tiny_inputs, tiny_model
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.finetuning import validation_loss
from hf_linattn.training.losses.chunks import cast_once, cross_entropy_by_chunks, replaced_head, separate_head
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.task import task_of
from hf_linattn.training.trainers import RecoveryTrainer
from tests.models import make_model
from tests.training.test_finetuning import make_data, make_training


class Largest(TorchDispatchMode):
    """Watches how many elements the largest tensor has that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
        return result


def full_loss(model, teacher: Teacher, batch: dict, smoothing: float = 0.0) -> torch.Tensor:
    """The loss of a step, with all logits, by its definition."""
    task, labels = task_of(model), batch["labels"]
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    chosen = task.predicted(labels) != -100
    with torch.no_grad():
        want = task.predicting(teacher.outputs(model, inputs).logits)[chosen] / teacher.temperature
    got = task.predicting(model(**inputs).logits)[chosen]
    loss = teacher.ce_weight * cross_entropy(got, task.predicted(labels)[chosen], label_smoothing=smoothing)
    p, q = want.softmax(-1), (got / teacher.temperature).softmax(-1)
    return loss + teacher.kl_weight * teacher.temperature**2 * (p * (p / q).log()).sum(-1).mean()


@pytest.mark.covering(1)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_loss_and_gradient_of_a_step_are_those_of_all_logits_at_once(tmp_path, monkeypatch, architecture, lora):
    original = make_model(architecture, std=0.3).double()
    data = make_data(original)
    teacher = None if lora else patch_model(copy.deepcopy(original), "softmax")
    model = patch_model(original, "hedgehog")
    model = add_adapters(model, rank=2) if lora else model
    options = {"save_strategy": "no", "remove_unused_columns": False, "label_smoothing_factor": 0.1}
    training = make_training(tmp_path, **options)
    taught = Teacher(teacher, kl_weight=0.7, ce_weight=0.3, temperature=2.0)
    trainer = RecoveryTrainer(model, training, data, taught)
    assert trainer._head is not None
    monkeypatch.setattr(chunked_sums, "ELEMENTS", 7 * model.config.vocab_size)
    model.train()
    batch = data.evaluation_collator([data.validation[i] for i in range(3)])
    trainer.state.max_steps = 10
    loss = trainer.compute_loss(model, dict(batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = full_loss(model, taught, batch, smoothing=0.1)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.fixture(scope="module")
def wide():
    """A model whose logits are larger than all else, by its tokens, its teacher and its data."""
    original = make_model("llama", std=0.3)
    data = make_data(original)
    original.resize_token_embeddings(20_000, mean_resizing=False)
    return patch_model(copy.deepcopy(original), "linear"), patch_model(original, "softmax"), data


@pytest.mark.parametrize("what", ["taught", "alone", "evaluated", "validated"])
def test_no_tensor_of_a_step_or_a_validation_is_as_large_as_its_logits(tmp_path, monkeypatch, wide, what):
    model, teacher, data = wide
    training = make_training(tmp_path, save_strategy="no", remove_unused_columns=False, prediction_loss_only=True)
    taught = Teacher(teacher, kl_weight=1) if what == "taught" else None
    trainer = RecoveryTrainer(model.train(), training, data, taught)
    batch = data.collator([data.train[i] for i in range(8)])
    held_out = data.evaluation_collator([data.validation[i] for i in range(8)])
    trainer.state.max_steps = 10
    run = {
        "evaluated": lambda: trainer.prediction_step(model.eval(), dict(held_out), True)[0],
        "validated": lambda: validation_loss(model, data, 8),
    }.get(what, lambda: trainer.compute_loss(model, dict(batch)).backward())
    logits, sizes, losses = batch["labels"].numel() * 20_000, {}, []
    for elements in (logits // 20, 2 * logits):
        monkeypatch.setattr(chunked_sums, "ELEMENTS", elements)
        with Largest() as made:
            losses.append(run())
        sizes[elements] = made.size
    assert sizes[logits // 20] < logits / 3 and sizes[2 * logits] > 0.8 * logits
    if what == "evaluated":
        loss = model(**held_out).loss.item()
        assert losses[0].item() == pytest.approx(loss, rel=1e-5) and losses[1].item() == pytest.approx(loss, rel=1e-5)
    if what == "validated":
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_parts_of_the_step_add_up_over_accumulated_batches(tmp_path):
    original = make_model("llama", std=0.3)
    data = make_data(original)
    teacher, model = patch_model(copy.deepcopy(original), "softmax"), patch_model(original, "linear").train()
    training = make_training(tmp_path, save_strategy="no", remove_unused_columns=False, gradient_accumulation_steps=2)
    trainer = RecoveryTrainer(model, training, data, Teacher(teacher, kl_weight=0.5))
    trainer.state.max_steps = 10
    parts = [data.collator([data.train[i] for i in rows]) for rows in (range(2), range(2, 7))]
    count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    total = sum(trainer.compute_loss(model, dict(part), num_items_in_batch=count).item() for part in parts)
    whole = data.collator([data.train[i] for i in range(7)])
    assert total == pytest.approx(full_loss(model, trainer.teacher, whole).item(), rel=1e-5)

    trainer.model_accepts_loss_kwargs, trainer._mean_rows = False, 3.5  # the mean of batches' means, each by its rows
    for part, rows in zip(parts, (2, 5), strict=True):
        wanted = full_loss(model, trainer.teacher, part).item() * rows / 3.5
        loss = trainer.compute_loss(model, dict(part), num_items_in_batch=count).item()
        assert loss == pytest.approx(wanted, rel=1e-5)


def test_a_head_is_separate_only_where_nothing_follows_it():
    model = make_model("llama", std=0.3)
    assert separate_head(model) is model.lm_head
    head = model.lm_head
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    for scaling, follows in ((1.0, False), (3.0, True), (8.0, True), (0.0625, True)):  # powers of two round nothing
        scaled = GraniteForCausalLM(GraniteConfig(**sizes, num_key_value_heads=2, logits_scaling=scaling))
        assert (separate_head(scaled) is None) == follows
    with pytest.raises(ZeroDivisionError), replaced_head(model, lambda states: 1 / 0):
        model(torch.tensor([[1, 2]]))
    assert "forward" not in head.__dict__


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["bert", "cohere", "esm", "gemma2", "gpt2", "mobilebert"])
def test_a_loss_by_chunks_is_the_models_own_or_not_asked_for(model_type):
    """Of models that scale logits, cap them, add a bias, or use the weight of a projection that they never call."""
    model = tiny_model(model_type)
    ids = tiny_inputs(model)["input_ids"]
    head = separate_head(model)
    assert (head is not None) == (model_type in ("bert", "gpt2"))
    if head is not None:
        total, count = cross_entropy_by_chunks(model, head, {"input_ids": ids, "labels": ids})
        torch.testing.assert_close(total.logits / count, model(input_ids=ids, labels=ids).loss)


def test_a_sum_by_chunks_has_the_gradient_of_rows_and_parameters_and_no_other():
    rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
    given = SimpleNamespace(targets=torch.randn(7, dtype=torch.float64))

    def squared(chunk, targets):
        return (chunk @ weight - targets).square().sum()

    total = 3 * sum_by_chunks(squared, 2, rows, given.targets, parameters=[weight])
    torch.testing.assert_close(total, 3 * squared(rows, given.targets))
    for got, want in zip(
        torch.autograd.grad(total, [rows, weight]),
        torch.autograd.grad(3 * squared(rows, given.targets), [rows, weight]),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert not sum_by_chunks(squared, 2, rows, given.targets).requires_grad


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of one shape."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_projection_is_cast_once_under_autocast(bias: bool):
    head = nn.Linear(8, 30, bias=bias).requires_grad_(False)
    states, labels = torch.randn(7, 8, requires_grad=True), torch.arange(7)

    def loss(project):
        def of_chunk(rows, wanted):
            return cross_entropy(project(rows).float(), wanted, reduction="sum")

        total = sum_by_chunks(of_chunk, 2, states, labels)
        return total, torch.autograd.grad(total, states)[0]

    with torch.autocast("cpu", torch.bfloat16):
        expected = loss(head.forward)
        with Casts(head.weight.shape) as casts:
            found = loss(cast_once(head.forward))
    assert casts.count == 1 and all(map(torch.equal, found, expected))
    assert cast_once(head.forward) == head.forward  # outside autocast
    with torch.autocast("cpu", torch.bfloat16):
        trained = nn.Linear(8, 30, bias=bias)
        assert cast_once(trained.forward) == trained.forward
        assert cast_once(torch.relu) is torch.relu
