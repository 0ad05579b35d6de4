"""One candidate: a model patched with its plan, calibrated, measured, and the same model as before in the end."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ..cache import state_bytes
from ..calibration import calibrate, what_is_fitted
from ..config import require_count, require_known, require_seed, require_texts
from ..evaluation.next_token import token_losses
from ..evaluation.paired import half_width
from ..evaluation.recall import RECALL_TASKS, RecallPrompt, answer_prompts
from ..evaluation.speed import SpeedRow, measure_speed, prefill_cache, random_input_ids
from ..inference import evaluation_mode, kept_flags
from ..patching import get_mechanisms, patch_model, unpatch_model
from ..pinning import same_configs
from ..plan import PatchConfig, Plan
from ..training.adapter_files import has_adapters
from ..training.adapters import add_adapters
from ..training.arguments import FinetuningArguments
from ..training.data import TrainingData
from ..training.finetuning import fine_tune
from ..training.losses.distillation import Teacher
from ..training.random_states import kept_random_states

logger = logging.getLogger(__name__)

STEPS = 2  # of the recovery that are timed, after one that is not
REPEATS, DECODED = 2, 16  # of the timings of a forward, tokens that are decoded; the prompts have warmed it up
EPSILON = 1e-9  # shares are sums of floats


@dataclass(frozen=True)
class Settings:
    """How much is measured, and what the recovery would be.

    Attributes:
        calibration_tokens: on which what is new in a plan is fitted, from the first half of the text.
        windows: of `length` tokens from the second half, on which losses are measured.
        prompts: of the recall task, at most `length` tokens each. recall_task: its name.
        recovery_tokens, block_size, batch_size, lora_rank: of the recovery whose time is estimated, in the model's
            dtype: bfloat16 is that of a recipe with `bf16: true`. Rows, those of the calibration too, are as long as
            the model has positions where it has fewer than `block_size`.
        seed: of the prompts and of what is drawn.
    """

    calibration_tokens: int = 8192
    windows: int = 4
    prompts: int = 10
    recall_task: str = "single_text"
    recovery_tokens: int = 10_000_000
    block_size: int = 512
    batch_size: int = 4
    lora_rank: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("recall_task", "seed"):
                require_count(name, value)
        require_known("recall task", self.recall_task, RECALL_TASKS)
        require_seed(self.seed)


@dataclass(frozen=True)
class Trial:
    """What one plan keeps of a model, and what it costs.

    Attributes:
        name, plan: which it is.
        loss: mean nats per token on the text that nothing was fitted on; loss_increase: over the original, with
            loss_error, half of the 95 % interval of the difference over texts, or over the windows of a single one.
        recall: share of the `prompts` that are answered right. These are fewer than were to be asked where the
            wrong ones rule the plan out.
        state_bytes, original_state_bytes: of one sequence after `length` tokens.
        calibrated: whether it has something that was fitted.
        speed: beside the original's, at `length`. step_seconds: of one training step of the recovery. Both are None of
            a plan that recalls too little, and the second where a step's loss is not finite.
        seconds: that this trial took.
    """

    name: str
    plan: Plan
    loss: float
    loss_increase: float
    loss_error: float
    recall: float
    prompts: int
    state_bytes: int
    original_state_bytes: int
    calibrated: bool = False
    speed: SpeedRow | None = None
    step_seconds: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Material:
    """What every trial is measured on.

    Attributes:
        calibration: rows [B, N] that are fitted to. held_out: windows [B, length] that are scored.
        prompts: of the recall task; nothing was chosen by them.
        original_losses: of the windows, by softmax [B]. original_state_bytes: its cache of one. length: in tokens.
        documents: the number of the text that each window is of; none: each is of its own.
    """

    tokenizer: PreTrainedTokenizerBase
    calibration: Tensor
    held_out: Tensor
    prompts: Sequence[RecallPrompt]
    original_losses: Tensor
    original_state_bytes: int
    length: int
    settings: Settings
    documents: Sequence[int] = ()


def run_trial(model: PreTrainedModel, name: str, plan: Plan, material: Material, least: float) -> Trial:
    """Patch a model, calibrate it, measure what it keeps, and take all of it back.

    least: the recall below which the plan is not recommended; it is asked no further once it cannot have that much.
    """
    start, settings = time.perf_counter(), material.settings
    with patched(model, plan):
        fitted = bool(what_is_fitted(get_mechanisms(model)))
        if fitted:
            rows = material.calibration.to(model.device)
            batches = [{"input_ids": batch} for batch in rows.split(settings.batch_size)]
            calibrate(model, batches, progress=False)
        losses = token_losses(model, material.held_out).losses.mean(1)
        found = answered(model, material, least)
        state = state_size(model, material.length)
    increase = losses - material.original_losses
    error = half_width(increase.tolist(), material.documents) if len(increase) > 1 else math.inf
    return Trial(
        name, plan, float(losses.mean()), float(increase.mean()), error, math.fsum(found) / len(found), len(found),
        state, material.original_state_bytes, fitted, seconds=time.perf_counter() - start,
    )  # fmt: skip


def with_costs(model: PreTrainedModel, trial: Trial, material: Material) -> Trial:
    """Return a trial with the speed of its plan and the time of a training step, for which it need not be fitted."""
    start = time.perf_counter()
    with patched(model, trial.plan):
        speed = measure_speed(model, [material.length], repeats=REPEATS, decode_tokens=DECODED, warmup=0)[0]
        step = step_seconds(model, material)
    seconds = trial.seconds + time.perf_counter() - start
    return dataclasses.replace(trial, speed=speed, step_seconds=step, seconds=seconds)


def answered(model: PreTrainedModel, material: Material, least: float = 0.0) -> list[float]:
    """Return what a model, patched or not, finds of each recall prompt, as long as their mean can be `least`."""
    found: list[float] = []
    allowed = (1 - least) * len(material.prompts) + EPSILON  # wrong answers
    for prompt in material.prompts:
        (answer,) = answer_prompts(model, material.tokenizer, [prompt], batch_size=1, progress=False)
        found.append(answer["found"])
        if len(found) - math.fsum(found) > allowed:
            break
    return found


def state_size(model: PreTrainedModel, length: int) -> int:
    """Return the bytes of the cache of one sequence after `length` tokens, as a model's attention now keeps it."""
    with evaluation_mode(model), torch.no_grad():
        return state_bytes(prefill_cache(model, random_input_ids(model, 1, length, seed=0)))


