"""Options: how the original model teaches the converted one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hf_linattn.config import require

OF_SINGLE_LAYERS = ("transfer_output_weight", "transfer_weights_weight", "transfer_projected")
OF_ADAPTERS = ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_mechanisms", "save_adapter")
# how the original's predictions or states count beside the text, where they do
OF_TEACHERS = ("ce_weight", "temperature", "top_k", "keep_logits", "fading_teacher")

BESIDE, ALONE = "beside", "alone"  # values of `save_adapter`


@dataclass
class DistillationArguments:
    """How the original teaches the converted model; all of it comes out of `max_train_tokens`."""

    transfer_tokens: int = field(
        default=0, metadata={"help": "Training tokens of attention transfer: layers learn what softmax does there."}
    )
    transfer_learning_rate: float = field(default=1e-2, metadata={"help": "Its peak learning rate."})
    transfer_output_weight: float = field(default=1.0, metadata={"help": "Of the relative error of layers' outputs."})
    transfer_weights_weight: float = field(
        default=1.0, metadata={"help": "Of the divergence from softmax's attention weights, where there are any."}
    )
    transfer_projected: bool = field(
        default=False, metadata={"help": "Compare outputs behind the layers' output projections."}
    )
    transfer_block_layers: int | None = field(
        default=None,
        metadata={"help": "Compare what comes out of blocks of that many layers; absent: each layer's attention."},
    )
    lora_rank: int | None = field(
        default=None,
        metadata={"help": "Train adapters of this rank and the mechanisms alone; absent: all weights, beside a copy."},
    )
    lora_alpha: float | None = field(default=None, metadata={"help": "Adapters count alpha / rank; default: 2 rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Of the adapters' inputs."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names as PEFT takes them; default: all projections around the attention."}
    )
    lora_mechanisms: bool = field(
        default=True, metadata={"help": "Train the mechanisms' parameters beside the adapters."}
    )
    save_adapter: str | None = field(
        default=None,
        metadata={
            "help": "Write what was trained, plan, mechanisms and LoRA weights, to `adapter` in output_dir, for"
            " `load_adapter`: `beside` the merged model, or `alone`, which removes that when it is measured."
        },
    )
    ce_weight: float = field(default=1.0, metadata={"help": "Of the text's own cross-entropy."})
    temperature: float = field(default=1.0, metadata={"help": "Divides both models' logits in the KL divergence."})
    top_k: int | None = field(
        default=None, metadata={"help": "Compare that many of the original's likeliest tokens, and all others as one."}
    )
    keep_logits: bool = field(
        default=False,
        metadata={
            "help": "Keep the original's top_k likeliest tokens and their probabilities on disk, 8 bytes for each, so"
            " that it runs once for rows seen more than once, in epochs or in a search."
        },
    )
    fading_teacher: bool = field(
        default=False,
        metadata={
            "help": "kl_weight and hidden_weight fall linearly to zero over the training, and again over that of"
            " longer rows."
        },
    )
    long_tokens: int = field(
        default=0, metadata={"help": "Training tokens of a last stage on longer rows, without a search."}
    )
    long_block_size: int | None = field(default=None, metadata={"help": "Tokens per row of that stage."})
    long_learning_rate: float | None = field(
        default=None, metadata={"help": "Its peak learning rate; default: that of the stage before."}
    )
    recall_share: float = field(
        default=0.0,
        metadata={
            "help": "Share of these longer rows that are generated recall, the tasks of `hf-linattn eval` in turn;"
            " tests of the same kinds then measure what was trained."
        },
    )
    window_dropout: float = field(
        default=0.0,
        metadata={
            "help": "Probability, falling to 0 over a training, that a hybrid layer's window is shut for a step."
        },
    )

    def __post_init__(self) -> None:
        for name in (
            "transfer_tokens", "transfer_output_weight", "transfer_weights_weight", "ce_weight", "long_tokens",
        ):  # fmt: skip
            require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("transfer_learning_rate", "temperature"):
            require(name, getattr(self, name), getattr(self, name) > 0, "above 0")
        rate = self.long_learning_rate
        fits = rate is None or (rate > 0 and self.long_block_size is not None)
        require("long_learning_rate", rate, fits, "above 0, and absent where long_block_size is")
        for name in ("lora_rank", "top_k", "transfer_block_layers"):
            given = getattr(self, name)
            require(name, given, given is None or given >= 1, "an integer >= 1, or absent")
        for name in ("lora_dropout", "window_dropout", "recall_share"):
            require(name, getattr(self, name), 0 <= getattr(self, name) < 1, "at least 0 and below 1")
        some = bool(self.transfer_output_weight or self.transfer_weights_weight)
        require("transfer_output_weight", self.transfer_output_weight, some, "above 0 if transfer_weights_weight is 0")
        given, both = self.long_block_size, (self.long_block_size is None) == (not self.long_tokens)
        require("long_block_size", given, both, "given with long_tokens, and only so")
        longer = self.long_block_size is not None
        require("recall_share", self.recall_share, longer or not self.recall_share, "0 without long_block_size")
        if self.transfer_block_layers is not None:
            for f in (f for f in dataclasses.fields(self) if f.name in OF_SINGLE_LAYERS):
                given = getattr(self, f.name)
                require(f.name, given, given == f.default, "absent where transfer_block_layers is set")
        require("keep_logits", self.keep_logits, self.top_k is not None or not self.keep_logits, "False without top_k")
        kinds = (None, BESIDE, ALONE)
        expected = f"{BESIDE!r} or {ALONE!r}, or absent"
        require("save_adapter", self.save_adapter, self.save_adapter in kinds, expected)
        require("lora_alpha", self.lora_alpha, self.lora_alpha is None or self.lora_alpha > 0, "above 0, or absent")
        for f in (f for f in dataclasses.fields(self) if f.name in OF_ADAPTERS):
            given = getattr(self, f.name)
            require(f.name, given, given == f.default or self.lora_rank is not None, "absent where lora_rank is")
