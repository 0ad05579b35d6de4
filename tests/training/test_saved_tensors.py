"""save_on_disk: the same gradients, files that go with their graph, memory that does not grow with the layers."""

from __future__ import annotations

import pytest
import torch

from hf_linattn import OptionError, patch_model
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.training.saved_tensors import save_on_disk
from tests.helpers import assert_close, gradients, make_tokens
from tests.models import SPINE, make_model


def step(model, ids, folder=None, least_bytes=0):
    with save_on_disk(folder, least_bytes):
        loss = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPINE)
def test_gradients_keep_their_bits_and_files_go_with_the_graph(name, dtype, checkpointing, tmp_path):
    model, ids = patch_model(make_model(name).to(dtype), "linear", chunk_feed_forward=8).train(), make_tokens(3, 21)
    if checkpointing:
        model.gradient_checkpointing_enable(checkpointing)
    model(input_ids=ids, labels=ids).loss.backward()
    want = gradients(model)
    model.zero_grad()
    loss = step(model, ids, tmp_path)
    assert len(list(tmp_path.iterdir())) > 4
    loss.backward()
    got = gradients(model)
    assert list(got) == list(want) and all(torch.equal(got[path], want[path]) for path in want)
    del loss
    assert not list(tmp_path.iterdir())


def test_a_graph_that_is_never_used_leaves_no_file(tmp_path):
    model, ids = patch_model(make_model("llama"), "linear").train(), make_tokens(3, 21)
    loss = step(model, ids, tmp_path)
    assert list(tmp_path.iterdir())
    del loss
    assert not list(tmp_path.iterdir())


def test_parameters_and_small_tensors_stay_in_memory(tmp_path):
    """Of the input of a product, its weight, its output's sine and a few rows' exponentials, two go to disk."""
    linear, leaf = torch.nn.Linear(40, 300), torch.randn(50, 40, requires_grad=True)
    with save_on_disk(tmp_path, least_bytes=leaf.nbytes):
        hidden = 2 * leaf
        output = linear(hidden)
        loss = output.sin()[:2].exp().sum()
    assert sorted(file.stat().st_size for file in tmp_path.iterdir()) == [hidden.nbytes, output.nbytes]
    loss.backward()
    wanted = torch.zeros_like(output)
    wanted[:2] = output[:2].sin().exp() * output[:2].cos()
    assert_close(linear.weight.grad, wanted.T @ hidden)
    assert_close(leaf.grad, 2 * wanted @ linear.weight)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"folder must be an existing folder, or None, got .*absent"):
        step(None, None, tmp_path / "absent")


def test_memory_between_the_passes_does_not_grow_with_the_layers(tmp_path):
    live = {}
    for depth in (2, 6):
        model = patch_model(make_model("llama", num_hidden_layers=depth), "linear").train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = make_tokens(3, 60)
        with LiveBytes() as count:
            loss = step(model, ids, tmp_path, least_bytes=2**12)
            live[depth] = count.live
        del loss
    assert live[2] == live[6]
