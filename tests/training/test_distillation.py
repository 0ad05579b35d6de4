"""The teacher inside the student, adapters, top-k divergences, windows that are shut."""

from __future__ import annotations

import copy
import math
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from hf_linattn import OptionError, get_mechanisms, is_patched, patch_model
from hf_linattn.attention_call import interceptor_of
from hf_linattn.calibration import own_parameters
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.losses.distillation import HiddenStates, Teacher, distillation_loss
from hf_linattn.training.task import CAUSAL, task_of
from hf_linattn.training.trainers import RecoveryTrainer
from hf_linattn.training.window_dropout import WindowDropout
from tests.helpers import logits_of, make_tokens
from tests.models import ARCHITECTURES, SPINE, make_model
from tests.training.test_finetuning import make_data, make_training

each_family = pytest.mark.parametrize("name", SPINE)


def packed_rows(name: str) -> dict[str, torch.Tensor]:
    """Two documents in a row, which must not see each other."""
    first = 2 if name == "roberta" else 0
    positions = torch.cat([torch.arange(5), torch.arange(8)]) + first
    return {"input_ids": make_tokens(2, 13), "position_ids": positions.expand(2, -1)}


def disturb(adapted) -> None:
    """Move everything that training would move."""
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


@each_family
def test_the_students_own_weights_are_the_teacher_and_stored_once(name):
    original = make_model(name, std=0.3)
    exact = patch_model(copy.deepcopy(original), "softmax").eval()
    pointers = {p.data_ptr() for p in original.parameters()}
    adapted = add_adapters(patch_model(original, "hybrid", window_size=4), rank=2)
    disturb(adapted)
    adapted.train()
    inputs = {**packed_rows(name), "labels": make_tokens(2, 13)}
    example = Teacher(kl_weight=1.0).outputs(adapted, inputs)
    torch.testing.assert_close(example.logits, exact(**packed_rows(name)).logits)
    assert not torch.allclose(logits_of(adapted, **{"ids": inputs["input_ids"]}), example.logits)
    # one copy: whatever is neither an adapter nor of a mechanism lies where the original's weights lay
    own = {p.data_ptr() for several in own_parameters(get_mechanisms(adapted)).values() for p in several}
    rest = {key: p for key, p in adapted.named_parameters() if not p.requires_grad and "hf_linattn" not in key}
    assert {p.data_ptr() for p in rest.values()} == pointers and not own & pointers
    assert adapted.training and all(m.training for m in get_mechanisms(adapted).values())
    assert all(interceptor_of(m) is None for m in get_mechanisms(adapted).values())


