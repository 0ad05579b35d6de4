"""Transfer by blocks, against a model whose block starts from states that were put in from outside."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_linattn import get_mechanisms, patch_model
from hf_linattn.architecture import layer_stacks, root_model
from hf_linattn.attention_call import interceptor_of
from hf_linattn.calibration import own_parameters
from hf_linattn.errors import OptionError, UnsupportedModelError
from hf_linattn.inference import accepted
from hf_linattn.training.losses.block_transfer import BlockTransfer
from tests.helpers import make_tokens, pad
from tests.models import ARCHITECTURES, make_model

LAYERS = 3
LENGTH = 11
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def make(name: str, mechanism="hedgehog"):
    """A patched model of three layers, in float64."""
    size = {"gpt2": "n_layer", "distilbert": "n_layers"}.get(name, "num_hidden_layers")
    return patch_model(make_model(name, std=0.3, **{size: LAYERS}).double(), mechanism)


def make_batch(name: str, side: str) -> dict[str, torch.Tensor]:
    ids, mask = pad([*make_tokens(1, LENGTH, seed=3), *make_tokens(1, 7, seed=4)], 0, side)
    return {"input_ids": ids, "attention_mask": mask}


def states(model, batch, start: int | None = None, state: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return what goes into every layer, and out of the last; `state` may take the place of what goes into one."""
    (stack,) = layer_stacks(root_model(model), get_mechanisms(model))
    layers, found = model.get_submodule(stack), []

    def before(layer, args, kwargs):
        if layer is layers[start or 0] and state is not None:
            args, kwargs = ((state, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": state})
        found.append(args[0] if args else kwargs["hidden_states"])
        return args, kwargs

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles.append(
        layers[-1].register_forward_hook(lambda layer, args, out: found.append(out[0] if type(out) is tuple else out))
    )
    model(**batch, **accepted(model, use_cache=False))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right"])
@each_architecture
def test_loss_and_gradients_are_those_of_a_block_that_starts_from_the_originals_states(name, side):
    model, batch = make(name), make_batch(name, side)
    with torch.no_grad():
        original = states(make(name, "softmax"), batch)
    own = [p for several in own_parameters(get_mechanisms(model)).values() for p in several]
    for block_layers, blocks in ((2, [(0, 2), (2, 3)]), (4, [(0, 3)])):
        errors = []
        for first, end in blocks:
            got, want, start = states(model, batch, first, original[first])[end], original[end], original[first]
            rows = [
                (((g - w) ** 2).sum() / ((w - x) ** 2).sum())
                for g, w, x in ((t[b][batch["attention_mask"][b] > 0] for t in (got, want, start)) for b in range(2))
            ]
            errors.append(sum(rows) / len(rows))
        expected = sum(errors) / len(errors)
        wanted = torch.autograd.grad(expected, own)
        transfer = BlockTransfer(model, block_layers)
        output = transfer(**batch, labels=batch["input_ids"])
        torch.testing.assert_close(output["loss"], expected.detach())
        torch.testing.assert_close(output["output_errors"], torch.stack(errors).detach())
        model.zero_grad()
        (2 * output["loss"]).backward()
        for parameter, gradient in zip(own, wanted, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
        assert not any(interceptor_of(m) for m in get_mechanisms(model).values())


def test_only_blocks_with_converted_layers_are_run_again():
    model = make("llama", {"hedgehog": [2]})
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    output = BlockTransfer(model, 2)(**make_batch("llama", "right"))
    assert sorted(calls) == [0, 1, 2, 2] and output["output_errors"].shape == (1,)


def test_nothing_stays_behind_after_an_error():
    model = make("gpt2")
    transfer, batch = BlockTransfer(model, 2), make_batch("gpt2", "left")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexError):
        transfer(batch["input_ids"] + 10_000)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.transformer.h)
    assert not any(interceptor_of(m) for m in get_mechanisms(model).values())
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())
    assert torch.isfinite(transfer(**batch)["loss"])


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(OptionError, match="block_layers must be an integer >= 1, got 0"):
        BlockTransfer(make("gpt2"), 0)
    with pytest.raises(OptionError, match="no parameters of its own"):
        BlockTransfer(make("gpt2", "performer"))
    with pytest.raises(UnsupportedModelError, match="attn lies in no list of layers"):
        layer_stacks(make("gpt2"), ["transformer.attn"])
