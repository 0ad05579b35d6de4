"""Quantised projections: mechanisms compute and keep their parameters in a floating dtype all the same.

What needs no package stands first. `make test-quantised` runs the rest, with bitsandbytes, torchao and optimum-quanto.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.pytorch_utils import Conv1D

from hf_linattn import (
    MechanismConfig,
    UnsupportedModelError,
    get_mechanisms,
    list_mechanisms,
    patch_model,
    register_mechanism,
    unpatch_model,
)
from hf_linattn.mechanisms import Mechanism
from tests.helpers import Snapshot, assert_close, each_of, generate, logits_of, make_patched, make_tokens
from tests.models import SPINE, make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of the quantisers, which announce each other's ends
QUANTISED = pytest.mark.quantised


class Packed(nn.Linear):
    """A projection as quantisers leave it: the layer itself, with weights in a form of the quantiser's own."""

    def __init__(self, linear: nn.Module, dtype: torch.dtype | None, buffer: bool):
        nn.Module.__init__(self)
        self.real = [linear]  # in a list, where no parameters are looked for
        rows, columns = linear.weight.T.shape if isinstance(linear, Conv1D) else linear.weight.shape
        self.in_features, self.out_features, self.bias = columns, rows, None
        packed = torch.zeros(rows * columns // 2, 1, dtype=dtype or torch.uint8)
        if buffer:
            self.register_buffer("qweight", packed)
        elif dtype is not None:
            self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return self.real[0](x)


FORMS = {
    "bytes": (torch.uint8, False),
    "integers": (torch.int8, False),
    "eight bits": (torch.float8_e4m3fn, False),
    "buffers": (torch.int32, True),
    "nothing": (None, False),
}


def pack(model: nn.Module, form: str) -> nn.Module:
    """Quantise, to all appearances, every linear layer of a model but its head."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, (nn.Linear, Conv1D)) and part is not head:
                setattr(module, name, Packed(part, *FORMS[form]))
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of all mechanisms, without the numbers that count forwards."""
    return {
        f"{path}.{name}": tensor
        for path, mechanism in get_mechanisms(model).items()
        for name, tensor in mechanism.state_dict().items()
        if tensor.dtype != torch.int64
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SPINE)
def test_maps_are_in_the_dtype_of_the_model_whatever_the_projections_are_in(name, form):
    ids, dtype = make_tokens(2, 9), torch.bfloat16
    for mechanism in ("softmax", "learned_exp"):
        expected = logits_of(patch_model(make_model(name).to(dtype), mechanism), ids)
        model = patch_model(pack(make_model(name).to(dtype), form), mechanism)
        assert {tensor.dtype for tensor in tensors_of(model).values()} <= {dtype}
        assert {kind.layer.dtype for kind in get_mechanisms(model).values()} == {dtype}
        assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.qint8], ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "opt"])
def test_a_dynamically_quantised_model_is_patched(name, dtype):
    ids = make_tokens(2, 9)
    original = quantize_dynamic(make_model(name), {nn.Linear}, dtype=dtype)
    before = logits_of(original, ids)
    model = patch_model(original, "softmax")
    assert_close(logits_of(model, ids), before)
    model = patch_model(unpatch_model(model), "learned_exp")
    assert {tensor.dtype for tensor in tensors_of(model).values()} == {torch.float32}
    if model.can_generate() and dtype == torch.float16:  # qint8 rounds the activations of a call by their own range
        tokens, logits = generate(model, ids)
        assert_close(logits, logits_of(model, torch.cat([ids, tokens[:, :-1]], dim=1))[:, -5:])
    assert torch.equal(logits_of(unpatch_model(model), ids), before)


@pytest.mark.parametrize("mechanism", each_of(list_mechanisms()))
def test_a_quantiser_that_comes_after_leaves_mechanisms_alone(mechanism):
    """Quantisers replace layers by their class: no mechanism has one of these."""
    model = make_patched("llama", mechanism)
    quantised = quantize_dynamic(model, {nn.Linear, nn.LSTM}, dtype=torch.float16)
    before, after = tensors_of(model), tensors_of(quantised)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    layers = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.modules.conv._ConvNd, Conv1D)
    assert not [part for kind in get_mechanisms(model).values() for part in kind.modules() if isinstance(part, layers)]
    assert logits_of(quantised, make_tokens(2, 9)).isfinite().all()


