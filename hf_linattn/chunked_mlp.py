"""The feed-forward (MLP) of a layer in chunks of tokens, after Reformer, to save memory (Kitaev et al. 2020, sec. 3).

A feed-forward works on every token alone, so tokens may go through it a chunk at a time,

    FFN(x_1 .. x_N) = [FFN(x_1 .. x_c), FFN(x_c+1 .. x_2c), ...]

and its wide activations exist for c tokens, not for all. For gradients each chunk is a checkpoint: its activations are
made again in the backward pass, one chunk at a time. Reformer makes them again by reversing its layers, for which they
have to be trained that way; here the layers stay what they are.

What is split is a module of a layer, or the method that layers of BERT's kind keep for this. It becomes an instance of
a subclass of its own class; its parameters, children and hooks stay where they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import XIELUActivation
from transformers.pytorch_utils import Conv1D

from .architecture import layer_stacks
from .errors import UnsupportedModelError

# what transformers calls the feed-forward of a layer; those of a Conformer layer are two
MODULES = ("mlp", "feed_forward", "ffn", "mlp_block", "feed_forward1", "feed_forward2")
# methods of a layer that transformers splits over tokens itself, by `config.chunk_size_feed_forward`
METHODS = ("feed_forward_chunk", "feed_forward_chunk_query", "ff_chunk")
# modules with parameters that treat every token alone, and how the names of others end that do
POSITION_WISE = (nn.Linear, Conv1D, nn.LayerNorm, nn.RMSNorm, nn.PReLU, XIELUActivation)
POSITION_WISE_NAME = "RMSNorm"
CALL = "__call__"  # and not `forward`, in whose place accelerate puts a function of its own
LARGEST_TILE = 64  # elements of two vectors of the smallest numbers
CHUNK_SIZE = "_hf_linattn_chunk_size"  # the attribute that holds the size; without it nothing is split


class FeedForward(NamedTuple):
    """The method of a module that is a layer's feed-forward, one tensor [..., N, d] in and one out."""

    module: nn.Module
    method: str

    def attach(self, chunk_size: int) -> None:
        """Split it into chunks of at most that many tokens from now on."""
        plain_class: Any = type(self.module)
        setattr(self.module, CHUNK_SIZE, chunk_size)
        self.module.__class__ = chunked_class(plain_class, self.method)

    def detach(self) -> None:
        """Undo `attach`, also one that did not happen."""
        if hasattr(self.module, CHUNK_SIZE):
            delattr(self.module, CHUNK_SIZE)
        plain_class = vars(type(self.module)).get("plain_class")
        if plain_class is not None:  # FSDP may have made a class of ours, which then splits nothing any more
            self.module.__class__ = plain_class


def find_feed_forwards(model: PreTrainedModel, attention: Collection[str]) -> list[FeedForward]:
    """Return the feed-forwards of all layers in the stacks in which the attention modules at these paths lie.

    Raises:
        UnsupportedModelError: a layer has none that could be split, as those of OPT and BART, which compute it between
            other things in their own forward, and mixtures of experts, whose routers' choices are recorded for a loss.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=8))
    >>> [(type(x.module).__name__, x.method) for x in find_feed_forwards(model, ["h.0.attn", "h.1.attn"])]
    [('GPT2MLP', '__call__'), ('GPT2MLP', '__call__')]
    """
    found = [
        feed_forward
        for stack in layer_stacks(model, attention)
        for name, layer in model.get_submodule(stack).named_children()
        for feed_forward in _of_layer(type(model).__name__, f"{stack}.{name}", layer)
    ]
    return list(dict.fromkeys(found))  # layers may share one


