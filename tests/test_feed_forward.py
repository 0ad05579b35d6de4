"""Feed-forward in chunks: the same bits, fewer bytes, gradients as in float64, and what cannot be split."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_linattn import (
    OptionError,
    PatchError,
    UnsupportedModelError,
    chunk_feed_forward,
    get_patch_config,
    original_attention,
    patch_model,
    unpatch_model,
)
from hf_linattn.chunked_mlp import FeedForward, apply_in_chunks, ends
from hf_linattn.evaluation import peak_forward_bytes
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.patching import PATCH
from hf_linattn.testing.counters import largest_tensor
from tests.helpers import Snapshot, assert_close, generate, logits_of, loss_gradients, make_tokens, pad
from tests.models import ARCHITECTURES, NUM_LAYERS, SPINE, VOCAB_SIZE, make_model

CHUNKED = [name for name in ARCHITECTURES if name != "opt"]
each_family = pytest.mark.parametrize("name", CHUNKED)
each_spine = pytest.mark.parametrize("name", SPINE)


def mixture():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=2, num_local_experts=4, **sizes))


def wide_modules(model: nn.Module) -> list[nn.Module]:
    """Return the products that make the wide activations, one per layer."""
    names = ("c_fc", "up_proj", "gate_up_proj", "intermediate.dense", "lin1", "mlp.Wi")
    return [module for path, module in model.named_modules() if path.endswith(names)]


def seen_tokens(module: nn.Module, run) -> list[int]:
    """Return how many tokens each call of a module got."""
    seen: list[int] = []
    with module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel())):
        run()
    return seen


# -- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_family
def test_outputs_are_bit_equal(name, dtype):
    """In two padded rows of odd lengths, with chunks that do not divide them."""
    ids, mask = pad([make_tokens(1, 61)[0], make_tokens(1, 37, seed=1)[0]], 0)
    model = patch_model(make_model(name).to(dtype), "linear")
    whole = logits_of(model, ids, attention_mask=mask)
    for chunk_size in (8, 19, 64, 125):
        chunk_feed_forward(model, chunk_size)
        assert torch.equal(logits_of(model, ids, attention_mask=mask), whole)
    chunk_feed_forward(model, None)
    assert torch.equal(logits_of(model, ids, attention_mask=mask), whole)


@each_family
def test_every_feed_forward_gets_few_tokens_at_a_time(name):
    model, ids = patch_model(make_model(name), "linear", chunk_feed_forward=16), make_tokens(3, 21)
    assert len(wide_modules(model)) == NUM_LAYERS
    for module in wide_modules(model):
        seen = seen_tokens(module, lambda: logits_of(model, ids))
        assert sum(seen) == 63 and max(seen) <= 16 and len(seen) == 4


@pytest.mark.parametrize("width", [50, 256, 1000])
@pytest.mark.parametrize("tokens", [129, 200, 1000])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_chunks_of_any_width_are_bit_equal(width, tokens, activation):
    """Whole vectors and leftovers of an activation are rounded in two ways, short products in a third."""
    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=width, hidden_act=activation)).eval()
    hidden_states = torch.randn(1, tokens, 64)
    with torch.no_grad():
        whole = mlp(hidden_states)
        for chunk_size in (128, 131, 190):
            assert torch.equal(apply_in_chunks(mlp, hidden_states, chunk_size), whole)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 8, 100, 127, 128, 129, 512])
def test_chunks_are_small_enough_few_and_whole_tiles(chunk_size):
    tile = 64 if chunk_size >= 128 else 4 if chunk_size >= 8 else 1
    for tokens in range(chunk_size + 1, 5 * chunk_size):
        cuts = [0, *ends(tokens, chunk_size), tokens]
        sizes = [end - start for start, end in pairwise(cuts)]
        assert 0 < min(sizes) and max(sizes) <= chunk_size
        assert all(size % tile == 0 for size in sizes[:-1])
        if chunk_size >= 8:
            assert sizes[-1] > tile and len(sizes) <= 2 + 2 * tokens // chunk_size


@each_spine
def test_decoding_is_as_without(name):
    if name == "bert":
        return
    ids = make_tokens(2, 21)
    want = generate(patch_model(make_model(name), "linear"), ids)
    got = generate(patch_model(make_model(name), "linear", chunk_feed_forward=8), ids)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@each_spine
def test_gradients_are_those_without_chunks(name, checkpointing):
    """Against a float64 model that is not patched in chunks and does not make anything again."""
    ids = make_tokens(3, 21)
    want = loss_gradients(patch_model(make_model(name).double(), "linear").train(), ids)
    model = patch_model(make_model(name).double(), "linear", chunk_feed_forward=8).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    got = loss_gradients(model, ids)
    assert list(got) == list(want)
    for path, gradient in want.items():
        assert_close(got[path], gradient, 1e-12)


def test_dropout_is_drawn_again_as_it_was():
    """Gradients are those of the drawn function: a step along them changes the loss by their squared norm."""
    model = patch_model(make_model("gpt2", resid_pdrop=0.3).double(), "linear", chunk_feed_forward=8).train()
    ids, parameter = make_tokens(2, 21), model.transformer.h[0].mlp.c_fc.weight

    def loss():
        torch.manual_seed(3)
        return model(input_ids=ids).logits.sin().sum()

    loss().backward()
    step = 1e-6 * parameter.grad
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.add_(sign * step)
            losses.append(loss())
            parameter.sub_(sign * step)
    assert_close((losses[0] - losses[1]) / 2e-6, parameter.grad.square().sum(), 1e-6)
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


# -- memory -----------------------------------------------------------------------------------------------------------

BATCH, LENGTH, CHUNK, WIDTH = 2, 192, 64, 512


def wide_llama(**options):
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    return patch_model(AutoModelForCausalLM.from_config(config), "linear", **options)


def test_the_widest_activation_is_that_of_a_chunk():
    model, ids = wide_llama(), make_tokens(BATCH, LENGTH)
    model.train()

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    def forward():
        logits_of(model, ids)

    for run in (forward, step):
        assert largest_tensor(run) == BATCH * LENGTH * WIDTH
    chunk_feed_forward(model, CHUNK)
    for run in (forward, step):
        assert largest_tensor(run) == max(CHUNK * WIDTH, BATCH * LENGTH * VOCAB_SIZE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peak_bytes_fall_by_the_activations_of_the_other_tokens(checkpointing):
    """A Llama's gate, its activation, the other half and their product, of all layers or of one."""
    model, ids = wide_llama().train(), make_tokens(BATCH, LENGTH)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peak():
        with LiveBytes() as count:
            model(input_ids=ids, labels=ids).loss.backward()
        return count.peak

    whole = peak()
    chunk_feed_forward(model, CHUNK)
    layers, wide = 1 if checkpointing else 2, 4
    saved = wide * WIDTH * 4 * (layers * BATCH * LENGTH - CHUNK)
    assert 0.8 * saved < whole - peak() < 1.6 * saved


