"""by_head: the heads of one layer shared out among mechanisms; those left out keep softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..config import require
from ..errors import OptionError
from ..plan import KEPT, PlanEntry, heads_plan, parse_indices, places_as_data, read_entries
from ..registry import MECHANISMS
from .capabilities import ExactnessLimit
from .composite import CompositeConfig, CompositeMechanism
from .forward import fitting, fitting_hidden
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs
from .registration import register_mechanism


@dataclass
class ByHeadConfig(CompositeConfig):
    """Options of `by_head`."""

    holds: ClassVar[str] = "plan"

    plan: dict[str, Any] | list[dict[str, Any]] | None = field(
        default=None,
        metadata={
            "help": "mechanism -> key/value heads, as 3, `0-5`, `0-2,7`, [6, 7], or -> {heads: ..., option: ...};"
            " others keep softmax; None: all to linear. Or a list of {mechanism: ..., heads: ..., options: ...}, in"
            " which a mechanism may stand more than once"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        plan = {"linear": None} if self.plan is None else self.plan
        valid = isinstance(plan, Mapping | list | tuple) and len(plan) > 0
        require("plan", plan, valid, "a dict of mechanisms and heads, such as {'linear': '0-5', 'softmax': [6, 7]}")
        self.plan = heads_plan([self._complete(entry) for entry in read_entries(plan, ("heads",))])

    @classmethod
    def complete_saved(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """As the base, for a plan that is a list, too."""
        options = super().complete_saved(options)
        if isinstance(options.get(cls.holds), list):
            saved = [
                (entry, MECHANISMS.get(entry.mechanism).config_class.complete_saved(entry.options))
                for entry in read_entries(options[cls.holds], ("heads",))
            ]
            options[cls.holds] = heads_plan([entry._replace(options=complete) for entry, complete in saved])
        return options

    def _complete(self, entry: PlanEntry) -> PlanEntry:
        options = self.complete_options(entry.mechanism, entry.options)
        return PlanEntry(entry.mechanism, options, {"heads": places_as_data(entry.places.get("heads"))})

    def entries(self) -> dict[str, PlanEntry]:
        """Return member -> its entry: the name of its mechanism, with a number from the second of its entries on.

        The last is for the heads that are left out.
        """
        named: dict[str, PlanEntry] = {}
        for entry in [*read_entries(self.plan, ("heads",)), self._complete(PlanEntry(KEPT, {}, {}))]:
            names = chain([entry.mechanism], (f"{entry.mechanism}_{number}" for number in count(2)))
            named[next(name for name in names if name not in named)] = entry
        return named

    def assign(self, layer: AttentionLayer) -> dict[str, list[int]]:
        """Return member -> its key/value heads of the layer; `OptionError` for one it lacks or named twice.

        Heads that are left out are with those that the plan itself gives softmax without any option.
        """
        owners: dict[int, str] = {}
        *given, (rest, plain) = self.entries().items()
        place = f"layer {layer.index} has the key/value heads"
        for name, entry in given:
            for head in parse_indices(entry.places.get("heads"), layer.num_key_value_heads, "head", place):
                if head in owners:
                    raise OptionError(
                        f"the plan gives key/value head {head} to both {owners[head]!r} and {name!r}; name it once"
                    )
                owners[head] = name
        alike = (name for name, entry in given if (entry.mechanism, entry.options) == (KEPT, plain.options))
        kept = next(alike, rest)
        heads: dict[str, list[int]] = {}
        for head in range(layer.num_key_value_heads):
            heads.setdefault(owners.get(head, kept), []).append(head)
        return heads


@register_mechanism("by_head")
class ByHeadMechanism(CompositeMechanism):
    """o^h = the output of the mechanism that the plan gives head h to, from the queries, keys and values of its heads.

    `plan={"performer": "0-5", "softmax": [6, 7]}`, or with options `{"performer": {"heads": "0-5", "num_features":
    128}}`. Heads are key/value heads: where several query heads share one, they go with it. In a model without grouped
    queries these are the heads themselves. What no mechanism is given keeps softmax, with the layer's own sliding
    window, soft cap and dropout; its decoding state is all of its keys and values, in the model's dtype, with room for
    256 tokens more, so that a token copies none of them. Query heads that share keys read these once for all of them.

    So a few heads that find things far away can stay exact and the others get cheap, as in DuoAttention (Xiao et al.
    2024), which is `{"streaming": ..., "softmax": retrieval heads}`. Each mechanism is made for a layer of its own
    heads alone: what differs by head, as decay rates do, is spread over these. With softmax heads cost and state grow
    as softmax's do, by the share of these heads.

    Plans over a model name heads too: `patch_model(model, {"performer": {"layers": "0-5", "heads": "0-2"}})` gives
    these layers this mechanism. A list of `{"mechanism": ..., "heads": ..., "options": {...}}` may give a mechanism to
    several groups of heads, each with options of its own.

    Deviation from DuoAttention: which heads are which is given, not trained.
    """

    config_class = ByHeadConfig
    takes_exact = True
    limit = ExactnessLimit("softmax attention where all heads keep it", equal=lambda length: {"plan": {KEPT: None}})
    citation = "Xiao et al. 2024, DuoAttention: Retrieval and Streaming Heads, arXiv 2410.10819"
    family = "composite"

    config: ByHeadConfig

    def __init__(self, config: ByHeadConfig, layer: AttentionLayer):
        super().__init__(config, layer)
        heads, groups = config.assign(layer), layer.num_heads // layer.num_key_value_heads
        entries = config.entries()
        configs, layers = {}, {}
        for name, own in heads.items():
            configs[name] = config.member_config(entries[name].mechanism, entries[name].options)
            layers[name] = replace(layer, num_heads=len(own) * groups, num_key_value_heads=len(own))
        self.add_members(configs, layers)
        self._runs = {name: _runs(heads[name]) for name in self.members}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        state: Any = None,
        *,
        keep_state: bool = True,
        sink: Tensor | None = None,
        hidden_states: Tensor | None = None,
        **exact: Any,
    ) -> tuple[Tensor, Any]:
        """As the base, which each member does for itself; `exact` as for softmax, whose heads keep the given dtype."""
        key_padding_mask, sequence_ids = fitting(self.layer, query, key, value, key_padding_mask, sequence_ids, state)
        self.record_call()
        shared = self.heads_of_members(query, key, value)
        call = self.call_options(keep_state, sink, fitting_hidden(self, query, key, hidden_states))
        outputs, after = self.ask(shared, key_padding_mask, sequence_ids, state, call, **exact)
        if len(outputs) == 1:
            return outputs[0], after
        # in the order [B, N, H, Dv], in which models go on
        return self._put_back([x.transpose(1, 2) for x in outputs], dim=2).transpose(1, 2), after

    def weights(self, query: Tensor, key: Tensor, allowed: Tensor, call: CallOptions = PLAIN) -> Tensor:
        return self._put_back(self.weights_of_members(self.heads_of_members(query, key), allowed, call))

    def weights_given(
        self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, call: CallOptions = PLAIN
    ) -> Tensor:
        return self._put_back(self.weights_of_members(self.heads_of_members(query, key, value), allowed, call))

    @property
    def has_scores(self) -> bool:
        return all(member.has_scores for member in self.parts())

    def scores(self, pairs: Pairs) -> Tensor:
        """Concatenate the scores of the members, in the order of the layer's heads."""
        owned = zip(self.parts(), self.pairs_of_members(pairs), strict=True)
        return self._put_back([member.scores(own) for member, own in owned])

    def log_sink(
        self, like: Tensor, given: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Concatenate the sinks of the members, in the order of the layer's heads."""
        owned = zip(self.parts(), self.sinks_of_members(given), strict=True)
        sinks = [member.log_sink(like, own, dtype) for member, own in owned]
        if all(sink is None for sink in sinks):
            return None
        heads = [member.layer.num_heads for member in self.parts()]
        absent = [like.new_full((count,), float("-inf"), dtype=dtype) for count in heads]
        found = [none if sink is None else sink for sink, none in zip(sinks, absent, strict=True)]
        return self._put_back([sink[None, :, None] for sink in found]).flatten()

    def heads_of_members(self, *heads: Tensor) -> list[Sequence[Tensor]]:
        if len(self._runs) == 1:
            return [heads]
        return [[self._share(x, runs) for x in heads] for runs in self._runs.values()]

    def _share(self, x: Tensor, runs: Sequence[range]) -> Tensor:
        """Return the heads in `runs` of x [B, H or Hkv, ...], a view of them if they stand side by side."""
        size = x.shape[1] // self.layer.num_key_value_heads
        parts = [x.narrow(1, run.start * size, len(run) * size) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _put_back(self, outputs: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return all heads in the layer's order, from those of each member: its query heads in dimension `dim`."""
        size = self.layer.num_heads // self.layer.num_key_value_heads
        placed: dict[int, Tensor] = {}
        for output, runs in zip(outputs, self._runs.values(), strict=True):
            parts = output.split([len(run) * size for run in runs], dim)
            placed.update({run.start: part for run, part in zip(runs, parts, strict=True)})
        heads = [placed[first] for first in sorted(placed)]
        return heads[0] if len(heads) == 1 else torch.cat(heads, dim)


def _runs(heads: Sequence[int]) -> list[range]:
    """Return ascending numbers as runs without a gap.

    >>> _runs([0, 1, 2, 5])
    [range(0, 3), range(5, 6)]
    """
    runs = [list(run) for _, run in groupby(range(len(heads)), key=lambda place: heads[place] - place)]
    return [range(heads[run[0]], heads[run[-1]] + 1) for run in runs]
