"""Memory of a patched model beside its original attention: decoding state and peak of a forward, in bytes.

A byte is a byte here: no kB and no KiB. The weights, which are the same for both, are never counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import architecture
from ..cache import state_bytes
from ..config import require
from ..errors import UnsupportedModelError
from ..inference import evaluation_mode
from ..ops.runtime.cpu import KEPT
from .speed import VARIANTS, check_lengths, prefill_cache, prefill_logits, random_input_ids


@dataclass(frozen=True)
class StateRow:
    """Bytes that the cache of one sequence holds after `length` tokens, over all layers.

    Attributes:
        length: tokens read.
        patched: bytes, of the patched model.
        original: bytes, of its original attention.
    """

    length: int
    patched: int
    original: int


@dataclass(frozen=True)
class MemoryRow:
    """Memory at one length, for one sequence.

    Attributes:
        length: tokens read.
        patched_peak: bytes alive at once during a forward without gradients, beyond weights and input.
        original_peak: the same of the original.
        patched_state: bytes of the decoding state after it; None for a model that does not decode.
        original_state: the same of the original.
    """

    length: int
    patched_peak: int
    original_peak: int
    patched_state: int | None = None
    original_state: int | None = None


def measure_memory(model: nn.Module, lengths: Iterable[int], *, seed: int = 0) -> list[MemoryRow]:
    """Return `state_bytes_by_length` and `peak_forward_bytes` of both variants, one row per length, shortest first.

    Args:
        model: a patched model.
        lengths: tokens of the sequence, in any order.
        seed: of the random tokens.

    Raises:
        PatchError: the model is not patched.
        UnsupportedModelError: the model is an encoder-decoder, or reads no text.
        OptionError: a length below 1 or beyond the positions of model or mechanisms.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import measure_memory
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> short, long = measure_memory(model, [64, 128])
        >>> long.patched_state == short.patched_state, long.original_state == 2 * short.original_state
        (True, True)
    """
    lengths = check_lengths(model, lengths)
    peaks: dict[str, list[int]] = {}
    for name, variant in VARIANTS.items():
        with variant(model):
            peaks[name] = [peak_forward_bytes(model, length, seed=seed) for length in lengths]
    states: Iterable[StateRow | None] = [None] * len(lengths)
    if architecture.root_model(model).can_generate():
        states = state_bytes_by_length(model, lengths, seed=seed)
    return [
        MemoryRow(length, patched, original, *((state.patched, state.original) if state else (None, None)))
        for length, patched, original, state in zip(lengths, peaks["patched"], peaks["original"], states, strict=True)
    ]


def state_bytes_by_length(model: nn.Module, lengths: Iterable[int], *, seed: int = 0) -> list[StateRow]:
    """Return the bytes of decoding state of one sequence against its length, patched and original.

    The state of a linear mechanism is constant; keys and values of softmax grow with the length. Both are what the
    cache really holds after the model has read that many random tokens.

    Args:
        model: a patched model.
        lengths: tokens of the sequence, in any order.
        seed: of the random tokens.

    Raises:
        PatchError: the model is not patched.
        UnsupportedModelError: the model does not decode, is an encoder-decoder, or reads no text.
        OptionError: a length below 1 or beyond the positions of model or mechanisms.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import state_bytes_by_length
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> state_bytes_by_length(model, [64, 128])
        [StateRow(length=64, patched=584, original=8192), StateRow(length=128, patched=584, original=16384)]
    """
    lengths = check_lengths(model, lengths)
    root = architecture.root_model(model)
    if not root.can_generate():
        raise UnsupportedModelError(f"{type(root).__name__} does not decode, so it has no decoding state")
    rows = []
    with evaluation_mode(model), torch.no_grad():
        for length in lengths:
            input_ids = random_input_ids(model, 1, length, seed)
            sizes: dict[str, int] = {}
            for name, variant in VARIANTS.items():
                with variant(model):
                    sizes[name] = state_bytes(prefill_cache(model, input_ids))
            rows.append(StateRow(length, sizes["patched"], sizes["original"]))
    return rows


def peak_forward_bytes(model: nn.Module, length: int, *, batch_size: int = 1, seed: int = 0) -> int:
    """Return the bytes alive at once, at the worst moment of a forward, beyond the weights and the input.

    The forward has neither gradients nor a cache, and runs whatever attention the model has at the moment: wrap the
    call in `original_attention(model)` for the original's. On CUDA the allocator is asked
    (`torch.cuda.max_memory_allocated`). Elsewhere every tensor that an operation returns is counted, from its creation
    to its release: exact and repeatable, except for scratch memory inside a single kernel.

    Args:
        model: a transformers model, patched or not.
        length: tokens of each sequence.
        batch_size: sequences at once.
        seed: of the random tokens.

    Raises:
        OptionError: `length` or `batch_size` is below 1.
        UnsupportedModelError: the model is an encoder-decoder, or reads no text.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import peak_forward_bytes
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> peak_forward_bytes(model, 64) < peak_forward_bytes(model, 128)
        True
    """
    require("length", length, length >= 1, "at least 1")
    require("batch_size", batch_size, batch_size >= 1, "at least 1")
    input_ids = random_input_ids(model, batch_size, length, seed)
    with evaluation_mode(model), torch.no_grad():
        if input_ids.device.type == "cuda":
            prefill_logits(model, input_ids)  # workspaces and tables that stay are no part of a forward
            torch.cuda.synchronize(input_ids.device)
            before = torch.cuda.memory_allocated(input_ids.device)
            torch.cuda.reset_peak_memory_stats(input_ids.device)
            prefill_logits(model, input_ids)
            return torch.cuda.max_memory_allocated(input_ids.device) - before
        with LiveBytes() as count:
            prefill_logits(model, input_ids)
        return count.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, from their creation to their release.

    No memory of large outputs is kept for later ones meanwhile, as `ops.runtime.cpu` does else.

    Attributes:
        live: bytes alive now.
        peak: the largest `live` so far.

    >>> with LiveBytes() as count:
    ...     total = (torch.ones(1000) + torch.ones(1000)).sum()
    >>> count.peak, count.live
    (12000, 4)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._counted: set[int] = set()
        self._contexts = ExitStack()

    def __enter__(self) -> LiveBytes:
        self._contexts.enter_context(KEPT.paused())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            # what was given comes back as a view, or changed in place
            if storage._cdata not in given and storage._cdata not in self._counted:
                self._count(storage)
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._counted.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, nbytes).atexit = False

    def _release(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self.live -= nbytes


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of every tensor in nested arguments or results."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