def step_seconds(model: PreTrainedModel, material: Material) -> float | None:
    """Return the seconds of one step of the recovery: adapters and mechanisms, taught by the same model's softmax.

    None where the first step already ends in a loss that is not finite, of a model that is not in memory whole, which
    a Trainer does not train, and of one that has adapters already, which would not outlive those of the recovery.
    """
    settings = material.settings
    away = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if away is not None:
        logger.warning("the seconds of a step are left open: %s is offloaded, and is not trained", away)
        return None
    if has_adapters(model):
        logger.warning("the seconds of a step are left open: the model has adapters, which must not be replaced")
        return None
    count = (STEPS + 1) * settings.batch_size
    rows = material.calibration.repeat(-(-count // len(material.calibration)), 1)[:count]
    columns = {"input_ids": list(rows.numpy()), "labels": list(rows.numpy())}
    data: Any = Dataset.from_dict(columns).with_format("torch")
    watch = StepTimes()
    with (
        tempfile.TemporaryDirectory() as folder, torch.enable_grad(), untouched(model),
        adapters(model, settings) as adapted,
    ):  # fmt: skip
        arguments = FinetuningArguments(
            output_dir=folder, per_device_train_batch_size=settings.batch_size, report_to="none", eval_strategy="no",
            save_strategy="no", load_best_model_at_end=False, disable_tqdm=True, seed=settings.seed,
            use_cpu=model.device.type == "cpu",
        )  # fmt: skip
        fine_tune(
            adapted, TrainingData(data, data.select([0])), arguments, Path(folder), learning_rate=1e-6,
            max_steps=STEPS + 1, teacher=Teacher(None, kl_weight=1.0), callbacks=[watch],
        )  # fmt: skip
    timed = watch.seconds[1:] or watch.seconds
    return statistics.median(timed) if timed else None


class StepTimes(TrainerCallback):
    """Notes the seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


@contextmanager
def patched(model: PreTrainedModel, plan: Plan | PatchConfig | None) -> Iterator[PreTrainedModel]:
    """Give a model the plan for a while; None leaves it as it is."""
    if plan is None:
        yield model
        return
    with same_configs(model):
        patch_model(model, plan)
        try:
            yield model
        finally:
            unpatch_model(model)


@contextmanager
def untouched(model: PreTrainedModel) -> Iterator[None]:
    """Give a model its device and modes back, and the process its random states: a Trainer changes all of these."""
    device = model.device
    with evaluation_mode(model), kept_random_states():
        try:
            yield
        finally:
            if model.device != device:  # not all that need not move could
                model.to(device)  # type: ignore[arg-type]


@contextmanager
def adapters(model: PreTrainedModel, settings: Settings) -> Iterator[nn.Module]:
    """Give a patched model LoRA adapters for a while; which parameters are trained comes back, and their gradients."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    adapted: Any = None
    with kept_flags(model):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            adapted = add_adapters(model, settings.lora_rank, seed=settings.seed)
            yield adapted
        finally:
            if adapted is not None:
                adapted.unload()
            for parameter, gradient in gradients:
                parameter.grad = gradient


def texts_in_halves(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts to fit to and those to measure on; of a single one its halves.

    Raises:
        DataError: `texts` is one string, or holds something else than texts.

    Examples:
        >>> texts_in_halves(["abcd"])
        (['ab'], ['cd'])
        >>> texts_in_halves(["a", "b", "c"])
        (['a'], ['b', 'c'])
    """
    texts = require_texts("texts", texts)
    if len(texts) == 1:
        middle = len(texts[0]) // 2
        return [texts[0][:middle]], [texts[0][middle:]]
    return list(texts[: len(texts) // 2]), list(texts[len(texts) // 2 :])
