"""What makes a training cheaper changes no loss: shared layers, kept logits; and what it says of speed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from hf_linattn import patch_model
from hf_linattn.errors import OptionError
from hf_linattn.report import Report
from hf_linattn.training import speed
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.losses.kept_logits import KeptLogits
from hf_linattn.training.losses.shared_layers import shared_layers
from hf_linattn.training.trainers import RecoveryTrainer
from tests.models import make_model
from tests.recipes.test_distill import flags, run
from tests.recipes.test_finetune import material, recorded
from tests.training.test_finetuning import make_data, make_training

__all__ = ["material"]


def trainer_of(tmp_path, teacher: Teacher, layers: str = "1", original=None, **options) -> RecoveryTrainer:
    """A trainer of adapters on a Llama with two layers, in a step."""
    original = make_model("llama", std=0.3) if original is None else original
    model = patch_model(original, "hedgehog", layers=layers)
    model = add_adapters(model, rank=2, target_modules=[f"layers.{layers}.self_attn.{x}_proj" for x in "qkvo"])
    training = make_training(tmp_path, remove_unused_columns=False, **options)
    trainer = RecoveryTrainer(model, training, make_data(model), teacher)
    trainer.state = TrainerState(max_steps=4)
    return trainer


def step(trainer: RecoveryTrainer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a batch, and its gradients."""
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    loss = trainer.compute_loss(trainer.model.train(), batch)
    trainer.model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(first, second) -> None:
    assert torch.equal(first[0], second[0]) and first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], x) for name, x in second[1].items())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("own", [False, True], ids=["itself", "another"])
def test_layers_that_both_have_are_run_once_for_the_same_loss(tmp_path, own, checkpointing):
    original = make_model("llama", std=0.3)
    teacher = Teacher(patch_model(copy.deepcopy(original), "softmax") if own else None, kl_weight=1.0)
    trainer = trainer_of(tmp_path, teacher, original=original, gradient_checkpointing=checkpointing)
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    for model in filter(None, (trainer.model.get_base_model(), teacher.model)):
        model.model.layers[0].mlp.register_forward_hook(lambda *_: runs.append(1))
    once = step(trainer)
    assert len(runs) == 1
    trainer._shared, shared = None, trainer._shared
    assert_same(once, step(trainer))
    assert len(runs) == 3 and len(shared.own) == 1
    assert "forward" not in vars(shared.own[0]), "as it was"


def test_no_layers_are_shared_where_one_may_differ(tmp_path):
    teacher = Teacher(None, kl_weight=1.0)
    assert trainer_of(tmp_path, teacher)._shared is not None
    assert trainer_of(tmp_path, teacher, layers="0")._shared is None, "the first one is converted"
    assert trainer_of(tmp_path, Teacher(None, kl_weight=1.0, hidden_weight=1.0))._shared is None
    assert trainer_of(tmp_path, teacher, neftune_noise_alpha=5.0)._shared is None
    assert trainer_of(tmp_path, teacher, original=make_model("llama", attention_dropout=0.1))._shared is None
    other = Teacher(patch_model(make_model("llama", std=0.3, seed=1), "softmax"), kl_weight=1.0)
    assert trainer_of(tmp_path, other)._shared is None, "other weights"
    adapted = add_adapters(patch_model(make_model("llama", std=0.3), "hedgehog", layers="1"), rank=2)
    assert shared_layers(adapted, None) is None, "adapters on all layers"
    trained = trainer_of(tmp_path, teacher)
    trained.model.get_base_model().model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    assert RecoveryTrainer(trained.model, trained.args, make_data(trained.model), teacher)._shared is None


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "ce_weight": 0.0}], ids=["plain", "warm"])
def test_kept_logits_give_the_loss_of_the_teacher_who_runs_once(tmp_path, options):
    kept = KeptLogits(tmp_path / "kept", 5)
    plain, keeping = (
        trainer_of(tmp_path, Teacher(None, kl_weight=1.0, top_k=5, kept=store, **options)) for store in (None, kept)
    )
    expected, first = step(plain), step(keeping)
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-9)
    object.__setattr__(keeping.teacher, "outputs", lambda *_: pytest.fail("the teacher runs again"))
    assert_same(first, step(keeping))
    again = KeptLogits(tmp_path / "kept", 5, process=1)  # which reads what others wrote
    object.__setattr__(keeping.teacher, "kept", again)
    assert_same(first, step(keeping))


