"""Which layers matter: how much a model's predictions suffer when one layer alone is converted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import root_model
from .attention_call import AttentionCall, Interceptor, intercept_attention
from .config import require, require_finite
from .errors import OptionError, UnsupportedModelError
from .inference import (
    accepted,
    evaluation_mode,
    prediction_inputs,
    progress_bar,
    require_batches,
    require_tensors,
    require_weights,
)
from .mechanisms.softmax import SoftmaxMechanism
from .patching import get_mechanisms


class Sensitivity(dict[str, float]):
    """Path of an attention module -> what converting it costs; `layers` has the index of those of self-attention."""

    layers: Mapping[str, int] | None = None


@torch.no_grad()
def layer_sensitivity(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], *, progress: bool | None = None
) -> Sensitivity:
    """Return path of the attention module -> mean KL(original || that layer converted), in nats per real token.

    All other layers answer with softmax, so that what one layer loses is not mixed with what others do. Mechanisms
    with parameters of their own should be calibrated before.

    Args:
        model: a patched language model.
        batches: what the model takes, such as `{"input_ids": ..., "attention_mask": ...}`; labels only
            for a decoder with nothing else to read.
        progress: show a progress bar; None: where standard error is a terminal.

    Raises:
        PatchError: the model is not patched.
        OptionError: no batches, no weights, or a divergence that is not finite.
        UnsupportedModelError: the model predicts no tokens, as a classifier of texts or a model of pictures.

    Examples:
        >>> import torch, hf_linattn
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50))
        >>> model = hf_linattn.patch_model(model, "linear")
        >>> loss = hf_linattn.layer_sensitivity(model, [{"input_ids": torch.randint(50, (2, 32))}])
        >>> list(loss)
        ['transformer.h.0.attn', 'transformer.h.1.attn']
    """
    require_vocabulary(model)
    require_weights(model)
    converted = {path: m for path, m in get_mechanisms(model).items() if not isinstance(m, SoftmaxMechanism)}
    totals, count = dict.fromkeys(converted, 0.0), 0
    require_batches(batches)
    with evaluation_mode(model):
        for number, batch in enumerate(progress_bar(batches, desc="layer sensitivity", progress=progress)):
            require_tensors(model, batch)
            inputs = prediction_inputs(model, batch) | accepted(model, use_cache=False)
            original = _predict(model, inputs, {})
            real = real_tokens(inputs, original)
            for path, mechanism in converted.items():
                alone = _predict(model, inputs, {path: partial(AttentionCall.run, mechanism=mechanism)})
                divergence = (original.exp() * (original - alone)).sum(-1)
                added = float((divergence * real).sum())
                require_finite(f"batches[{number}]: divergence of {path}", [added])
                totals[path] += added
            count += int(real.sum())
    if not count:
        raise OptionError("batches must hold at least one batch with real tokens, got none")
    costs = Sensitivity({path: total / count for path, total in totals.items()})
    costs.layers = {path: mechanism.layer.index for path, mechanism in converted.items() if not mechanism.layer.cross}
    return costs


def choose_layers(sensitivity: Mapping[str, float], share: float) -> list[int]:
    """Return the indices of the layers to convert: all but the most sensitive ones, at most `share` of them.

    Args:
        sensitivity: of `layer_sensitivity`, of which layers that were measured and attend to no encoder count; a plain
            dict has all layers of a model in order.
        share: of the layers that keep softmax, at least 0 and below 1.

    Raises:
        OptionError: `share` is out of range.

    Examples:
        >>> from hf_linattn import choose_layers
        >>> choose_layers({"a": 0.1, "b": 0.7, "c": 0.2, "d": 0.05}, 0.25)
        [0, 2, 3]
    """
    require("softmax_share", share, 0 <= share < 1, "at least 0 and below 1")
    layers = getattr(sensitivity, "layers", None)
    layers = {path: index for index, path in enumerate(sensitivity)} if layers is None else layers
    ranked = sorted(layers, key=lambda path: -sensitivity[path])
    return sorted(layers[path] for path in ranked[math.floor(share * len(ranked)) :])


def _predict(model: nn.Module, inputs: Mapping[str, Any], interceptors: Mapping[str, Interceptor]) -> Tensor:
    """Return the log probabilities [B, N, V] when all layers without an interceptor answer with softmax."""
    with intercept_attention(get_mechanisms(model), interceptors):
        return log_probabilities(logits_of(model(**inputs)))


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log probabilities of logits [..., V], in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def logits_of(output: Any) -> Tensor:
    """Return what a model predicts of each token, logits [B, N, V].

    Raises:
        UnsupportedModelError: the output has no logits, or those of texts.
    """
    logits = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        has = "no logits" if logits is None else f"logits {list(logits.shape)}, which are not of tokens"
        raise predicts_no_tokens(type(output).__name__, has)
    return logits


def real_tokens(inputs: Mapping[str, Any], predicted: Tensor) -> Tensor:
    """Return [B, N], 1 where the token that a prediction [B, N, V] is made from is real, and 0 where it is padding."""
    mask = inputs.get("decoder_attention_mask" if "decoder_input_ids" in inputs else "attention_mask")
    return torch.ones_like(predicted[..., 0]) if mask is None else mask.to(predicted.dtype)


def require_vocabulary(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a model without a vocabulary, as one of pictures: it predicts no tokens."""
    root = root_model(model)
    if getattr(root.config.get_text_config(), "vocab_size", None) is None:
        raise UnsupportedModelError(
            f"{type(root).__name__} has no vocabulary and predicts no tokens, by whose divergence layers and heads are"
            " chosen; name them yourself, patch_model(model, mechanism, layers=[...]), or heads in a plan with by_head"
        )


def predicts_no_tokens(name: str, has: str) -> UnsupportedModelError:
    """Return the error that nothing is chosen by the predictions of a model or output, which has other ones."""
    return UnsupportedModelError(
        f"{name} has {has}: by the divergence of these layers and heads are chosen; load the checkpoint with its"
        " language-modelling head, as by AutoModelForMaskedLM, or name the layers"
    )
