"""Memory of large outputs is taken up again when nobody uses it any more, and never before; what training keeps."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_linattn.evaluation import memory as evaluation_memory
from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.ops.linear.cpu_kernels import SEGMENT
from hf_linattn.ops.runtime import cpu as library
from tests.ops.cpu_cases import HEADS, KV_HEADS, kept_for_backward, make_heads, make_mechanism

SHAPES = (torch.Size((1, 8, 1, 4111, 64)), torch.Size((1, 8, 4111, 64)))  # of query and value: 8.4 MB


@pytest.fixture(autouse=True)
def kept(variant, monkeypatch):
    """None yet, and a PyTorch that counts."""
    monkeypatch.setattr(library, "KEPT", library.Kept())
    assert library.can_keep()
    return library.KEPT


def make_output() -> torch.Tensor:
    return library.empty_output(torch.empty(SHAPES[0], device="meta"), torch.empty(1).expand(SHAPES[1]))


def test_what_is_free_is_taken_up_again():
    output = make_output()
    assert output.shape == SHAPES[0] and output.stride() == (8 * 4111 * 64, 64, 64, 512, 1)
    place = output.data_ptr()
    other = make_output()
    assert other.data_ptr() != place
    del output
    assert make_output().data_ptr() == place


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x[0, 3, :, 7:9],
        lambda x: x.detach().numpy(),
        lambda x: x.untyped_storage(),
        lambda x: (x[..., 0] * torch.ones(1, requires_grad=True)).grad_fn,  # saved for a backward pass
        lambda x: memoryview(x.detach().numpy()[0, 0, 0]),
        lambda x: torch.utils.dlpack.to_dlpack(x),
        lambda x: torch.from_dlpack(x.detach()),
        lambda x: torch.from_numpy(x.detach().numpy())[..., 1:],
    ],
    ids=["tensor", "view", "numpy", "storage", "autograd", "buffer", "dlpack", "tensor of dlpack", "tensor of numpy"],
)
def test_what_anybody_holds_is_not(hold):
    output = make_output()
    place = output.data_ptr()
    held = hold(output)
    del output
    assert make_output().data_ptr() != place
    del held
    assert make_output().data_ptr() == place


def test_another_size_and_what_is_small_are_made_anew(kept):
    place = make_output().data_ptr()
    assert library.zeros(torch.empty(1), torch.Size((4112, 512))).data_ptr() != place
    assert len(kept.storages) == 2
    library.zeros(torch.empty(1), torch.Size((100,)))
    assert len(kept.storages) == 2


def test_zeros_are_zeros_and_layouts_are_kept():
    make_output().fill_(3.0)
    like = torch.empty(1, 4111, 8, 64).transpose(1, 2)
    zeros = library.zeros_like(like)
    assert zeros.stride() == like.stride() and not zeros.any()
    turned = library.empty_like(torch.empty(1, 8, 64, 4111).mT)  # the last dimension is contiguous all the same
    assert turned.shape == (1, 8, 4111, 64) and turned.stride(-1) == 1


def test_no_more_is_kept_than_said(kept, monkeypatch):
    monkeypatch.setattr(library, "KEPT_BYTES", 20 << 20)
    outputs = [make_output() for _ in range(5)]
    assert [x.data_ptr() for x in kept.storages] == [x.data_ptr() for x in outputs[3:]]


def test_a_storage_that_was_given_away_is_left_alone():
    output = make_output()
    output.untyped_storage().resize_(0)
    del output
    assert make_output().untyped_storage().nbytes() == 8 * 4111 * 64 * 4


def test_tensors_without_memory_keep_none(kept):
    with FakeTensorMode():
        output = library.zeros(torch.empty(1), torch.Size((4112, 512)))
    assert isinstance(output, FakeTensor) and not kept.storages


def test_what_is_alive_is_counted_as_if_nothing_were_kept(monkeypatch):
    """Whatever was kept before, and no more afterwards."""
    monkeypatch.setattr(library, "KEPT", evaluation_memory.KEPT)
    counts, like, shape = [], torch.empty(1), torch.Size((4112, 512))
    for _ in range(2):
        with LiveBytes() as count:
            outputs = [library.zeros(like, shape), library.zeros(like, shape)]
            del outputs
            library.zeros(like, shape)
        counts.append((count.peak, count.live))
        library.zeros(like, shape)
    assert counts == [(2 * shape.numel() * 4, 0)] * 2


def test_threads_do_not_get_the_same():
    outputs = [make_output() for _ in range(4)]
    del outputs
    found, start = [], threading.Barrier(4)

    def take():
        start.wait()
        found.append(make_output())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({x.data_ptr() for x in found}) == 4


def test_what_another_process_may_read_is_never_taken_up_again(kept):
    output = make_output().fill_(1.0)
    output.share_memory_()  # as by sending it through a queue of torch.multiprocessing
    place = output.data_ptr()
    del output
    assert make_output().data_ptr() != place and len(kept.storages) == 1


@pytest.mark.parametrize("size", [None, 1, 16])
@pytest.mark.parametrize("length", [SEGMENT, SEGMENT + 1])
def test_training_keeps_states_for_tokens_and_not_for_sequences(length, size):
    """None before the first tokens of a sequence, where it would be zero."""
    ids = None if size is None else (torch.arange(length) // size).expand(2, -1)
    heads = [x.requires_grad_() for x in make_heads(2, length)]
    with kept_for_backward() as kept:
        output, state = make_mechanism("linear", True).train()(*heads, None, ids)
    numbers = 2 * HEADS * length  # of the factor and of the largest exponent of each query
    states = 2 * KV_HEADS * (length // (SEGMENT + 1)) * (32 * 33 + 1)  # of 24 rows and 20 columns, padded
    assert sum(kept.values()) == sum(x.nbytes for x in (*heads, output, *state)) + 4 * (2 * numbers + states)
