"""What a patch must do on every architecture, tried out on a small random model of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linattn import get_mechanisms, patch_model, unpatch_model
from hf_linattn.attention_modules import undeclared_attention
from hf_linattn.config import make_config
from hf_linattn.errors import HfLinattnError, UnsupportedModelError
from hf_linattn.mechanisms import MECHANISMS

from .tiny import FAILURES, architectures, one_line, tiny_inputs, tiny_model

NEW_TOKENS = 4
TOLERANCE = 1e-3  # relative to the largest logit
PADDING = 4  # tokens in front of the first row, or behind it
MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


@dataclass(frozen=True)
class Support:
    """What was found out about one architecture.

    Attributes:
        model_type, model_class: what transformers calls it.
        kind: what it was tried as: causal, masked, seq2seq, speech or base.
        status: "patched": every check that applies holds; "partly": it patches, and `reason` says what does not hold;
            "not": it cannot be patched; "untried": no small model or input could be made here.
        layers: self-attention modules that got a mechanism.
        passed: names of the checks that hold.
        reason: why it is not "patched".
    """

    model_type: str
    model_class: str
    kind: str
    status: str
    layers: int = 0
    passed: tuple[str, ...] = ()
    reason: str = ""


def check_architecture(model_type: str, mechanism: str = "linear", **options: Any) -> Support:
    """Patch a small random model of an architecture and see whether everything holds that has to.

    What does not hold with the model's own attention either, such as left padding where positions are absolute, does
    not apply. Nor does that outputs differ from softmax's, where a mechanism can equal it: short inputs fit a window.

    Args:
        mechanism, options: its name, and options of it.

    Raises:
        UnknownNameError: transformers has no such model type, or there is no such mechanism.
        OptionError: the mechanism has no such option, or not with this value.

    >>> check_architecture("gpt2").passed
    ('called', 'differs', 'future', 'cache', 'left padding', 'padding', 'restored', 'softmax')
    """
    config = make_config(mechanism, options)
    kind, name = architectures().get(model_type, ("", ""))
    found: dict[str, Any] = {"model_type": model_type, "model_class": name, "kind": kind}
    try:
        model = tiny_model(model_type)
        inputs = tiny_inputs(model)
        trial = Trial(model, inputs, kind, _output(model, inputs))
    except UnsupportedModelError as error:
        return Support(**found, status="untried", reason=str(error))
    applicable = [check for check in CHECKS if check not in BEHAVIOUR or not _fault(BEHAVIOUR[check], trial)]
    if MECHANISMS.get(mechanism).limit.equal is not None:
        applicable.remove("differs")
    try:
        patch_model(model, config)
    except HfLinattnError as error:
        return Support(**found, status="not", reason=one_line(error))
    found["layers"] = len(get_mechanisms(model))
    passed: list[str] = []
    for check in applicable:
        status = "partly"
        try:
            fault = _fault(CHECKS[check], trial)
        except HfLinattnError as error:
            fault, status = one_line(error), "partly" if passed else "not"
        if fault:
            return Support(**found, status=status, passed=tuple(passed), reason=f"{check}: {fault}")
        passed.append(check)
    return Support(**found, status="patched", passed=tuple(passed))


class Trial(NamedTuple):
    """A small model, inputs for it, what it is, and what its own attention gave for them."""

    model: PreTrainedModel
    inputs: dict[str, Tensor]
    kind: str
    original: Tensor


# -- each check returns what is wrong, or nothing ---------------------------------------------------------------------


def called(trial: Trial) -> str:
    """Every attention module called its mechanism, and none goes without."""
    _output(trial.model, trial.inputs)
    idle = [path for path, mechanism in get_mechanisms(trial.model).items() if not mechanism.calls]
    if idle:
        return f"given {' and '.join(trial.inputs)}, {idle[0]} and {len(idle) - 1} more never ran"
    left = [*undeclared_attention(trial.model)]
    return f"{left[0]} and {len(left) - 1} more keep softmax, as the model does not declare them" if left else ""


def differs(trial: Trial) -> str:
    """The outputs are finite and not those of softmax."""
    output = _output(trial.model, trial.inputs)
    if not bool(output.isfinite().all()):
        return "the output is not finite"
    return "the output is that of softmax" if torch.allclose(output, trial.original, rtol=1e-4, atol=1e-5) else ""


def future(trial: Trial) -> str:
    """The last token changes nothing in front of it."""
    name = "decoder_input_ids" if "decoder_input_ids" in trial.inputs else "input_ids"
    ids = trial.inputs[name].clone()
    ids[:, -1] = ids[:, -2]
    changed, before = (_output(trial.model, inputs) for inputs in ({**trial.inputs, name: ids}, trial.inputs))
    return _difference(changed[:, :-1], before[:, :-1])


def cached(trial: Trial) -> str:
    """Generation with a cache gives what it gives without."""
    with_cache, without = (_generate(trial, trial.inputs, use_cache=use_cache) for use_cache in (True, False))
    return _difference(with_cache, without)


def left_padded(trial: Trial) -> str:
    """A row with padding on its left is continued as it is without."""
    ids = trial.inputs["input_ids"].clone()
    mask = torch.ones_like(ids)
    ids[0, :PADDING] = mask[0, :PADDING] = 0
    padded = _generate(trial, {"input_ids": ids, "attention_mask": mask})
    alone = _generate(trial, {"input_ids": ids[:1, PADDING:], "attention_mask": mask[:1, PADDING:]})
    return _difference(padded[:1], alone)


def padded(trial: Trial) -> str:
    """A row with padding on its right gives what it gives without."""
    ids = trial.inputs["input_ids"].clone()
    mask, kept = torch.ones_like(ids), ids.shape[1] - PADDING
    ids[0, kept:] = mask[0, kept:] = 0
    both = _output(trial.model, {"input_ids": ids, "attention_mask": mask})
    alone = _output(trial.model, {"input_ids": ids[:1, :kept], "attention_mask": mask[:1, :kept]})
    return _difference(both[:1, :kept], alone)


def restored(trial: Trial) -> str:
    """Unpatched, the model computes bit for bit what it computed before."""
    unpatch_model(trial.model)
    return "" if torch.equal(_output(trial.model, trial.inputs), trial.original) else "the output is another"


def softmax(trial: Trial) -> str:
    """Patched with softmax the model computes what it does itself, also with padding, and where it decodes."""
    calls: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: _output(trial.model, trial.inputs),
        "padded": lambda: _padded_output(trial),
        "decoding": lambda: _generate(trial, trial.inputs),
    }
    original: dict[str, Tensor] = {}
    for name, call in calls.items():
        with suppress(*FAILURES):  # what its own attention cannot do does not apply
            original[name] = call()
    patch_model(trial.model, "softmax")
    faults = {name: _difference(calls[name](), want) for name, want in original.items()}
    return next((f"{name}: {fault}" for name, fault in faults.items() if fault), "")


BEHAVIOUR: dict[str, Callable[[Trial], str]] = {
    "future": future, "cache": cached, "left padding": left_padded, "padding": padded,
}  # fmt: skip
CHECKS: dict[str, Callable[[Trial], str]] = {
    "called": called, "differs": differs, **BEHAVIOUR, "restored": restored, "softmax": softmax,
}  # fmt: skip


def _fault(check: Callable[[Trial], str], trial: Trial) -> str:
    """Return what is wrong; an error of the model's own code is, too, and a refusal of ours is raised."""
    try:
        return check(trial)
    except HfLinattnError:
        raise
    except FAILURES as error:
        return one_line(error)


