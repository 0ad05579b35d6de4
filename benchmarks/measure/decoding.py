"""The decoding of a whole model: one token after another at a short and at a long context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.measure.stopwatch import SOFTMAX, Stopwatch, Timing
from benchmarks.measure.timed import timed_config
from hf_linattn import patch_model, set_backend
from hf_linattn.cache import state_bytes
from hf_linattn.mechanisms import MECHANISMS

TURN_SECONDS = 0.1  # a turn decodes tokens for about so long,
FEWEST_TOKENS, MOST_TOKENS = 2, 4  # but not fewer or more of them than this


@dataclass(frozen=True)
class DecodingRow:
    """One new token of a whole model after `context` tokens; `state_bytes` is what its cache holds then."""

    mechanism: str
    context: int
    milliseconds_per_token: Timing
    ratio: float
    state_bytes: int


def measure_decoding(stopwatch: Stopwatch, names: Sequence[str], dtype: torch.dtype) -> list[DecodingRow]:
    """Time single-token steps of a small Llama after each context, with softmax's own cache and with every state.

    Each mechanism takes turns with softmax alone: the caches of a dozen models would slow each other down.
    """
    plan, rows = stopwatch.plan, []
    softmax = build_model(stopwatch, dtype, SOFTMAX)
    causal = [name for name in names if "causal" in MECHANISMS.get(name).modes]
    for context in plan.contexts:
        softmax_seconds: list[float] = []
        cache = fill_cache(softmax, context)
        size, after = state_bytes(cache), []
        for name in tqdm(causal, desc=f"decoding after {context}"):
            model = build_model(stopwatch, dtype, name)
            own_cache = prefill(model, context)
            own_bytes = state_bytes(own_cache)
            if decoded := cache.get_seq_length() - context:  # beside the last one
                cache.crop(-decoded)
            turns = {SOFTMAX: Turn(stopwatch, softmax, cache), name: Turn(stopwatch, model, own_cache)}
            seconds = {k: [s / turns[k].tokens for s in values] for k, values in stopwatch.compare(turns).items()}
            softmax_seconds += seconds[SOFTMAX]
            ratio = median(seconds[SOFTMAX]) / median(seconds[name])
            after.append(DecodingRow(name, context, Timing.of(seconds[name]), ratio, own_bytes))
        rows += [DecodingRow(SOFTMAX, context, Timing.of(softmax_seconds), 1.0, size), *after]
    return rows


def build_model(stopwatch: Stopwatch, dtype: torch.dtype, mechanism: str) -> LlamaForCausalLM:
    """Return a Llama with random weights, patched unless the mechanism is softmax, which keeps SDPA.

    Its feed-forward has Llama's own width, 8/3 of the model's rounded up to a multiple of 256.
    """
    plan = stopwatch.plan
    width = plan.num_heads * plan.head_dim
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=256 * math.ceil(8 * width / 3 / 256),
        num_hidden_layers=plan.num_layers,
        num_attention_heads=plan.num_heads,
        num_key_value_heads=plan.num_heads,
        max_position_embeddings=2 * max(plan.contexts),
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model = model.to(stopwatch.device, dtype).eval()
    if mechanism != SOFTMAX:
        set_backend(patch_model(model, timed_config(mechanism)), stopwatch.backend)
    return model


def fill_cache(model: LlamaForCausalLM, context: int) -> DynamicCache:
    """Return softmax's cache with random keys and values of that many tokens: a quadratic prefill is not the point."""
    config = model.config
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    cache = DynamicCache(config=config)
    for index in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(2))
        cache.update(key, value, index)
    return cache


@torch.no_grad()
def prefill(
    model: LlamaForCausalLM, context: int, piece: int | None = None, use_cache: bool = True
) -> DynamicCache:
    """Return the cache of a model after that many random tokens, read `piece` at a time or all at once."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(model.device)
    cache = DynamicCache(config=model.config)
    for part in tokens.split(piece or context, 1):
        model(part, past_key_values=cache if use_cache else None, use_cache=use_cache, logits_to_keep=1)
    return cache


class Turn:
    """Decodes `tokens` tokens one by one: as many as take about `TURN_SECONDS`."""

    def __init__(self, stopwatch: Stopwatch, model: LlamaForCausalLM, cache: DynamicCache):
        self.model, self.cache, self.tokens = model, cache, 1
        self()
        self.tokens = min(max(round(TURN_SECONDS / stopwatch.once(self)), FEWEST_TOKENS), MOST_TOKENS)

    @torch.no_grad()
    def __call__(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        for _ in range(self.tokens):
            self.model(token, past_key_values=self.cache, use_cache=True)
