"""Tiny random models on which the invariants are checked, and the cases they span."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from ..architecture import describe_layers, self_attention_modules
from ..config import make_config
from ..errors import UnknownNameError
from ..mechanisms import MECHANISMS, AttentionLayer, Mechanism
from ..patching import patch_model

VOCABULARY, HEADS, HEAD_DIM, POSITIONS = 61, 4, 8, 4096

# architecture -> causal -> (model class, config); bidirectional decoders are the embedding models people make of them
_SIZES = {"num_hidden_layers": 2, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
_COMMON = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
_BERT = {**_SIZES, **_COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "n_layer": 2, "n_embd": HEADS * HEAD_DIM, "n_head": HEADS, "n_inner": 48, "n_positions": POSITIONS,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
_LLAMA = {**_SIZES, **_COMMON, "num_key_value_heads": 2}
_RECIPES = {
    ("bert", True): (BertLMHeadModel, lambda: BertConfig(**_BERT, is_decoder=True)),
    ("bert", False): (BertForMaskedLM, lambda: BertConfig(**_BERT)),
    ("gpt2", True): (GPT2LMHeadModel, lambda: GPT2Config(**_GPT2)),
    ("gpt2", False): (GPT2LMHeadModel, lambda: GPT2Config(**_GPT2)),
    ("llama", True): (LlamaForCausalLM, lambda: LlamaConfig(**_LLAMA)),
    ("llama", False): (LlamaForCausalLM, lambda: LlamaConfig(**_LLAMA)),
}
ARCHITECTURES = ("bert", "gpt2", "llama")
MODES = ("bidirectional", "causal")
KEY_VALUE_HEADS = {"bert": HEADS, "gpt2": HEADS, "llama": 2}


def tiny_model(architecture: str, causal: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a random 2-layer model in evaluation mode, weights wide enough that attention is far from uniform.

    In float64 an invariant can be asked for to a billionth. The global random state is left as it was.
    """
    if architecture not in ARCHITECTURES:
        raise UnknownNameError("architecture", architecture, ARCHITECTURES)
    return copy.deepcopy(_make_model(architecture, causal, dtype, seed))


@functools.cache  # a copy takes a fifth of the time
def _make_model(architecture: str, causal: bool, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    model_class, make = _RECIPES[architecture, causal]
    with torch.random.fork_rng(devices=[]):
        model = model_class(make())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(noise + (1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0))
    if not causal and architecture != "bert":
        model.config.is_causal = False
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    return model.to(dtype).eval()


@functools.cache
def _make_layer(architecture: str, causal: bool, dtype: torch.dtype) -> AttentionLayer:
    model = _make_model(architecture, causal, dtype, 0)
    return next(iter(describe_layers(model, self_attention_modules(model)).values()))


@dataclass
class Case:
    """One mechanism in one architecture and one mode."""

    mechanism: str
    architecture: str
    causal: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """`"causal"` or `"bidirectional"`."""
        return "causal" if self.causal else "bidirectional"

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the architecture."""
        return KEY_VALUE_HEADS[self.architecture]

    @property
    def mechanism_class(self) -> type[Mechanism]:
        """The class under test."""
        return MECHANISMS.get(self.mechanism)

    def model(self, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
        """Return the patched tiny model."""
        return patch_model(tiny_model(self.architecture, self.causal, dtype), self.mechanism, **self.options)

    def make(self, dtype: torch.dtype = torch.float64, **options: Any) -> Mechanism:
        """Return the mechanism alone, for a layer with the architecture's heads."""
        layer = _make_layer(self.architecture, self.causal, dtype)
        return self.mechanism_class(make_config(self.mechanism, {**self.options, **options}), layer).to(dtype)

    def heads(
        self, length: int, batch: int = 2, dtype: torch.dtype = torch.float64, size: float = 1.0, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return random query [B, H, N, D], key and value [B, Hkv, N, D] with the architecture's head counts."""
        generator = torch.Generator().manual_seed(seed)
        kv = self.kv_heads
        shapes = [(batch, heads, length, HEAD_DIM) for heads in (HEADS, kv, kv)]
        query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        return (query * size).to(dtype), (key * size).to(dtype), value.to(dtype)


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids [batch, length] without the padding token."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def positions_of(mask: Tensor) -> Tensor:
    """Return the position ids [B, N] of real tokens under a 2-D mask, as generate makes them."""
    return (mask.cumsum(1) - 1).clamp(min=0)
