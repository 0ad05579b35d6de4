"""Speed of a patched model beside its original attention: prefill tokens/s and decode ms/token against length.

Both run on the same weights, in the same process, repeat by repeat in turn, so that whatever else the machine does
hits both alike. A speed means something only as the ratio of the two.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from .. import architecture
from .. import transformers_bridge as bridge
from ..config import require
from ..errors import OptionError, PatchError
from ..inference import accepted, device_of, evaluation_mode
from ..patching import is_patched, original_attention
from .perplexity import position_limit

logger = logging.getLogger(__name__)

# what a model is measured with, and the context in which it runs so
VARIANTS: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "patched": lambda model: nullcontext(),
    "original": original_attention,
}


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the repeats.

    Attributes:
        median: of all repeats.
        minimum: the smallest.
        maximum: the largest.
    """

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class SpeedRow:
    """Speed at one length.

    Attributes:
        length: tokens per sequence of the prefill, and the context of the decoded tokens.
        batch_size: sequences at once.
        patched_prefill: tokens per second, of all sequences together.
        original_prefill: the same of the original.
        patched_decode: milliseconds per step of one token for each sequence; None for a model that does not decode.
        original_decode: the same of the original.
        original_attention: transformers' name of the attention that the original was measured with.
    """

    length: int
    batch_size: int
    patched_prefill: Spread
    original_prefill: Spread
    patched_decode: Spread | None = None
    original_decode: Spread | None = None
    original_attention: str = "sdpa"

    @property
    def prefill_speedup(self) -> float:
        """How many times faster the patched model reads than the original; ratio of the medians."""
        return self.patched_prefill.median / self.original_prefill.median

    @property
    def decode_speedup(self) -> float | None:
        """How many times faster the patched model decodes than the original; ratio of the medians."""
        if self.patched_decode is None or self.original_decode is None:
            return None
        return self.original_decode.median / self.patched_decode.median


def measure_speed(
    model: nn.Module,
    lengths: Iterable[int],
    *,
    batch_size: int = 1,
    repeats: int = 5,
    decode_tokens: int = 16,
    warmup: int = 1,
    seed: int = 0,
) -> list[SpeedRow]:
    """Time a patched model and, through `original_attention`, the same model with its own attention.

    Prefill is one forward without cache and gradients, with the last token's logits alone where the model can.
    Decoding starts from a cache of each variant's own, filled with `length` random tokens, or as many as leave room in
    a learned position table. Every repeat continues from a fresh copy.

    Args:
        model: a patched model. Its original attention is SDPA, unless it was loaded with another one.
        lengths: tokens per sequence, in any order.
        batch_size: sequences at once.
        repeats: timed runs of each variant.
        decode_tokens: steps over which one decoding time is averaged; 0 does not time decoding.
        warmup: runs of each variant before the timed ones.
        seed: of the random tokens.

    Returns:
        One row per length, shortest first. A model without a decoding state (BERT) has no decoding times.

    Raises:
        PatchError: the model is not patched.
        UnsupportedModelError: the model is an encoder-decoder, or reads no text.
        OptionError: an option out of range, or a length beyond `position_limit(model)`, before anything runs.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import measure_speed
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> (row,) = measure_speed(model, [64], repeats=1, decode_tokens=2)
        >>> row.length, row.patched_prefill.median > 0, row.original_attention
        (64, True, 'sdpa')
    """
    lengths = check_lengths(model, lengths, margin=decode_tokens)
    for name, value, least in (("batch_size", batch_size, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        require(name, value, value >= least, f"at least {least}")
    decodes = decode_tokens > 0 and architecture.root_model(model).can_generate()
    limit, rows, implementation = position_limit(model), [], _original_implementation(model)
    with evaluation_mode(model), torch.no_grad():
        for length in lengths:
            logger.info("timing %d tokens", length)
            input_ids = random_input_ids(model, batch_size, length, seed)
            prefill = _time_prefill(model, input_ids, repeats, warmup)
            decode: dict[str, Spread] = {}
            if decodes:
                context = length if limit is None else min(length, limit - decode_tokens)
                decode = _time_decoding(model, input_ids[:, :context], decode_tokens, repeats, warmup)
            found = (prefill["patched"], prefill["original"], decode.get("patched"), decode.get("original"))
            rows.append(SpeedRow(length, batch_size, *found, original_attention=implementation))
    return rows


def crossover_length(rows: Iterable[SpeedRow]) -> int | None:
    """Return the smallest measured length from which on the patched prefill stays faster, or None if it does not.

    Args:
        rows: what `measure_speed` returned.

    Examples:
        >>> from hf_linattn.evaluation import SpeedRow, Spread, crossover_length
        >>> slow, fast = Spread(1.0, 1.0, 1.0), Spread(2.0, 2.0, 2.0)
        >>> crossover_length([SpeedRow(256, 1, slow, fast), SpeedRow(512, 1, fast, slow)])
        512
    """
    crossover = None
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        if row.prefill_speedup <= 1:
            break
        crossover = row.length
    return crossover


def check_lengths(model: nn.Module, lengths: Iterable[int], margin: int = 0) -> list[int]:
    """Return the lengths sorted, each once; raise unless the model is patched and reaches every one of them."""
    if not is_patched(model):
        raise PatchError(f"{type(model).__name__} is not patched, so there is nothing to compare; patch it first")
    limit, ordered = position_limit(model), sorted(set(lengths))
    if not ordered or ordered[0] < 1:
        raise OptionError(f"lengths must be at least one length of 1 token or more, got {ordered}")
    if limit is not None and ordered[-1] > limit:
        raise OptionError(
            f"lengths reaches {ordered[-1]} tokens, but the model has {limit} positions; leave out lengths"
            f" above {limit}"
        )
    require("decode_tokens", margin, 0 <= margin < (limit or margin + 1), f"0 to {(limit or margin + 1) - 1}")
    return ordered


def random_input_ids(model: nn.Module, batch_size: int, length: int, seed: int) -> Tensor:
    """Return token ids [batch_size, length], uniform over the vocabulary, where the model is.

    Raises:
        UnsupportedModelError: the model reads something else, or more than these.
    """
    architecture.require_token_ids(
        model, "speed and memory are measured on token ids alone; time calls of your own, and the same calls within"
        " hf_linattn.original_attention(model)"
    )  # fmt: skip
    root = architecture.root_model(model)
    vocab_size = root.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, length), generator=generator).to(device_of(model))


