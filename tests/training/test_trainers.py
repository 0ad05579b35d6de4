"""The losses of distillation against loops, and what a teacher changes and what it does not."""

from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import trainer

from hf_linattn import patch_model
from hf_linattn.errors import OptionError
from hf_linattn.training.finetuning import fine_tune
from hf_linattn.training.losses.distillation import Teacher, distillation_loss
from hf_linattn.training.stages.training import TrainingPlan
from hf_linattn.training.task import CAUSAL, MASKED
from hf_linattn.training.trainers import RecoveryTrainer
from tests.models import make_model
from tests.training.test_finetuning import make_data, make_training


@pytest.mark.parametrize("masked", [False, True])
def test_the_losses_are_those_of_a_loop_over_tokens(masked):
    student, example = (
        SimpleNamespace(
            logits=torch.randn(2, 5, 7, dtype=torch.float64),
            hidden_states=[torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(4)],
        )
        for _ in range(2)
    )
    labels = torch.tensor([[-100, 3, -100, 2, 1], [4, -100, -100, -100, 6]])
    divergences = []
    for row in range(2):
        for target in range(5):
            source = target if masked else target - 1
            if labels[row, target] >= 0 and source >= 0:
                p, q = (out.logits[row, source].softmax(-1) for out in (example, student))
                divergences.append(sum(p[v] * math.log(p[v] / q[v]) for v in range(7)))
    kl = sum(divergences) / len(divergences)
    hidden = 0.0
    for layer in (1, 2, 3):  # the embeddings are no layer's output
        got, want = student.hidden_states[layer], example.hidden_states[layer]
        tokens = zip(got.flatten(0, 1), want.flatten(0, 1), strict=True)
        ratios = [((g - w) ** 2).sum() / (w**2).sum() for g, w in tokens]
        hidden += float(sum(ratios) / len(ratios)) / 3
    for weights, expected in (((1.0, 0.0), kl), ((0.0, 1.0), hidden), ((2.0, 0.5), 2 * kl + 0.5 * hidden)):
        loss = sum(distillation_loss(student, example, labels, Teacher(None, *weights), MASKED if masked else CAUSAL))
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_an_equal_student_has_nothing_to_learn_and_a_batch_without_targets_is_no_error():
    out = SimpleNamespace(logits=torch.randn(1, 4, 5), hidden_states=[torch.randn(1, 4, 3) for _ in range(2)])
    labels = torch.full((1, 4), -100)
    assert sum(distillation_loss(out, out, labels, Teacher(None, 1.0, 1.0), MASKED)) == 0
    learnt = sum(distillation_loss(out, out, labels.fill_(1), Teacher(None, 1.0, 1.0), MASKED))
    assert float(learnt) == pytest.approx(0)


@pytest.mark.parametrize("architecture", ["bert", "llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_a_taught_model_comes_closer_to_its_teacher_which_stays_as_it_is(tmp_path, architecture):
    original = make_model(architecture, std=0.3)
    teacher = patch_model(copy.deepcopy(original), "softmax")
    before = {name: x.clone() for name, x in teacher.state_dict().items()}
    distances = {}
    for hidden_weight in (0.0, 30.0):
        model = patch_model(copy.deepcopy(original), "linear")
        data = make_data(model)
        training = make_training(
            tmp_path, learning_rate=2e-3, max_steps=12, save_strategy="no", remove_unused_columns=False
        )
        taught = Teacher(teacher, hidden_weight=hidden_weight) if hidden_weight else None
        trainer = RecoveryTrainer(model, training, data, taught)
        trainer.train()
        batch = data.evaluation_collator([data.validation[i] for i in range(4)])
        del batch["labels"]
        with torch.no_grad():
            got, want = (m.eval()(**batch, output_hidden_states=True).hidden_states[-1] for m in (model, teacher))
        distances[hidden_weight] = float((got - want).square().mean() / want.square().mean())
    assert distances[30.0] < 0.7 * distances[0.0]
    assert all(torch.equal(before[name], x) for name, x in teacher.state_dict().items())
    # the validation loss is the text's cross-entropy alone, so that it compares with that of the control
    alone = RecoveryTrainer(model, training, data)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])  # the first takes the mean over a batch by itself
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_without_a_masked_token_teaches_nothing(tmp_path, architecture, whole):
    model, other = (patch_model(make_model(architecture), "softmax") for _ in range(2))
    data = make_data(model)
    batch = data.collator([data.train[i] for i in range(2)])
    batch["labels"].fill_(-100)
    for smoothing, teacher in ((0.0, None), (0.1, None), (0.0, Teacher(other, kl_weight=1.0))):
        training = make_training(tmp_path, label_smoothing_factor=smoothing, remove_unused_columns=False)
        trainer = RecoveryTrainer(model.train(), training, data, teacher)
        trainer.state.max_steps = trainer.current_gradient_accumulation_steps = 1
        trainer._head = None if whole else trainer._head
        for counted in (torch.tensor(0), None):
            loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=counted)
            loss.backward()
            assert float(loss.detach()) == 0
            assert not any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