def _of_layer(family: str, path: str, layer: nn.Module) -> list[FeedForward]:
    methods = [FeedForward(layer, name) for name in METHODS if hasattr(layer, name)]
    modules = {name: child for name, child in layer.named_children() if name in MODULES}
    remedy = "leave chunk_feed_forward out; gradient checkpointing saves memory in training without it"
    if not methods and not modules:
        children = ", ".join(name for name, _ in layer.named_children())
        raise UnsupportedModelError(
            f"{family}: no child of {path} ({type(layer).__name__}: {children}) is known to be its feed-forward, which"
            f" cannot be split into chunks therefore; {remedy}"
        )
    for name, module in modules.items() if not methods else ():
        if reason := _not_position_wise(module):
            raise UnsupportedModelError(
                f"{family}: {path}.{name} ({type(module).__name__}) cannot be split into chunks of tokens, as"
                f" {reason}; {remedy}"
            )
    return methods or [FeedForward(module, CALL) for module in modules.values()]


def _not_position_wise(module: nn.Module) -> str:
    """Return why a module cannot be known to treat every token alone, or nothing."""
    for part in _parts(module):
        kind = type(part)
        known = isinstance(part, POSITION_WISE) or kind.__name__.endswith(POSITION_WISE_NAME)
        if isinstance(part, nn.ModuleList) or (part._parameters and not known):
            return f"it has a {kind.__name__}, which is not known to treat every token alone"
    parameters = inspect.signature(module.forward).parameters.values()
    named = [x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    return "" if len(named) == 1 else f"its forward takes {', '.join(named)}"


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all inside it; of one that PEFT adapts, what it adapts."""
    module = getattr(module, "base_layer", module)
    yield module
    for child in module.children():
        yield from _parts(child)


@functools.cache
def chunked_class(plain_class: Any, method: str) -> Any:
    """Return the subclass of a module's class whose `method` takes the tokens in chunks."""
    plain = getattr(plain_class, method)

    def chunked(self: Any, hidden_states: Tensor) -> Tensor:
        return apply_in_chunks(partial(plain, self), hidden_states, getattr(self, CHUNK_SIZE, None))

    def reduce(self: Any) -> tuple[Any, ...]:
        # pickle looks classes up by their names, and finds the plain one
        return new_chunked, (plain_class, method), vars(self)

    namespace = {
        method: chunked, "__reduce__": reduce, "plain_class": plain_class, "__module__": plain_class.__module__,
        "__qualname__": plain_class.__qualname__, "__doc__": plain_class.__doc__,
    }  # fmt: skip
    return type(plain_class.__name__, (plain_class,), namespace)


def new_chunked(plain_class: Any, method: str) -> nn.Module:
    """Return an empty module for pickle and copy to fill."""
    made: Any = chunked_class(plain_class, method)
    return made.__new__(made)


def apply_in_chunks(feed_forward: Any, hidden_states: Tensor, chunk_size: int | None) -> Tensor:
    """Return `feed_forward(hidden_states)`, [..., N, d], made of at most `chunk_size` tokens at a time."""
    tokens = hidden_states.shape[:-1].numel()
    if chunk_size is None or tokens <= chunk_size:
        return feed_forward(hidden_states)
    # chunks have as many dimensions as the whole
    rows = hidden_states.reshape(*[1] * (hidden_states.dim() - 2), tokens, hidden_states.shape[-1])
    if torch.is_grad_enabled():
        feed_forward = partial(checkpoint, feed_forward, use_reentrant=False)
    output = torch.cat([feed_forward(chunk) for chunk in rows.tensor_split(ends(tokens, chunk_size), dim=-2)], dim=-2)
    return output.reshape(*hidden_states.shape[:-1], output.shape[-1])


def ends(tokens: int, chunk_size: int) -> list[int]:
    """Return where chunks end, the last one apart: as few and as equal ones as there can be, of whole tiles.

    A CPU rounds the elements that fill no whole vector in another way, and products of one to three rows, too. So all
    chunks but the last have a multiple of 64 tokens, and that one more than 64; of less, where chunks are below 128.

    >>> ends(1000, 256), ends(1000, 300), ends(129, 128), ends(37, 17)
    ([256, 512, 768], [256, 512, 768], [64], [8, 24])
    """
    tile = min(LARGEST_TILE, 1 << max(0, chunk_size.bit_length() - 2))
    tiles = -(-tokens // tile)
    count = -(-tiles // (chunk_size // tile))
    return [tile * (i * tiles // count) for i in range(1, count)]
