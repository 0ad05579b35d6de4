"""Tiny random models of many architectures, as data.

Their weights are larger than transformers' initial ones: those give nearly uniform attention, and then every mechanism
computes the same and no test can fail.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from hf_linattn.support.tiny import tiny_config

VOCAB_SIZE = 96
NUM_LAYERS = 2
NUM_HEADS, NUM_KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN_SIZE = NUM_HEADS * HEAD_DIM

TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "max_position_embeddings": 64,
}
GROUPED = {**TOKENS, **SIZES, "num_key_value_heads": NUM_KEY_VALUE_HEADS}
DROPOUT_FREE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Architecture:
    """A family with the options of its tiny config; `prefix` names its classes, as in `GPT2LMHeadModel`."""

    prefix: str
    options: dict[str, Any]
    head: str = "ForCausalLM"

    @property
    def causal(self) -> bool:
        return self.head != "ForMaskedLM"

    def config(self, **options: Any) -> Any:
        return getattr(transformers, f"{self.prefix}Config")(**{**self.options, **options})

    def model_class(self, head: str | None = None) -> type[PreTrainedModel]:
        return getattr(transformers, f"{self.prefix}{self.head if head is None else head}")


GPT2_SIZES = {"n_embd": HIDDEN_SIZE, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS, "n_positions": 64}
GPT2_DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DISTILBERT_SIZES = {"dim": HIDDEN_SIZE, "hidden_dim": 48, "n_layers": NUM_LAYERS, "n_heads": NUM_HEADS}

ARCHITECTURES = {
    "bert": Architecture("Bert", {**TOKENS, **SIZES, **DROPOUT_FREE}, "ForMaskedLM"),
    "gpt2": Architecture("GPT2", {**TOKENS, **GPT2_SIZES, **GPT2_DROPOUTS}, "LMHeadModel"),
    "llama": Architecture("Llama", GROUPED),
    "mistral": Architecture("Mistral", {**GROUPED, "sliding_window": 8, "head_dim": HEAD_DIM}),
    "qwen2": Architecture("Qwen2", GROUPED),
    "qwen3": Architecture("Qwen3", {**GROUPED, "head_dim": HEAD_DIM}),
    "gemma2": Architecture(
        "Gemma2",
        {**GROUPED, "head_dim": HEAD_DIM, "sliding_window": 8, "query_pre_attn_scalar": HEAD_DIM,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
    ),
    "opt": Architecture(
        "OPT", {**TOKENS, **SIZES, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN_SIZE, "dropout": 0.0}
    ),
    "phi3": Architecture("Phi3", GROUPED),
    "roberta": Architecture("Roberta", {**TOKENS, **SIZES, **DROPOUT_FREE, "pad_token_id": 1}, "ForMaskedLM"),
    "distilbert": Architecture(
        "DistilBert",
        {**TOKENS, **DISTILBERT_SIZES, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0},
        "ForMaskedLM",
    ),
    "modernbert": Architecture(
        "ModernBert",
        {**TOKENS, **SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "reference_compile": False,
         "cls_token_id": 1, "sep_token_id": 2},
        "ForMaskedLM",
    ),
}  # fmt: skip
EXTRA_SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"linear_head_dim": 8},
    "kimi_linear": {"linear_head_dim": 8},
    "longcat_flash": {
        "head_dim": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2,
    },
}  # fmt: skip
SPINE = ("bert", "gpt2", "llama")
# latent attention: what is cached is smaller than the heads, whose keys and values differ in width
LATENT = tuple(
    name
    for name in (
        "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash",
        "minicpm3", "mistral4", "youtu",
    )
    if name in CONFIG_MAPPING  # the oldest transformers that is supported has fewer
)  # fmt: skip
# the last two layers attend to the keys of the first two, each to those of its own kind
SHARED = {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 2,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
}  # fmt: skip
SHARING: dict[str, dict[str, Any]] = {
    "Gemma3n": {**SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    "Gemma4": {**SHARED, "global_head_dim": HEAD_DIM},
    "Gemma4Unified": {**SHARED, "global_head_dim": HEAD_DIM},
}
CAUSAL = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.causal)
ENCODERS = tuple(name for name, architecture in ARCHITECTURES.items() if not architecture.causal)
_MADE: dict[tuple[Any, ...], PreTrainedModel] = {}


def make_model(
    name: str, head: str | None = None, std: float = 0.2, seed: int = 0, **options: Any
) -> PreTrainedModel:
    """Return a tiny model in evaluation mode with weights from N(0, std^2), the same for the same seed.

    Each call returns a copy of one that is made once, which takes half the time; the global random state stays.
    """
    known = (name, head, std, seed, repr(sorted(options.items())))
    if known not in _MADE:
        architecture = ARCHITECTURES[name]
        with torch.random.fork_rng(devices=[]):
            _MADE[known] = fill(architecture.model_class(head)(architecture.config(**options)), std, seed)
    return copy.deepcopy(_MADE[known])


def make_latent(model_type: str) -> PreTrainedModel:
    """Return a tiny model of one of `LATENT`, with heads of keys of 4 + 6 numbers, and of values of 5."""
    sizes = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, **EXTRA_SIZES.get(model_type, {})}
    config = tiny_config(CONFIG_MAPPING[model_type], **sizes)
    classes = {**MODEL_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return fill(getattr(transformers, classes[model_type])(config))


def make_sharing(prefix: str, **options: Any) -> PreTrainedModel:
    """Return a tiny model of one of `SHARING`."""
    options = {**GROUPED, "head_dim": HEAD_DIM, **SHARING[prefix], **options}
    config = getattr(transformers, f"{prefix}TextConfig")(**options)
    return fill(getattr(transformers, f"{prefix}ForCausalLM")(config))


def fill(model: PreTrainedModel, std: float = 0.2, seed: int = 0) -> PreTrainedModel:
    """Give a model weights from N(0, std^2), the same for the same seed, and put it in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = std * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model.eval()
