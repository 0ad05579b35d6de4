"""transformers' TrainingArguments with the defaults of the recipes."""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import str_to_bool
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_linattn.config import require
from hf_linattn.dtypes import is_fast

logger = logging.getLogger(__name__)

LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # in which accelerate launch hands on what its own options and files say
MIXED = ("no", "bf16", "fp16")


def bfloat16_pays() -> bool:
    """Return whether this machine trains in bfloat16 as fast as in float32; where it does not, the log says so."""
    if torch.accelerator.is_available() or is_fast(torch.bfloat16, torch.device("cpu")):
        return True
    logger.warning("bf16: float32 is taken, as this processor has no instructions for products of bfloat16")
    return False


@functools.cache
def report_idle(gpus: int) -> None:
    """Say in the log, once, that a process trains on one of several GPUs."""
    logger.warning(
        "%d GPUs are visible, and this process trains on one; for all of them run"
        " accelerate launch --config_file recipes/accelerate/ddp.yaml", gpus,
    )  # fmt: skip


@dataclass
class FinetuningArguments(TrainingArguments):
    """transformers' TrainingArguments with defaults for recovering a model in a few hundred steps.

    Ratios below 1 (`warmup_steps`, `logging_steps`, `eval_steps`, `save_steps`) are shares of the run, so that short
    search runs go through the whole schedule.
    """

    output_dir: str | None = field(
        default=None,
        metadata={"help": "Receives the model, the report and the plots; absent, empty or to be continued."},
    )
    learning_rate: float | None = field(  # type: ignore[assignment]  # None: searched
        default=None, metadata={"help": "One learning rate for control and recovered, instead of a search."}
    )
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule after the warm-up."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Steps of linear warm-up, or a share of the run."})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's decoupled weight decay."})
    logging_steps: float = field(default=0.1, metadata={"help": "Steps between logs, or a share of the run."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide losses that are nan or infinite."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to measure the validation loss."})
    eval_steps: float = field(default=0.125, metadata={"help": "Steps between evaluations, or a share of the run."})
    save_strategy: str = field(default="steps", metadata={"help": "When to save; `no` cannot resume within a stage."})
    save_steps: float = field(
        default=0.125, metadata={"help": "Steps between checkpoints; eval_steps, where the best weights are kept."}
    )
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints kept beside the best one."})
    load_best_model_at_end: bool = field(
        default=True, metadata={"help": "Keep the weights with the lowest validation loss, not the last ones."}
    )
    metric_for_best_model: str | None = field(
        default="loss", metadata={"help": "What the best checkpoint is best in."}
    )
    greater_is_better: bool | None = field(default=False, metadata={"help": "No: of a loss, less is better."})
    mechanism_rate: float = field(
        default=1.0, metadata={"help": "The mechanisms' learning rate (maps, gates, decays), times that of the rest."}
    )
    attention_rate: float = field(
        default=1.0,
        metadata={"help": "That of the projections around attention, or of the adapters on these, times the rest's."},
    )
    head_rate: float = field(
        default=1.0,
        metadata={
            "help": "That of what answers, times the rest's: a classifier's head and pooler, or an untied output"
            " projection."
        },
    )
    mechanism_weight_decay: float | None = field(
        default=None, metadata={"help": "Weight decay of the mechanisms; default: weight_decay."}
    )
    attention_weight_decay: float | None = field(
        default=None, metadata={"help": "Weight decay of the projections around attention; default: weight_decay."}
    )
    head_weight_decay: float | None = field(
        default=None, metadata={"help": "Weight decay of the head and the pooler; default: weight_decay."}
    )
    ddp_timeout: int = field(
        default=86_400,
        metadata={"help": "Seconds that processes wait for the one that chooses heads, fits or measures for all."},
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "End a run after that many evaluations without a lower validation loss."}
    )

    def __post_init__(self) -> None:
        require("output_dir", self.output_dir, bool(self.output_dir), "a folder for the results")
        self.output_dir = str(
            Path(self.output_dir or "").expanduser().resolve()
        )  # checkpoints refer to each other by it
        for name in ("logging_steps", "eval_steps", "save_steps"):  # which transformers makes integers
            require(name, getattr(self, name), getattr(self, name) != math.inf, "finite")
        if self.save_strategy == "no":
            self.load_best_model_at_end = False
        launched = os.environ.get(LAUNCHED, "no")
        require(LAUNCHED, launched, launched in MIXED, f"one of {', '.join(MIXED)}, given to accelerate launch")
        # fields of transformers' dataclass, which trains so, too, but does not say it
        self.bf16 = self.bf16 or (launched == "bf16" and not self.fp16)  # type: ignore[has-type]
        self.fp16 = self.fp16 or (launched == "fp16" and not self.bf16)  # type: ignore[has-type]
        half = self.bf16 or self.bf16_full_eval  # type: ignore[has-type]
        if half and not torch.accelerator.is_available():
            self.use_cpu = True  # which has bfloat16, but transformers wants it said
            both = self.fp16 or self.fp16_full_eval  # which transformers refuses
            if not both and not bfloat16_pays():
                self.bf16, self.bf16_full_eval = False, False
                os.environ.pop(LAUNCHED, None)  # transformers looks there itself
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        by_deepspeed = str_to_bool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "no"))  # which has its own group
        if several and not by_deepspeed and not torch.accelerator.is_available():
            self.use_cpu = True  # torchrun does not say it, nor accelerate; without, each process trains all alone
        on_cpus = self.use_cpu or str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "no"))
        if on_cpus and several and not torch.distributed.is_initialized():
            # transformers honours ddp_timeout on other devices alone, and keeps the process group that is there
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        super().__post_init__()
        if (visible := super().n_gpu) > 1:
            report_idle(visible)
        # with it, every model loaded from now on would be an empty shard, which nothing but a Trainer can use
        unset_hf_deepspeed_config()

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: one, as the copies that torch.nn.DataParallel makes know of no teacher."""
        return min(super().n_gpu, 1)