def test_peak_bytes_of_a_forward_fall():
    model = wide_llama()
    whole = peak_forward_bytes(model, LENGTH, batch_size=BATCH)
    chunk_feed_forward(model, CHUNK)
    few = peak_forward_bytes(model, LENGTH, batch_size=BATCH)
    assert whole - few > 1.5 * WIDTH * 4 * (BATCH * LENGTH - CHUNK)
    with original_attention(model):
        assert peak_forward_bytes(model, LENGTH, batch_size=BATCH) < whole / 2


# -- attaching and undoing --------------------------------------------------------------------------------------------


@each_family
def test_unpatching_restores_everything(name):
    model = make_model(name)
    before = Snapshot.of(model)
    patch_model(model, "linear", chunk_feed_forward=8)
    chunk_feed_forward(model, 16)
    assert list(model.state_dict()) == list(patch_model(make_model(name), "linear").state_dict())
    before.assert_kept(unpatch_model(model))


@each_spine
def test_no_chunks_leave_the_patch_as_it_was(name):
    model = patch_model(make_model(name), "linear")
    before = Snapshot.of(model)
    chunk_feed_forward(model, 8)
    chunk_feed_forward(model, None)
    before.assert_kept(model)


UNSPLIT = {
    "opt": (lambda: make_model("opt"), r"no child of model\.decoder\.layers\.0 \(OPTDecoderLayer: .*fc1, fc2"),
    "mixture": (mixture, r"model\.layers\.0\.mlp \(MixtralSparseMoeBlock\) .*Mixtral.* alone; leave chunk_feed_for"),
}


@pytest.mark.parametrize("case", UNSPLIT)
def test_what_cannot_be_split_is_named_and_nothing_changes(case):
    make, message = UNSPLIT[case]
    model = make().eval()
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModelError, match=message):
        patch_model(model, "linear", chunk_feed_forward=8)
    before.assert_kept(model)
    patched = Snapshot.of(patch_model(model, "linear"))
    with pytest.raises(UnsupportedModelError, match=message):
        chunk_feed_forward(model, 8)
    patched.assert_kept(model)


def test_a_feed_forward_that_mixes_tokens_is_refused():
    model = make_model("llama")
    model.model.layers[1].mlp.shift = nn.Conv1d(32, 32, 3)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp \(LlamaMLP\) .*has a Conv1d, which is not"):
        patch_model(model, "linear", chunk_feed_forward=8)


def test_a_feed_forward_that_takes_more_than_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x, paddings=None: x)
    with pytest.raises(UnsupportedModelError, match="its forward takes x, paddings"):
        patch_model(make_model("llama"), "linear", chunk_feed_forward=8)


