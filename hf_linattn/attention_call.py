"""Calls of attention layers: one as data, interceptors, which answer it in place of the mechanism, those that run.

Nothing of a call is kept on a module or a mechanism, so calls of one model may overlap: in threads, or one inside
another. What hooks hand to the attention function is a `ModuleCall`, in the thread that runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .errors import UnsupportedModeError, UnsupportedModelError
from .masks import CAUSAL
from .mechanisms import CallOptions, Mechanism, Pairs
from .mechanisms.forward import fitting_hidden
from .mechanisms.softmax import SoftmaxMechanism
from .mixed_adapters import refuse_mixed_adapters
from .ops.common.exact_softmax import softmax_attention
from .ops.reference import allowed_pairs

MECHANISM = "hf_linattn"  # the attribute of an attention module that holds its mechanism


class AttentionCall(NamedTuple):
    """One call of one layer, as its mechanism would get it.

    query [B, H, N, D], key [B, Hkv, N, D], value [B, Hkv, N, Dv], key_padding_mask [B, N] or None, sequence_ids [B, N]
    or None. exact: the sliding window, the soft cap, the dropout and the sink of the model's own attention, and
    whether it is causal, where that is not as its layer says. cross: whether the keys are an encoder's tokens, as
    many as they may be, and the mask says nothing of queries.
    hidden_states: the layer's input [B, N, E], where its mechanism reads it. first_query: across, how many tokens of
    the decoder stand before the queries.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    sequence_ids: Tensor | None
    exact: dict[str, Any]
    cross: bool = False
    hidden_states: Tensor | None = None
    first_query: Any = None

    @property
    def real(self) -> Tensor | None:
        """[B, N], true for queries that are no pads; None if all count."""
        mask = None if self.cross else self.key_padding_mask
        return None if mask is None else mask[:, -self.query.shape[2] :]

    @property
    def longest_row(self) -> int:
        """How many real keys the longest row has, or the longest document of packed rows."""
        batch, _, count, _ = self.key.shape
        mask, ids = self.key_padding_mask, self.sequence_ids
        real = self.key.new_ones(batch, count, dtype=torch.bool) if mask is None else mask.bool().expand(batch, -1)
        if ids is None:
            return int(real.sum(-1).max())
        rows = zip(ids.expand(batch, -1), real, strict=True)
        return max(int(row[own].bincount(minlength=1).max()) for row, own in rows)

    def rows(self, chosen: list[int]) -> AttentionCall:
        """Return the call of some of its rows."""
        if len(chosen) == len(self.query):
            return self

        def take(x: Tensor | None) -> Tensor | None:
            return x if x is None or len(x) == 1 else x[chosen]  # one row may stand for all

        mask, ids = take(self.key_padding_mask), take(self.sequence_ids)
        query, key, value = (x[chosen] for x in (self.query, self.key, self.value))
        hidden = None if self.hidden_states is None else self.hidden_states[chosen]
        return AttentionCall(query, key, value, mask, ids, self.exact, self.cross, hidden, self.first_query)

    def options(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return what the mechanism takes of the call beside its heads and masks."""
        given = {"hidden_states": self.hidden_states, "first_query": self.first_query}
        return mechanism.keywords({**self.exact, **given})

    def run(self, mechanism: Mechanism) -> Tensor:
        """Return the mechanism's answer [B, H, N, Dv]; no state is made."""
        return mechanism(*self[:5], keep_state=False, **self.options(mechanism))[0]

    def prepare(self, mechanism: Mechanism) -> None:
        """Let the mechanism fit what gradients cannot, as `Mechanism.prepare` does."""
        hidden = fitting_hidden(mechanism, self.query, self.key, self.hidden_states)
        mechanism.run_hook(CallOptions(hidden_states=hidden), "prepare", *self[:4])

    def run_softmax(self, mechanism: Mechanism) -> Tensor:
        """Return the answer of the attention that the mechanism replaced [B, H, N, Dv]."""
        layer = mechanism.layer
        return softmax_attention(
            self.query, self.key, self.value, scaling=layer.scaling, key_padding_mask=self.key_padding_mask,
            sequence_ids=self.sequence_ids, **{"causal": layer.causal, **self.exact},
        )  # fmt: skip

    def pairs(self, causal: bool, block_size: int) -> Iterator[Pairs]:
        """Yield the pairs of `block_size` queries at a time, in float32 or wider."""
        num_keys, compute = self.key.shape[2], torch.promote_types(self.query.dtype, torch.float32)
        query, key, position = self.query.to(compute), self.key.to(compute), self._positions()
        num_queries = query.shape[2]
        own = torch.arange(num_queries, device=query.device)[None] if self.cross else position
        real = torch.ones_like(own, dtype=torch.bool) if self.real is None else self.real.expand_as(own)
        for first in range(0, num_queries, block_size):
            end = min(first + block_size, num_queries)
            seen = end if causal else num_keys
            mask, ids = (None if x is None else x[:, :seen] for x in (self.key_padding_mask, self.sequence_ids))
            allowed = allowed_pairs(end - first, seen, causal, mask, ids, query.device, first)
            heads, places = (query[:, :, first:end], key[:, :, :seen]), (own[:, first:end], position[:, :seen])
            yield Pairs(*heads, *places, allowed, real[:, None, first:end, None], first, self.exact.get("sink"))

    def _positions(self) -> Tensor:
        """Return each token's position in its own sequence, pads not counted: [B or 1, N]."""
        num_keys, device = self.key.shape[2], self.key.device
        mask, ids = self.key_padding_mask, self.sequence_ids
        real = torch.ones(1, num_keys, dtype=torch.long, device=device) if mask is None else mask.long()
        before = real.cumsum(1) - real  # real tokens of the row that stand before each
        if ids is None:
            return before
        begins = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        return before - torch.where(begins, before, 0).cummax(1).values


def causal_by_itself(module: nn.Module) -> bool:
    """Whether a self-attention module masks the future: its config says so, or else it says so or is a decoder's.

    `config.is_causal` is what transformers tells its masks and attention functions in every call, where it is set: it
    makes an encoder of a decoder.
    """
    if (asked := getattr(module.config, "is_causal", None)) is not None:
        return bool(asked)
    said = getattr(module, "is_causal", getattr(module.config, "is_decoder", False))
    return bool(said or getattr(module, "is_decoder", False))


def looks_back(
    module: nn.Module, mechanism: Mechanism | None, queries: int, mask: Tensor | None, asked: bool | None
) -> bool:
    """Whether a call of a layer is causal: its mask says so, else who calls it, else its module.

    The mask comes first, as in PyTorch's attention, of which transformers asks `is_causal` where it has no mask. One
    query sees all keys in either case. Attention to an encoder's tokens is causal only if its module says so.
    """
    own = None if mechanism is None or mechanism.layer.cross else mechanism.layer
    if own is not None and queries == 1:
        return own.causal
    asked = getattr(mask, CAUSAL, asked)
    if asked is not None:
        return asked
    return bool(getattr(module, "is_causal", False)) if own is None else causal_by_itself(module)


def order_option(mechanism: Mechanism, causal: bool, mask: Tensor | None) -> dict[str, bool]:
    """Return what softmax is told of a call whose mask is causal and its layer not, or the reverse.

    Other mechanisms refuse it, and all do where no mask says so.
    """
    layer = mechanism.layer
    if causal == layer.causal:
        return {}
    if isinstance(mechanism, SoftmaxMechanism) and hasattr(mask, CAUSAL):
        return {"causal": causal}
    raise UnsupportedModeError(
        f"is_causal={causal} was asked of layer {layer.index}, which was patched with is_causal={layer.causal}, and"
        f" mechanism {mechanism.config.mechanism!r} cannot be both: patch the model with 'softmax' in that layer, if"
        " it is the mask of padded inputs that asks; else unpatch the model, change it, and patch it again"
    )


Interceptor = Callable[[AttentionCall], Tensor]

_INTERCEPTORS = threading.local()  # `of`: mechanism -> what answers in its place, for this thread
_OF_ALL_THREADS: list[Mapping[Mechanism, Interceptor | None]] = []


@contextmanager
def intercept_attention(
    mechanisms: Mapping[str, Mechanism], interceptors: Mapping[str, Interceptor] | None = None
) -> Iterator[None]:
    """Let each layer that `interceptors` names be answered by its interceptor for a while, all others by softmax.

    Without a cache. With no interceptors the model is the original, also on packed rows of a bidirectional model.
    Other threads that run the model meanwhile are left alone.
    """
    standing = {
        mechanism: (interceptors or {}).get(path, partial(AttentionCall.run_softmax, mechanism=mechanism))
        for path, mechanism in mechanisms.items()
    }
    with _standing(standing):
        yield


@contextmanager
def pass_through(mechanisms: Iterable[Mechanism]) -> Iterator[None]:
    """Let mechanisms answer for themselves for a while, inside `intercept_attention`."""
    with _standing(dict.fromkeys(mechanisms)):
        yield


@contextmanager
def _standing(interceptors: Mapping[Mechanism, Interceptor | None]) -> Iterator[None]:
    """Let these interceptors stand before their mechanisms in this thread for a while, beside those of others."""
    before = getattr(_INTERCEPTORS, "of", None)
    try:
        _INTERCEPTORS.of = {**(before or {}), **interceptors}
        _OF_ALL_THREADS.append(interceptors)
        yield
    finally:
        _INTERCEPTORS.of = before
        _OF_ALL_THREADS.remove(interceptors)


def interceptor_of(mechanism: Mechanism) -> Interceptor | None:
    """Return what stands before a mechanism in this thread; refuse a replica of one before which something stands."""
    if _OF_ALL_THREADS and is_replica(mechanism):
        _refuse_replica(mechanism)
    standing = getattr(_INTERCEPTORS, "of", None)
    return None if standing is None else standing.get(mechanism)


def mechanism_of(module: nn.Module) -> Any:
    """Return the mechanism attached to an attention module, or None.

    PEFT wraps it where `modules_to_save` names it, beside the copy that it trains: the active one is returned.

    Raises:
        UnsupportedModeError: PEFT was given the adapter of each row, and these have mechanisms of their own.
        UnsupportedModelError: something else stands in its place, as where PEFT adapts a parameter of the mechanism.
    """
    attached: Any = getattr(module, MECHANISM, None)
    if attached is None or isinstance(attached, Mechanism):
        return attached
    if "modules_to_save" not in attached._modules:
        _refuse_wrapper(module, attached)
    if attached._forward_pre_hooks:
        refuse_mixed_adapters(attached)
    if attached.disable_adapters or not attached.active_adapters:
        return attached.original_module
    return attached.modules_to_save[attached.active_adapters[0]]


def _refuse_wrapper(module: nn.Module, wrapper: nn.Module) -> NoReturn:
    """Refuse what stands in place of a mechanism and calls it by itself: nobody would call that."""
    layer, parameter = getattr(module, "layer_idx", None), getattr(wrapper, "parameter_name", None)
    place = type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"
    adapted = "" if parameter is None else f", which adapts its parameter {parameter!r},"
    of_peft = parameter is not None or type(wrapper).__module__.startswith("peft.")
    remedy = (
        "take the mechanism out of target_parameters and target_modules, and have it trained whole, as"
        f" LoraConfig(..., modules_to_save=[{MECHANISM!r}])"
        if of_peft
        else "wrap or compile the attention module or a layer around it, not the mechanism"
    )
    raise UnsupportedModelError(
        f"{MECHANISM} of {place} has {type(wrapper).__name__}{adapted} in place of the mechanism; {remedy}"
    )


def scaled(query: Tensor, scaling: float | None, mechanism: Mechanism) -> Tensor:
    """Return queries for a mechanism that scales as its layer says: OPT scales its queries itself and passes 1."""
    if scaling is None or scaling == mechanism.layer.scaling:
        return query
    return query * (scaling / mechanism.layer.scaling)


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a copy on another GPU, which torch.nn.DataParallel makes for one call, in a thread."""
    return getattr(module, "_is_replica", False)


def _refuse_replica(mechanism: Mechanism) -> None:
    """Refuse to let a replica answer for itself where its original would not; both have one description of the layer.
    """
    if any(original.layer is mechanism.layer for standing in _OF_ALL_THREADS for original in standing):
        raise UnsupportedModeError(
            f"torch.nn.DataParallel runs layer {mechanism.layer.index} while something else answers for its mechanism,"
            " as softmax does for a teacher, and its copies would not obey; let each process have one GPU (accelerate"
            " launch --config_file recipes/accelerate/ddp.yaml), or make one visible (CUDA_VISIBLE_DEVICES=0)"
        )


class ModuleCall:
    """One call of an attention module: the cache layer that belongs to it, None without a cache.

    read: how many tokens it had read before, a tensor in a static cache that has begun; across, how many the decoder's
    own attention has read, the new ones too.
    consumed: whether the new keys in it were attended to, by a mechanism that keeps a state of them.
    hidden_states: the input of the module [B, N, E], where its mechanism reads it; None where it was called without.
    """

    def __init__(self, module: nn.Module):
        self.module, self.consumed = module, False
        self.layer: Any = None
        self.read: Any = None
        self.hidden_states: Tensor | None = None

    def first_query(self, count: int) -> Any:
        """Return, across, how many tokens of the decoder stand before the `count` queries; None without its cache."""
        return None if self.read is None else self.read - count

    def keep_input(self, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the module is called with for a mechanism that reads it."""
        given = kwargs.get("hidden_states", args[0] if args else None)
        if mechanism.reads_hidden and isinstance(given, Tensor):
            self.hidden_states = given


_RUNNING = threading.local()  # its list `calls`: the innermost last


def begin_call(module: nn.Module) -> ModuleCall:
    """Return a new call of `module`, which is the innermost of this thread until `end_call`."""
    calls = getattr(_RUNNING, "calls", None)
    if calls is None:
        calls = _RUNNING.calls = []
    calls.append(ModuleCall(module))
    return calls[-1]


def current_call(module: nn.Module) -> ModuleCall | None:
    """Return the call of `module` that runs in this thread; None where it was called past its hooks."""
    calls = getattr(_RUNNING, "calls", None)
    return calls[-1] if calls and calls[-1].module is module else None


def end_call(module: nn.Module) -> None:
    """Forget the innermost call, which is of `module`."""
    calls = getattr(_RUNNING, "calls", None)
    if calls and calls[-1].module is module:
        calls.pop()
