"""Pretrain a small BERT, GPT-2 or Llama on the documentation of Python's standard library, offline and on a CPU.

    python recipes/pretrain.py --architecture gpt2 --output_dir recipes/pretrained/gpt2

Other text is given by ``--train_file`` and its like, as to the other recipes. The checkpoints under
``recipes/pretrained`` were made by this file; each holds its ``training_log.json``. The three share one byte-level BPE
tokenizer, trained on the training split. The log compares the test perplexity with that of the same model with its
queries set to zero, when every query attends to all its keys alike: a model on which linear attention can be judged
must lose a lot by that.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
from datasets import DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_linattn import patch_model, unpatch_model
from hf_linattn.evaluation import perplexity
from hf_linattn.reading import exit_with_one_line
from hf_linattn.training.arguments.help import help_if_asked
from hf_linattn.training.data import PackedMaskingCollator, load_text_splits, tokenize_and_pack

logger = logging.getLogger("pretrain")

BLOCK_SIZE = 512
VOCAB_SIZE = 2048
MLM_PROBABILITY = 0.2  # of BERT's tokens
POSITION_SCALE = 2 * math.sqrt(2)  # position tables start with twice the root mean square of the token embeddings
END, PAD, CLS, SEP, MASK = SPECIAL_TOKENS = ["<|endoftext|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
CAUSAL_TOKENS = {"bos_token": END, "eos_token": END, "pad_token": PAD}
GROUPS = {"model": ["architecture"], "data": ["*_file"], "output": ["output_dir"], "training": ["*"]}  # of --help
MASKED_TOKENS = {"cls_token": CLS, "sep_token": SEP, "mask_token": MASK, "pad_token": PAD}


@dataclass(frozen=True)
class Architecture:
    """What sets one architecture apart: its classes, sizes and special tokens, how it starts and how it is trained.

    Attributes:
        query_module, key_module: the ends of the names of the modules that compute the queries and the keys.
        query_of, key_of: the parts of their parameters that do.
        position_table: the name of the learned position table, which starts as sinusoids; "" where there is none.
        starts_local: queries start equal to keys, twice as large as usual, so that attention starts out preferring
            near positions.
        stages: block size and share of the training tokens of each stage.
        train_tokens, learning_rate: the defaults of these options.
    """

    config_class: type
    model_class: type
    sizes: dict[str, Any]
    special_tokens: dict[str, str]
    query_module: str
    key_module: str
    query_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    key_of: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    position_table: str = ""
    starts_local: bool = False
    stages: tuple[tuple[int, float], ...] = ((BLOCK_SIZE, 1.0),)
    train_tokens: int = 8_000_000
    learning_rate: float = 3e-3


ARCHITECTURES = {
    "bert": Architecture(
        config_class=BertConfig,
        model_class=BertForMaskedLM,
        sizes={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "max_position_embeddings": BLOCK_SIZE,
            "initializer_range": 0.05,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        special_tokens=MASKED_TOKENS,
        query_module="attention.self.query",
        key_module="attention.self.key",
        position_table="bert.embeddings.position_embeddings.weight",
        starts_local=True,
        stages=((64, 0.7), (BLOCK_SIZE, 0.3)),  # short first, as BERT was trained itself (Devlin et al. 2019, A.2)
        train_tokens=12_000_000,
        learning_rate=2e-3,
    ),
    "gpt2": Architecture(
        config_class=GPT2Config,
        model_class=GPT2LMHeadModel,
        sizes={
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
            "n_inner": 512,
            "n_positions": BLOCK_SIZE,
            "activation_function": "gelu_pytorch_tanh",  # gelu_new in one operation
            "initializer_range": 0.05,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        special_tokens=CAUSAL_TOKENS,
        query_module="attn.c_attn",
        key_module="attn.c_attn",
        position_table="transformer.wpe.weight",
        starts_local=True,
        query_of=lambda parameter: parameter.chunk(3, dim=-1)[0],
        key_of=lambda parameter: parameter.chunk(3, dim=-1)[1],
    ),
    "llama": Architecture(
        config_class=LlamaConfig,
        model_class=LlamaForCausalLM,
        sizes={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 352,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "attention_dropout": 0.0,
        },
        special_tokens=CAUSAL_TOKENS,
        query_module="self_attn.q_proj",
        key_module="self_attn.k_proj",
    ),
}


@dataclass
class PretrainArguments:
    """Options of the recipe; the defaults made the bundled checkpoints."""

    architecture: str = field(metadata={"help": "Which model to train.", "choices": sorted(ARCHITECTURES)})
    output_dir: str = field(metadata={"help": "Where the checkpoint goes; replaced as a whole, at the end."})
    train_file: str | None = field(
        default=None, metadata={"help": "Training text; default: the documentation of Python's standard library."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "Default: cut from the training text."})
    test_file: str | None = field(default=None, metadata={"help": "Default: cut from the training text."})
    train_tokens: int | None = field(default=None, metadata={"help": "Over all epochs; default: the architecture's."})
    batch_tokens: int = field(default=2048, metadata={"help": "Tokens per step."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak; default: the architecture's. Cosine to a tenth."}
    )
    warmup_steps: int = field(default=200, metadata={"help": "Steps of linear warm-up."})
    weight_decay: float = field(default=0.1, metadata={"help": "AdamW's decoupled weight decay."})
    evaluations: int = field(default=16, metadata={"help": "How often each stage measures the validation loss."})
    bf16: bool = field(default=True, metadata={"help": "Autocast to bfloat16; the weights stay float32."})
    threads: int = field(default=1, metadata={"help": "Threads that torch may use."})
    seed: int = field(default=0, metadata={"help": "Of the weights, the order of the rows and the masks."})

    def __post_init__(self) -> None:
        architecture = ARCHITECTURES[self.architecture]
        self.train_tokens = self.train_tokens or architecture.train_tokens
        self.learning_rate = self.learning_rate or architecture.learning_rate


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer that the three architectures share."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer, special_tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    """Give the shared tokenizer one architecture's special tokens; masked models get ``[CLS] text [SEP]``."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    if "cls_token" in special_tokens:
        ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=BLOCK_SIZE, **special_tokens)


