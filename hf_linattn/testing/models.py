"""Tiny random models on which the invariants are checked, and the cases they span."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from ..architecture import describe_cross_layers, describe_layers
from ..attention_modules import cross_attention_modules, self_attention_modules
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
FRAMES, BANDS = 75, 8  # what Whisper's encoder hands on, and of how many mel bands: its inputs are of one length
_CROSS = {
    "vocab_size": VOCABULARY, "d_model": HEADS * HEAD_DIM, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
_WHISPER = {"max_source_positions": FRAMES, "num_mel_bins": BANDS, "begin_suppress_tokens": None}
_RECIPES = {
    ("bert", True): (BertLMHeadModel, lambda: BertConfig(**_BERT, is_decoder=True)),
    ("bert", False): (BertForMaskedLM, lambda: BertConfig(**_BERT)),
    ("gpt2", True): (GPT2LMHeadModel, lambda: GPT2Config(**_GPT2)),
    ("gpt2", False): (GPT2LMHeadModel, lambda: GPT2Config(**_GPT2)),
    ("llama", True): (LlamaForCausalLM, lambda: LlamaConfig(**_LLAMA)),
    ("llama", False): (LlamaForCausalLM, lambda: LlamaConfig(**_LLAMA)),
    ("bart", False): (
        BartForConditionalGeneration,
        lambda: BartConfig(**_CROSS, max_position_embeddings=POSITIONS, forced_eos_token_id=None),
    ),
    ("whisper", False): (WhisperForConditionalGeneration, lambda: WhisperConfig(**_CROSS, **_WHISPER)),
}
# what else decoders do with heads: norms of queries and keys, windows, soft caps, joint projections, scaled queries
_WINDOWS = {"head_dim": HEAD_DIM, "sliding_window": 40}
_MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": HEAD_DIM}),
    "mistral": ("Mistral", {**_LLAMA, **_WINDOWS}),
    "gemma2": (
        "Gemma2",
        {**_LLAMA, **_WINDOWS, "query_pre_attn_scalar": HEAD_DIM, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 30.0},
    ),
    "phi3": ("Phi3", _LLAMA),
    "opt": ("OPT", {**_SIZES, **_COMMON, "ffn_dim": 48, "word_embed_proj_dim": HEADS * HEAD_DIM, "dropout": 0.0}),
    "gpt_neox": ("GPTNeoX", {**_SIZES, **_COMMON, "attention_dropout": 0.0, "hidden_dropout": 0.0}),
}  # fmt: skip
ARCHITECTURES = ("bert", "gpt2", "llama")
MORE_ARCHITECTURES = tuple(_MORE)  # causal ones
SUMMED_IN_FLOAT32 = {"gemma2": "norm"}  # parameters whose gradients are, in any model: rounding hides what they are
CROSS_ARCHITECTURES = ("bart", "whisper")
MODES = ("bidirectional", "causal")


def modes_of(architecture: str) -> tuple[str, ...]:
    """Return the modes in which the self-attention of a tiny model can be tried."""
    return ("causal",) if architecture in _MORE else MODES


# neither model that has cross-attention shares key/value heads: Whisper's bare mechanisms are given shared ones
KEY_VALUE_HEADS = {"bert": HEADS, "gpt2": HEADS, "llama": 2, "bart": HEADS, "whisper": 2}
KEY_VALUE_HEADS |= {name: options.get("num_key_value_heads", HEADS) for name, (_, options) in _MORE.items()}


def tiny_model(architecture: str, causal: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """Return a random 2-layer model in evaluation mode, weights wide enough that attention is far from uniform.

    In float64 an invariant can be asked for to a billionth. The global random state is left as it was.
    """
    if architecture not in KEY_VALUE_HEADS:
        raise UnknownNameError("architecture", architecture, KEY_VALUE_HEADS)
    return copy.deepcopy(_make_model(architecture, causal, dtype, seed))


def _recipe(architecture: str, causal: bool) -> tuple[Any, Any]:
    """Return a model class, and what makes its config; those of `_MORE` are imported here, as few need them."""
    if architecture not in _MORE:
        return _RECIPES[architecture, causal]
    prefix, options = _MORE[architecture]
    model_class, config = (getattr(transformers, prefix + name) for name in ("ForCausalLM", "Config"))
    return model_class, functools.partial(config, **options)


@functools.cache  # a copy takes a fifth of the time
def _make_model(architecture: str, causal: bool, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    model_class, make = _recipe(architecture, causal)
    with torch.random.fork_rng(devices=[]):
        model = model_class(make())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                parameter.copy_(noise + (1.0 if parameter.dim() == 1 and parameter.mean() > 0.5 else 0.0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(SUMMED_IN_FLOAT32.get(architecture, "/") not in name)
    if not causal and architecture in ("gpt2", "llama"):
        model.config.is_causal = False
        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
    return model.to(dtype).eval()


@functools.cache
def _make_layer(architecture: str, causal: bool, dtype: torch.dtype) -> AttentionLayer:
    model = _make_model(architecture, causal, dtype, 0)
    if architecture in CROSS_ARCHITECTURES:
        layer = next(iter(describe_cross_layers(model, cross_attention_modules(model)).values()))
        return replace(layer, num_key_value_heads=KEY_VALUE_HEADS[architecture])
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
        """`"causal"`, `"bidirectional"`, or `"cross"`: the cross-attention of an encoder-decoder model."""
        if self.architecture in CROSS_ARCHITECTURES:
            return "cross"
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
        """Return the patched tiny model; in mode "cross" its self-attention stays softmax."""
        model = tiny_model(self.architecture, self.causal, dtype)
        if self.mode == "cross":
            return patch_model(model, "softmax", cross_attention=make_config(self.mechanism, self.options))
        return patch_model(model, self.mechanism, **self.options)

    def make(self, dtype: torch.dtype = torch.float64, **options: Any) -> Mechanism:
        """Return the mechanism alone, for a layer with the architecture's heads."""
        layer = _make_layer(self.architecture, self.causal, dtype)
        return self.mechanism_class(make_config(self.mechanism, {**self.options, **options}), layer).to(dtype)

    def heads(
        self, length: int, batch: int = 2, dtype: torch.dtype = torch.float64, size: float = 1.0, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return random query [B, H, N, D], key and value [B, Hkv, N, D] with the architecture's head counts.

        In mode "cross" there are 3 N / 4 queries, at least one.
        """
        generator = torch.Generator().manual_seed(seed)
        kv, own = self.kv_heads, max(3 * length // 4, 1) if self.mode == "cross" else length
        shapes = [(batch, heads, count, HEAD_DIM) for heads, count in ((HEADS, own), (kv, length), (kv, length))]
        query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        return (query * size).to(dtype), (key * size).to(dtype), value.to(dtype)


class FedCase(Case):
    """A case whose mechanism, if it reads the layer's input, is given one that is made of the keys of each call.

    So a token has the same input wherever it is read: in a prompt, in a step, beside pads.
    """

    def make(self, dtype: torch.dtype = torch.float64, **options: Any) -> Mechanism:
        mechanism = super().make(dtype, **options)
        return _fed(mechanism) if mechanism.reads_hidden else mechanism


def _fed(mechanism: Mechanism) -> Mechanism:
    """Have the calls of a mechanism come with the layer's input; it stays an instance of its class."""
    kind: Any = type(mechanism)

    class Fed(kind):  # type: ignore[misc]
        def forward(self, query: Tensor, key: Tensor, *given: Any, **named: Any) -> Any:
            return super().forward(query, key, *given, **{"hidden_states": self.input_of(key), **named})

        def attention_matrix(self, query: Tensor, key: Tensor, *given: Any, **named: Any) -> Tensor:
            hidden = {"hidden_states": self.input_of(key), **named}
            matrix: Tensor = super().attention_matrix(query, key, *given, **hidden)
            return matrix

        def input_of(self, key: Tensor) -> Tensor:
            width: Any = self.layer.hidden_size
            every = key.transpose(1, 2).flatten(2)
            return every.repeat(1, 1, -(-width // every.shape[2]))[..., :width]

    mechanism.__class__ = Fed
    return mechanism


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids [batch, length] without the padding token."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def positions_of(mask: Tensor) -> Tensor:
    """Return the position ids [B, N] of real tokens under a 2-D mask, as generate makes them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def source_of(architecture: str, batch: int, length: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return what the encoder of a tiny model is given: tokens, or the mel bands of all of Whisper's frames."""
    if architecture == "bart":
        return {"input_ids": random_tokens(batch, length, seed)}
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(batch, BANDS, 2 * FRAMES, generator=generator, dtype=torch.float64)
    return {"input_features": sound.to(dtype)}
