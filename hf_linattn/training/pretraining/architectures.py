"""The small models that recipes/pretrain.py trains: their classes, sizes and tokenizers, and how they start."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_linattn.training.corpus import DOCUMENTED_PACKAGES
from hf_linattn.training.pretraining.induction import start_gpt2_with_induction, start_llama_with_induction
from hf_linattn.training.pretraining.mixture import Stage

BLOCK_SIZE = 512
VOCAB_SIZE = 2048
RECALL_LENGTH = 1024
RECALL: dict[str, Any] = {  # what the models that look far back have in common
    # millions of tokens, a quarter of them recall. It comes first, without any text, and copies before all others: so
    # the circuit that the models start with becomes a strong one within a few hundred steps. Text wears it off a
    # little; the end, at low rates, has more recall again
    "stages": (
        Stage(128, 0.288, 1.0, "copies"),
        Stage(128, 1.44, 1.0),
        Stage(256, 1.92, 1.0),
        Stage(512, 1.92, 1.0),
        Stage(RECALL_LENGTH, 2.88, 1.0),
        Stage(512, 14.4, 0.03),
        Stage(RECALL_LENGTH, 20.352, 0.03),
        Stage(RECALL_LENGTH, 4.8, 0.523),
        Stage(RECALL_LENGTH, 3.0, 0.4),
    ),
    "cooldown": 3 / 51,  # the last of them
    "packages": DOCUMENTED_PACKAGES,
    "saved_dtype": torch.float16,
    "train_tokens": 51_000_000,
    "batch_tokens": 2048,
    "learning_rate": 1e-3,
    "warmup_steps": 50,
}
POSITION_SCALE = 2 * math.sqrt(2)  # position tables start with twice the root mean square of the token embeddings
END, PAD, CLS, SEP, MASK = SPECIAL_TOKENS = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CAUSAL_TOKENS = {"bos_token": END, "eos_token": END, "pad_token": PAD}
MASKED_TOKENS = {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "pad_token": PAD}


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart: its classes, sizes and special tokens, how it starts and how it is trained.

    Attributes:
        query_module, key_module: the ends of the names of the modules that compute the queries and the keys.
        query_of, key_of: the parts of their parameters that do.
        position_table: the name of the learned position table, which starts as sinusoids; "" where there is none.
        starts_local: queries start equal to keys, twice as large as usual, so that attention starts out preferring
            near positions.
        start: what else sets the weights of an untrained model.
        stages: the lengths of the rows, in their order, and what the rows are.
        packages: installed packages whose documentation is trained on beside the standard library's.
        saved_dtype: of the weights in the checkpoint, which loads as float32 all the same.
        train_tokens, batch_tokens, learning_rate, warmup_steps, cooldown: the defaults of these options.
    """

    config_class: type
    model_class: type
    sizes: dict[str, Any]
    special_tokens: dict[str, str]
    query_module: str
    key_module: str
    query_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    key_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    position_table: str = ""
    starts_local: bool = False
    start: Callable[[Any], None] | None = None
    stages: tuple[Stage, ...] = (Stage(BLOCK_SIZE, 1.0),)
    packages: tuple[str, ...] = ()
    saved_dtype: torch.dtype = torch.float32
    train_tokens: int = 8_000_000
    batch_tokens: int = 2048
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    cooldown: float = 0.0

    @property
    def looks_far_back(self) -> bool:
        """Whether text and generated recall are trained as one mixture."""
        return any(stage.recall for stage in self.stages)


ARCHITECTURES = {
    "bert": Architecture(
        config_class=BertConfig,
        model_class=BertForMaskedLM,
        sizes={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "max_position_embeddings": BLOCK_SIZE,
            "initializer_range": 0.05,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        special_tokens=MASKED_TOKENS,
        query_module="attention.self.query",
        key_module="attention.self.key",
        position_table="bert.embeddings.position_embeddings.weight",
        starts_local=True,
        # short first, as BERT was trained itself (Devlin et al. 2019, A.2)
        stages=(Stage(64, 0.7), Stage(BLOCK_SIZE, 0.3)),
        train_tokens=12_000_000,
        learning_rate=2e-3,
    ),
    "gpt2": Architecture(
        config_class=GPT2Config,
        model_class=GPT2LMHeadModel,
        sizes={
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
            "n_inner": 512,
            "n_positions": BLOCK_SIZE,
            "activation_function": "gelu_pytorch_tanh",  # gelu_new in one operation
            "initializer_range": 0.05,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        special_tokens=CAUSAL_TOKENS,
        query_module="attn.c_attn",
        key_module="attn.c_attn",
        position_table="transformer.wpe.weight",
        starts_local=True,
        query_of=lambda parameter: parameter.chunk(3, dim=-1)[0],
        key_of=lambda parameter: parameter.chunk(3, dim=-1)[1],
    ),
    "llama": Architecture(
        config_class=LlamaConfig,
        model_class=LlamaForCausalLM,
        sizes={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 352,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "attention_dropout": 0.0,
        },
        special_tokens=CAUSAL_TOKENS,
        query_module="self_attn.q_proj",
        key_module="self_attn.k_proj",
    ),
}
ARCHITECTURES |= {
    "gpt2-recall": replace(
        ARCHITECTURES["gpt2"],
        sizes=ARCHITECTURES["gpt2"].sizes
        | {"n_embd": 192, "n_head": 3, "n_inner": 768, "n_positions": RECALL_LENGTH},
        position_table="",
        starts_local=False,
        start=start_gpt2_with_induction,
        **RECALL,
    ),
    "llama-recall": replace(
        ARCHITECTURES["llama"],
        sizes=ARCHITECTURES["llama"].sizes
        | {
            "hidden_size": 192,
            "head_dim": 64,
            "intermediate_size": 512,
            "max_position_embeddings": 2 * RECALL_LENGTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
        start=start_llama_with_induction,
        **RECALL,
    ),
}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer that all architectures share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer, architecture: Architecture) -> PreTrainedTokenizerFast:
    """Give the shared tokenizer one architecture's special tokens; masked models get `[CLS] text [SEP]`."""
    special_tokens, length = architecture.special_tokens, architecture.stages[-1].length
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if "cls_token" in special_tokens:
        ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special_tokens)


def build_model(architecture: Architecture, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return an untrained model of the architecture.

    From random positions, models this small spend most of their training on finding the neighbouring token, and a
    masked one stays at the frequencies of the tokens. So position tables start as sinusoids, and attention local.
    """
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    config = architecture.config_class(vocab_size=len(tokenizer), **architecture.sizes, **ids)
    model = architecture.model_class(config)
    if architecture.position_table:
        table = model.get_parameter(architecture.position_table)
        table.data.copy_(sinusoids(*table.shape) * POSITION_SCALE * config.initializer_range)
    if architecture.starts_local:
        for path, module in model.named_modules():
            if path.endswith(architecture.query_module):
                keys = model.get_submodule(path.removesuffix(architecture.query_module) + architecture.key_module)
                key = architecture.key_of(keys.weight.data).mul_(2)
                architecture.query_of(module.weight.data).copy_(key)
    if architecture.start:
        architecture.start(model)
    return model


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Return the position table [positions, width] of Vaswani et al. (2017), of root mean square 1 / sqrt(2)."""
    angles = torch.arange(positions)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
