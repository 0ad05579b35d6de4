"""Attention transfer: losses and gradients against the matrices, layer by layer and in one layer's memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_linattn import OptionError, PatchError, UnsupportedModelError, get_mechanisms, list_mechanisms, patch_model
from hf_linattn.attention_call import AttentionCall, intercept_attention
from hf_linattn.calibration import own_parameters
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.inference import accepted
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops import reference as naive
from hf_linattn.support.tiny import tiny_model as small_model
from hf_linattn.testing.counters import largest_tensor
from hf_linattn.testing.models import ARCHITECTURES, Case, positions_of, random_tokens, tiny_model
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.losses.attention_transfer import AttentionTransfer, attention_divergence
from hf_linattn.training.losses.block_transfer import BlockTransfer
from hf_linattn.training.task import load_model

LENGTH = 37
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
each_mode = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in list_mechanisms()),
    ("linear", {"decay": "learned"}),
    ("learned_exp", {"decay": "learned"}),
    ("hedgehog", {"decay": "learned", "self_weight": "learned"}),
    ("gla", {"self_weight": "learned"}),
    ("hybrid", {"window_size": 5, "num_sink_tokens": 1, "window_scale": "maximum", "initial_share": 0.5}),
    (
        "hybrid",
        {"window_size": 5, "num_sink_tokens": 2, "linear": "learned_exp", "linear_options": {"decay": "learned"}},
    ),
]


def with_scores(architecture: str, causal: bool) -> list[Case]:
    cases = [
        Case(name, architecture, causal, options)
        for name, options in VARIANTS
        if ("causal" if causal else "bidirectional") in MECHANISMS.get(name).modes
    ]
    return [case for case in cases if case.make().has_scores]


def make_call(case: Case, **exact: Any) -> AttentionCall:
    """Two rows of two packed sequences each; the first begins with two pads."""
    query, key, value = case.heads(LENGTH)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :2] = False
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    ids[0, 20:], ids[1, 9:] = 1, 1
    own = {"sliding_window": None, "softcap": None, "sink": None, **exact}
    return AttentionCall(query, key, value, mask, ids, own)


@pytest.mark.covering(2)
@each_architecture
@each_mode
@pytest.mark.parametrize("exact", [{}, {"softcap": 2.0}, {"sliding_window": 6}], ids=str)
def test_the_divergence_is_that_of_the_whole_matrices(architecture, causal, exact):
    cases = with_scores(architecture, causal)
    assert {case.mechanism for case in cases} >= {"linear", "performer", "hedgehog", "learned_exp", "taylor", "hybrid"}
    for case in cases:
        mechanism, call = case.make(), make_call(case, **exact)
        query, key, mask, ids = call.query, call.key, call.key_padding_mask, call.sequence_ids
        allowed = naive.allowed_pairs(LENGTH, LENGTH, causal, mask, ids)
        scores = torch.einsum("bhid,bhjd->bhij", query, naive.repeat_heads(key, query)) * mechanism.layer.scaling
        scores = 2.0 * torch.tanh(scores / 2.0) if "softcap" in exact else scores
        steps = torch.arange(LENGTH)
        near = (steps[:, None] - steps).abs() < exact.get("sliding_window", LENGTH)
        wanted = scores.masked_fill(~(allowed & near), float("-inf")).softmax(-1)
        got = mechanism.attention_matrix(query, key, mask, ids)
        terms = torch.where(wanted > 0, wanted * (wanted.clamp(min=1e-300) / got.clamp(min=1e-300)).log(), 0.0)
        expected = terms.sum(-1).transpose(1, 2)[mask].mean()
        for block_size in (5, 64):
            torch.testing.assert_close(attention_divergence(mechanism, call, block_size), expected, msg=str(case))


def test_mechanisms_whose_weights_can_vanish_have_no_scores():
    without = [name for name in ("t2r", "local", "lsh", "linformer") if not Case(name, "gpt2", True).make().has_scores]
    assert without == ["t2r", "local", "lsh", "linformer"]
    assert not Case("performer", "gpt2", True, {"kernel": "relu"}).make().has_scores
    assert not Case("hybrid", "gpt2", True, {"linear": "t2r"}).make().has_scores


def make(architecture: str, mechanism: Any = "hedgehog", dtype: torch.dtype = torch.float64, **options: Any):
    return patch_model(tiny_model(architecture, architecture != "bert", dtype), mechanism, **options)


def make_batch(architecture: str, length: int = LENGTH) -> dict[str, Tensor]:
    """A left-padded batch."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :5] = 0
    inputs = {"input_ids": random_tokens(3, length), "attention_mask": mask}
    return inputs if architecture == "bert" else {**inputs, "position_ids": positions_of(mask)}