@each_spine
def test_an_attachment_that_stops_half_way_is_undone(name, monkeypatch):
    model = make_model(name)
    before = Snapshot.of(model)
    attached = []

    def stop(self, chunk_size):
        if attached:
            raise KeyboardInterrupt
        attached.append(attach(self, chunk_size))

    attach = FeedForward.attach
    monkeypatch.setattr(FeedForward, "attach", stop)
    with pytest.raises(KeyboardInterrupt):
        patch_model(model, "linear", chunk_feed_forward=8)
    before.assert_kept(model)


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, True, "512"])
def test_a_bad_size_changes_nothing(chunk_size):
    model = make_model("llama")
    before = Snapshot.of(model)
    with pytest.raises(OptionError, match="chunk_feed_forward must be None or an integer >= 1, got"):
        patch_model(model, "linear", chunk_feed_forward=chunk_size)
    before.assert_kept(model)
    with pytest.raises(PatchError, match="is not patched; call patch_model"):
        chunk_feed_forward(model, 8)


# -- what stands around a model ---------------------------------------------------------------------------------------


@each_spine
@pytest.mark.parametrize("first", ["peft", "patch"])
def test_adapters_of_the_feed_forward_train(name, first):
    config, ids = LoraConfig(r=2, target_modules="all-linear", use_dora=True), make_tokens(3, 21)

    def build(chunk_size):
        torch.manual_seed(0)
        model = make_model(name).double()
        if first == "peft":
            return patch_model(get_peft_model(model, config), "linear", chunk_feed_forward=chunk_size)
        return get_peft_model(patch_model(model, "linear", chunk_feed_forward=chunk_size), config)

    want, got = (loss_gradients(build(chunk_size).train(), ids) for chunk_size in (None, 8))
    assert any("lora" in path and gradient.abs().max() > 0 for path, gradient in got.items())
    for path, gradient in want.items():
        assert_close(got[path], gradient, 1e-12)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_chunks_are_compiled_as_one_graph(name):
    torch.compiler.reset()
    model = patch_model(make_model(name), "linear", chunk_feed_forward=8).train()
    module, method = getattr(model, PATCH).feed_forwards[0]
    hidden_states = torch.randn(2, 21, 32, requires_grad=True)
    want = getattr(module, method)(hidden_states)
    (gradient,) = torch.autograd.grad(want.sin().sum(), hidden_states)
    compiled = torch.compile(lambda x: getattr(module, method)(x), backend="aot_eager", fullgraph=True)
    got = compiled(hidden_states)
    assert_close(got, want, 1e-6)
    assert_close(torch.autograd.grad(got.sin().sum(), hidden_states)[0], gradient, 1e-5)


@pytest.mark.slow
@each_spine
def test_a_compiled_model_takes_chunks(name):
    torch.compiler.reset()
    model, ids = patch_model(make_model(name), "linear").train(), make_tokens(2, 21)
    want = loss_gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager")
    chunk_feed_forward(compiled, 8)
    for path, gradient in loss_gradients(compiled, ids).items():
        assert_close(gradient, want[path.removeprefix("_orig_mod.")], 1e-5)


@each_spine
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_chunks_of_its_own(name, way):
    model, ids = patch_model(make_model(name), "linear", chunk_feed_forward=8), make_tokens(2, 9)
    copied = way(model)
    plain = unpatch_model(model)
    assert max(seen_tokens(wide_modules(copied)[0], lambda: logits_of(copied, ids))) == 8
    assert max(seen_tokens(wide_modules(plain)[0], lambda: logits_of(plain, ids))) == 18
    assert torch.equal(logits_of(unpatch_model(copied), ids), logits_of(plain, ids))


@each_spine
@pytest.mark.parametrize("first", ["dispatch", "patch"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_dispatched_model_takes_chunks(name, place, first, tmp_path):
    """accelerate puts a function of its own in place of every module's forward."""
    model, ids = make_model(name), make_tokens(2, 21)
    softmax = logits_of(model, ids)
    want = logits_of(patch_model(make_model(name), "linear"), ids)
    if first == "patch":
        patch_model(model, "linear", chunk_feed_forward=8)
    if place == "cpu":
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    if first == "dispatch":
        patch_model(model, "linear", chunk_feed_forward=8)
    assert torch.equal(logits_of(model, ids), want)
    assert max(seen_tokens(wide_modules(model)[0], lambda: logits_of(model, ids))) == 8
    assert torch.equal(logits_of(unpatch_model(model), ids), softmax)


def test_chunks_are_not_saved(tmp_path):
    model, ids = patch_model(make_model("llama"), "linear", chunk_feed_forward=8), make_tokens(2, 21)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert get_patch_config(loaded) == get_patch_config(model)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    projection = loaded.model.layers[0].mlp.up_proj
    assert seen_tokens(projection, lambda: logits_of(loaded, ids)) == [42]
    chunk_feed_forward(loaded, 8)
    assert max(seen_tokens(projection, lambda: logits_of(loaded, ids))) == 8
