"""The advice: every candidate tried on one model, and the smallest state that keeps what the original finds."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..architecture import layers_sharing_keys
from ..attention_modules import self_attention_modules
from ..config import require, require_count
from ..errors import DataError, HfLinattnError, OptionError, PatchError, UnsupportedModelError
from ..evaluation.next_token import evenly, token_losses, windows_of_documents
from ..evaluation.perplexity import is_masked_language_model, position_limit
from ..evaluation.recall import make_prompts
from ..inference import progress_bar, require_gradients, require_weights
from ..patching import is_patched
from ..plan import Plan, plan_as_data
from ..plan_search import choose_plan
from .candidates import IN_ALL_LAYERS, candidate_plans, chosen_plans
from .trial import EPSILON, Material, Settings, Trial, answered, run_trial, state_size, texts_in_halves, with_costs

logger = logging.getLogger(__name__)

WITHIN = 0.05  # nats per token that a plan may lose: 5 % of perplexity
CHOSEN_BY = ("single_noise", "single_text", "single_uuid", "multi_key")  # recall tasks that heads are chosen by
LONGEST = 1024  # tokens of their prompts
ROOM = 16  # positions that are left to what is decoded


@dataclass(frozen=True)
class Advice:
    """What `advise` found.

    Attributes:
        length: tokens. original_loss, original_recall: of the model as it is.
        trials: in the order of the candidates. recommended: the name of one of them.
        settings: what was measured, and of the recovery that `recovery_seconds` is the time of.
    """

    length: int
    original_loss: float
    original_recall: float
    trials: tuple[Trial, ...]
    recommended: str
    settings: Settings

    @property
    def chosen(self) -> Trial:
        """The recommended trial."""
        return next(trial for trial in self.trials if trial.name == self.recommended)

    def recovery_seconds(self, trial: Trial) -> float | None:
        """Return the time of the recovery: its steps by the seconds of one; None where that was not measured."""
        settings = self.settings
        if trial.step_seconds is None:
            return None
        return settings.recovery_tokens / (settings.block_size * settings.batch_size) * trial.step_seconds

    def command(self, model: str, output: str = "converted", files: Sequence[str] = ("text.txt",)) -> str:
        """Return the command that makes the recommended plan.

        files: of text, all of which it is fitted on with as many tokens; here rows of the first half were.
        """
        plan = plan_as_data(self.chosen.plan)
        options = ["--mechanism", plan if isinstance(plan, str) else json.dumps(plan)]
        if self.chosen.calibrated:
            options += [part for file in files for part in ("--calibrate", file)]
            options += ["--calibration-tokens", str(self.settings.calibration_tokens)]
        return shlex.join(["hf-linattn", "convert", model, output, *options])

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        trials = (replace(trial, plan=plan_as_data(trial.plan)) for trial in self.trials)
        return asdict(replace(self, trials=tuple(trials)))


@torch.inference_mode(False)  # recovery is timed
def advise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    length: int,
    *,
    plans: Mapping[str, Plan] | None = None,
    settings: Settings | None = None,
    progress: bool | None = None,
) -> Advice:
    """Try candidate plans on a causal language model and recommend one; the model is the same in the end.

    Each plan is calibrated on the first half of the text and measured on the second: loss per token beside the
    original's, recall of a needle in prompts of `length` tokens, bytes of decoding state. Recommended is the smallest
    state among the plans that recall as much as the best one does, up to one prompt, and lose at most 0.05 nats per
    token; where none loses so little, the one of these that loses least. A plan that cannot recall as much any more is
    asked no further. Of those that do, speed beside the original's and the seconds of a training step of the recovery
    are measured, too. A plan that is refused, as one whose numbers are not finite, is left out with a warning.

    Args:
        texts: documents of the kind that the model is for. length: tokens of the inputs that it is for.
        plans: name -> plan; None: those of `candidate_plans`, behind those
            that keep a few heads exact, chosen by recall.

    Raises:
        PatchError: the model is patched.
        UnsupportedModelError: it is no causal language model, or its attention cannot be reached.
        OptionError: `length` beyond its positions. DataError: the text is too short.
        HfLinattnError: every plan is refused, the last one for this.
    """
    settings = settings or Settings()
    require_original(model)
    require_count("length", length)
    limit = position_limit(model)
    fits = limit is None or length + ROOM <= limit
    require("length", length, fits, f"at most {(limit or 0) - ROOM}: {limit} positions, of which {ROOM} are decoded")
    if limit is not None:  # rows of calibration and recovery
        settings = replace(settings, block_size=min(settings.block_size, limit))
    require("plans", plans, plans is None or bool(plans), "name -> plan of at least one candidate")
    material = read_material(model, tokenizer, texts, length, settings)
    recall = fmean(answered(model, material))
    if plans is None:
        attention = self_attention_modules(model)
        others = candidate_plans(len(attention), layers_sharing_keys(attention))
        plans = choose(model, material, progress) | others
    trials = try_plans(model, plans, material, recall, progress)
    least = least_recall(trials, recall, settings)
    with progress_bar(trials, desc="what they cost", unit="plan", progress=progress) as bar:
        trials = [known_costs(model, trial, material) if trial.recall >= least else trial for trial in bar]
    return Advice(
        length, float(material.original_losses.mean()), recall, tuple(trials),
        recommend(trials, recall, settings).name, settings,
    )  # fmt: skip


def require_original(model: PreTrainedModel) -> None:
    """Raise, as `advise` does, unless a model is a causal one that is not patched, and can have gradients."""
    require_weights(model)
    require_gradients("the model's weights", model.parameters())
    if is_patched(model):
        raise PatchError(f"{type(model).__name__} is patched already; give the original")
    if is_masked_language_model(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no causal language model, and has no recall that could be generated;"
            " convert it with a mechanism of docs/mechanisms.md and compare it with `hf-linattn eval`"
        )


def try_plans(
    model: PreTrainedModel, plans: Mapping[str, Plan], material: Material, recall: float, progress: bool | None
) -> list[Trial]:
    """Return a trial of each plan, those left out that the library refuses to run.

    recall: of the original.

    Raises:
        HfLinattnError: every plan is refused, the last one for this.
    """
    trials: list[Trial] = []
    with progress_bar(plans.items(), desc="what they keep", unit="plan", progress=progress) as bar:
        for number, (name, plan) in enumerate(bar, 1):
            bar.set_postfix_str(name)
            least = least_recall(trials, recall, material.settings)
            try:
                trials.append(run_trial(model, name, plan, material, least))
            except HfLinattnError as error:
                if number == len(plans) and not trials:
                    raise
                logger.warning("the plan %r is left out, as it cannot be measured: %s", name, error)
    return trials


def known_costs(model: PreTrainedModel, trial: Trial, material: Material) -> Trial:
    """Return a trial with its costs, or as it is where they cannot be measured: what it keeps is known."""
    try:
        return with_costs(model, trial, material)
    except HfLinattnError as error:
        logger.warning("the costs of the plan %r are left open, as they cannot be measured: %s", trial.name, error)
        return trial


def choose(model: PreTrainedModel, material: Material, progress: bool | None) -> dict[str, Plan]:
    """Return the plans that keep a few heads exact, by recall where the model can, else by their divergence.

    None where no heads can be chosen, as where `length` has no more tokens than their windows, or too few for a task.
    """
    window = IN_ALL_LAYERS["streaming"]
    try:
        plan = choose_plan(
            model, material.tokenizer, tasks=CHOSEN_BY, lengths=[min(material.length, LONGEST)], num_prompts=2,
            replace={window["mechanism"]: window["options"]}, seed=material.settings.seed, progress=progress,
            batches=[{"input_ids": row[None]} for row in material.calibration.to(model.device)],
        )  # fmt: skip
    except HfLinattnError as error:  # what lies within the window chooses no heads; the other plans can be tried
        logger.warning("no heads are chosen, and plans that keep some are not tried: %s", error)
        return {}
    return chosen_plans(plan)


def read_material(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, settings: Settings
) -> Material:
    """Return the windows that are fitted to and those that are scored; `DataError` where the text is too short."""
    fitted, scored = texts_in_halves(texts)
    rows, documents = {}, {}
    for name, half, size, count in (
        ("calibration_tokens", fitted, settings.block_size, -(-settings.calibration_tokens // settings.block_size)),
        ("windows", scored, length, settings.windows),
    ):
        try:
            found, own = (evenly(x, count) for x in windows_of_documents(tokenizer, half, size))
        except OptionError as error:
            raise DataError(
                f"texts: no document of one half has the {size} tokens of a row; give longer documents, or a smaller"
                " length"
            ) from error
        if len(found) < count:
            raise DataError(
                f"texts hold {len(found)} of the {count} windows of {size} tokens for {name} in one of their halves;"
                f" give more text, or a smaller {name}"
            )
        rows[name], documents[name] = found, own.tolist()
    prompts = make_prompts(
        settings.recall_task, tokenizer, length, count=settings.prompts, seed=settings.seed + 1,
        positions=position_limit(model),
    )  # fmt: skip
    losses = token_losses(model, rows["windows"]).losses.mean(1)
    return Material(
        tokenizer, rows["calibration_tokens"], rows["windows"], prompts, losses, state_size(model, length), length,
        settings, documents["windows"],
    )  # fmt: skip


def least_recall(trials: Sequence[Trial], original_recall: float, settings: Settings) -> float:
    """Return what a plan must recall: as much as the best, or as the original if that has less, but for one prompt."""
    best = min(original_recall, max((trial.recall for trial in trials), default=0.0))
    return best - 1 / settings.prompts - EPSILON


def recommend(trials: Sequence[Trial], original_recall: float, settings: Settings) -> Trial:
    """Return the trial with the smallest state among those that recall enough and lose little."""
    least = least_recall(trials, original_recall, settings)
    enough = [trial for trial in trials if trial.recall >= least]
    close = [trial for trial in enough if trial.loss_increase <= WITHIN]
    if close:
        return min(close, key=lambda trial: (trial.state_bytes, trial.loss))
    return min(enough, key=lambda trial: trial.loss)
