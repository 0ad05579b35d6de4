"""The comparison: every plan patched into one model, measured, and taken out again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration import calibrate, what_is_fitted
from ..calibration_rows import TOKENS, calibration_batches
from ..config import require, require_count
from ..evaluation import (
    MemoryRow,
    SpeedRow,
    is_masked_language_model,
    measure_memory,
    measure_speed,
    perplexity,
    position_limit,
)
from ..evaluation.paired import mean_score, paired_difference
from ..evaluation.suite import SuiteOptions, language
from ..patching import get_mechanisms, patch_model, unpatch_model
from ..plan import Plan, plan_as_data
from .deadline import TimeIsUpError, check_minutes, time_limit

Say = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonOptions:
    """How much is measured.

    Attributes:
        lengths: tokens at which speed and memory are measured.
        max_length: tokens of the windows that perplexity is measured on; None: the longest of `lengths`, as far as the
            model has positions. num_windows: how many, the first of each text in turn; a masked model reads all.
        calibration: documents that are fitted to; none: nothing is fitted. calibration_tokens: of these, at most.
        batch_size, repeats, decode_tokens: of the timings, see `measure_speed`.
        limit_minutes: of each plan; None: no limit. seed: of the random tokens of the timings.
    """

    lengths: tuple[int, ...]
    max_length: int | None = None
    num_windows: int = 4
    calibration: tuple[str, ...] = ()
    calibration_tokens: int = TOKENS
    batch_size: int = 1
    repeats: int = 3
    decode_tokens: int = 16
    limit_minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require("lengths", self.lengths, bool(self.lengths), "numbers of tokens, at least one")
        for name in ("num_windows", "batch_size", "repeats"):
            require_count(name, getattr(self, name))
        require_count("max_length", self.max_length, least=2, optional=True)
        require_count("decode_tokens", self.decode_tokens, least=0)
        check_minutes(self.limit_minutes)


@dataclass(frozen=True)
class Quality:
    """Perplexity, how many times softmax's it is, and the 95 % interval of that over texts, or over the windows of a
    single one; None for one window."""

    perplexity: float
    ratio: float = 1.0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Entry:
    """What one plan came to.

    Attributes:
        name, plan: which it is.
        untrained, calibrated: perplexity as patched, and after `calibrate`; None: not measured, or nothing to fit.
        speed, memory: one row for each length that was reached.
        seconds: that it took. stopped: whether it ended before all was measured.
    """

    name: str
    plan: Plan
    untrained: Quality | None = None
    calibrated: Quality | None = None
    speed: tuple[SpeedRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    seconds: float = 0.0
    stopped: bool = False


@dataclass(frozen=True)
class Material:
    """What all plans are measured on, and what softmax makes of it: nats per token of each window, and perplexity.

    Attributes:
        documents: the number of the text that each window is of.
    """

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]
    window: int
    losses: tuple[float, ...] = ()
    documents: tuple[int, ...] = ()

    @property
    def quality(self) -> Quality:
        """The perplexity of softmax."""
        return Quality(mean_score(self.losses, logarithmic=True).value)


@dataclass(frozen=True)
class Comparison:
    """All entries, beside the original.

    Attributes:
        decodes: whether the model has a decoding state; where it has none, memory is the peak of a forward.
    """

    options: ComparisonOptions
    original: Quality
    decodes: bool
    entries: list[Entry] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return all of it as JSON; of the texts that were fitted to only how many there were."""
        options = asdict(self.options) | {"calibration": len(self.options.calibration)}
        return {
            "options": options, "original": asdict(self.original), "decodes": self.decodes,
            "entries": [asdict(replace(entry, plan=plan_as_data(entry.plan))) for entry in self.entries],
        }  # fmt: skip


def read_original(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], plans: Mapping[str, Plan],
    options: ComparisonOptions,
) -> Material:  # fmt: skip
    """Check that every plan fits the model, and measure its own perplexity.

    Raises:
        OptionError: a length or window beyond the positions of the model, or those of a plan.
        DataError: the text is too short.
        PatchError: the model is patched. UnsupportedModelError: it is no causal or masked language model.
        Others of `patch_model`, for a plan that does not fit.
    """
    is_masked_language_model(model)
    window = options.max_length or max(options.lengths)
    check_positions(model, window, options, "the model")
    for name, plan in plans.items():
        patch_model(model, plan)
        try:
            check_positions(model, window, options, f"the model with {name}")
        finally:
            unpatch_model(model)
    if options.calibration:
        calibration_batches(model, tokenizer, options.calibration, tokens=options.calibration_tokens)
    material = Material(tokenizer, tuple(texts), window)
    return Material(tokenizer, tuple(texts), window, *losses_of(model, material, options))


