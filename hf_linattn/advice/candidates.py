"""The plans that are tried where none is named, as data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..chosen_plan import ChosenPlan
from ..config import require
from ..plan import Plan, softmax_beside_states

SHARES = (0.05, 0.1, 0.25)  # of the key/value heads that stay exact, chosen by what they recall
EVERY = 4  # one layer of that many keeps softmax

# name of the row -> mechanism and options; what is tried in all layers
IN_ALL_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "streaming": {"mechanism": "streaming", "options": {"window_size": 256, "num_sink_tokens": 4}},
    "hybrid": {"mechanism": "hybrid", "options": {}},
    "deltanet": {"mechanism": "deltanet", "options": {"gate": True}},
    "linear": {"mechanism": "linear", "options": {"decay": "learned"}},
}
IN_MOST_LAYERS = ("streaming", "deltanet")  # what is tried in three layers of four, too


def candidate_plans(num_layers: int, sharing: Sequence[Sequence[int]] = ()) -> dict[str, Plan]:
    """Return name -> plan of what is tried in a model with that many layers.

    sharing: groups of layers that attend to the keys of one of them.

    >>> list(candidate_plans(12))
    ['streaming', 'hybrid', 'deltanet', 'linear', 'softmax every 4th + streaming', 'softmax every 4th + deltanet']
    >>> candidate_plans(6)["softmax every 4th + deltanet"]
    [{'mechanism': 'deltanet', 'options': {'gate': True}, 'layers': [0, 1, 3, 4, 5]}]
    """
    plans: dict[str, Plan] = {name: [copy.deepcopy(dict(entry))] for name, entry in IN_ALL_LAYERS.items()}
    converted = most_layers(num_layers)
    if 0 < len(converted) < num_layers:
        for name in IN_MOST_LAYERS:
            entry = {**copy.deepcopy(IN_ALL_LAYERS[name]), "layers": converted}
            plans[f"softmax every {EVERY}th + {name}"] = [entry, *softmax_beside_states(converted, sharing)]
    return plans


def most_layers(num_layers: int) -> list[int]:
    """Return the layers that are converted where every fourth keeps softmax.

    >>> most_layers(8)
    [0, 1, 3, 4, 5, 7]
    """
    return [index for index in range(num_layers) if index % EVERY != EVERY // 2]


def with_share_kept(plan: ChosenPlan, share: float) -> ChosenPlan:
    """Return the plan in which another share of the heads stays exact, by the scores of the same choice.

    Raises:
        OptionError: the plan was chosen by layers.
    """
    record = plan.record
    require("unit", record.unit, record.unit == "head", "'head'")
    ranked = sorted(
        ([layer, head] for layer, scores in enumerate(record.scores) for head in range(len(scores))),
        key=lambda place: -record.scores[place[0]][place[1]],
    )
    count = min(max(1, round(share * len(ranked))), len(ranked) - 1)
    return plan.keeping(ranked[:count], keep=share)


def chosen_plans(plan: ChosenPlan, shares: Sequence[float] = SHARES) -> dict[str, Plan]:
    """Return name -> plan for every share of the heads, each number of heads once."""
    plans = {with_share_kept(plan, share).record.num_kept: with_share_kept(plan, share) for share in shares}
    total = sum(plan.record.heads)
    return {f"{count} of {total} heads + streaming": list(chosen) for count, chosen in plans.items()}