def build_model(architecture: Architecture, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return an untrained model of the architecture.

    From random positions, models this small spend most of their training on finding the neighbouring token, and a
    masked one stays at the frequencies of the tokens. So position tables start as sinusoids, and attention local.
    """
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    config = architecture.config_class(vocab_size=len(tokenizer), **architecture.sizes, **ids)
    model = architecture.model_class(config)
    if architecture.position_table:
        table = model.get_parameter(architecture.position_table)
        table.data.copy_(sinusoids(*table.shape) * POSITION_SCALE * config.initializer_range)
    if architecture.starts_local:
        for path, module in model.named_modules():
            if path.endswith(architecture.query_module):
                keys = model.get_submodule(path.removesuffix(architecture.query_module) + architecture.key_module)
                key = architecture.key_of(keys.weight.data).mul_(2)
                architecture.query_of(module.weight.data).copy_(key)
    return model


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Return the position table [positions, width] of Vaswani et al. (2017), of root mean square 1 / sqrt(2)."""
    angles = torch.arange(positions)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


@contextmanager
def queries_zeroed(model: PreTrainedModel, architecture: Architecture) -> Iterator[None]:
    """Set the query weights and biases to zero for a while: attention becomes a plain average."""
    queries = [
        architecture.query_of(parameter.data)
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0].endswith(architecture.query_module)
    ]
    kept = [query.clone() for query in queries]
    try:
        for query in queries:
            query.zero_()
        yield
    finally:
        for query, values in zip(queries, kept, strict=True):
            query.copy_(values)


