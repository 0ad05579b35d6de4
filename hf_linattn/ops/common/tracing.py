"""Whether operations are watched: recorded for other inputs, differentiated or mapped by a transformation.

What calls C, writes into memory of its own, or looks at the values of tensors asks here, and nobody else asks PyTorch.
What masks and positions say is looked at `once` in a forward of a model, by its first layer, and not by each layer: on
a GPU every look at a number waits for all that is still to be computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

GRADS_BATCHED = torch._C._dispatch_key_parse("Batched")  # of tensors that `is_grads_batched` maps over

ENDS_GRAPH = (
    "what this mechanism reads depends on lengths or data, so that compiled graphs end here and begin again; leave out"
    " fullgraph=True, export with strict=False, or take a mechanism of one graph, such as linear"
)
PROXY = torch._C._TorchDispatchModeKey.PROXY  # of the mode in which `make_fx` records
FAKE = torch._C._TorchDispatchModeKey.FAKE  # of FakeTensorMode


def ends_graph(function: Any) -> Any:
    """Have torch.compile run a function as it is: its graph ends before and another begins behind."""
    return torch.compiler.disable(function, reason=ENDS_GRAPH)


def is_recorded() -> bool:
    """Whether a program for other inputs is made of what runs: torch.compile, torch.export, torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_watched() -> bool:
    """Whether only PyTorch's own operations are understood: `is_recorded`, torch.func, or forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return True
    functional = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return functional or torch.jit.is_tracing()


def is_made_again() -> bool:
    """Whether a backward pass runs here, in which gradient checkpointing makes a forward again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def may_write(*tensors: Tensor) -> bool:
    """Whether memory of one's own may be written into: no gradient needs what is there, and nobody watches."""
    if torch.is_grad_enabled() or is_watched():
        return False
    outside = not torch.is_inference_mode_enabled()  # where what was made inside must stay as it is
    return not any(x.requires_grad or (outside and x.is_inference()) for x in tensors)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x, which nobody else holds, times a factor of its dtype: in its own memory where that may be written."""
    return x.mul_(factor) if may_write(x) else x * factor


def has_values(x: Tensor) -> bool:
    """Whether x has numbers beside its shape: not on the meta device, nor under FakeTensorMode."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_shape_only(x: Tensor) -> bool:
    """Whether nothing but shapes is asked for: x has no numbers, and no program is made of it, `make_fx`'s neither."""
    return not (has_values(x) or is_recorded() or torch._C._get_dispatch_mode(PROXY) is not None)


def is_known(x: Tensor) -> bool:
    """Whether the values of x may decide what is done: not where that is recorded, nor where vmap maps over x.

    Nor where it has none.
    """
    return not is_recorded() and has_values(x) and not is_mapped(x)


def is_mapped(x: Tensor) -> bool:
    """Whether vmap, or the one that `is_grads_batched` takes, maps over x, where nothing is recorded."""
    if is_recorded():
        return False
    if torch._C._dispatch_keys(x).has(GRADS_BATCHED):
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return False


def is_open(x: Tensor) -> bool:
    """Whether a program is made that is to hold for other sizes of x: any by torch.jit.trace, dynamic by torch.export.

    Not by torch.compile, which makes another program where sizes decide.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and not all(isinstance(size, int) for size in x.shape)
    return torch.jit.is_tracing()


def unrecorded(function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), which torch.export does not see: what is recorded is what one thread does.

    For what follows from sizes alone and is a constant of the program. FakeTensorMode does not see it either, and gets
    its tensors as those that it knows.
    """
    if torch.compiler.is_dynamo_compiling():
        return function(*given)
    exporting, mode = torch.compiler.is_exporting(), torch._C._get_dispatch_mode(FAKE)
    if not exporting and mode is None:
        return function(*given)
    with ThreadPoolExecutor(1) as elsewhere:
        found = elsewhere.submit(function, *given).result()
    return found if exporting else tree_map_only(Tensor, mode.from_tensor, found)


class _Forward(NamedTuple):
    positioned: bool  # whether its caller gave it positions
    order: bool | None
    found: dict[Any, Any]


_RUNNING = threading.local()  # its list `forwards`: those that run in this thread, the innermost last


def begin_forward(positioned: bool, order: bool | None = None) -> None:
    """Begin a forward of a model, which `end_forward` ends, however it went.

    positioned: whether its caller gave it positions, rather than leaving them to the model, which counts.
    order: whether its layers are causal, where masks that say otherwise count even if they mask nothing; else None.
    """
    if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing():
        return
    if not hasattr(_RUNNING, "forwards"):
        _RUNNING.forwards = []
    _RUNNING.forwards.append(_Forward(positioned, order, {}))


def end_forward() -> None:
    """Forget the innermost forward and what it found."""
    if not (torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing()) and getattr(_RUNNING, "forwards", None):
        _RUNNING.forwards.pop()


def order_of_layers() -> bool | None:
    """Return what the innermost forward began with as `order`; None outside."""
    forwards: Any = getattr(_RUNNING, "forwards", None)
    return forwards[-1].order if forwards else None


def counts_positions() -> bool:
    """Whether torch.export records a forward of a model that counts positions itself: none of its rows are packed.

    Not of programs that Dynamo makes (`strict=True`), which does not see this.
    """
    forwards: Any = getattr(_RUNNING, "forwards", None) if torch.compiler.is_exporting() else None
    return bool(forwards) and not forwards[-1].positioned


def once(function: Callable[..., Any], *given: Any) -> Any:
    """Return function(*given), or what it returned in this forward for these very tensors and equal other arguments.

    Outside a forward, and where it is recorded, the function is called.
    """
    forwards = None if is_recorded() else getattr(_RUNNING, "forwards", None)
    if not forwards:
        return function(*given)
    key, found = (function, *(id(x) if isinstance(x, Tensor) else x for x in given)), forwards[-1].found
    if key not in found:
        found[key] = given, function(*given)  # the tensors are kept, so that no others get their ids
    return found[key][1]