def reference(model: nn.Module, batch: dict[str, Tensor], output_weight: float, weights_weight: float, project: Any):
    """The same loss by one graph over all layers, from calls that were recorded on the original's heads."""
    mechanisms, calls = get_mechanisms(model), []

    def record(path):
        def answer(call):
            calls.append((path, call))
            return call.run_softmax(mechanisms[path])

        return answer

    with torch.no_grad(), intercept_attention(mechanisms, {path: record(path) for path in mechanisms}):
        model(**batch, **accepted(model, use_cache=False))
    losses = []
    for path, call in calls:
        mechanism, real = mechanisms[path], batch["attention_mask"].bool()
        outputs = (call.run(mechanism), call.run_softmax(mechanism))
        got, want = (project(path, x.transpose(1, 2).flatten(2)) for x in outputs)
        rows = [((g - w)[r]).square().sum() / w[r].square().sum() for g, w, r in zip(got, want, real, strict=True)]
        loss = output_weight * sum(rows) / len(rows)
        if weights_weight and mechanism.has_scores:
            loss = loss + weights_weight * attention_divergence(mechanism, call, LENGTH)
        losses.append(loss)
    return torch.stack(losses).mean()


def heads(path: str, rows: Tensor) -> Tensor:
    return rows


@pytest.mark.covering(1)
@each_architecture
@pytest.mark.parametrize(
    ("mechanism", "options", "weights"),
    [
        ("hedgehog", {}, (1.0, 1.0)),
        ("hybrid", {"window_size": 4, "num_sink_tokens": 1}, (0.5, 2.0)),
        ("learned_exp", {"decay": "learned"}, (0.0, 1.0)),
        ("linformer", {"num_slots": 4, "block_size": 8}, (1.0, 1.0)),
        ("linformer", {"num_slots": 4, "block_size": 8, "sharing": "layers"}, (2.0, 0.0)),
    ],
    ids=["hedgehog", "hybrid", "learned_exp", "linformer", "linformer-shared"],
)
def test_loss_and_gradients_are_those_of_one_graph_over_all_layers(architecture, mechanism, options, weights):
    model, batch = make(architecture, mechanism, **options), make_batch(architecture)
    own = [p for several in own_parameters(get_mechanisms(model)).values() for p in several]
    expected = reference(model, batch, *weights, heads)
    wanted = torch.autograd.grad(expected, own, allow_unused=True)
    transfer = AttentionTransfer(model, *weights)
    assert {id(p) for p in transfer.parameters()} == {id(p) for p in own}
    output = transfer(**batch, labels=batch["input_ids"])
    torch.testing.assert_close(output["loss"], expected)
    (3 * output["loss"]).backward()
    for parameter, gradient in zip(own, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * (torch.zeros_like(parameter) if gradient is None else gradient))
    assert all(p.grad is None for p in model.parameters() if id(p) not in {id(q) for q in own})
    with torch.no_grad():
        torch.testing.assert_close(transfer(**batch)["loss"], expected)


@pytest.mark.parametrize("loss", [AttentionTransfer, BlockTransfer])
def test_a_layer_that_runs_twice_counts_each_time(loss):
    """ALBERT's: the loss is the mean over both, and the gradient is that of the loss."""
    model, batch = patch_model(small_model("albert").double(), "hedgehog"), make_batch("bert")
    transfer = loss(model)
    output = transfer.measure(batch)
    if loss is AttentionTransfer:
        torch.testing.assert_close(output["loss"], reference(model, batch, 1.0, 1.0, heads))
    output["loss"].backward()
    own = list(transfer.parameters())
    ways = [torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype) for p in own]
    slope = sum(float((p.grad * way).sum()) for p, way in zip(own, ways, strict=True))
    losses = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for parameter, way in zip(own, ways, strict=True):
                parameter += step * way
            losses.append(float(transfer.measure(batch)["loss"]))
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


