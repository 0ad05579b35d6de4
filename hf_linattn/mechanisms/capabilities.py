"""What a mechanism declares about itself: its modes, the inputs it takes, its cost, its exactness limit, its paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import MechanismConfig


@dataclass(frozen=True)
class ExactnessLimit:
    """How a mechanism relates to softmax attention, in words and in a form that can be checked.

    Attributes:
        text: the setting at which it equals softmax attention, or what it converges to.
        equal: for an input of this length, the options with which it equals softmax attention.
        converging: (option, (few, many), rate): its error falls as option^-rate.
        kernel: it is kernel attention: never softmax, but exactly what its `weights` say.
        length: the most tokens on which such options equal it; None: `window_size`, if that is what `equal` chooses.
    """

    text: str
    equal: Callable[[int], dict[str, Any]] | None = None
    converging: tuple[str, tuple[int, int], float] | None = None
    kernel: bool = False
    length: Callable[[Any], int] | None = None

    def window(self, config: Any) -> int | None:
        """Return the most tokens of inputs on which options equal softmax, as in a window; None where they do not."""
        if self.length is not None:
            return self.length(config)
        size = getattr(config, "window_size", None)
        if size is None or self.equal is None or self.equal(size) != {"window_size": size}:
            return None
        return int(size)


class Capabilities:
    """The declarations of a mechanism, as class attributes. An instance may override those that are no `ClassVar`.

    config_class: dataclass of its options. modes: what it can do, of {"causal", "bidirectional", "cross"}.
    constant_state: whether its decoding state has a size that does not grow with the context.
    subquadratic: whether its cost grows slower than N^2. prepares: whether `prepare` fits anything.
    continuous: whether nearby inputs give nearby outputs; not where rounding may change which keys are chosen.
    averages: whether outputs are weighted means of values (and of zero, with a sink), never beyond their range.
    growth: what 4,096 tokens cost, as a multiple of 2,048.
    position_limit: most tokens of a sequence, or None. any_length: see `forward.require_recordable`.
    static_steps: whether a step of one token never waits for the device and leaves the sizes of the `fixed_state`
    as they are, so that a static cache can hold it and one compiled graph serves all steps.
    takes_exact: whether `forward` takes the layer's own sliding window, soft cap and dropout as keywords.
    takes_half: whether it takes heads in half precision as they come; else they come in float32.
    takes_sink: whether it takes the layer's own learned sinks.
    reads_hidden: the options for which it reads the layer's input, as they are written; empty where it does not.
    reads_queries: whether an output depends on the queries of other tokens, so that none of these may be missing.
    splits: whether heads are independent but for parameters of each, so that tensor parallelism may share them out.
    backends: which of `POLICIES` in `ops/dispatch.py` can work through its causal form.
    limit: how it relates to softmax attention. citation: the paper it comes from.
    family: with which others `hf-linattn list` shows it.
    """

    config_class: ClassVar[type[MechanismConfig]] = MechanismConfig
    modes: ClassVar[frozenset[str]] = frozenset({"causal", "bidirectional"})
    constant_state: bool = True
    subquadratic: bool = True
    continuous: bool = True
    averages: bool = True
    prepares: bool = False
    growth: float = 2.0
    position_limit: int | None = None
    any_length: bool = False
    static_steps: bool = False
    takes_exact: ClassVar[bool] = False
    takes_half: bool = False
    takes_sink: bool = False
    reads_hidden: tuple[str, ...] = ()
    reads_queries: bool = False
    splits: ClassVar[bool] = False
    backends: ClassVar[tuple[str, ...]] = ("auto", "torch")
    limit: ExactnessLimit = ExactnessLimit("none stated")
    citation: ClassVar[str] = ""
    family: ClassVar[str] = "other"

    config: MechanismConfig

    def mechanisms_dropping_sinks(self) -> list[str]:
        """Return the names of the mechanisms in it that leave a layer's own sinks out."""
        return [] if self.takes_sink else [self.config.mechanism]