def test_a_model_that_says_no_floating_dtype_is_refused():
    model = pack(make_model("llama"), "bytes")
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float8_e4m3fn)
    snapshot = Snapshot.of(model, logits=torch.zeros(1))
    model.config.dtype = "int8"
    with pytest.raises(UnsupportedModelError, match=r"'int8'.*set model\.config\.dtype"):
        patch_model(model, "learned_exp")
    model.config.dtype = None
    now = Snapshot.of(model, logits=torch.zeros(1))
    assert {path: facts for path, facts in now.structure.items() if path != "config"} == {
        path: facts for path, facts in snapshot.structure.items() if path != "config"
    }
    model.config.dtype = torch.float16
    assert {tensor.dtype for tensor in tensors_of(patch_model(model, "learned_exp")).values()} == {torch.float16}


# -- with the packages ------------------------------------------------------------------------------------------------


def torchao(kind: str) -> TorchAoConfig:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, kind)())


@dataclass(frozen=True)
class Quantiser:
    """A way to load a model quantised; `error`: how far its outputs are from those of the weights it stands for.

    Exact weights are not exact outputs: activations are quantised, too, or the kernel rounds them to bfloat16.
    """

    config: Callable[[], Any]
    error: float = 1e-4
    saves: bool = True


QUANTISERS = {
    "bitsandbytes 4 bit": Quantiser(lambda: BitsAndBytesConfig(load_in_4bit=True), error=0.02),
    "bitsandbytes 8 bit": Quantiser(lambda: BitsAndBytesConfig(load_in_8bit=True), error=0.05),
    "torchao weights": Quantiser(lambda: torchao("Int8WeightOnlyConfig")),
    "torchao weights and activations": Quantiser(lambda: torchao("Int8DynamicActivationInt8WeightConfig"), error=0.05),
    "quanto 8 bit": Quantiser(lambda: QuantoConfig(weights="int8"), saves=False),
    "quanto 4 bit": Quantiser(lambda: QuantoConfig(weights="int4"), saves=False),
}
EACH = pytest.mark.parametrize("quantiser", QUANTISERS.values(), ids=list(QUANTISERS))
# bitsandbytes and quanto pack 64 and 128 numbers of a row together
WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
STD = 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_model("llama", std=STD, **WIDE).save_pretrained(folder)
    return folder


def load(folder, quantiser: Quantiser, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantiser.config(), dtype=dtype).eval()


@torch.no_grad()
def with_its_weights(model: nn.Module) -> nn.Module:
    """Return the plain model whose linear layers have the weights that those of a quantised one stand for."""
    plain = make_model("llama", std=STD, **WIDE)
    for path, part in plain.named_modules():
        if isinstance(part, nn.Linear):
            part.weight.copy_(model.get_submodule(path)(torch.eye(part.in_features)).T)
    return plain


@QUANTISED
@EACH
@pytest.mark.parametrize("mechanism", ["softmax", "learned_exp", "hybrid", "gla"])
def test_a_quantised_model_computes_as_one_with_its_weights(checkpoint, quantiser, mechanism):
    ids = make_tokens(2, 9)
    model = load(checkpoint, quantiser)
    original = logits_of(model, ids)
    expected = logits_of(patch_model(with_its_weights(model), mechanism), ids)
    patch_model(model, mechanism)
    assert {tensor.dtype for tensor in tensors_of(model).values()} <= {torch.float32}
    assert (logits_of(model, ids) - expected).norm() <= quantiser.error * expected.norm()
    tokens, logits = generate(model, ids)
    whole = logits_of(model, torch.cat([ids, tokens[:, :-1]], dim=1))[:, -5:]
    assert (logits - whole).norm() <= quantiser.error * whole.norm()
    assert torch.equal(logits_of(unpatch_model(model), ids), original)


