"""The picture of a chosen plan shows its scores and what stays exact."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from hf_linattn import ChosenPlan
from hf_linattn.chosen_plan import PlanRecord
from hf_linattn.report import save_plan_picture
from hf_linattn.report.plan_picture import plan_figure


@pytest.mark.parametrize(
    ("unit", "scores", "kept", "framed"),
    [
        ("head", [[0.1, -0.2], [0.9, 0.3], [0.0, 0.5]], [[1, 0], [2, 1]], [(0.5, -0.5), (1.5, 0.5)]),
        ("layer", [[0.1], [0.9], [0.0]], [[1, 0], [1, 1]], [(0.5, -0.5)]),
        ("head", [[-0.1], [-0.9, -0.2]], [[1, 1]], [(0.5, 0.5)]),
    ],
)
def test_scores_are_in_their_places_and_frames_round_what_is_kept(unit, scores, kept, framed, tmp_path):
    replace = {"mechanism": "linear", "options": {}}
    heads = [2] * 3 if len(scores) == 3 else [1, 2]
    plan = ChosenPlan.of(PlanRecord("LlamaForCausalLM", heads, unit, kept, replace, scores, "slope", "recall"))
    axes = plan_figure(plan).axes[0]
    drawn = axes.images[0].get_array()
    for layer, column in enumerate(scores):
        assert [drawn[head][layer] for head in range(len(column))] == column
    frames = [patch.get_xy() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert frames == framed
    assert save_plan_picture(plan, tmp_path / "plan.png").stat().st_size > 0