@each_architecture
def test_outputs_can_be_compared_behind_their_projection(architecture):
    model, batch = make(architecture), make_batch(architecture)
    projections = {
        "bert": lambda path: model.get_submodule(path.removesuffix("self") + "output.dense").weight.T,
        "gpt2": lambda path: model.get_submodule(path + ".c_proj").weight,
        "llama": lambda path: model.get_submodule(path + ".o_proj").weight.T,
    }
    with torch.no_grad():
        expected = reference(model, batch, 1.0, 0.0, lambda path, rows: rows @ projections[architecture](path))
        got = AttentionTransfer(model, 1.0, 0.0, projected=True)(**batch)["loss"]
    torch.testing.assert_close(got, expected)


def test_layers_without_parameters_hand_on_softmax_too():
    model = make("llama", {"performer": [0], "hedgehog": [1]})
    batch = make_batch("llama")
    with torch.no_grad():
        expected = reference(model, batch, 1.0, 1.0, heads)
        output = AttentionTransfer(model)(**batch)
    torch.testing.assert_close(output["loss"], expected)
    assert output["output_errors"].shape == output["divergences"].shape == (2,)
    assert bool((output["divergences"] > 0).all())


def test_memory_is_one_layers_and_no_matrix_is_made():
    length, peaks = 1280, []
    for layers in ([1], [0, 1]):
        model = make("llama", {"hybrid": {"layers": layers, "window_size": 16}}, torch.float32)
        transfer = AttentionTransfer(model)
        batch = {"input_ids": random_tokens(1, length)}
        assert largest_tensor(lambda t=transfer, b=batch: t(**b)["loss"].backward()) < length**2 // 2
        with LiveBytes() as count:
            transfer(**batch)["loss"].backward()
        peaks.append(count.peak)
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.slow
def test_a_step_at_4096_tokens_takes_less_memory_than_one_of_lora():
    original = load_model("recipes/pretrained/llama", "float32")
    ids = random_tokens(1, 4096)
    transfer = AttentionTransfer(patch_model(copy.deepcopy(original), "learned_exp", decay="learned"))
    peaks = []
    for step in (
        lambda: transfer(input_ids=ids)["loss"].backward(),
        lambda: add_adapters(patch_model(original, "softmax"), 8).train()(input_ids=ids, labels=ids).loss.backward(),
    ):
        with LiveBytes() as count:
            step()
        peaks.append(count.peak)
    assert peaks[0] <= peaks[1], peaks  # at most 1.3 times as much is what was asked for


def test_a_trainer_trains_it_saves_the_mechanisms_alone_and_lowers_the_loss(tmp_path):
    model = make("gpt2", "hedgehog", torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    transfer = AttentionTransfer(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in random_tokens(64, LENGTH)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=20, learning_rate=1e-2, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    trainer = Trainer(transfer, arguments, train_dataset=rows, eval_dataset=rows[:8])
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * first
    trainer.save_model(str(tmp_path / "saved"))
    own = {name for name, p in model.named_parameters() if ".hf_linattn." in name}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in own), name
    sizes = sum(p.numel() for p in transfer.parameters())
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 4 * sizes + 4096


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(PatchError, match="not patched"):
        AttentionTransfer(tiny_model("gpt2", True))
    with pytest.raises(OptionError, match="mechanism performer has no parameters of its own"):
        AttentionTransfer(make("gpt2", "performer"))
    with pytest.raises(OptionError, match="weights_weight must be at least 0, got -1"):
        AttentionTransfer(make("gpt2"), weights_weight=-1.0)
    with pytest.raises(OptionError, match="output_weight must be above 0 if weights_weight is 0, got 0"):
        AttentionTransfer(make("gpt2"), 0.0, 0.0)


@pytest.mark.parametrize("kind", [AttentionTransfer, BlockTransfer])
def test_layers_that_text_does_not_run_are_left_out(kind):
    """Gemma 3 has a tower of images, its first two layers."""
    model, ids = patch_model(small_model("gemma3"), "hedgehog"), random_tokens(2, 19)
    transfer = kind(model)
    found = transfer(input_ids=ids)
    assert len(found["output_errors"]) == (2 if kind is AttentionTransfer else 1)
    found["loss"].backward()
    trained = [any(p.grad.any() for p in mechanism.parameters()) for mechanism in transfer.mechanisms]
    assert trained == [False, False, True, True]
    model = patch_model(small_model("gemma3"), {"hedgehog": [0, 1], "softmax": [2, 3]})
    with pytest.raises(UnsupportedModelError, match=r"no converted layer ran .* read text \(layers=\)"):
        kind(model)(input_ids=ids)
