"""choose_plan: a score for every head of a model, and the plan that keeps the best of them exact.

A gate g per key/value head stands between its exact output and the one of what replaces it,

    o = g exact + (1 - g) replaced,

and one backward pass of a signal per example, all gates shut, says what opening each would bring: its slope
d signal / d g at g = 0. The slopes of an example are divided by their length, and averaged over the examples of a
kind, then over kinds. The steepest third of the heads to keep is opened, slopes are measured again and divided by the
first ones' lengths, so that an example counts as far as it still fails, and once more. Of prompts those count that the
original answers and the model with everything replaced does not: p >= 1/2 a token, in the geometric mean. The answers
are in the original's own words, its greedy continuation up to where the answer is complete.

That few heads retrieve is from Wu et al. 2024 (arXiv 2404.15574); that the others need a window and the first tokens
alone from DuoAttention (Xiao et al. 2024, arXiv 2410.10819), which trains its gates. One backward pass for all gates
is as in Michel et al. 2019 (arXiv 1905.10650), who prune heads.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from ..architecture import classifies_texts, layers_sharing_keys, root_model
from ..chosen_plan import ChosenPlan, PlanRecord
from ..config import MechanismConfig, make_config, require, require_known
from ..dtypes import in_fast_dtype
from ..errors import DataError, OptionError
from ..inference import (
    prediction_inputs,
    require_batches,
    require_gradients,
    require_tensors,
    require_weights,
    shared_by,
)
from ..mechanisms import MECHANISMS
from ..mechanisms.composite import CompositeMechanism
from ..patching import original_attention
from ..plan import entry_of, read_entries
from ..sensitivity import predicts_no_tokens, require_vocabulary
from .budget import number_to_keep
from .divergence_signal import DivergenceSignal, beyond_windows
from .gates import UNITS, Gates, gated
from .joint_signal import JointSignal
from .one_at_a_time import one_at_a_time
from .options import SearchOptions, Signal
from .recall_signal import RecallSignal
from .restore_one import restore_one
from .slope import slope
from .suite_prompts import in_own_words, prompts_for, with_lengths
from .trained_gates import trained_gates

logger = logging.getLogger(__name__)

Search = Callable[[Gates, Signal, SearchOptions, int], Tensor]

SEARCHES: dict[str, Search] = {
    "slope": slope, "one_at_a_time": one_at_a_time, "restore_one": restore_one, "gates": trained_gates,
}  # fmt: skip
SIGNALS: dict[str, tuple[str, ...]] = {
    "recall": ("recall",), "divergence": ("divergence",), "both": ("recall", "divergence"),
}  # fmt: skip
LEAST_PROMPTS = 3  # that the original must answer for recall to choose


@torch.inference_mode(False)
def choose_plan(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    keep: float | int = 0.1,
    *,
    unit: str = "head",
    replace: str | MechanismConfig | Mapping[str, Any] = "streaming",
    signal: str = "recall",
    search: str = "slope",
    batches: Iterable[Mapping[str, Any]] | None = None,
    **options: Any,
) -> ChosenPlan:
    """Return the plan that keeps the few key/value heads exact by which a model finds what is far back.

    One backward pass of the signal says what each exact head adds to what replaces it. Nothing is trained; the model
    is as before, also after an error. A processor slow in the model's dtype computes in float32, with a warning.

    Args:
        model: a model that is not patched.
        tokenizer: its own; None where there is nothing to tokenise.
        keep: a share of the key/value heads, as 0.1, or their number, as 9; of the layers where `unit` is "layer".
        unit: "head" or "layer", of which all heads have one gate.
        replace: what serves the others: a name, a mechanism config, or {"streaming": {"window_size": 128}}.
        signal: "recall", log p of the right answers of generated prompts; "divergence", minus the KL divergence from
            the original's predictions on `batches`; "both", the mean of the two, each over the length of its first
            scores. Of an encoder, or a model that knows fewer than three answers, divergence, with a warning.
        search: "slope"; "gates", Adam on all gates from there; as references "restore_one" and "one_at_a_time".
        batches: text as the model takes it, `{"input_ids": ..., "attention_mask": ...}`; labels as in `calibrate`.
        **options: the fields of `SearchOptions`, such as lengths, seed, state_bytes and progress.

    Raises:
        OptionError: an option out of range, as nothing or everything kept; a signal that is not finite; FSDP.
        UnknownNameError: no such mechanism, unit, signal or search.
        DataError: the tokenizer lacks what prompts need, or there is no text beyond the window of what replaces heads.
        PatchError: as for `patch_model`.
        UnsupportedModelError: as for `patch_model`, or the model predicts no tokens.
        UnsupportedModeError: as for `patch_model`.

    Examples:
        >>> from hf_linattn import choose_plan, patch_model
        >>> model = patch_model(model, choose_plan(model, tokenizer, keep=0.1))  # doctest: +SKIP
    """
    for kind, name, known in (("unit", unit, UNITS), ("signal", signal, SIGNALS), ("search", search, SEARCHES)):
        require_known(kind, name, known)
    start, settings = time.perf_counter(), SearchOptions.from_options(options)
    config, texts = read_replacement(replace, unit), read_batches(model, batches)
    if classifies_texts(model):  # whose text, given in place of prompts, would not help
        raise predicts_no_tokens(type(root_model(model)).__name__, "logits of texts, which are not of tokens")
    with gated(model, config, unit) as gates, torch.no_grad():
        count = number_to_keep(gates, keep, unit, settings)
        with in_fast_dtype(model):
            chosen, reason = _signal(gates, tokenizer, signal, texts, settings)
            scores = SEARCHES[search](gates, chosen, settings, count)
        record = PlanRecord(
            **_places(gates, scores, count), unit=unit, replace=entry_of(config), search=search, reason=reason,
            signal="divergence" if reason else signal, seed=settings.seed, seconds=time.perf_counter() - start,
            examples=dict(Counter(chosen.groups)),
            options={**settings.recorded(), "keep": keep if settings.state_bytes is None else None},
        )  # fmt: skip
    return ChosenPlan.of(record)


def read_batches(model: nn.Module, batches: Iterable[Mapping[str, Tensor]] | None) -> list[Mapping[str, Tensor]]:
    """Return batches of text, none for None, once each is known to be what the model takes.

    The model has a vocabulary, and weights, all of them in each process.
    """
    require_vocabulary(model)
    require_weights(model)
    require_gradients("the model's weights", model.parameters())
    if wrapper := shared_by(model, copies=False):
        raise OptionError(
            f"the model is a {wrapper}, of which each process has a part, and gates need whole heads; call choose_plan"
            " before the model is wrapped"
        )
    if batches is None:
        return []
    require_batches(batches)
    texts: list[Mapping[str, Tensor]] = []
    for batch in batches:
        require_tensors(model, batch)
        texts.append(prediction_inputs(model, batch))
    return texts


def _places(gates: Gates, scores: Tensor, count: int) -> dict[str, Any]:
    """Return what a record says of a model: its class and heads, who shares keys, the scores, and the `count` best.

    The scores are divided by their length.
    """
    scores = F.normalize(scores.double(), dim=0, eps=torch.finfo(torch.float64).tiny)
    root = root_model(gates.model)
    layers = [mechanism.layer for mechanism in gates.mechanisms.values()]
    kept = sorted(scores.topk(count).indices.tolist())
    return {
        "model": type(root).__name__,
        "heads": [layer.num_key_value_heads for layer in layers],
        "kept": [[gates.places[i].layer, head] for i in kept for head in gates.places[i].heads],
        "scores": [
            [float(scores[i]) for i, place in enumerate(gates.places) if place.layer == layer.index]
            for layer in layers
        ],
        "sharing": layers_sharing_keys({path: root.get_submodule(path) for path in gates.mechanisms}),
    }


def read_replacement(replace: str | MechanismConfig | Mapping[str, Any], unit: str) -> MechanismConfig:
    """Return the config of what replaces heads or layers: from its name, or a mapping of its name to options."""
    if isinstance(replace, MechanismConfig):
        config = replace
    elif isinstance(replace, str):
        config = make_config(replace, {})
    else:
        single = isinstance(replace, Mapping) and len(replace) == 1
        single = single and all(isinstance(options, Mapping | None) for options in replace.values())
        require("replace", replace, single, 'a name, a mechanism config, or {"streaming": {"window_size": 128}}')
        (entry,) = read_entries({name: dict(value or {}) for name, value in replace.items()}, ("heads",))
        config = make_config(entry.mechanism, entry.options)
    require("replace", config.mechanism, config.mechanism != "softmax", "something else than what the model has")
    single = not issubclass(MECHANISMS.get(config.mechanism), CompositeMechanism)
    expected = "a mechanism that is not made of others itself, unless unit is 'layer'"
    require("replace", config.mechanism, single or unit == "layer", expected)
    return config


def _signal(
    gates: Gates, tokenizer: PreTrainedTokenizerBase | None, asked: str, texts: list[Mapping[str, Any]],
    options: SearchOptions,
) -> tuple[Signal, str]:
    """Return the signal to choose by, and why it is not the one asked for."""
    signals: list[Signal] = []
    reason = ""
    if "recall" in SIGNALS[asked]:
        recall, reason = _recall(gates, tokenizer, options)
        signals += [] if reason else [recall]
    if reason:
        if not texts:
            raise DataError(
                f"recall cannot choose: {reason}; give batches of text as the model takes it (--text on the command"
                " line), and divergence chooses by these"
            )
        logger.warning("choose_plan: recall cannot choose: %s; divergence is used", reason)
    if reason or "divergence" in SIGNALS[asked]:
        if not texts:
            raise OptionError(f"batches must hold at least one batch of text for signal={asked!r}, got none")
        signals.append(DivergenceSignal(beyond_windows(texts, gates)))
    return (signals[0] if len(signals) == 1 else JointSignal(signals)), reason


def _recall(
    gates: Gates, tokenizer: PreTrainedTokenizerBase | None, options: SearchOptions
) -> tuple[RecallSignal, str]:
    """Return the signal over prompts that the original answers, and why it cannot choose; empty if it can.

    Those that the model with everything replaced answers, too, say little: they count only if there are no others.
    Where no lengths are asked for, shorter prompts are tried if it does not answer the longest.
    """
    root = root_model(gates.model)
    causal = root.can_generate() and all(kind.layer.causal for kind in gates.mechanisms.values())
    if root.config.is_encoder_decoder or not causal:
        return RecallSignal([]), f"{type(root).__name__} does not continue a prompt from left to right"
    missed: list[str] = []
    for tried in with_lengths(gates, tokenizer, options):
        asked = prompts_for(gates, tokenizer, tried)
        if options.prompts is None and tokenizer is not None:
            with original_attention(gates.model):
                known = in_own_words(gates.model, tokenizer, asked, options.progress)
        else:
            known = RecallSignal(asked).answered(gates, options.progress)
        signal, least = RecallSignal(known), min(LEAST_PROMPTS, len(asked))
        length = "" if options.prompts else f" of {max(tried.lengths or ()):,} tokens"
        if len(known) >= least:
            if missed:
                said = ", ".join(missed)
                logger.warning("choose_plan: %s answers %s; those%s choose", type(root).__name__, said, length)
            signal.keep_lost(gates, least, options.progress)
            return signal, ""
        missed.append(f"{len(known)} of {len(asked)} prompts{length}")
    return RecallSignal([]), f"{type(root).__name__} itself answers {', '.join(missed)}"