def test_a_row_that_was_cut_short_is_not_found_and_written_over(tmp_path):
    rows = {"input_ids": torch.arange(12).view(3, 4)}
    tokens, logs = torch.arange(24).view(3, 4, 2), torch.randn(3, 4, 2)
    KeptLogits(tmp_path, 2).keep(rows, tokens, logs)
    (file,) = tmp_path.iterdir()
    kept = KeptLogits(tmp_path, 2)
    assert file.stat().st_size == 3 * kept.row_bytes(4)
    with open(file, "r+b") as content:
        content.truncate(3 * kept.row_bytes(4) - 7)
    assert kept.find(rows) is None
    kept.keep({"input_ids": rows["input_ids"].flip(0)}, tokens.flip(0), logs.flip(0))
    assert file.stat().st_size == 3 * kept.row_bytes(4)
    found = KeptLogits(tmp_path, 2).find({"input_ids": rows["input_ids"][[2, 0]]})
    assert torch.equal(found[0], tokens[[2, 0]]) and torch.equal(found[1], logs[[2, 0]])
    shifted = {**rows, "position_ids": torch.ones(3, 4, dtype=torch.int64)}
    assert kept.find(shifted) is None, "other positions are other rows"


def test_a_recipe_keeps_logits_and_says_so(material, tmp_path):
    short = {"control": "none", "calibration_tokens": 0, "transfer_tokens": 0, "max_train_tokens": 1792, "top_k": 4}
    plain, kept = (
        run(flags(material, tmp_path / str(keeps), keep_logits=keeps, **short)) for keeps in (False, True)
    )
    assert kept.perplexity.recovered == pytest.approx(plain.perplexity.recovered, rel=1e-5)
    assert kept.training.teaching["keep_logits"] is True and "keep_logits" not in plain.training.teaching
    assert not (tmp_path / "True" / "stages" / "teacher_logits").exists()
    stage = Report.load(tmp_path / "True").stages[-1]
    assert stage.tokens_per_second == recorded(tmp_path / "True", "recovered_training")["tokens_per_second"] > 0
    assert 0 < stage.matrix_share and "of matrix rate" in (tmp_path / "True" / "report.md").read_text()
    with pytest.raises(OptionError, match="keep_logits=True: top_k=1000 is the whole vocabulary; leave it out"):
        run(flags(material, tmp_path / "out", keep_logits=True, **{**short, "top_k": 1000}))
    with pytest.raises(OptionError, match="keep_logits must be False without top_k, got True"):
        run(flags(material, tmp_path / "out", keep_logits=True, **{**short, "top_k": None}))


def test_the_speed_is_that_of_the_steps_and_the_share_that_of_their_products(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now) / 2)  # half a second between two looks
    monkeypatch.setattr(speed, "matrix_rate", lambda device, dtype: 10_000.0)
    batch = {"train_batch_size": 3, "gradient_accumulation_steps": 2, "world_size": 2}
    args = SimpleNamespace(**batch, device=torch.device("cpu"), torch_compile=False)
    watch = speed.Speed(16, torch.float32)
    watch.on_train_begin(args, None, None)
    for _ in range(5):
        watch.on_step_begin(args, None, None)
        torch.ones(5, 7) @ torch.ones(7, 9)
        watch.on_step_end(args, None, None)
    share = 2 * 5 * 7 * 9 / 0.5 / 10_000
    assert watch.result(args) == {"tokens_per_second": 3 * 2 * 2 * 16 / 0.5, "matrix_share": share}
    assert speed.Speed(16, torch.float32).result(args) == {}


def test_the_rate_of_a_machine_is_measured():
    assert 1e8 < speed.matrix_rate("cpu", torch.float32) < 1e16
