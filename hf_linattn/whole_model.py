"""What the fits of all layers are worth together: how far the model is from softmax on rows held out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .architecture import root_model
from .attention_call import intercept_attention
from .held_out import HeldOut, Judge, Split, squared_errors, write
from .inference import accepted
from .mechanisms import Mechanism
from .positions.tables import known_positions

logger = logging.getLogger(__name__)

UNDONE = (0, 0.25, 0.5, 0.75, 1)  # shares of the fits, of the first layers, that are tried
WORST = 1.1  # times the error without fits, which none may have at either length
NOISE = 1e-6  # errors below it are those of rounding
LONGER = 4  # rows held out that a causal model reads as one
OF_TOKENS = {"input_ids", "attention_mask", "position_ids", "labels"}  # what such rows are made of


class Reading(NamedTuple):
    """What a model reads at once, how many rows that is, and which of them count."""

    inputs: Mapping[str, Any]
    size: int
    rows: Sequence[int]


def take_together(
    model: nn.Module, mechanisms: Mapping[str, Mechanism], judges: Mapping[str, Judge],
    found: Mapping[str, HeldOut], batches: Sequence[Mapping[str, Any]], split: Split,
) -> tuple[Mapping[str, HeldOut], tuple[HeldOut, ...]]:  # fmt: skip
    """Undo the fits with which the model is further from softmax; return what is known then.

    A layer that is closer by itself, on what softmax makes of the text, may still lead all layers behind it astray,
    the first ones most. So the model reads the rows held out with all fits, with the last three quarters of them, the
    last half, the last quarter and none. The error is that of the last hidden states, sum |h - h'|^2 / sum |h'|^2 over
    real tokens, h' those of softmax in all layers. A causal model of tokens reads the rows as they are and four of
    them end to end, as far as its positions go: sums over a sequence may be right at no other length than that of the
    rows that they were fitted to. Kept is what has the least mean error, the geometric one over both lengths, among
    what has at most a tenth more than no fits at each.
    """
    fits = {path: judges[path] for path, result in found.items() if result.taken}
    if not fits:
        return found, ()
    lengths = [*filter(None, (one_by_one(batches, split), end_to_end(model, mechanisms, batches, split)))]
    with intercept_attention(mechanisms):
        wanted = [[hidden_states(model, reading) for reading in readings] for readings in lengths]
    if any(states is None for several in wanted for states in several):
        return found, ()
    order, fitted = list(fits.values()), [[x.clone() for x in judge.tensors] for judge in fits.values()]
    errors, undone = dict[int, list[float]](), 0  # at each length, by how many of the first fits are undone
    for count in sorted({round(len(fits) * share) for share in UNDONE}):
        for judge in order[undone:count]:
            judge.go_back()
        errors[count], undone = [*map(error_of, repeat(model), lengths, wanted)], count
    before = errors[len(fits)]
    best = min(errors, key=lambda count: (mean_ratio(errors[count], before), -count))
    for judge, values in zip(order[best:], fitted[best:], strict=True):
        write(judge.tensors, values)
    if best:
        logger.warning(
            "calibrate: the fits of the first %d of %d layers are taken back, as without them the model is closer to"
            " softmax on rows held out", best, len(fits),
        )  # fmt: skip
    dropped = {path: found[path]._replace(taken=False) for path in list(fits)[:best]}
    whole = (HeldOut(*pair, best < len(fits)) for pair in zip(before, errors[best], strict=True))
    return {**found, **dropped}, tuple(whole)


def mean_ratio(errors: Sequence[float], before: Sequence[float]) -> float:
    """Return the geometric mean of errors over those before; infinite where one is not finite, or a tenth larger.

    >>> round(mean_ratio([0.1, 0.21], [0.4, 0.2]), 3), mean_ratio([0.0, 0.3], [0.4, 0.2])
    (0.512, inf)
    """
    if not all(map(math.isfinite, errors)):
        return math.inf
    others = [other if math.isfinite(other) else math.inf for other in before]
    ratios = [max(own, NOISE) / max(other, NOISE) for own, other in zip(errors, others, strict=True)]
    if max(ratios) > WORST:
        return math.inf
    return math.prod(ratios) ** (1 / len(ratios))


def end_to_end(
    model: nn.Module, mechanisms: Mapping[str, Mechanism], batches: Sequence[Mapping[str, Any]], split: Split
) -> list[Reading]:
    """Return the rows held out as longer ones; none where the model is not causal or reads more than tokens."""
    causal = all(mechanism.layer.causal and not mechanism.layer.cross for mechanism in mechanisms.values())
    if not causal or not all(map(is_of_tokens, batches)):
        return []
    ids = [batch["input_ids"] for batch in batches]
    if len({x.shape[1] for x in ids}) > 1:
        return []
    rows = torch.cat([x[chosen] for x, chosen in zip(ids, split.held_out, strict=True)])
    limits = [known_positions(root_model(model)), *(mechanism.position_limit for mechanism in mechanisms.values())]
    joined = min([LONGER, len(rows), *(limit // rows.shape[1] for limit in limits if limit)])
    if joined < 2:
        return []
    longer = rows[: len(rows) // joined * joined].reshape(-1, joined * rows.shape[1])
    return [Reading({"input_ids": row[None]}, 1, [0]) for row in longer]


def is_of_tokens(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is rows of tokens without pads, and nothing else."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    rows = isinstance(ids, Tensor) and ids.dim() == 2 and batch.keys() <= OF_TOKENS
    return rows and (mask is None or bool(mask.all()))


def one_by_one(batches: Sequence[Mapping[str, Any]], split: Split) -> list[Reading]:
    """Return the rows held out of `prediction_inputs`; inside their batch where not all that it has is rows."""
    readings = []
    for batch, size, rows in zip(batches, split.sizes, split.held_out, strict=True):
        if rows and all(isinstance(x, Tensor) and len(x) == size for x in batch.values()) and is_of_rows(batch):
            readings.append(Reading({name: x[rows] for name, x in batch.items()}, len(rows), range(len(rows))))
        elif rows:
            readings.append(Reading(batch, size, rows))
    return readings


def is_of_rows(batch: Mapping[str, Any]) -> bool:
    """Whether position ids, if a batch has any, are [B, N]: those of pictures may be [3, B, N]."""
    ids = batch.get("position_ids")
    return ids is None or ids.dim() == 2


def hidden_states(model: nn.Module, reading: Reading) -> Any:
    """Return the last hidden states of the rows that count, pads zero: [rows, N, E]; None if the model has none."""
    backbone = root_model(model).base_model
    found = backbone(**{**reading.inputs, **accepted(backbone, use_cache=False)})
    states = getattr(found, "last_hidden_state", None)
    if states is None:
        return None
    name = "decoder_attention_mask" if "decoder_input_ids" in reading.inputs else "attention_mask"
    real = reading.inputs.get(name)
    if isinstance(real, Tensor) and real.shape == states.shape[:2]:
        states = states * real[..., None].to(states)
    return states[reading.rows] if len(states) == reading.size else states


def error_of(model: nn.Module, readings: Sequence[Reading], wanted: Sequence[Tensor]) -> float:
    """Return sum |h - h'|^2 / sum |h'|^2 over all that is read."""
    error = size = 0.0
    for reading, target in zip(readings, wanted, strict=True):
        states = hidden_states(model, reading).flatten(1)
        errors, sizes = squared_errors(states[:, None, None], target.flatten(1)[:, None, None], None)
        error, size = error + float(errors.sum()), size + float(sizes.sum())
    return error / size
