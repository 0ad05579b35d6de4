"""Pretrain a small BERT, GPT-2 or Llama on the documentation of Python's standard library, offline and on a CPU.

    python recipes/pretrain.py --architecture gpt2 --output_dir recipes/pretrained/gpt2
    python recipes/pretrain.py --architecture llama-recall --checkpoint_dir runs/llama-recall \\
      --threads 2 --output_dir recipes/pretrained/llama-recall

Other text is given by `--train_file` and its like, as to the other recipes. The checkpoints under
`recipes/pretrained` were made by this file; each holds its `training_log.json`. All share one byte-level BPE
tokenizer, trained on the training split. The log compares the test perplexity with that of the same model with its
queries set to zero, when every query attends to all its keys alike: a model on which linear attention can be judged
must lose a lot by that.

`gpt2-recall` and `llama-recall` look back over 1,024 tokens. A quarter of their tokens is generated recall
(`hf_linattn/training/pretraining/rows.py`), the text is grown by the documentation of installed packages, rows
become longer in the course of the training, and its learning rate falls to zero in the end. Their log has the share
of needles and pairs they find, and the loss by position, on rows and text that were held out. With
`--checkpoint_dir` the training goes on where it was stopped, with the tokenizer and the text that it began with.

The training is one process on one device. The checkpoint is put in its place before it is measured, its log later.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_linattn import patch_model, unpatch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.command_errors import exit_with_one_line
from hf_linattn.config import require, require_count
from hf_linattn.errors import DataError, OptionError
from hf_linattn.evaluation import perplexity
from hf_linattn.training.arguments.help import help_if_asked
from hf_linattn.training.arguments.trainer import bfloat16_pays
from hf_linattn.training.checkpoints import last_complete_checkpoint
from hf_linattn.training.data import load_text_splits, tokenize_and_pack
from hf_linattn.training.masking import MaskedAnew, PackedMaskingCollator
from hf_linattn.training.pretraining.architectures import (
    ARCHITECTURES,
    build_model,
    wrap_tokenizer,
)
from hf_linattn.training.pretraining.cooldown import CooledTrainer
from hf_linattn.training.pretraining.items import Material
from hf_linattn.training.pretraining.kept import alone_in, same_run_or_new, text_with_documentation, tokenizer_of
from hf_linattn.training.pretraining.measures import measure_recall, queries_zeroed
from hf_linattn.training.pretraining.mixture import Mixture, text_tokens
from hf_linattn.training.same_run import rows_digest

logger = logging.getLogger("pretrain")

MLM_PROBABILITY = 0.2  # of BERT's tokens
VALIDATION_BATCHES = 16  # of the mixture
# may differ in a run that goes on
FREE = ("output_dir", "checkpoint_dir", "save_steps", "compile", "threads", "recall_samples")
GROUPS = {
    "model": ["architecture"],
    "data": ["*_file"],
    "output": ["output_dir", "checkpoint_dir", "save_steps"],
    "training": ["*"],
}  # of --help


@dataclass
class PretrainArguments:
    """Options of the recipe; the defaults made the bundled checkpoints."""

    architecture: str = field(metadata={"help": "Which model to train.", "choices": sorted(ARCHITECTURES)})
    output_dir: str = field(metadata={"help": "Where the checkpoint goes; replaced as a whole, once trained."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training text; default: the documentation of Python's standard library."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Default: cut from the training text."})
    test_file: str | None = field(default=None, metadata={"help": "Default: cut from the training text."})
    train_tokens: int | None = field(default=None, metadata={"help": "Over all epochs; default: the architecture's."})
    batch_tokens: int | None = field(default=None, metadata={"help": "Tokens per step; default: the architecture's."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak; default: the architecture's. Cosine to a tenth."}
    )
    warmup_steps: int | None = field(
        default=None, metadata={"help": "Steps of linear warm-up; default: the architecture's."}
    )
    cooldown: float | None = field(
        default=None,
        metadata={"help": "Share of the steps, behind the cosine, that end at zero; default: the architecture's."},
    )
    weight_decay: float = field(default=0.1, metadata={"help": "AdamW's decoupled weight decay."})
    recall_samples: int = field(
        default=100, metadata={"help": "Prompts and rows of each kind on which a model with recall is measured."}
    )
    checkpoint_dir: str | None = field(
        default=None, metadata={"help": "Keep checkpoints here, or go on from them; architectures with recall only."}
    )
    save_steps: int = field(default=200, metadata={"help": "Steps between these checkpoints."})
    evaluations: int = field(default=16, metadata={"help": "How often each stage measures the validation loss."})
    bf16: bool = field(
        default=True, metadata={"help": "Autocast to bfloat16 where that is faster; the weights stay float32."}
    )
    compile: bool = field(
        default=False,
        metadata={"help": "Compile the model: minutes at first, then steps take 10 to 15 % less time on a CPU."},
    )
    threads: int = field(default=1, metadata={"help": "Threads that torch may use."})
    seed: int = field(default=0, metadata={"help": "Of the weights, the order of the rows and the masks."})

    def __post_init__(self) -> None:
        architecture = ARCHITECTURES[self.architecture]
        self.train_tokens = self.train_tokens or architecture.train_tokens
        self.batch_tokens = self.batch_tokens or architecture.batch_tokens
        self.learning_rate = self.learning_rate or architecture.learning_rate
        if self.warmup_steps is None:
            self.warmup_steps = architecture.warmup_steps
        if self.cooldown is None:
            self.cooldown = architecture.cooldown
        require("cooldown", self.cooldown, 0 <= self.cooldown < 1, "a share of the steps, from 0 to less than 1")
        for name in ("recall_samples", "evaluations", "save_steps", "threads"):
            require_count(name, getattr(self, name))
        lengths = sorted({stage.length for stage in architecture.stages})
        whole = self.batch_tokens > 0 and all(self.batch_tokens % length == 0 for length in lengths)
        require("batch_tokens", self.batch_tokens, whole, f"a multiple of the lengths of the rows, {lengths}")
        least = 1 if architecture.looks_far_back else min(stage.share for stage in architecture.stages)
        enough = int(least * self.train_tokens) >= self.batch_tokens
        require("train_tokens", self.train_tokens, enough, f"enough for a step of {self.batch_tokens} in every stage")
        for name in ("checkpoint_dir", "train_file", "validation_file", "test_file"):
            given = getattr(self, name)
            if given and Path(given).resolve().is_relative_to(Path(self.output_dir).resolve()):
                raise OptionError(
                    f"{name}={given!r} lies in output_dir={self.output_dir!r}, which is replaced as a whole; give"
                    " output_dir another folder"
                )
        for name in ("checkpoint_dir", "cooldown"):
            if getattr(self, name) and not architecture.looks_far_back:
                known = ", ".join(name for name, known in ARCHITECTURES.items() if known.looks_far_back)
                raise OptionError(
                    f"{name}={getattr(self, name)!r}: {self.architecture} is trained in one go; leave it out, or"
                    f" take an architecture that looks far back: {known}"
                )


def training_arguments(options: PretrainArguments, folder: Path, steps: int, **others: Any) -> TrainingArguments:
    """Translate the recipe's options for that number of steps into those of transformers.Trainer."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=min(options.warmup_steps, steps // 2),
        weight_decay=options.weight_decay,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        use_cpu=not torch.accelerator.is_available(),
        bf16=options.bf16 and bfloat16_pays(),
        torch_compile=options.compile,
        logging_steps=max(1, steps // 50),
        eval_strategy="steps",
        eval_steps=max(1, steps // options.evaluations),
        report_to="none",
        remove_unused_columns=False,
        seed=options.seed,
        **others,
    )
    arguments._n_gpu = 1  # with more the Trainer would draw a batch for each, and train on that many times the tokens
    return arguments


def train(options: PretrainArguments, folder: Path) -> dict[str, Any]:
    """Train, write the checkpoint into `folder`, put that in its place and measure it; return the training log."""
    architecture = ARCHITECTURES[options.architecture]
    corpus = load_text_splits(
        train_file=options.train_file, validation_file=options.validation_file, test_file=options.test_file
    )
    documented = bool(architecture.packages) and options.train_file is None  # text that changes with what is installed
    kept = options.checkpoint_dir if documented else None
    tokenizer = wrap_tokenizer(tokenizer_of(corpus["train"]["text"], kept), architecture)
    if documented:
        corpus["train"] = text_with_documentation(corpus["train"], architecture.packages, kept)
    model = build_model(architecture, tokenizer)
    start = time.perf_counter()
    train_model = train_on_mixture if architecture.looks_far_back else train_on_text
    history = train_model(model, tokenizer, corpus, options, folder)
    seconds = time.perf_counter() - start
    save(model, folder, architecture.saved_dtype)
    tokenizer.save_pretrained(folder)
    target = put_in_place(folder, Path(options.output_dir))  # where it stays, whatever becomes of the measuring
    model = architecture.model_class.from_pretrained(target, dtype=torch.float32)  # as saved: the Trainer's autocasts
    length = architecture.stages[-1].length
    test_perplexity = measure(model, tokenizer, corpus["test"]["text"], length)
    with queries_zeroed(model, architecture):
        queries_zeroed_perplexity = measure(model, tokenizer, corpus["test"]["text"], length)
    return {
        "arguments": {name: value for name, value in asdict(options).items() if not name.endswith("_dir")},
        "stages": [stage._asdict() for stage in architecture.stages],
        "versions": versions(),
        "parameters": model.num_parameters(),
        "characters": {split: sum(map(len, documents["text"])) for split, documents in corpus.items()},
        "seconds": round(seconds),
        "test_perplexity": test_perplexity,
        "test_perplexity_queries_zeroed": queries_zeroed_perplexity,
        "queries_zeroed_ratio": queries_zeroed_perplexity / test_perplexity,
        "recall": recall_of(model, tokenizer, corpus, options),
        "history": history,
    }


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights in a type, with a config that has them loaded as float32."""
    model.to(dtype).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = torch.float32
    config.save_pretrained(folder)


def put_in_place(folder: Path, target: Path) -> Path:
    """Move a folder to `target`, and what is there already to `old` beside the folder; return `target`."""
    if target.exists():
        os.replace(target, folder.with_name("old"))
    return folder.rename(target)


def train_on_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: DatasetDict, options: PretrainArguments,
    folder: Path,
) -> list[dict[str, float]]:  # fmt: skip
    """Train in stages, on rows of packed documents; return the losses on the way."""
    masked = tokenizer.mask_token is not None
    history: list[dict[str, float]] = []
    for block_size, share, *_ in ARCHITECTURES[options.architecture].stages:
        rows = {split: tokenize_and_pack(corpus[split], tokenizer, block_size) for split in ("train", "validation")}
        count = options.batch_tokens // block_size
        arguments = training_arguments(
            options,
            folder,
            int(share * options.train_tokens) // options.batch_tokens,
            per_device_train_batch_size=count,
            per_device_eval_batch_size=count,
            save_strategy="no",
        )
        masking = PackedMaskingCollator(tokenizer, MLM_PROBABILITY) if masked else None
        with packing_honoured(model, masked):
            trainer = Trainer(
                model=model,
                args=arguments,
                train_dataset=rows["train"],
                eval_dataset=rows["validation"],
                data_collator=masking or default_data_collator,
                callbacks=[MaskedAnew(masking)] if masking else [],
            )
            trainer.train()
        history += [{"block_size": block_size} | entry for entry in losses(trainer)]
    return history


def train_on_mixture(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    corpus: DatasetDict,
    options: PretrainArguments,
    folder: Path,
) -> list[dict[str, float]]:
    """Train on text and generated recall, from the last checkpoint on if there is one; return the losses."""
    architecture = ARCHITECTURES[options.architecture]
    steps, longest = options.train_tokens // options.batch_tokens, architecture.stages[-1]._replace(share=1.0)
    materials = {split: Material(tokenizer, text_tokens(texts, tokenizer)) for split, texts in corpus.items()}
    for split, material in materials.items():  # the test's, too, before hours of training
        if len(material.text) <= longest.length:
            raise DataError(
                f"the text of the {split} split has {len(material.text):,} tokens, no more than the {longest.length:,}"
                f" of a row; give a {split}_file with more text"
            )
    rows = {
        split: Mixture(materials[split], split, stages, count, options.batch_tokens, options.seed)
        for split, stages, count in (
            ("train", architecture.stages, steps),
            ("validation", (longest,), VALIDATION_BATCHES),
        )
    }
    checkpoints = Path(options.checkpoint_dir) if options.checkpoint_dir else folder
    arguments = training_arguments(
        options,
        checkpoints,
        steps,
        per_device_train_batch_size=1,  # a batch is an item
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",
        save_strategy="steps" if options.checkpoint_dir else "no",
        save_steps=options.save_steps,
        save_total_limit=2,
    )
    if options.checkpoint_dir:
        chosen = {name: value for name, value in asdict(options).items() if name not in FREE}
        same_run_or_new(checkpoints, chosen | {"train_digest": rows_digest(corpus["train"])})
    use_cache, model.config.use_cache = model.config.use_cache, False
    trainer = CooledTrainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=lambda batches: batches[0],
        cooldown=options.cooldown,
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(checkpoints))
    model.config.use_cache = use_cache
    return losses(trainer)


def losses(trainer: Trainer) -> list[dict[str, float]]:
    """Return the losses of a training, by step."""
    return [
        {name: entry[name] for name in ("step", "loss", "eval_loss") if name in entry}
        for entry in trainer.state.log_history
        if {"loss", "eval_loss"} & set(entry)
    ]


def recall_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, corpus: DatasetDict, options: PretrainArguments
) -> dict[str, Any] | None:
    """Measure what a model trained on recall finds in held-out rows and text."""
    architecture = ARCHITECTURES[options.architecture]
    if not architecture.looks_far_back:
        return None
    material = Material(tokenizer, text_tokens(corpus["test"], tokenizer))
    length = architecture.stages[-1].length
    return measure_recall(model.eval(), material, length, options.recall_samples)


@contextmanager
def packing_honoured(model: PreTrainedModel, masked: bool) -> Iterator[None]:
    """Keep packed documents apart while training: causal models do without a cache, masked models when patched."""
    use_cache = model.config.use_cache
    model.config.use_cache = False
    if masked:
        patch_model(model, "softmax")
    try:
        yield
    finally:
        if masked:
            unpatch_model(model)
        model.config.use_cache = use_cache


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> float:
    """Return the perplexity on whole documents, as the reports measure it."""
    return perplexity(model, tokenizer, texts, max_length=length)["perplexity"]


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    libraries = (torch, transformers, datasets, tokenizers)
    return {"python": platform.python_version(), **{library.__name__: library.__version__ for library in libraries}}


def main() -> None:
    """Run the recipe; the checkpoint appears whole or not at all, and what it is worth once that is measured."""
    help_if_asked(sys.argv[1:], "python recipes/pretrain.py", [PretrainArguments], GROUPS)
    (options,) = HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()  # exits with 2 itself
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # as torchrun and accelerate launch say
    if processes > 1:
        raise OptionError(f"WORLD_SIZE={processes}: the recipe is one process; run it as python recipes/pretrain.py")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    set_seed(options.seed)
    target = Path(options.output_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(options.checkpoint_dir), tempfile.TemporaryDirectory(dir=target.parent, prefix=".pre-") as scratch:
        log = train(options, Path(scratch) / "new")
    write_json(target / "training_log.json", log)
    logger.info(json.dumps({name: value for name, value in log.items() if name != "history"}, indent=1))


if __name__ == "__main__":
    with exit_with_one_line():
        main()