@pytest.mark.parametrize("name", ["bert", "llama", pytest.param("gpt2", marks=pytest.mark.exhaustive)])
def test_training_with_the_teacher_inside_moves_adapters_and_mechanisms_towards_it(tmp_path, name):
    original = make_model(name, std=0.3)
    data = make_data(original)
    adapted = add_adapters(patch_model(copy.deepcopy(original), "hedgehog"), rank=4)
    before = {key: x.clone() for key, x in adapted.state_dict().items()}
    teacher = Teacher(kl_weight=1.0, ce_weight=0.0)
    rows = [data.validation[i] for i in range(4)]
    batch = data.evaluation_collator(rows)

    def divergence() -> float:
        with torch.no_grad():
            example = teacher.outputs(adapted, batch)
            output = adapted.eval()(**{k: v for k, v in batch.items() if k != "labels"})
        return float(distillation_loss(output, example, batch["labels"], teacher, task_of(adapted))[0])

    first = divergence()
    training = make_training(
        tmp_path, learning_rate=1e-2, max_steps=40, save_strategy="no", remove_unused_columns=False
    )
    RecoveryTrainer(adapted, training, data, teacher).train()
    assert divergence() < 0.8 * first
    for key, x in adapted.state_dict().items():
        trained = "lora_" in key or ".modules_to_save." in key
        assert torch.equal(x, before[key]) != trained or not x.is_floating_point(), key


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_are_on_the_projections_of_queries_keys_values_and_outputs(name):
    adapted = add_adapters(patch_model(make_model(name), "performer"), rank=2, seed=3)
    trained = {key for key, p in adapted.named_parameters() if p.requires_grad}
    count = 2 * len({key.split(".lora_")[0] for key in trained})
    assert len(trained) == count and count in {8, 16}  # in two layers fused projections, or four of their own
    again = add_adapters(patch_model(make_model(name), "performer"), rank=2, seed=3)
    for (key, got), (_, want) in zip(adapted.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(got, want), key
    assert is_patched(adapted.merge_and_unload())
    frozen = add_adapters(patch_model(make_model(name), "hedgehog"), rank=2, train_mechanisms=False)
    assert not any(p.requires_grad for m in get_mechanisms(frozen).values() for p in m.parameters())


def test_a_student_without_adapters_needs_a_teacher_of_its_own():
    with pytest.raises(OptionError, match="has no adapters to switch off"):
        Teacher(kl_weight=1.0).outputs(patch_model(make_model("gpt2"), "linear"), {"input_ids": make_tokens(1, 5)})


def test_the_divergence_of_the_likeliest_tokens_is_that_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    student, example = (SimpleNamespace(logits=3 * torch.randn(2, 5, 9, generator=generator)) for _ in range(2))
    labels = torch.tensor([[-100, 3, -100, 2, 1], [4, -100, -100, -100, 6]])
    temperature, top_k, total = 2.0, 3, []
    for row, target in (labels[:, 1:] >= 0).nonzero().tolist():
        p, q = ((out.logits[row, target].double() / temperature).softmax(-1) for out in (example, student))
        chosen = sorted(range(9), key=lambda v: -p[v])[:top_k]
        pairs = [(p[v], q[v]) for v in chosen]
        pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
        total.append(sum(float(a) * math.log(a / b) for a, b in pairs))
    teacher = Teacher(None, 2.0, temperature=temperature, top_k=top_k)
    loss, _ = distillation_loss(student, example, labels, teacher, CAUSAL)
    assert float(loss) == pytest.approx(2.0 * temperature**2 * sum(total) / len(total), rel=1e-4)
    whole, _ = distillation_loss(student, example, labels, Teacher(None, 2.0, temperature=temperature), CAUSAL)
    assert float(loss) < float(whole)  # merging outcomes loses information


def test_a_shut_window_leaves_the_own_key_and_the_sinks_in_training_alone():
    options = {"window_size": 6, "num_sink_tokens": 1}
    model, ids = patch_model(make_model("gpt2"), "hybrid", **options).eval(), make_tokens(2, 11)
    narrow = patch_model(make_model("gpt2"), "hybrid", **{**options, "window_size": 1}).eval()
    narrow.load_state_dict(model.state_dict())
    open_logits = logits_of(model, ids)
    for mechanism in get_mechanisms(model).values():
        mechanism.window_shut = True
    assert torch.equal(logits_of(model, ids), open_logits), "evaluation is not touched"
    with torch.no_grad():
        torch.testing.assert_close(model.train()(ids).logits, narrow.train()(ids).logits)


def test_windows_are_shut_less_and_less_often_and_alike_after_a_resumption():
    model = patch_model(make_model("gpt2"), "hybrid")
    schedule = WindowDropout(model, 0.8, seed=5)

    def shut(step: int) -> list[bool]:
        schedule.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=400), None)
        return [m.window_shut for m in get_mechanisms(model).values()]

    steps = [shut(step) for step in range(400)]
    early, late = (sum(map(sum, part)) / 200 for part in (steps[:100], steps[300:]))
    assert early == pytest.approx(0.7, abs=0.1) and late == pytest.approx(0.1, abs=0.06)
    assert [shut(step) for step in range(200, 210)] == steps[200:210]
    assert any(a != b for a, b in steps), "each layer is drawn for itself"
    schedule.on_train_end(None, None, None)
    assert not any(m.window_shut for m in get_mechanisms(model).values())
    with pytest.raises(OptionError, match=r"window_dropout=0\.5: the model has no hybrid mechanism"):
        WindowDropout(patch_model(make_model("gpt2"), "linear"), 0.5)


def test_windows_of_single_heads_are_shut_too():
    model = patch_model(make_model("gpt2"), {"hybrid": {"heads": 1}})
    WindowDropout(model, 1.0).on_step_begin(None, SimpleNamespace(global_step=0, max_steps=4), None)
    assert all(m.members["hybrid"].window_shut for m in get_mechanisms(model).values())


def test_hidden_states_are_compared_token_by_token_and_layer_by_layer():
    student, teacher = (make_model("bert", std=0.3).bert for _ in range(2))
    patch_model(student, "linear")
    module = HiddenStates(student.train(), teacher.train())
    ids, mask = make_tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    loss = module(ids, mask, labels=ids)["loss"]
    with torch.no_grad():
        got, want = (m.eval()(ids, mask, output_hidden_states=True).hidden_states[1:] for m in (student, teacher))
    rows = [
        fmean(float(((g[b, i] - w[b, i]) ** 2).sum() / (w[b, i] ** 2).sum()) for i in range(length))
        for g, w in zip(got, want, strict=True)
        for b, length in enumerate(mask.sum(1).tolist())
    ]
    assert float(loss) == pytest.approx(fmean(rows), rel=1e-5), "rows count alike, however long"
    loss.backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert {id(p) for p in module.parameters()} == {id(p) for p in student.parameters()}
