"""Options: how much is trained and what is measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_linattn.config import require

NONE, LORA, FULL, WINDOW = "none", "lora", "full", "window"  # values of `control`


@dataclass
class RecipeArguments:
    """How much is trained and what is measured."""

    max_train_tokens: int = field(
        default=2_000_000,
        metadata={"help": "Tokens of each full run, over all its stages and epochs (not those of the search)."},
    )
    learning_rates: list[float] | None = field(
        default=None,
        metadata={
            "help": "Grid searched for control and recovered alike; default: 3e-4 1e-3 3e-3. One value: no search."
        },
    )
    control_learning_rates: list[float] | None = field(
        default=None, metadata={"help": "A grid of its own for the control."}
    )
    control: str | None = field(
        default=None,
        metadata={
            "help": "What of the original is trained on as many tokens, for comparison: `lora` adapters, `full`: all"
            " weights, `none`, or `window`: as by default, and windows with as many bytes of decoding state as the"
            " mechanism too. Default: as the converted model, so `lora` with lora_rank."
        },
    )
    control_dir: str | None = field(
        default=None,
        metadata={
            "help": "Output folder of a run on the same tokens, whose control serves here too; empty: none. It must"
            " have trained what `control` says."
        },
    )
    lr_search_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of each search run; default: 0.15 of max_train_tokens."}
    )
    kl_weight: float = field(
        default=0.0, metadata={"help": "Of the KL divergence from the original's predictions; control: none."}
    )
    hidden_weight: float = field(
        default=0.0, metadata={"help": "Of the relative squared error of all layers' hidden states; control: none."}
    )
    cosine_weight: float | None = field(
        default=None,
        metadata={"help": "Of 1 - cosine to the original's embeddings; default: 1, of embedding models alone."},
    )
    similarity_weight: float | None = field(
        default=None,
        metadata={
            "help": "Of the squared difference between the cosines of a batch's texts and the original's; default: 1,"
            " of embedding models alone."
        },
    )
    calibration_tokens: int = field(
        default=0,
        metadata={"help": "Training tokens on which the mechanisms are fitted, layer by layer, before training."},
    )
    speed_lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048, 4096],
        metadata={"help": "Lengths to time, where the position table allows them."},
    )
    fidelity_windows: int = field(
        default=0,
        metadata={
            "help": "Test windows on which generated text and accuracy by position are compared, with the original"
            " beside the model; causal only."
        },
    )
    long_windows: int = field(
        default=0,
        metadata={
            "help": "Test windows of 8 times block_size, as far as there are positions, on which loss by position and"
            " by distance of recurrence are compared; causal only."
        },
    )
    position_windows: int = field(
        default=0,
        metadata={
            "help": "Held-out windows of 4 times the rows of a stage, as far as there are positions, on which loss by"
            " position is compared before and after it; one that makes a bucket worse is refused. Causal only."
        },
    )
    text_samples: int = field(
        default=3, metadata={"help": "Test texts that the report shows with what each model makes of them; 0: none."}
    )
    plan_steps: int = field(
        default=3,
        metadata={
            "help": "Real steps of each training that are timed, on a copy, for the plan that is printed before a run;"
            " 0: no plan."
        },
    )
    dry_run: bool = field(default=False, metadata={"help": "Print the plan alone, and write nothing."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Start anew in an output_dir that holds another run's results."}
    )

    def __post_init__(self) -> None:
        self.searches_a_share = not self.lr_search_tokens  # messages speak of what was given
        self.lr_search_tokens = self.lr_search_tokens or int(0.15 * self.max_train_tokens)
        kinds = (NONE, LORA, FULL, WINDOW)
        require("control", self.control, self.control in (None, *kinds), f"one of {', '.join(kinds)}, or absent")
        self.control_dir = self.control_dir or None  # a flag that takes back what a file says
        shared = self.control_dir is None or self.control != NONE
        require("control_dir", self.control_dir, shared, f"absent where control is {NONE!r}")
        for name in ("learning_rates", "control_learning_rates"):
            rates = getattr(self, name)
            require(name, rates, rates is None or all(rate > 0 for rate in rates), "positive numbers")
        for name in ("cosine_weight", "similarity_weight"):
            weight = getattr(self, name)
            require(name, weight, weight is None or weight >= 0, "at least 0, or absent")
        for name in (
            "kl_weight", "hidden_weight", "calibration_tokens", "fidelity_windows", "long_windows", "position_windows",
            "text_samples",
        ):  # fmt: skip
            require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        timed = self.plan_steps >= 2 or (self.plan_steps == 0 and not self.dry_run)
        require("plan_steps", self.plan_steps, timed, "at least 2, or 0 without dry_run")
        lengths = self.speed_lengths
        require("speed_lengths", lengths, bool(lengths) and min(lengths) > 0, "positive numbers of tokens")
