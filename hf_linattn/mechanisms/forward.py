"""What is done around every call of a mechanism: it is checked, its heads and weights made ready, its form chosen."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import OperandError, UnsupportedModeError, UnsupportedModelError
from ..feature_maps import FeatureMap
from ..ops.common.precision import accum_dtype
from ..ops.common.tracing import is_known, is_open, is_recorded, is_shape_only, is_watched, once
from ..ops.dispatch import Policy
from .capabilities import Capabilities
from .inputs import AttentionLayer, CallOptions

# methods of a mechanism that get the `CallOptions` if they name an argument `call`
HOOKS = (
    "causal_attention", "bidirectional_attention", "cross_state", "cross_attention", "weights", "weights_given",
    "causal_sequences", "causal_in_place", "bidirectional_sequences", "cross_sequences", "prepare",
)  # fmt: skip


class Forward(Capabilities, nn.Module):
    """Base of `Mechanism`: its `forward`, and which of its methods that calls.

    reads_call: those of `HOOKS` that name an argument `call`. scheduled: whether `before_forward` does anything.
    """

    reads_call: ClassVar[frozenset[str]] = frozenset()
    scheduled: bool = False

    layer: AttentionLayer
    backend: str
    calls: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hooks = {name: getattr(cls, name) for name in HOOKS if hasattr(cls, name)}
        cls.reads_call = frozenset(x for x, hook in hooks.items() if "call" in inspect.signature(hook).parameters)
        cls.scheduled = cls.before_forward is not Forward.before_forward

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
        *,
        keep_state: bool = True,
        sink: Tensor | None = None,
        hidden_states: Tensor | None = None,
        first_query: Any = None,
    ) -> tuple[Tensor, Any]:
        """Return the output in the dtype of `value`, and the state after the last key (None if bidirectional).

        Args:
            query: [B, H, Nq, D], after position encoding. With Nk > Nq the queries are the last Nq positions; not in
                cross-attention, where each sees all keys.
            key: [B, Hkv, Nk, D], after position encoding; in cross-attention not read with a state, which has them.
            value: [B, Hkv, Nk, Dv], else as `key`.
            key_padding_mask: [B, Nk], true for real keys; None if all are.
            sequence_ids: [B, Nk], equal inside a packed sequence, pads having any; None if nothing is packed.
            state: what an earlier call returned, if this one continues it. `OperandError` where these do not fit.
            keep_state: whether the state is needed; if not, what is returned in place of it means nothing.
            sink: the layer's own learned sinks [H], where `takes_sink` says that these are read.
            hidden_states: the layer's input [B, Nk, E], where `reads_hidden` names options that read it.
            first_query: in cross-attention, how many tokens of the decoder stand before the queries, a number or a
                tensor []; None: as many as the state has answered.
        """
        key_padding_mask, sequence_ids = fitting(self.layer, query, key, value, key_padding_mask, sequence_ids, state)
        self.record_call()
        require_recordable(self, query, key_padding_mask, sequence_ids)
        call = self.call_options(keep_state, sink, fitting_hidden(self, query, key, hidden_states), first_query)
        with loaded(self), without_autocast(self, query.device):
            query, key, wide_value = admitted(self.takes_half and not self.layer.cross, query, key, value)
            if self.layer.cross:
                if state is None:
                    state = self.run_hook(call, "cross_state", key, wide_value, key_padding_mask)
                output, state = self.run_hook(call, "cross_attention", query, state)
                return output.to(value.dtype), state
            earlier = key.shape[2] - query.shape[2]
            if earlier:  # keys that came without their queries, as from a prefix or another model's cache
                query = torch.cat([query.new_zeros(*query.shape[:2], earlier, query.shape[3]), query], dim=2)
            heads = (query, key, wide_value, key_padding_mask, sequence_ids)
            if self.layer.causal:
                output, state = self.run_hook(call, "causal_attention", *heads, state)
            else:
                output, state = self.run_hook(call, "bidirectional_attention", *heads), None
            return (output[:, :, earlier:] if earlier else output).to(value.dtype), state

    def run_hook(self, call: CallOptions, name: str, *operands: Any) -> Any:
        """Return what one of `HOOKS` returns, which gets the options of the call if it asks for them."""
        hook = getattr(self, name)
        return hook(*operands, call=call) if name in self.reads_call else hook(*operands)

    def keywords(self, exact: dict[str, Any]) -> dict[str, Any]:
        """Return what `forward` takes of the layer's sliding window, soft cap, dropout, sink, input and place."""
        takes = {"sink": self.takes_sink, "hidden_states": bool(self.reads_hidden)}
        takes["first_query"] = self.layer.cross and "cross_attention" in self.reads_call
        return {name: x for name, x in exact.items() if takes.get(name, self.takes_exact)}

    def call_options(
        self, keep_state: bool, sink: Tensor | None, hidden_states: Tensor | None = None, first_query: Any = None
    ) -> CallOptions:
        """Return what the methods of a call get; `UnsupportedModeError` for a sink that would be left out."""
        if sink is not None and not self.takes_sink:
            raise UnsupportedModeError(
                f"mechanism {self.config.mechanism!r} has no softmax denominator for a sink, got sink"
                f" {tuple(sink.shape)}; leave it out"
            )
        return CallOptions(keep_state, sink, hidden_states, first_query)

    @property
    def policy(self) -> Policy:
        """How operations choose their backends."""
        return Policy(self.backend, self.training)

    def record_call(self) -> None:
        """Count a forward; a compiled graph does not, as a changing number would have it compiled anew."""
        if not torch.compiler.is_compiling():
            self.calls += 1

    def before_forward(self) -> None:
        """Called once before a forward of the whole model, never between its layers; for scheduled changes.

        Not while the gradients of an earlier forward are still to come, whose layers may be made again for them.
        """

    def times_redrawn(self) -> int:
        """Return how often the random directions were drawn anew, its own and its parts'; a state is of one draw."""
        return sum(x.redraws for x in self.modules() if isinstance(x, FeatureMap)) if self.scheduled else 0

    def borrowed(self) -> tuple[nn.Module, ...]:
        """Return the mechanisms of other layers whose own weights this one reads."""
        return ()