def training_arguments(options: PretrainArguments, folder: Path, block_size: int, share: float) -> TrainingArguments:
    """Translate the recipe's options for one stage into those of transformers.Trainer."""
    steps = int(share * options.train_tokens) // options.batch_tokens
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=options.batch_tokens // block_size,
        per_device_eval_batch_size=options.batch_tokens // block_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=min(options.warmup_steps, steps // 2),
        weight_decay=options.weight_decay,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        use_cpu=not torch.accelerator.is_available(),
        bf16=options.bf16,
        logging_steps=max(1, steps // 50),
        eval_strategy="steps",
        eval_steps=max(1, steps // options.evaluations),
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        seed=options.seed,
    )


def train(options: PretrainArguments, folder: Path) -> dict[str, Any]:
    """Train, measure and write the checkpoint into ``folder``; return the training log."""
    architecture = ARCHITECTURES[options.architecture]
    corpus = load_text_splits(
        train_file=options.train_file, validation_file=options.validation_file, test_file=options.test_file
    )
    tokenizer = wrap_tokenizer(train_tokenizer(corpus["train"]["text"]), architecture.special_tokens)
    model = build_model(architecture, tokenizer)
    start = time.perf_counter()
    history = [
        entry
        for stage in architecture.stages
        for entry in train_stage(model, tokenizer, corpus, stage[0], training_arguments(options, folder, *stage))
    ]
    seconds = time.perf_counter() - start
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model = architecture.model_class.from_pretrained(folder)  # as saved: the Trainer's still autocasts
    test_perplexity = measure(model, tokenizer, corpus["test"]["text"])
    with queries_zeroed(model, architecture):
        queries_zeroed_perplexity = measure(model, tokenizer, corpus["test"]["text"])
    return {
        "arguments": {name: value for name, value in asdict(options).items() if name != "output_dir"},
        "stages": [{"block_size": block_size, "share": share} for block_size, share in architecture.stages],
        "versions": versions(),
        "parameters": model.num_parameters(),
        "characters": {split: sum(map(len, documents["text"])) for split, documents in corpus.items()},
        "seconds": round(seconds),
        "test_perplexity": test_perplexity,
        "test_perplexity_queries_zeroed": queries_zeroed_perplexity,
        "queries_zeroed_ratio": queries_zeroed_perplexity / test_perplexity,
        "history": history,
    }


def train_stage(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    corpus: DatasetDict,
    block_size: int,
    arguments: TrainingArguments,
) -> list[dict[str, float]]:
    """Train on rows of one block size; return the losses on the way."""
    masked = tokenizer.mask_token is not None
    rows = {split: tokenize_and_pack(corpus[split], tokenizer, block_size) for split in ("train", "validation")}
    with packing_honoured(model, masked):
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows["train"],
            eval_dataset=rows["validation"],
            data_collator=PackedMaskingCollator(tokenizer, MLM_PROBABILITY) if masked else default_data_collator,
        )
        trainer.train()
    return [
        {"block_size": block_size} | {name: entry[name] for name in ("step", "loss", "eval_loss") if name in entry}
        for entry in trainer.state.log_history
        if {"loss", "eval_loss"} & set(entry)
    ]


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


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Return the perplexity on whole documents, as the reports measure it."""
    return perplexity(model, tokenizer, texts, max_length=BLOCK_SIZE)["perplexity"]


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    libraries = (torch, transformers, datasets, tokenizers)
    return {"python": platform.python_version(), **{library.__name__: library.__version__ for library in libraries}}


def main() -> None:
    """Run the recipe; the output folder appears whole or not at all."""
    help_if_asked(sys.argv[1:], "python recipes/pretrain.py", [PretrainArguments], GROUPS)
    (options,) = HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()  # exits with 2 itself
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    set_seed(options.seed)
    target = Path(options.output_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pretrain-") as scratch:
        folder = Path(scratch) / "new"
        log = train(options, folder)
        (folder / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
        if target.exists():
            os.replace(target, Path(scratch) / "old")
        os.replace(folder, target)
    logger.info(json.dumps({name: value for name, value in log.items() if name != "history"}, indent=1))


if __name__ == "__main__":
    with exit_with_one_line():
        main()