def prefill_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run one forward without cache; only the last logits, where the model can leave out the others.

    An encoder without a head gives its last hidden states.
    """
    return model(input_ids=input_ids, **accepted(model, use_cache=False, logits_to_keep=1))[0]


def prefill_cache(model: nn.Module, input_ids: Tensor) -> DynamicCache:
    """Return a new cache that has read `input_ids`, as the model's attention at the moment keeps it."""
    cache = DynamicCache(config=architecture.root_model(model).config)
    model(input_ids=input_ids, past_key_values=cache, use_cache=True, **accepted(model, logits_to_keep=1))
    return cache


def _time_prefill(model: nn.Module, input_ids: Tensor, repeats: int, warmup: int) -> dict[str, Spread]:
    """Return tokens per second of reading `input_ids` [B, N], for each variant."""
    seconds = _interleave(model, lambda name: partial(prefill_logits, model, input_ids), repeats, warmup)
    return {name: Spread.of([input_ids.numel() / s for s in values]) for name, values in seconds.items()}


def _time_decoding(model: nn.Module, context: Tensor, steps: int, repeats: int, warmup: int) -> dict[str, Spread]:
    """Return milliseconds per step of decoding after `context` [B, N], for each variant."""
    caches = {}
    for name, variant in VARIANTS.items():
        with variant(model):
            caches[name] = prefill_cache(model, context)
    token = context[:, -1:]
    seconds = _interleave(
        model, lambda name: partial(_decode, model, token, copy.deepcopy(caches[name]), steps), repeats, warmup
    )
    return {name: Spread.of([1000 * s / steps for s in values]) for name, values in seconds.items()}


def _decode(model: nn.Module, token: Tensor, cache: Cache, steps: int) -> None:
    """Feed one token [B, 1] `steps` times."""
    for _ in range(steps):
        model(input_ids=token, past_key_values=cache, use_cache=True)


def _interleave(
    model: nn.Module, prepare: Callable[[str], Callable[[], Any]], repeats: int, warmup: int
) -> dict[str, list[float]]:
    """Return seconds per run of each variant, in turn; `prepare` makes the run of a variant and is not timed."""
    device = device_of(model)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(warmup + repeats):
        for name, variant in VARIANTS.items():
            run = prepare(name)
            with variant(model):
                elapsed = _time(run, device)
            if repeat >= warmup:
                seconds[name].append(elapsed)
    return seconds


def _time(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that `run` takes, until the device has finished it."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else bool
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def _original_implementation(model: nn.Module) -> str:
    """Return the name of the attention function that the model was loaded with."""
    with original_attention(model):
        return bridge.get_implementation(architecture.root_model(model).config)
