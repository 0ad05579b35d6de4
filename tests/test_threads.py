"""One model, several threads: each gets what it gets alone, also where calls of one layer overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_linattn import get_mechanisms, patch_model
from hf_linattn.attention_call import current_call, intercept_attention, interceptor_of
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.mechanisms import MECHANISMS, list_mechanisms
from tests.helpers import each_of, logits_of, make_patched, make_tokens
from tests.models import make_model

LENGTHS = 7, 16
CAUSAL_MECHANISMS = [name for name in list_mechanisms() if "causal" in MECHANISMS.get(name).modes]


def together(model: Any, run: Callable[[int], Any], meetings: bool = True) -> list[Any]:
    """Return run(0), run(1), made at the same time; both threads meet inside each attention module of the model."""
    barrier, found = threading.Barrier(2, timeout=20), [None, None]

    def work(number: int) -> None:
        try:
            found[number] = run(number)
        except BaseException as error:  # handed on to the test
            barrier.abort()
            found[number] = error

    projections = [module for path, module in model.named_modules() if path.endswith("v_proj")]
    handles = [x.register_forward_hook(lambda *_: [barrier.wait(), None][1]) for x in projections if meetings]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.mark.parametrize("mechanism", each_of(CAUSAL_MECHANISMS))
def test_steps_and_gradients_are_those_of_one_thread_alone(mechanism):
    """A step from a cache; then a padded row with its gradients, where no state is kept."""
    model = make_patched("llama", mechanism, num_hidden_layers=1)
    rows = [make_tokens(1, length, seed) for seed, length in enumerate(LENGTHS)]

    @torch.no_grad()
    def step(number: int) -> Tensor:
        return model(rows[number][:, -1:], past_key_values=caches[number]).logits

    @torch.no_grad()
    def read() -> list[Any]:
        return [model(row[:, :-1], use_cache=True).past_key_values for row in rows]

    caches = read()
    alone = [step(number) for number in range(2)]
    caches = read()
    for got, want in zip(together(model, step), alone, strict=True):
        torch.testing.assert_close(got, want)

    def train(number: int) -> list[Tensor]:
        tokens = make_tokens(2, LENGTHS[number], number)
        mask = torch.ones_like(tokens)
        mask[0, : 2 + number] = 0
        hidden = model.get_input_embeddings()(tokens).detach().requires_grad_()
        # one thread keeps a state, the other one has no use for it
        output = model(inputs_embeds=hidden, attention_mask=mask, use_cache=bool(number)).logits
        return [output.detach(), *torch.autograd.grad(output.sin().sum(), hidden)]

    alone = [train(number) for number in range(2)]
    for got, want in zip(together(model, train), alone, strict=True):
        torch.testing.assert_close(got, want)


def test_each_thread_generates_what_it_generates_alone():
    model = patch_model(make_model("llama"), {"linear": 0, "hybrid": {"layers": 1, "window_size": 4}})
    rows = [make_tokens(1, length, seed) for seed, length in enumerate(LENGTHS)]

    def generate(number: int) -> Tensor:
        return model.generate(rows[number], max_new_tokens=6, do_sample=False)

    alone = [generate(number) for number in range(2)]
    for got, want in zip(together(model, generate), alone, strict=True):
        assert torch.equal(got, want)


def test_an_interceptor_stands_in_its_own_thread_only():
    model = make_patched("llama")
    tokens = make_tokens(1, 9)
    mechanisms = get_mechanisms(model)
    patched = model(tokens, use_cache=False).logits

    @torch.no_grad()
    def run(number: int) -> Tensor:
        with intercept_attention(mechanisms) if number else contextmanager(lambda: (yield))():
            return model(tokens, use_cache=False).logits

    plain, softmax = together(model, run)
    torch.testing.assert_close(plain, patched)
    torch.testing.assert_close(softmax, make_model("llama")(tokens).logits)
    assert not any(interceptor_of(mechanism) for mechanism in mechanisms.values())


def replica_of(module: nn.Module) -> nn.Module:
    """Return what torch.nn.parallel.replicate makes of a module, but on the same device."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replica_of(child))
    replica._parameters = {name: None for name, x in module._parameters.items() if x is None}
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter.view_as(parameter))  # no parameter any more
    return replica


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_replicas_of_data_parallel_compute_the_same_and_meet_no_interceptor(name):
    model, tokens = make_patched(name), make_tokens(2, 9)
    replica = replica_of(model)
    found = replica(tokens).logits  # before the model was called itself
    assert torch.equal(found, model(tokens).logits)
    other = make_patched(name)
    with intercept_attention(get_mechanisms(other)):
        assert torch.equal(replica(tokens).logits, found)
    with intercept_attention(get_mechanisms(model)), ThreadPoolExecutor(1) as elsewhere:
        for run in (replica, lambda ids: elsewhere.submit(replica, ids).result()):
            with pytest.raises(UnsupportedModeError, match=r"DataParallel runs layer 0 .*accelerate/ddp\.yaml"):
                run(tokens)
    assert torch.equal(replica(tokens).logits, found)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "local"])
def test_a_call_inside_a_call_of_the_same_layer(mechanism):
    """And one that ends with an exception leaves nothing behind."""
    model = make_patched("llama", mechanism, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    rows = [make_tokens(1, length, seed) for seed, length in enumerate(LENGTHS)]
    with torch.no_grad():
        want = [model(row).logits[:, -1] for row in rows]
        caches = [model(row[:, :-1], use_cache=True).past_key_values for row in rows]
        inner: list[Tensor] = []

        def call_again(*_: Any) -> None:
            handle.remove()
            inner.append(model(rows[1][:, -1:], past_key_values=caches[1]).logits[:, -1])

        handle = attention.v_proj.register_forward_hook(call_again)
        outer = model(rows[0][:, -1:], past_key_values=caches[0]).logits[:, -1]
        torch.testing.assert_close([outer, *inner], want)

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        handle = attention.v_proj.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(rows[0], use_cache=True)
        handle.remove()
    assert current_call(attention) is None


@pytest.mark.parametrize("patched", ["whole", "part"])
def test_two_threads_save_one_model(tmp_path, patched):
    """A save changes the model and its config for a while; where a part is patched, so that it loads as it is."""
    model = make_model("llama")
    patch_model(model if patched == "whole" else model.model, "linear")
    ids = make_tokens(2, 9)
    expected = logits_of(model, ids)
    folders = [[tmp_path / f"{number}{turn}" for turn in range(4)] for number in range(2)]
    together(model, lambda number: [model.save_pretrained(folder) for folder in folders[number]], meetings=False)
    for folder in tmp_path.iterdir():
        assert not list(folder.glob(".*"))
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(folder).eval(), ids), expected)