def without_autocast(mechanism: Forward, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which nothing computes in another dtype; the meta device, which has no autocast, needs none.

    Raises:
        UnsupportedModelError: heads are on the meta device, and the mechanism's tensors are not.
    """
    if device.type != "meta":
        return torch.autocast(device.type, enabled=False)
    elsewhere = [name for name, x in (*mechanism.named_parameters(), *mechanism.named_buffers()) if not x.is_meta]
    if elsewhere:  # as `patch_model` leaves them, since loading a checkpoint may not bring all of them
        raise UnsupportedModelError(
            f"mechanism {mechanism.config.mechanism!r} of layer {mechanism.layer.index} has {', '.join(elsewhere)} in"
            " memory, and its inputs are on the device 'meta'; call model.to('meta') after patch_model"
        )
    return nullcontext()


def fitting(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sequence_ids: Tensor | None,
    state: Any, *, pooled: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return mask and ids of all rows, where one row may stand for all; pads are of a sequence beside them.

    pooled: whether keys may be fewer than queries, as where a layer pools them.

    Programs that are being recorded are not checked: their sizes may be symbols, and they call no C. Of
    heads without numbers neither mask nor ids are returned: what is masked or packed changes no shape.

    Raises:
        OperandError: the arguments of `Mechanism.forward` do not fit each other or the `AttentionLayer`.
    """
    if not is_recorded():
        _check_sizes(layer, query, key, value, mask, sequence_ids, state is not None, pooled)
        if state is not None:
            check_rows(state, query.shape[0])
        if is_shape_only(query):
            return None, None
    rows = query.shape[0]
    mask = mask if mask is None else mask.bool()  # the same tensor where it is that: what is made of it is kept by it
    mask = mask if mask is None or mask.shape[0] == rows else mask.expand(rows, -1)
    ids = sequence_ids
    ids = ids if ids is None or ids.shape[0] == rows else ids.expand(rows, -1)
    return mask, ids if ids is None or mask is None or not layer.causal else once(_ids_beside, ids, mask)


def _ids_beside(ids: Tensor, mask: Tensor) -> Tensor:
    """Return ids [B, N] where pads of neither sequence beside them belong to the one before, or to the first one.

    With ids of their own they would end a sequence that goes on behind them, or that the state belongs to.
    """
    real_first, read = (~mask).long().argsort(dim=1, stable=True), mask.cumsum(1)
    last = (read[:, -1:] - 1).clamp(min=0)
    before, after = (
        ids.gather(1, real_first.gather(1, place)) for place in ((read - 1).clamp(min=0), torch.minimum(read, last))
    )
    return torch.where(mask | (ids == after), ids, before)


def _check_sizes(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sequence_ids: Tensor | None,
    stateful: bool, pooled: bool,
) -> None:  # fmt: skip
    given, known, width = query.shape, key.shape, layer.head_dim
    if len(given) != 4 or len(known) != 4 or value.dim() != 4:
        _refuse("query, key and value", query, key, value, "must have four dimensions [B, H, N, D]")
    batch, heads = given[:2]
    if known[0] != batch or not known[1] or heads % known[1] or given[3] != width or known[3] != width:
        _refuse("query and key", query, key, f"must be [B, H, Nq, {width}] and [B, Hkv, Nk, {width}], Hkv dividing H")
    if not (batch and given[2] and (known[2] or layer.cross)):  # a step across reads what its state has
        _refuse("query and key", query, key, "must have a row and a token at least")
    if value.shape[:3] != known[:3]:
        _refuse("key and value", key, value, "must have the same rows, heads and tokens")
    if not (layer.cross or pooled) and known[2] < given[2]:
        what = "these are the last tokens" if layer.causal else "leave layers that pool their keys out of `layers`"
        _refuse("query and key", query, key, f"must have at least as many keys as queries: {what}")
    rows = ((batch, known[2]), (1, known[2]))
    if layer.cross and stateful:
        return  # the state has the keys, and what masked them
    if mask is not None and mask.shape not in rows:
        _refuse("key_padding_mask", mask, f"must be {list(rows[0])}: a row of the batch, a column for each key")
    if sequence_ids is not None and sequence_ids.shape not in rows:
        _refuse("sequence_ids", sequence_ids, f"must be {list(rows[0])}: a row of the batch, a column for each key")


def fitting_hidden(mechanism: Any, query: Tensor, key: Tensor, hidden_states: Tensor | None) -> Tensor | None:
    """Return the layer's input for a mechanism that reads it, beside its heads and in their dtype; else None.

    Raises:
        UnsupportedModeError: nobody handed it over. OperandError: it is not [B, Nk, E].
    """
    if not mechanism.reads_hidden:
        return None
    options, layer = " and ".join(mechanism.reads_hidden), mechanism.layer
    if hidden_states is None:
        raise UnsupportedModeError(
            f"mechanism {mechanism.config.mechanism!r} of layer {layer.index} has {options}, for which it reads the"
            " layer's input, and this attention was called without it; leave these options out, or call the attention"
            " module with its hidden_states"
        )
    want = (key.shape[0], key.shape[2], layer.hidden_size)
    if tuple(hidden_states.shape) != want:
        raise OperandError(
            f"hidden_states {list(hidden_states.shape)} must be {list(want)} for {options}: a token of the layer's"
            " input for every key; keys that came without it, as from a prefix, need these options left out"
        )
    return hidden_states.to(query.device, accum_dtype(query))


def check_rows(state: Any, batch: int) -> None:
    """Raise `OperandError` where a decoding state, tensors with the batch first, is that of another number of rows."""
    for x in state:
        if isinstance(x, Tensor) and x.dim() and x.shape[0] != batch:
            raise OperandError(
                f"the decoding state has {x.shape[0]} rows, and {batch} are to continue it; give every row a state of"
                " its own (cache.batch_repeat_interleave, cache.reorder_cache) or start with a new cache"
            )


def _refuse(what: str, *found: Any) -> None:
    *tensors, rule = found
    raise OperandError(f"{what} {' and '.join(str(list(x.shape)) for x in tensors)} {rule}")


def admitted(half: bool, *heads: Tensor) -> tuple[Tensor, ...]:
    """Return heads as they are, if that is in one dtype and half precision may come; else in the first one's, wide."""
    if half and all(x.dtype == heads[0].dtype for x in heads):
        return heads
    return tuple(x.to(accum_dtype(heads[0])) for x in heads)


def require_recordable(mechanism: Any, query: Tensor, *masks: Tensor | None) -> None:
    """Refuse a program in which lengths, paddings or packings of its example would stand for those of all inputs.

    Args:
        mechanism: one that has `any_length` is right in every such program.
        query: [B, H, N, D]. masks: its mask and sequence ids, each [B, N], if there are any.

    Raises:
        UnsupportedModeError: torch.jit.trace; torch.export of a dynamic size, or with a mask or ids; torch.func.vmap
        over a mask or ids.
    """
    if not is_watched() or mechanism.any_length:
        return
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return  # torch.compile makes another program where these differ
    if not is_open(query) and all(x is None or is_known(x) for x in masks):
        return
    raise UnsupportedModeError(
        f"mechanism {mechanism.config.mechanism!r} of layer {mechanism.layer.index} works by the length, padding and"
        " packing that it sees, and torch.jit.trace, torch.export with dynamic sizes or a mask, and torch.func.vmap"
        " over masks make one program for all: patch with a mechanism on the linear base (linear, performer,"
        " hedgehog, gla, retention, ...) or softmax, or export with strict=False, static sizes and neither"
        " attention_mask nor position_ids"
    )


def gather_parts(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Have DeepSpeed's ZeRO-3 gather the weights of parts with those of a module: now, and before each forward of it.

    Left to itself it gathers them for each call of a part, and when they are read otherwise. How often that is depends
    on how rows are packed, and processes that differ in it would wait for each other's weights.
    """
    from deepspeed import zero  # here: it has prepared the module

    if not _gathering(module._forward_pre_hooks):  # a part itself
        return
    known = module.__dict__.get("_external_params", {})
    for part in parts:
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in _gathering(hooks):
                del hooks[key]
        weights: list[Any] = list(part.parameters(recurse=False))
        for parameter in weights:
            if id(parameter) not in known:
                zero.register_external_parameter(module, parameter)
                if parameter.ds_status.name == "NOT_AVAILABLE":
                    parameter.all_gather()
                parameter.ds_active_sub_modules.add(module.ds_id)


def _gathering(hooks: Mapping[int, Any]) -> list[int]:
    """Return the keys of the hooks that are DeepSpeed's."""
    return [key for key, hook in hooks.items() if getattr(hook, "__module__", "").startswith("deepspeed")]


def loaded(mechanism: Forward) -> AbstractContextManager[object]:
    """Return a context in which all parts of a mechanism have their weights, where these are kept elsewhere.

    Accelerate loads them for a call of the part that has them, DeepSpeed gathers them for one, but a mechanism hands
    weights of its parts, and those that it borrows, to an operation without calling these.
    """
    # not with hasattr, which takes five times as long, in every step of decoding
    parts = (*mechanism.modules(), *mechanism.borrowed())
    if "ds_id" in mechanism.__dict__:
        gather_parts(mechanism, list(mechanism.modules())[1:])
    hooked = [part for part in parts if part is not mechanism and "_hf_hook" in part.__dict__]
    if not hooked:
        return nullcontext()
    stack = ExitStack()
    for part in hooked:
        hook: Any = part._hf_hook
        hook.pre_forward(part)
        stack.callback(hook.post_forward, part, None)
    return stack
