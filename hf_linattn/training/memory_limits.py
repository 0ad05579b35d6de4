"""What is said where memory runs out: the stage, the size of the tensor, and the options that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from hf_linattn.errors import OptionError
from hf_linattn.memory_errors import is_out_of_memory, size_said
from hf_linattn.training.arguments import FULL, Arguments
from hf_linattn.training.same_run import BATCHES, step_rows

REPORT = "report"  # the stage that times long texts, and trains nothing


@contextmanager
def naming_memory(stage: str, arguments: Arguments, divisible: bool = True) -> Iterator[None]:
    """Turn what is raised where memory runs out into an `OptionError` that names the stage and what helps.

    Args:
        stage: that runs meanwhile. divisible: whether its steps may be made of smaller batches.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = what_continues(arguments, stage, divisible)
        raise OptionError(
            f"the stage {stage} runs out of memory, {size_said(error)}; go on from its last checkpoint, in this"
            f" output_dir, with {less}; or begin in another one with {what_helps(arguments)}"
        ) from error


def what_continues(arguments: Arguments, stage: str, divisible: bool) -> str:
    """Name the options that make a stage smaller and that a run may be continued with."""
    training, trains = arguments.training, stage != REPORT
    smaller = smaller_batch(arguments) if trains and divisible else None
    some = {
        f"speed_lengths below {max(arguments.recipe.speed_lengths)}": not trains,
        "gradient_checkpointing true": trains and not _checkpoints(arguments),
        "per_device_train_batch_size {} and gradient_accumulation_steps {}".format(*smaller or (0, 0)):
            smaller is not None,
        f"per_device_eval_batch_size {training.per_device_eval_batch_size // 2}":
            training.per_device_eval_batch_size > 1,
        "chunk_feed_forward, as 512": arguments.model.chunk_feed_forward is None,
    }  # fmt: skip
    return ", or ".join(name for name, helps in some.items() if helps) or "nothing else running beside it"


def smaller_batch(arguments: Arguments) -> tuple[int, int] | None:
    """Return a smaller batch and its accumulation that make steps of as many rows, of longer ones too; or None."""
    training, options = arguments.training, asdict(arguments.data) | asdict(arguments.distillation)
    batch, accumulated = training.per_device_train_batch_size, training.gradient_accumulation_steps
    made = {n: (n, accumulated * batch // n) for n in range(batch, 0, -1) if batch % n == 0}
    devices = training.train_batch_size // batch
    rows = {n: step_rows(options | dict(zip(BATCHES, (*made[n], n * devices), strict=True))) for n in made}
    return next((made[n] for n in made if n < batch and rows[n] == rows[batch]), None)


def what_helps(arguments: Arguments, disk: bool = False) -> str:
    """Name the options that make a run smaller and are not set yet.

    disk: those that leave less on the disk.
    """
    model, data, recipe, training, distillation = arguments
    some: dict[str, bool] = {
        "lora_rank, as 8": arguments.distils and distillation.lora_rank is None,
        "control 'none'": recipe.control == FULL,
        "another output_dir": disk,
        "save_total_limit 1": disk and training.save_total_limit != 1,
        "dtype 'bfloat16'": not disk and model.dtype == "float32",
        "gradient_checkpointing": not disk and not _checkpoints(arguments),
        f"a per_device_train_batch_size below {training.per_device_train_batch_size}": not disk
        and training.per_device_train_batch_size > 1,
        f"a block_size below {data.block_size}": not disk,
    }
    return ", or ".join(name for name, helps in some.items() if helps)


def _checkpoints(arguments: Arguments) -> bool:
    """Return whether activations are made again in the backward pass."""
    names = "gradient_checkpointing", "activation_checkpointing"  # newer transformers has the second name
    return any(getattr(arguments.training, name, False) for name in names)