def test_a_fading_teacher_counts_less_and_less(tmp_path):
    model, teacher = (patch_model(make_model("gpt2", std=0.3), name) for name in ("linear", "softmax"))
    data = make_data(model)
    batch = data.collator([data.train[i] for i in range(4)])
    extras = {}
    for fading in (False, True):
        training = make_training(tmp_path, max_steps=10, save_strategy="no", remove_unused_columns=False)
        taught = Teacher(teacher, kl_weight=0.7, hidden_weight=0.3, fading=fading)
        trainer = RecoveryTrainer(model.train(), training, data, taught)
        trainer.state.max_steps = 10
        for step in (0, 4, 10):
            trainer.state.global_step = step
            plain = float(model(**batch, use_cache=False).loss)
            extras[fading, step] = float(trainer.compute_loss(model, dict(batch))) - plain
    assert extras[False, 0] == pytest.approx(extras[False, 10], rel=1e-4) and extras[False, 0] > 0
    for step, share in ((0, 1.0), (4, 0.6), (10, 0.0)):
        assert extras[True, step] == pytest.approx(share * extras[False, 0], rel=1e-3, abs=1e-5)


def test_a_teacher_of_another_vocabulary_is_refused_by_name(tmp_path):
    model, other = patch_model(make_model("llama"), "linear"), make_model("llama", vocab_size=80)
    with pytest.raises(OptionError, match=r"teacher: LlamaForCausalLM predicts 80 tokens \(vocab_size\), and the "):
        RecoveryTrainer(model, make_training(tmp_path), make_data(model), Teacher(other, kl_weight=1.0))


def test_a_training_shows_one_bar_and_does_not_warn_of_a_tied_head(tmp_path, capsys, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(trainer.logger, "warning", said.append)
    model = patch_model(make_model("llama", tie_word_embeddings=True), "linear")
    data = make_data(model)
    capsys.readouterr()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "max_steps": 4}
    options |= {"learning_rate": 1e-3, "remove_unused_columns": False, "load_best_model_at_end": True}
    RecoveryTrainer(model, make_training(tmp_path, disable_tqdm=False, **options), data).train()
    shown = "".join(capsys.readouterr())
    assert set(re.findall(r"\d+/(\d+) ", shown)) == {"4"} and "{" not in shown
    assert not [text for text in said if "keys" in text]


@pytest.mark.parametrize("drops", [False, True])
def test_the_tokens_of_a_training_are_those_that_the_model_reads(tmp_path, drops):
    """Of 24 rows, five to a batch and two batches to a step, a step at the end of an epoch has four, or none."""
    model, read = make_model("gpt2"), []
    options = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "dataloader_drop_last": drops}
    training, data = make_training(tmp_path, eval_strategy="no", save_strategy="no", **options), make_data(model)
    training.load_best_model_at_end = False

    def count(module, arguments, inputs):
        read.extend([inputs["input_ids"].numel()] * module.training)

    model.register_forward_pre_hook(count, with_kwargs=True)
    for steps in (2, 3, 4):
        read.clear()
        fine_tune(model, data, training, tmp_path / f"{steps}", learning_rate=1e-3, max_steps=steps)
        assert TrainingPlan(data, training, [1e-3], steps).tokens(steps) == sum(read)
    assert len(data.train) == 24 and sum(read) == (40 if drops else 34) * 16
