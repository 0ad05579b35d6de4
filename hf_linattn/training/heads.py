"""Which head a checkpoint was saved with, as its config says, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto import modeling_auto as auto

from hf_linattn.errors import OptionError, UnsupportedModelError
from hf_linattn.evaluation.label_metrics import COLUMNS, REGRESSION, SEVERAL, SINGLE, problem_of
from hf_linattn.saved_config import PREFIX, class_names

TEXT = "input_ids"

# in this order: a model type may have the same class for two of them
HEADS = {
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING,
}
KINDS = (
    "next tokens (ForCausalLM), masked tokens (ForMaskedLM), classes of texts (ForSequenceClassification) and"
    " embeddings (a folder with modules.json)"
)


def trained_head(name_or_path: str, config: Any) -> str:
    """Return which of `HEADS` a checkpoint has; it is loaded as that.

    A config without `architectures`, as old checkpoints have them, says nothing: the masked head, or the causal one
    where the model type has no masked one.

    Args:
        name_or_path: for the message. config: of the checkpoint, converted or not.

    Raises:
        UnsupportedModelError: it was saved with another head, or is an encoder-decoder or no model of text.
        OptionError: a classifier whose problem is none of those that are known.
    """
    classes = {kind: model_class for kind, mapping in HEADS.items() if (model_class := _class_of(mapping, config))}
    saved_as = set(class_names(config))
    names = {kind: model_class.__name__.removeprefix(PREFIX) for kind, model_class in classes.items()}
    found = next((kind for kind in classes if names[kind] in saved_as), None)
    if found is None and "masked" in names and (_pretraining_name(names["masked"]) in saved_as or not saved_as):
        found = "masked"  # the same head beside another one, or nothing said
    if found is None and not saved_as:
        found = "causal" if "causal" in names else None
    known = ", ".join(dict.fromkeys(names.values())) or "none"
    saved = f"model_name_or_path={name_or_path!r} was saved as {', '.join(sorted(saved_as)) or 'no class'}"
    if found is None:
        raise UnsupportedModelError(
            f"{saved}, whose head the recipes do not train; they train {KINDS}, of the model type"
            f" {config.model_type!r}: {known}; give a checkpoint saved as one of these, or call patch_model or"
            " `hf-linattn convert`, which keep any head, and train it with a loop of your own"
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{saved}, an encoder-decoder, which the recipes do not train; they train {KINDS}, of an encoder or a"
            " decoder alone; call patch_model or `hf-linattn convert`, and train it with a loop of your own"
        )
    if classes[found].main_input_name != TEXT:
        raise UnsupportedModelError(
            f"{saved}, which reads {classes[found].main_input_name} and no text; the recipes train {KINDS}; give a"
            " model of text"
        )
    if found == "classification":
        check_classes(name_or_path, config)
    return found


def check_classes(name_or_path: str, config: Any) -> None:
    """Raise `OptionError` unless a classifier gives one class, several labels or one number per text."""
    problem, outputs = problem_of(config), config.num_labels
    if problem not in COLUMNS or (outputs == 1) != (problem == REGRESSION):
        raise OptionError(
            f"model_name_or_path={name_or_path!r} has num_labels={outputs} and problem_type={config.problem_type!r};"
            f" give a classifier of one problem: {SINGLE!r} or {SEVERAL!r} with two classes or more, or {REGRESSION!r}"
            " with one number"
        )


def _class_of(mapping: Mapping[Any, Any], config: Any) -> Any:
    """Return the class that an Auto class has for a config; None if it has none, or several of them."""
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found if isinstance(found, type) else None


def _pretraining_name(masked: str) -> str:
    """Return the name of the class with the masked head and a second one beside it, such as BertForPreTraining."""
    return masked.replace("ForMaskedLM", "ForPreTraining")