@torch.no_grad()
def _output(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the first output that holds numbers: logits or hidden states."""
    torch.manual_seed(0)  # some encoders mask at random
    outputs: Any = model(**inputs)
    values = outputs.values() if hasattr(outputs, "values") else outputs
    numbers = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if not numbers:
        raise UnsupportedModelError(f"{type(model).__name__} gives no tensor that could be compared")
    return numbers[0]


def _padded_output(trial: Trial) -> Tensor:
    """Return what comes of inputs whose first row has padding on its right, of texts on either side."""
    inputs, kept = dict(trial.inputs), torch.tensor(True)
    for name, mask in MASKS.items():
        if name in inputs:
            inputs[mask] = torch.ones_like(inputs[name])
            inputs[mask][0, -PADDING:] = 0
            inputs[name] = inputs[name] * inputs[mask]
            kept = inputs[mask].bool()
    output = _output(trial.model, inputs)
    return output[kept] if output.shape[:2] == kept.shape else output


def _generate(trial: Trial, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Return the logits [B, n, V] of greedily chosen new tokens."""
    if trial.kind not in ("causal", "seq2seq", "speech"):
        raise NotImplementedError("it does not generate")
    given = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    if "input_ids" in given:
        given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    result: Any = trial.model.generate(  # type: ignore[operator]
        **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(result.logits, dim=1)


def _difference(got: Tensor, want: Tensor) -> str:
    error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
    return "" if error <= TOLERANCE else f"outputs differ by {error:.1%} of the largest"