@QUANTISED
@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_model_is_saved_and_loaded(checkpoint, quantiser, dtype, tmp_path):
    ids = make_tokens(2, 9)
    model = patch_model(load(checkpoint, quantiser, dtype), "learned_exp")
    assert {tensor.dtype for tensor in tensors_of(model).values()} == {dtype}
    if not quantiser.saves:
        with pytest.raises(ValueError, match="not serializable"):
            model.save_pretrained(tmp_path / "saved")
        assert not list((tmp_path / "saved").glob("*.safetensors"))
        return
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype).eval()
    projections = [next(iter(m.model.layers)).self_attn.q_proj for m in (model, loaded)]
    assert type(projections[0]) is type(projections[1]) and type(projections[0].weight) is type(projections[1].weight)
    assert all(torch.equal(tensor, tensors_of(loaded)[name]) for name, tensor in tensors_of(model).items())
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


class TurnedConfig(MechanismConfig):
    """Of `Turned`."""


class Turned(Mechanism):
    """Softmax attention of turned queries, by layers that every quantiser would replace."""

    config_class = TurnedConfig

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.turn = nn.Linear(layer.head_dim, layer.head_dim, bias=False)
        nn.init.orthogonal_(self.turn.weight)

    def causal_attention(self, query, key, value, key_padding_mask, sequence_ids, state):
        past = () if state is None else state
        key, value = (torch.cat([*past[i : i + 1], x], dim=2) for i, x in enumerate((key, value)))
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        late = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        query = query @ self.turn.weight.to(query.dtype).T
        return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=late), (key, value)


@QUANTISED
@EACH
def test_a_converted_model_is_quantised_as_it_is_loaded_and_its_mechanisms_are_not(quantiser, tmp_path):
    ids = make_tokens(2, 9)
    register_mechanism("turned")(Turned)
    for mechanism in ("learned_exp", "turned"):
        model = patch_model(make_model("llama", std=STD, **WIDE), mechanism)
        model.save_pretrained(tmp_path / mechanism)
        loaded = load(tmp_path / mechanism, quantiser)
        assert type(loaded.lm_head) is nn.Linear and type(loaded.lm_head.weight) is nn.Parameter
        saved, kept = tensors_of(model), tensors_of(loaded)
        assert all(type(tensor) is torch.Tensor and torch.equal(saved[name], tensor) for name, tensor in kept.items())
        plain = patch_model(with_its_weights(loaded), mechanism)
        for path, kind in get_mechanisms(plain).items():
            kind.load_state_dict(get_mechanisms(loaded)[path].state_dict())
        expected = logits_of(plain, ids)
        assert (logits_of(loaded, ids) - expected).norm() <= quantiser.error * expected.norm()


def by_torchao(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def by_quanto(model: nn.Module) -> None:
    from optimum import quanto

    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


@QUANTISED
@pytest.mark.parametrize("quantise", [by_torchao, by_quanto])
@pytest.mark.parametrize("mechanism", ["learned_exp", "hybrid"])
def test_a_patched_model_is_quantised_by_hand(quantise, mechanism):
    ids = make_tokens(2, 9)
    model = patch_model(make_model("llama", std=STD, **WIDE), mechanism)
    expected, before = logits_of(model, ids), {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    quantise(model)
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
    assert all(torch.equal(tensor, tensors_of(model)[name]) for name, tensor in before.items())
    assert (logits_of(model, ids) - expected).norm() <= 0.1 * expected.norm()


@QUANTISED
@pytest.mark.parametrize(("mechanism", "options"), [("learned_exp", {}), ("hybrid", {"window_size": 8})])
def test_qlora(checkpoint, mechanism, options, tmp_path):
    """A base of 4 bits, trained by adapters and by the mechanisms' own parameters, saved and loaded."""
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training

    def base() -> Any:
        model = load(checkpoint, QUANTISERS["bitsandbytes 4 bit"])
        return patch_model(prepare_model_for_kbit_training(model), mechanism, **options)

    ids = make_tokens(2, 33)
    lora = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj"], modules_to_save=["hf_linattn"], r=4)
    model = get_peft_model(base(), lora).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {part for part in ("lora_A", "hf_linattn") if any(part in name for name in trained)} == {
        "lora_A", "hf_linattn"
    }  # fmt: skip
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
        assert any(p.grad.any() for name, p in trained.items() if "hf_linattn" in name)
        optimizer.step()
    assert losses[1] < losses[0]
    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert_close(logits_of(loaded, ids), logits_of(model, ids))