def check_positions(model: PreTrainedModel, window: int, options: ComparisonOptions, whose: str) -> None:
    """Raise `OptionError` for a length or window beyond the positions of a model, or those of its mechanisms."""
    limit, longest, shortest = position_limit(model), max(options.lengths), min(options.lengths)
    require("lengths", shortest, shortest >= 1, "at least 1")
    require("lengths", longest, window >= 2, "2 or more where max_length is absent: windows of text are as long then")
    require("lengths", longest, limit is None or longest <= limit, f"1 to {limit}, the positions of {whose}")
    require("max_length", window, limit is None or window <= limit, f"2 to {limit}, the positions of {whose}")


def compare(
    load: Callable[[], PreTrainedModel], plans: Mapping[str, Plan], material: Material, options: ComparisonOptions,
    say: Say = lambda _: None,
) -> Iterator[Entry]:  # fmt: skip
    """Yield what each plan comes to, as soon as it is measured; of one that an error ends what was measured by then.

    Args:
        load: returns the original, each time as new: after a plan whose time was up a new one is taken.
        say: gets what is being measured, in words.
    """
    model = None
    for number, (name, plan) in enumerate(plans.items(), 1):
        if model is None:
            gc.collect()  # the one before; modules may refer to each other in a ring
            model = load()
        trial = _Trial(name, plan, say, f"{number} of {len(plans)}, {name}")
        try:
            with time_limit(options.limit_minutes):
                patch_model(model, plan)
                trial.run(model, material, options)
                unpatch_model(model)
        except TimeIsUpError:
            say(f"{name}: its {options.limit_minutes:g} minutes are up")
            trial.found["stopped"], model = True, None  # a new one is read when the error, which holds it, is gone
        except BaseException:  # as where memory runs out at the longest length, or of Ctrl-C
            if "untrained" in trial.found:
                trial.found["stopped"] = True
                yield trial.entry()
            raise
        yield trial.entry()


class _Trial:
    """One plan while it is measured: what was found stays where its time is up."""

    def __init__(self, name: str, plan: Plan, say: Say, place: str):
        self.name, self.plan = name, plan
        self.say = lambda what: say(f"{place}: {what}")
        self.found: dict[str, Any] = {"speed": (), "memory": ()}
        self.start = time.perf_counter()

    def run(self, model: PreTrainedModel, material: Material, options: ComparisonOptions) -> None:
        """Measure a patched model: quality, then speed and memory from the shortest length on, then what is fitted."""
        self.say("perplexity")
        self.found["untrained"] = quality_of(model, material, options)
        for length in sorted(set(options.lengths)):
            self.say(f"speed and memory at {length:,} tokens")
            self.found["memory"] += tuple(measure_memory(model, [length], seed=options.seed))
            self.found["speed"] += tuple(measure_speed(
                model, [length], batch_size=options.batch_size, repeats=options.repeats,
                decode_tokens=options.decode_tokens, seed=options.seed,
            ))  # fmt: skip
        if options.calibration and what_is_fitted(get_mechanisms(model)):
            self.say("calibrate")
            batches = calibration_batches(
                model, material.tokenizer, options.calibration, tokens=options.calibration_tokens
            )
            calibrate(model, batches, progress=False)
            self.say("perplexity after calibrate")
            self.found["calibrated"] = quality_of(model, material, options)

    def entry(self) -> Entry:
        """Return what was found."""
        return Entry(self.name, self.plan, seconds=time.perf_counter() - self.start, **self.found)


def quality_of(model: PreTrainedModel, material: Material, options: ComparisonOptions) -> Quality:
    """Return the perplexity of a patched model beside the original's on the same windows."""
    losses, documents = losses_of(model, material, options)
    pair = paired_difference(
        "converted", "original", losses, material.losses, higher_is_better=False, groups=documents
    )
    low, high = (None if bound is None else exp(bound) for bound in (pair.low, pair.high))
    return Quality(mean_score(losses, logarithmic=True).value, exp(pair.value), low, high)


def losses_of(
    model: PreTrainedModel, material: Material, options: ComparisonOptions
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the mean loss of each window, in nats per token, and its text; of a masked model, of all of the text."""
    if is_masked_language_model(model):
        all_of_it = perplexity(model, material.tokenizer, material.texts, max_length=material.window, progress=False)
        return (all_of_it["loss"],), (0,)
    wanted = SuiteOptions(
        texts=material.texts, length=material.window, num_windows=options.num_windows, progress=False
    )
    found = language(model, material.tokenizer, wanted)[0]
    return found.values, found.groups
