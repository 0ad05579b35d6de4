"""The row that every table needs: a sliding window and sink tokens with as many bytes of decoding state.

A state of constant size is worth what it does better than the plainest state of that size: exact keys of the last
tokens and of the first few (Xiao et al. 2023, arXiv 2309.17453). `streaming_for` makes that plan for any number of
bytes, and `streaming_like` for those of a converted model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.configuration_utils import PreTrainedConfig

from .. import architecture
from ..attention_modules import self_attention_modules
from ..cache import StateLayer
from ..config import make_config, require
from ..errors import UnsupportedModelError
from ..inference import evaluation_mode
from ..mechanisms import MECHANISMS, AttentionLayer
from ..ops.block_softmax.interface import keep_keys
from ..patching import get_mechanisms, get_patch_config
from ..plan import LayerSpec, PatchConfig, parse_layers
from .perplexity import position_limit
from .speed import prefill_cache, random_input_ids

MECHANISM = "streaming"
NUM_SINK_TOKENS = 4  # as many as Xiao et al. keep
STATE_TOKENS = 16  # a state of constant size has all of its bytes by then


def streaming_for(
    model_or_config: nn.Module | PreTrainedConfig,
    *,
    bytes: int,
    layers: LayerSpec = None,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return the plan of windows and sink tokens whose decoding state takes at most `bytes`, for `patch_model`.

    All layers get the largest `window_size` W with

        sum over layers of (W - 1 + num_sink_tokens) (Hkv (D + Dv) s + 8) + 8 <= bytes,

    where s is the size of a number of the model's dtype; the 8 are those of a token's position and of the length. A
    window of one token more would exceed `bytes`. Bytes are best counted for the dtype that a model is served in, as
    sums are float32 in any dtype, and keys in a window are not.

    Args:
        model_or_config: a model, patched or not, wrapped or not, or the config of one; no weight is read.
        bytes: of the state of one sequence, over all of `layers`.
        layers: which layers get windows, see `parse_layers`; None is all of them. The others keep softmax.
        num_sink_tokens: how many first tokens every query sees.
        dtype: in which the model decodes; None is the dtype that it has, or that its config names.

    Raises:
        OptionError: `bytes` is less than what the sink tokens and a window of one token take, or another option is
            out of range.
        UnsupportedModelError: a layer is bidirectional, as in an encoder, and so has no decoding state, or the
            attention cannot be reached.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from hf_linattn.evaluation import streaming_for
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, dtype="bfloat16")
        >>> streaming_for(config, bytes=10_000)
        {'streaming': {'window_size': 66, 'num_sink_tokens': 4}}
        >>> streaming_for(config, bytes=10_000, layers="0")
        {'streaming': {'window_size': 135, 'num_sink_tokens': 4, 'layers': [0]}}
    """
    chosen = _chosen(model_or_config, layers, dtype)
    least, two = (_window_bytes(chosen, window, num_sink_tokens) for window in (1, 2))
    what = f"at least {least:,}, which {num_sink_tokens} sink tokens and a window of one token take"
    require("bytes", bytes, isinstance(bytes, int) and bytes >= least, what)
    plan = {"window_size": 1 + (bytes - least) // (two - least), "num_sink_tokens": num_sink_tokens}
    return {MECHANISM: plan if layers is None else plan | {"layers": [layer.index for layer in chosen]}}


def streaming_bytes(
    model_or_config: nn.Module | PreTrainedConfig,
    *,
    window_size: int,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    layers: LayerSpec = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes of decoding state of one sequence that a plan of `streaming_for` takes.

    Args:
        model_or_config: as for `streaming_for`.
        window_size: of the plan.
        num_sink_tokens: of the plan.
        layers: as for `streaming_for`.
        dtype: as for `streaming_for`.

    Raises:
        UnsupportedModelError: as for `streaming_for`.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from hf_linattn.evaluation import streaming_bytes, streaming_for
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, dtype="bfloat16")
        >>> streaming_bytes(config, **streaming_for(config, bytes=10_000)["streaming"])
        9952
    """
    return _window_bytes(_chosen(model_or_config, layers, dtype), window_size, num_sink_tokens)


def streaming_like(model: nn.Module, *, num_sink_tokens: int = NUM_SINK_TOKENS) -> dict[str, Any] | None:
    """Return `streaming_for` the layers that a model converted, with the bytes that these have in its cache.

    None where there is nothing to compare: the model does not decode, a state grows with the context, or it is
    smaller than the sink tokens.

    Args:
        model: a patched model.
        num_sink_tokens: how many first tokens every query sees.

    Raises:
        PatchError: the model is not patched.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import streaming_like
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
        >>> streaming_like(patch_model(LlamaForCausalLM(config), "linear", layers="1"), num_sink_tokens=1)
        {'streaming': {'window_size': 4, 'num_sink_tokens': 1, 'layers': [1]}}
    """
    own, config = constant_state_bytes(model), get_patch_config(model)
    converted = _converted_layers(config)
    layers = None if len(converted) == config.num_layers else converted
    if own is None or own < _window_bytes(_chosen(model, layers), 1, num_sink_tokens):
        return None
    return streaming_for(model, bytes=own, layers=layers, num_sink_tokens=num_sink_tokens)


def constant_state_bytes(model: nn.Module) -> int | None:
    """Return the bytes of the decoding state of one sequence, over the layers that a model converted.

    They are what a cache really holds after a few tokens. None where the model does not decode by itself, or where
    the state of one of these layers grows with the context.

    Args:
        model: a patched model.

    Raises:
        PatchError: the model is not patched.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_linattn import patch_model
        >>> from hf_linattn.evaluation import constant_state_bytes
        >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> model = patch_model(LlamaForCausalLM(config), "linear")
        >>> constant_state_bytes(model)
        584
    """
    converted, root = _converted_layers(get_patch_config(model)), architecture.root_model(model)
    mechanisms = [m for m in get_mechanisms(model).values() if m.layer.cross or m.layer.index in converted]
    constant = converted and all(mechanism.constant_state and mechanism.layer.causal for mechanism in mechanisms)
    if not root.can_generate() or not constant:
        return None
    count = min(STATE_TOKENS, position_limit(model) or STATE_TOKENS)
    with evaluation_mode(model), torch.no_grad():
        cache = prefill_cache(model, random_input_ids(model, 1, count, seed=0))
    return sum(layer.nbytes for layer in cache.layers if isinstance(layer, StateLayer))


def _converted_layers(config: PatchConfig) -> list[int]:
    """Return the layers that do not keep softmax."""
    return sorted(index for index, layer in config.layers.items() if layer.mechanism != "softmax")


def _root(model_or_config: nn.Module | PreTrainedConfig) -> Any:
    """Return a model to read sizes from: one without memory where a config is given."""
    if isinstance(model_or_config, nn.Module):
        return architecture.root_model(model_or_config)
    with torch.device("meta"):
        return AutoModel.from_config(model_or_config)


def _chosen(
    model_or_config: nn.Module | PreTrainedConfig, layers: LayerSpec, dtype: torch.dtype | None = None
) -> list[AttentionLayer]:
    """Return the layers that are to have windows; `UnsupportedModelError` if one of them does not decode."""
    root = _root(model_or_config)
    found = list(architecture.describe_layers(root, self_attention_modules(root)).values())
    chosen = [found[index] for index in parse_layers(layers, len(found))]
    for layer in chosen:
        if not layer.causal:
            raise UnsupportedModelError(
                f"layer {layer.index} of {type(root).__name__} is bidirectional, so it has no decoding state that a"
                " window could be as large as; give layers of a decoder"
            )
    return [replace(layer, dtype=dtype or layer.dtype) for layer in chosen]


def _window_bytes(layers: Iterable[AttentionLayer], window_size: int, num_sink_tokens: int) -> int:
    """Return the bytes of what `streaming` keeps of one sequence, over these layers."""
    config, total = make_config(MECHANISM, {"window_size": window_size, "num_sink_tokens": num_sink_tokens}), 0
    for layer in layers:
        pattern = MECHANISMS.get(MECHANISM)(config, layer)
        widths = layer.head_dim, layer.value_dim or layer.head_dim
        shapes = [(1, layer.num_key_value_heads, 1, width) for width in widths]
        key, value = (torch.empty(shape, dtype=layer.dtype, device="meta") for shape in shapes)
        total += sum(x.nbytes for x in keep_keys(key, value, pattern))
    return total
