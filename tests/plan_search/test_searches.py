"""Searches for the heads that matter: against differences of gates, patched models and a head that is known."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from hf_linattn import choose_plan, chunked_sums, get_mechanisms, patch_model
from hf_linattn.config import make_config
from hf_linattn.errors import OptionError
from hf_linattn.plan_search import SEARCHES
from hf_linattn.plan_search.divergence_signal import DivergenceSignal
from hf_linattn.plan_search.gates import gated
from hf_linattn.plan_search.joint_signal import JointSignal
from hf_linattn.plan_search.options import SearchOptions
from hf_linattn.plan_search.recall_signal import RecallSignal
from hf_linattn.plan_search.slope import slope, slopes_at
from tests.helpers import assert_close, logits_of, make_tokens, pad
from tests.models import VOCAB_SIZE, make_model
from tests.plan_search.retriever import FOUND, WINDOW, make_prompts, make_retriever

SHORT = make_config("streaming", {"window_size": 3, "num_sink_tokens": 1, "block_size": 4})
OPTIONS = SearchOptions()


def make_wide(name: str) -> PreTrainedModel:
    """Return a model of float64 throughout; transformers computes root mean squares in float32."""
    model = make_model(name, std=0.3).double()
    for norm in (part for part in model.modules() if type(part).__name__.endswith("RMSNorm")):
        eps, gain = getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), norm.weight + (name == "gemma2")
        norm.forward = lambda x, eps=eps, gain=gain: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
    return model


def text(*lengths: int) -> dict[str, torch.Tensor]:
    ids, mask = pad([make_tokens(1, n, seed=n)[0] for n in lengths], 0, side="right")
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def random_prompts() -> list[SimpleNamespace]:
    rows = [make_tokens(1, n, seed=n)[0].tolist() for n in (13, 17)]
    return [SimpleNamespace(task="any", length=len(r), prompt_ids=r[:-3], answer_ids=r[-3:]) for r in rows]


def difference(gates, signal, example, at: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """Return the derivative of a signal by each gate, from forwards alone."""
    moves = step * torch.eye(len(at), dtype=at.dtype)
    with torch.no_grad():
        return torch.stack([
            (signal.value(gates, at + move, example) - signal.value(gates, at - move, example)) / (2 * step)
            for move in moves
        ])  # fmt: skip


def test_layers_beyond_what_may_be_kept_are_made_again_for_the_same_slopes(monkeypatch):
    """As many layers as there is room for run once, the others twice, the first of them last."""
    model, signal, runs = make_model("llama", num_hidden_layers=4), RecallSignal(random_prompts()[:1]), []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    found = {}
    with gated(model, SHORT, "head") as gates:
        for room, again in {10**9: [], 1: [3, 2, 1], 0: [3, 2, 1, 0]}.items():
            monkeypatch.setattr("hf_linattn.plan_search.gates.KEPT_BYTES", room)
            runs.clear()
            found[room] = slopes_at(gates, signal, torch.full_like(gates.values, 0.5), OPTIONS)
            assert runs == [0, 1, 2, 3, *again]
    assert found[0].any() and all(torch.equal(slopes, found[0]) for slopes in found.values())


@pytest.mark.parametrize("unit", ["head", "layer"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_slopes_of_recall_are_the_differences_of_gates(name, unit):
    model, signal = make_wide(name), RecallSignal(random_prompts())
    with gated(model, SHORT, unit) as gates:
        found = slopes_at(gates, signal, torch.zeros_like(gates.values), OPTIONS)
        for row, prompt in zip(found, signal.examples, strict=True):
            assert_close(row, difference(gates, signal, prompt, torch.zeros_like(gates.values)), 1e-6)
    assert found.abs().min() > 1e-4


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_slopes_of_divergence_are_the_differences_of_gates_and_pads_do_not_count(name, monkeypatch):
    monkeypatch.setattr(chunked_sums, "ELEMENTS", 5 * VOCAB_SIZE)
    model, signal = make_wide(name), DivergenceSignal([text(14, 9), text(11)])
    with gated(model, SHORT, "head") as gates:
        shut = torch.zeros_like(gates.values)
        found = slopes_at(gates, signal, shut, OPTIONS)
        for row, batch in zip(found, signal.examples, strict=True):
            assert_close(row, difference(gates, signal, batch, torch.zeros_like(gates.values)), 1e-6)
        filled = {**signal.examples[0], "input_ids": signal.examples[0]["input_ids"].clone()}
        filled["input_ids"][1, 9:] = 7
        assert_close(slopes_at(gates, DivergenceSignal([filled]), shut, OPTIONS)[0], found[0], 1e-9)


@pytest.mark.parametrize("elements", [5 * VOCAB_SIZE, 10**9])
def test_divergence_is_the_mean_over_real_tokens(elements, monkeypatch):
    monkeypatch.setattr(chunked_sums, "ELEMENTS", elements)
    model, batch = make_wide("llama"), text(14, 9)
    with gated(model, SHORT, "head") as gates, torch.no_grad():
        at = torch.linspace(0, 1, len(gates), dtype=torch.float64)
        got, want = (x.logits.log_softmax(-1) for x in (gates.run(at, batch), gates.run_original(batch)))
        divergence = (want.exp() * (want - got)).sum(-1)
        mean = (divergence[0].sum() + divergence[1, :9].sum()) / 23
        assert mean > 1e-4 and got.shape[-1] == VOCAB_SIZE
        assert_close(DivergenceSignal([batch]).value(gates, at, batch), -mean, 1e-12)


def test_gradients_between_open_and_shut_are_the_differences_of_gates():
    model, signal = make_wide("llama"), RecallSignal(random_prompts())
    with gated(model, SHORT, "head") as gates:
        at = torch.linspace(0.1, 0.9, len(gates), dtype=torch.float64).requires_grad_()
        (found,) = torch.autograd.grad(signal.value(gates, at, signal.examples[0]), at)
        assert_close(found, difference(gates, signal, signal.examples[0], at.detach()), 1e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_gates_of_zero_and_one_are_the_models_that_these_plans_make(recorded):
    original, ids = make_model("llama", std=0.3), make_tokens(2, 13)
    options = {"window_size": 3, "num_sink_tokens": 1, "block_size": 4}
    plans = {
        (0.0, 0.0, 0.0, 0.0): {"streaming": options},
        (1.0, 0.0, 0.0, 0.0): [
            {"mechanism": "streaming", "layers": 0, "heads": 1, "options": options},
            {"mechanism": "streaming", "layers": 1, "options": options},
        ],
        (1.0, 1.0, 0.0, 1.0): [{"mechanism": "streaming", "layers": 1, "heads": 0, "options": options}],
    }
    wanted = {values: logits_of(patch_model(copy.deepcopy(original), plan), ids) for values, plan in plans.items()}
    wanted[1.0, 1.0, 1.0, 1.0] = logits_of(original, ids)
    with gated(original, SHORT, "head") as gates:
        for values, logits in wanted.items():
            given = torch.tensor(values, requires_grad=recorded)
            assert_close(gates.run(given, {"input_ids": ids}).logits, logits, 1e-5)
        assert_close(gates.run_original({"input_ids": ids}).logits, logits_of(make_model("llama", std=0.3), ids), 1e-5)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("unit", "signal"), [("head", "recall"), ("layer", "recall"), ("head", "both")])
def test_every_search_finds_the_head_that_recalls(search, unit, signal):
    options = {"search": search, "signal": signal, "prompts": make_prompts(), "steps": 8}
    texts = [{"input_ids": make_tokens(1, 40, seed=seed) % 30} for seed in range(3)]
    plan = choose_plan(make_retriever(), None, 1, unit=unit, replace=WINDOW, batches=texts, **options)
    layer, head = FOUND
    assert plan.record.kept == ([[layer, head]] if unit == "head" else [[layer, 0], [layer, 1]])
    scores = torch.tensor([score for row in plan.record.scores for score in row])
    assert scores.max() > 2 * scores.sort().values[-2].clamp(min=0)


def test_the_chosen_head_keeps_recall_and_all_others_lose_it():
    prompts = make_prompts()
    plan = choose_plan(make_retriever(), None, 1, replace=WINDOW, prompts=prompts)

    def likelihood(plan) -> float:
        model = patch_model(make_retriever(), plan)
        rows = [logits_of(model, torch.tensor([p.prompt_ids]))[0, -1].log_softmax(-1) for p in prompts]
        return min(float(row[p.answer_ids[0]]) for row, p in zip(rows, prompts, strict=True))

    other = [{**plan.record.replace, "layers": 0, "heads": 0}, {**plan.record.replace, "layers": 1}]
    assert likelihood(plan) > -0.3 and likelihood(other) < -1.5


def test_restore_one_and_one_at_a_time_are_what_forwards_say():
    model, prompts = make_retriever(), make_prompts()[:1]
    found = {
        name: torch.tensor(choose_plan(model, None, 1, replace=WINDOW, search=name, prompts=prompts).record.scores)
        for name in ("restore_one", "one_at_a_time")
    }
    config, signal = make_config("streaming", WINDOW["streaming"]), RecallSignal(prompts)
    with gated(model, config, "head") as gates, torch.no_grad():
        none, every, single = torch.zeros(4), torch.ones(4), torch.eye(4)
        value = [signal.value(gates, values, prompts[0]) for values in (none, every, *single, *(1 - single))]
    gains = {"restore_one": torch.stack(value[2:6]) - value[0], "one_at_a_time": value[1] - torch.stack(value[6:])}
    for name, gain in gains.items():
        assert_close(found[name].flatten(), gain / gain.norm(), 1e-5)


def test_rounds_measure_slopes_with_those_open_that_were_steepest():
    model, signal = make_wide("llama"), RecallSignal(random_prompts())
    with gated(model, SHORT, "head") as gates:
        shut = torch.zeros_like(gates.values)
        raw = slopes_at(gates, signal, shut, OPTIONS)
        lengths = raw.norm(dim=1, keepdim=True)
        first = (raw / lengths).mean(0)
        opened = shut.clone()
        opened[first.argmax()] = 1
        rest = slopes_at(gates, signal, opened, OPTIONS) / lengths  # one is "any 10", the other "any 14"
        second = rest.mean(0).masked_fill(opened > 0, float("-inf"))
        found = slope(gates, signal, SearchOptions(rounds=2), 2)
        assert found.topk(2).indices.tolist() == [int(first.argmax()), int(second.argmax())]
        assert_close(found[second.argmax()], second.max(), 1e-9)
        once = slope(gates, signal, SearchOptions(rounds=1), 2)
        assert_close(once, first, 1e-9)
        assert not torch.allclose(once[second.argmax()], found[second.argmax()], rtol=0.5)


def test_only_the_logits_of_the_answer_are_made():
    model, shapes = make_model("llama"), []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape[:2])))
    with gated(model, SHORT, "head") as gates:
        slopes_at(gates, RecallSignal(random_prompts()), torch.zeros_like(gates.values), OPTIONS)
    assert shapes == [(1, 3), (1, 3)]


def prompts_of(*tasks: str) -> RecallSignal:
    return RecallSignal([SimpleNamespace(task=task, length=1) for task in tasks])


def test_scores_are_averaged_by_group_whatever_their_size():
    signal, rows = prompts_of("a", "a", "b"), torch.tensor([[3.0, 4.0], [0.0, 100.0], [1e-3, 0.0]])
    assert_close(signal.mean(rows, signal.scales(rows)), torch.tensor([(0.3 + 1.0) / 2, 0.9 / 2]))
    signal, nothing = prompts_of("a"), torch.zeros(1, 2)
    assert_close(signal.mean(nothing, signal.scales(nothing)), torch.zeros(2))


def test_signals_count_alike_whatever_their_numbers_of_examples_and_how_far_these_agree():
    recall, loss = prompts_of("a", "b"), DivergenceSignal([text(9)])
    joint, rows = JointSignal([recall, loss]), torch.tensor([[2.0, 0.0], [0.0, -7.0], [0.0, 5.0]])
    assert joint.groups == ["a 1", "text", "b 1"], "mixed evenly"
    agreed, opposed = torch.tensor([1.0, 1.0]) / 2**0.5, torch.tensor([0.0, -1.0])
    assert_close(joint.mean(rows, joint.scales(rows)), (agreed + opposed) / 2)
    later = torch.tensor([[1.0, 0.0], [0.0, -7.0], [0.0, 2.5]])  # recall has half of its slopes left
    assert_close(joint.mean(later, joint.scales(rows)), (agreed / 2 + opposed) / 2)
    rows[1] = 0  # nothing moves the loss
    assert_close(joint.mean(rows, joint.scales(rows)), agreed / 2)
    with pytest.raises(OptionError, match=r"divergence of example 0 \(text\) must be finite"):
        joint.require_finite(1, torch.tensor([float("nan")]))


def test_a_head_that_is_open_for_one_signal_is_open_for_the_other():
    model, signals = make_wide("llama"), [RecallSignal(random_prompts()), DivergenceSignal([text(14), text(11)])]
    with gated(model, SHORT, "head") as gates:

        def slopes(opened: torch.Tensor) -> list[torch.Tensor]:
            return [slopes_at(gates, signal, opened, OPTIONS) for signal in signals]

        lengths = [rows.norm(dim=1, keepdim=True) for rows in slopes(torch.zeros_like(gates.values))]

        def means(opened: torch.Tensor) -> list[torch.Tensor]:
            return [(rows / length).mean(0) for rows, length in zip(slopes(opened), lengths, strict=True)]

        before = means(torch.zeros_like(gates.values))
        first = sum(mean / mean.norm() for mean in before) / 2
        opened = (first == first.max()).double()
        second = sum(now / mean.norm() for now, mean in zip(means(opened), before, strict=True)) / 2
        found = slope(gates, JointSignal(signals), SearchOptions(rounds=2), 2)
        chosen = {int(first.argmax()), int(second.masked_fill(opened > 0, float("-inf")).argmax())}
        assert set(found.topk(2).indices.tolist()) == chosen
        assert_close(found[opened == 0], second[opened == 0], 1e-9)


def test_memory_of_a_backward_pass_is_that_of_one_layer_beside_what_may_be_kept(monkeypatch):
    from hf_linattn.evaluation.memory import LiveBytes

    monkeypatch.setattr("hf_linattn.plan_search.gates.KEPT_BYTES", 1)
    peaks = []
    for layers in (2, 8):
        model, prompts = make_model("llama", num_hidden_layers=layers), random_prompts()[:1]
        with gated(model, SHORT, "head") as gates, LiveBytes() as count:
            slopes_at(gates, RecallSignal(prompts), torch.zeros_like(gates.values), OPTIONS)
        peaks.append(count.peak)
        hidden = 4 * model.config.hidden_size * 16
    assert peaks[1] - peaks[0] < 6 * 3 * hidden  # an input and its gradient for each layer more, not its activations


def test_batches_and_prompts_are_of_the_model_alone_and_its_layers_are_as_before():
    model = make_retriever()
    before = [vars(layer).get("forward") for layer in model.model.layers]
    configs = [(vars(module).get("config"), {*vars(module)}) for module in model.modules()]
    batches = [{"input_ids": make_tokens(1, 9) % 30}]
    choose_plan(model, None, 1, replace=WINDOW, signal="both", batches=batches, prompts=make_prompts())
    assert [vars(layer).get("forward") for layer in model.model.layers] == before == [None, None]
    for module, (config, names) in zip(model.modules(), configs, strict=True):
        assert vars(module).get("config") is config, "others may hold it, and change it"
        assert {*vars(module)} <= names
    with pytest.raises(Exception, match="not patched"):
        get_mechanisms(model)
