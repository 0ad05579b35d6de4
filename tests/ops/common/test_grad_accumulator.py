"""Parts of a tensor that share one gradient, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.evaluation.memory import LiveBytes
from hf_linattn.ops.common.grad_accumulator import GradAccumulator
from hf_linattn.ops.slots.segment_pool import products_with_rows
from hf_linattn.testing.counters import elements_written

INDEX = torch.tensor([0, 3, 3, 29])


@pytest.fixture
def tensor():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 10, 4, dtype=torch.float64, generator=generator).requires_grad_()


def parts(source: GradAccumulator) -> list[torch.Tensor]:
    """Overlapping, scattered and repeated parts, and the whole."""
    selected = source.index_select(1, 2, INDEX)
    return [source.narrow(2, 2, 5).sin(), source.narrow(2, 4, 6) ** 2, selected**3, source.whole.cos()]


def plain_parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, :, 2:7].sin(), x[:, :, 4:] ** 2, x.flatten(1, 2)[:, INDEX] ** 3, x.cos()]


@pytest.mark.parametrize("used", [[0], [3], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 3]])
def test_gradients_are_those_of_indexing(tensor, used):
    got, want = parts(GradAccumulator(tensor)), plain_parts(tensor)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    gradients = [torch.autograd.grad(sum(x[i].sum() for i in used), tensor)[0] for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def test_parts_taken_without_gradients_ask_for_none(tensor):
    """PyTorch's counter of operations hooks into the gradient of what a module is given, which no part has then."""
    source = GradAccumulator(tensor)
    with torch.no_grad():
        for part, want in zip(parts(source), plain_parts(tensor), strict=True):
            assert torch.equal(part, want)
        rows = source.rows(torch.tensor([0, 3, 3]).expand(2, 3, 3))
        taken = source.narrow(2, 2, 5), source.index_select(1, 2, INDEX), rows
    assert not any(part.requires_grad for part in taken)


@pytest.mark.parametrize("layout", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=str)
def test_rows_of_heads_in_any_layout(tensor, layout):
    """Those of a source, with its other parts, and their gradients."""
    dims = [0, *(1 + x for x in layout)]
    x = tensor.detach().permute(dims).contiguous().permute([dims.index(i) for i in range(4)]).requires_grad_()
    place = torch.tensor([3, 9, 3, 0]).expand(2, 3, 4)
    source = GradAccumulator(x)
    got = [source.rows(place), *parts(source)]
    want = [x[:, :, place[0, 0]], *plain_parts(x)]
    gradients = [torch.autograd.grad(sum(y.sin().sum() for y in made), x)[0] for made in (got, want)]
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


def test_a_second_backward_pass_starts_anew(tensor):
    total = sum(x.sum() for x in parts(GradAccumulator(tensor)))
    once, twice = (torch.autograd.grad(total, tensor, retain_graph=True)[0].clone() for _ in range(2))
    assert torch.equal(once, twice)


def test_derivatives_of_gradients_are_those_of_indexing(tensor):
    def slopes(outputs: list[torch.Tensor]) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in outputs), tensor, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), tensor)[0]

    torch.testing.assert_close(slopes(parts(GradAccumulator(tensor))), slopes(plain_parts(tensor)))


def test_a_pass_that_ended_in_an_error_leaves_nothing_for_the_next(tensor):
    source, fails = GradAccumulator(tensor), [True]

    def refuse(_: torch.Tensor) -> None:
        if fails:
            raise RuntimeError(fails.pop())

    first = source.narrow(2, 0, 5) * 2
    first.register_hook(refuse)
    total = first.sum() + source.narrow(2, 3, 7).sum()  # whose gradient comes before that of the first
    with pytest.raises(RuntimeError, match="True"):
        total.backward(retain_graph=True)
    total.backward()
    (want,) = torch.autograd.grad(tensor[:, :, :5].sum() * 2 + tensor[:, :, 3:].sum(), tensor)
    assert torch.equal(tensor.grad, want)


def test_a_part_costs_its_own_size():
    def written(number: int) -> int:
        source = GradAccumulator(torch.zeros(number, 100, requires_grad=True))
        return elements_written(sum(source.narrow(0, i, 1).sum() for i in range(number)).backward)

    assert written(64) < 2.1 * written(32)


def test_the_graph_does_not_keep_itself_alive():
    with LiveBytes() as count:
        x = torch.zeros(1000, requires_grad=True) * 1
        outputs = parts(GradAccumulator(x.view(1, 1, 250, 4)))
        assert count.live >= 8000
        del x, outputs
        assert count.live == 0


def test_without_gradients_parts_are_plain(tensor):
    with torch.no_grad():
        source = GradAccumulator(tensor)
    assert source.whole is tensor
    assert source.narrow(2, 1, 2)._base is tensor


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_products_with_rows_add_to_the_same_gradient(tensor, turned, shared):
    """Of vectors for all heads or for each, with rows as models give them, too; beside other parts, and alone."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(1 if shared else 3, 2, 4, dtype=torch.float64, generator=generator).requires_grad_()
    rows = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) if turned else tensor.detach()
    rows.requires_grad_()
    for beside in (True, False):
        results = []
        for source, others in ((GradAccumulator(rows), parts), (rows, plain_parts)):
            made = products_with_rows(vectors, source) if others is parts else vectors @ rows.mT
            outputs = [made.sin(), *(others(source) if beside else [])]
            results.append([made, *torch.autograd.grad(sum(x.sum() for x in outputs), [vectors, rows])])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
