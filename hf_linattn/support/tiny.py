"""Small random models of any architecture of transformers, and inputs for them, from data.

A config is made small by what its fields are called: transformers uses the same names for the same sizes nearly
everywhere. Where an architecture needs something else, that is a row of `CHANGES`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_linattn.errors import UnknownNameError, UnsupportedModelError

# what the code of a model raises for a config or an input that it was not written for
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip

WIDTH, HEADS, HEAD_DIM, VOCABULARY, POSITIONS = 32, 4, 8, 96, 64
MOST_PARAMETERS = 20_000_000  # of a model that still counts as small
BATCH, LENGTH = 2, 11
FIRST_TOKEN = 5  # below stand special tokens

# what a model is tried as, in this order: with both of its sides, where it has two
HEADS_TRIED: Mapping[str, Mapping[str, Any]] = {
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "base": auto.MODEL_MAPPING_NAMES,
}

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "projection_dim", "mamba_d_ssm"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "sliding_window_size"), POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "relation_channels", "mamba_d_state", "sliding_window"), 8),
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "v_head_dim": 6,  # not that of keys and queries
    "vocab_size": VOCABULARY,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "type_vocab_size": 2,
}
# set only where the config has a value: absent, it follows from the others
FOLLOWING = ("head_dim", "sliding_window", "q_lora_rank", "n_inner")
OF_LATENT = ("head_dim", "num_key_value_heads")  # of latent attention: that of the rotary part; all heads
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")  # one entry per layer

# sections of rotary dimensions for time, height and width, whose defaults are for larger heads
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0}
CHANGES: dict[str, dict[str, Any]] = {
    "xmod": {"default_language": "en_XX"},  # its adapters are chosen by language
    **{
        name: {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_image_text", "glm_ocr_text")
    },
    "glm4v_moe_text": {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    # one layer of each kind, where it is not a list
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # whose queries have as many heads as its keys, and are made wider before the attention
    "moonshine": {
        "encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS, "pad_head_dim_to_multiple_of": 12,
    },
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "videoprism_vision_model": {"num_frames": 4},  # as many as the inputs have
    # parts of a head that are rotated
    "gptj": {"rotary_dim": HEAD_DIM},
    "codegen": {"rotary_dim": HEAD_DIM},
    # the recurrence is as wide as its heads
    "falcon_h1": {"mamba_expand": 2, "mamba_d_ssm": 2 * WIDTH},
}


def architectures() -> dict[str, tuple[str, str]]:
    """Return model type -> what it is tried as (a key of `HEADS_TRIED`) and the name of its class.

    >>> architectures()["llama"], architectures()["bart"]
    (('causal', 'LlamaForCausalLM'), ('seq2seq', 'BartForConditionalGeneration'))
    """
    found: dict[str, tuple[str, str]] = {}
    for kind, mapping in HEADS_TRIED.items():
        for model_type, name in mapping.items():
            found.setdefault(model_type, (kind, name if isinstance(name, str) else name[0]))
    return dict(sorted(found.items()))


def tiny_config(config_class: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """Return a config of that class whose fields named in `SIZES` are small, those of nested configs too."""
    default: Any = config_class()
    names = {*inspect.signature(config_class.__init__).parameters, *vars(default)}
    for base in config_class.__mro__:
        names |= set(inspect.get_annotations(base))
    latent = "qk_rope_head_dim" in names
    chosen: dict[str, Any] = {}
    for name, value in SIZES.items():
        current = getattr(default, name, None) if name in names else []
        keeps = isinstance(current, (list, tuple, dict, str)) or (latent and name in OF_LATENT)
        if not keeps and not (current is None and (name in FOLLOWING or isinstance(value, float))):
            chosen[name] = value
    if latent and "num_key_value_heads" in names:
        chosen["num_key_value_heads"] = HEADS
    for name in LAYER_LISTS:
        kinds = getattr(default, name, None) if name in names else None
        if isinstance(kinds, list) and len(kinds) > 2:  # one layer of every kind
            different = list(dict.fromkeys(kinds))
            chosen[name] = (different * 2)[: max(2, len(different))]
            chosen["num_hidden_layers"] = len(chosen[name])
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(default, name, None) if name in names else None
        if isinstance(rope, dict) and "mrope_section" in rope:
            chosen[name] = {**rope, "mrope_section": [1, 1, 2]}
    for name in config_class.sub_configs or {}:
        nested = getattr(default, name, None)
        if isinstance(nested, PreTrainedConfig):
            chosen[name] = tiny_config(type(nested), **CHANGES.get(nested.model_type, {}))
    return config_class(**{**chosen, **changes})


def tiny_model(model_type: str, seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """Return a small model of that type in evaluation mode, with weights from N(0, std^2).

    Raises:
        UnknownNameError: transformers has no such type.
        UnsupportedModelError: it cannot be made small, or needs a package that is not installed.
    """
    known = architectures()
    if model_type not in known:
        raise UnknownNameError("model type", model_type, known)
    _, name = known[model_type]
    try:
        model_class: Any = getattr(transformers, name)
        config = tiny_config(CONFIG_MAPPING[model_type], **CHANGES.get(model_type, {}))
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in model_class(config).parameters())
        if count > MOST_PARAMETERS:
            raise ValueError(f"it has {count:,} parameters even so")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = model_class(config)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=std)
    except FAILURES as error:
        raise UnsupportedModelError(f"no small {name} could be made: {one_line(error)}") from error
    return model.eval()


def tiny_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the first of the inputs that we know with which the forward of `model` works.

    Raises:
        UnsupportedModelError: none of them does.
    """
    error: Exception | None = None
    for inputs in _candidates(model):
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except FAILURES as failure:
            error = error or failure
    reason = "it takes none of the inputs known here" if error is None else one_line(error)
    raise UnsupportedModelError(f"no input was found for {type(model).__name__}: {reason}")


def _candidates(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield inputs by the names that the forward has."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    text = {
        name: torch.randint(FIRST_TOKEN, VOCABULARY - 6, (BATCH, LENGTH), generator=generator)
        for name in ("input_ids", "decoder_input_ids")
        if name in names
    }
    vision: Any = getattr(config, "vision_config", None) or config
    size: Any = getattr(vision, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = getattr(vision, "num_channels", None) or 3
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", None) or 16
    frames = 2 * getattr(config, "max_source_positions", POSITIONS // 2)
    media: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [(channels, height, width), (4, channels, height, width)],
        "pixel_values_videos": [(4, channels, height, width)],
        "input_values": [(4000,), (1, 4000)],
        "input_features": [(bins, frames), (frames, bins)],
    }
    offered = [(name, shapes) for name, shapes in media.items() if name in names]
    both = hasattr(model, "logit_scale")  # contrastive models need a picture or a sound beside every text
    if text and not both:
        yield text
    for name, shapes in offered:
        for shape in shapes:
            yield {**text, name: torch.randn(BATCH, *shape, generator=generator)}
    if text and both:
        yield text


def one_line(error: Exception) -> str:
    """Return the kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
