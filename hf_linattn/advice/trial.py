"""One candidate: a model patched with its plan, calibrated, measured, and the same model as before in the end."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ..calibration import calibrate, what_is_fitted
from ..evaluation.memory import state_bytes_by_length
from ..evaluation.next_token import token_losses
from ..evaluation.recall import recall
from ..evaluation.speed import SpeedRow, measure_speed
from ..inference import evaluation_mode
from ..patching import get_mechanisms, patch_model, unpatch_model
from ..plan import Plan
from ..training.adapters import add_adapters
from ..training.arguments import FinetuningArguments
from ..training.data import TrainingData
from ..training.finetuning import fine_tune
from ..training.losses.distillation import Teacher
from ..training.random_states import kept_random_states

STEPS = 3  # of the recovery that are timed, after one that is not
REPEATS, DECODED = 3, 16  # of the timings of a forward, tokens that are decoded


@dataclass(frozen=True)
class Settings:
    """How much is measured, and what the recovery would be.

    Attributes:
        calibration_tokens: on which what is new in a plan is fitted, from the first half of the text.
        windows: of `length` tokens from the second half, on which losses are measured.
        prompts: of the recall task, at most `length` tokens each. recall_task: its name.
        recovery_tokens, block_size, batch_size, lora_rank: of the recovery whose time is estimated; rows, those of the
            calibration too, are as long as the model has positions where it has fewer than `block_size`.
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


@dataclass(frozen=True)
class Trial:
    """What one plan keeps of a model, and what it costs.

    Attributes:
        name, plan: which it is.
        loss: mean nats per token on the text that nothing was fitted on; loss_increase: over the original, with
            loss_error, half of the 95 % interval of the difference over windows.
        recall: share of the prompts that are answered right.
        state_bytes, original_state_bytes: of one sequence after `length` tokens.
        speed: beside the original's, at `length`.
        step_seconds: of one training step of the recovery.
        seconds: that this trial took. calibrated: whether it has something that was fitted.
    """

    name: str
    plan: Plan
    loss: float
    loss_increase: float
    loss_error: float
    recall: float
    state_bytes: int
    original_state_bytes: int
    speed: SpeedRow
    step_seconds: float
    seconds: float
    calibrated: bool = False


@dataclass(frozen=True)
class Material:
    """What every trial is measured on.

    Attributes:
        calibration: rows [B, N] that are fitted to. held_out: windows [B, length] that are scored.
        original_losses: of these windows, by softmax [B]. length: in tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    calibration: Tensor
    held_out: Tensor
    original_losses: Tensor
    length: int
    settings: Settings


def run_trial(model: PreTrainedModel, name: str, plan: Plan, material: Material) -> Trial:
    """Patch a model, calibrate and measure it, and take all of it back."""
    start, settings = time.perf_counter(), material.settings
    with patched(model, plan):
        fitted = bool(what_is_fitted(get_mechanisms(model)))
        if fitted:
            rows = material.calibration.to(model.device)
            batches = [{"input_ids": batch} for batch in rows.split(settings.batch_size)]
            calibrate(model, batches, progress=False)
        losses = token_losses(model, material.held_out).losses.mean(1)
        found = share_right(model, material)
        state = state_bytes_by_length(model, [material.length])[0]
        speed = measure_speed(model, [material.length], repeats=REPEATS, decode_tokens=DECODED)[0]
        step = step_seconds(model, material)
    increase = losses - material.original_losses
    error = 1.96 * float(increase.std()) / math.sqrt(len(increase)) if len(increase) > 1 else math.inf
    return Trial(
        name, plan, float(losses.mean()), float(increase.mean()), error, found, state.patched, state.original, speed,
        step, time.perf_counter() - start, fitted,
    )  # fmt: skip


def share_right(model: PreTrainedModel, material: Material) -> float:
    """Return the share of the recall prompts that a model, patched or not, answers right; none was chosen by."""
    settings = material.settings
    rows = recall(
        model, material.tokenizer, [settings.recall_task], [material.length], num_samples=settings.prompts,
        seed=settings.seed + 1, batch_size=1, progress=False,
    )  # fmt: skip
    return next(row["found"] for row in rows if row["depth"] is None)


def step_seconds(model: PreTrainedModel, material: Material) -> float:
    """Return the seconds of one step of the recovery: adapters and mechanisms, taught by the same model's softmax."""
    settings = material.settings
    count = (STEPS + 1) * settings.batch_size
    rows = material.calibration.repeat(-(-count // len(material.calibration)), 1)[:count]
    columns = {"input_ids": list(rows.numpy()), "labels": list(rows.numpy())}
    data: Any = Dataset.from_dict(columns).with_format("torch")
    watch = StepTimes()
    with tempfile.TemporaryDirectory() as folder, untouched(model), adapters(model, settings) as adapted:
        arguments = FinetuningArguments(
            output_dir=folder, per_device_train_batch_size=settings.batch_size, report_to="none", eval_strategy="no",
            save_strategy="no", load_best_model_at_end=False, disable_tqdm=True, seed=settings.seed,
            use_cpu=model.device.type == "cpu",
        )  # fmt: skip
        fine_tune(
            adapted, TrainingData(data, data.select([0])), arguments, Path(folder), learning_rate=1e-6,
            max_steps=STEPS + 1, teacher=Teacher(None, kl_weight=1.0), callbacks=[watch],
        )  # fmt: skip
    return statistics.median(watch.seconds[1:])


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
def patched(model: PreTrainedModel, plan: Plan | None) -> Iterator[PreTrainedModel]:
    """Give a model the plan for a while; None leaves it as it is."""
    if plan is None:
        yield model
        return
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
    """Give a patched model LoRA adapters for a while; which parameters are trained comes back with the end."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    adapted = add_adapters(model, settings.lora_rank, seed=settings.seed)
    try:
        yield adapted
    finally:
        adapted.unload()  # type: ignore[operator]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained.get(name, True))


def texts_in_halves(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts to fit to and those to measure on; of a single one its halves.

    >>> texts_in_halves(["abcd"])
    (['ab'], ['cd'])
    >>> texts_in_halves(["a", "b", "c"])
    (['a'], ['b', 'c'])
    """
    if len(texts) == 1:
        middle = len(texts[0]) // 2
        return [texts[0][:middle]], [texts[0][middle:]]
    return list(texts[: len(texts) // 2]), list(texts[len(texts) // 2 :])
