"""What mechanisms made of several others share: whom they consist of, how these are asked, and one state for all."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

from torch import Tensor, nn

from ..config import MechanismConfig, make_config, require
from ..registry import MECHANISMS
from .base import Mechanism
from .inputs import PLAIN, AttentionLayer, CallOptions, Pairs


@dataclass
class CompositeConfig(MechanismConfig):
    """Options of every mechanism made of others, which it names in the option called `holds`."""

    holds: ClassVar[str] = "members"

    @classmethod
    def complete_saved(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """As the base, the options of members, too."""
        options = super().complete_saved(options)
        if isinstance(options.get(cls.holds), Mapping):
            options[cls.holds] = {
                name: MECHANISMS.get(name).config_class.complete_saved(own) if isinstance(own, Mapping) else own
                for name, own in options[cls.holds].items()
            }
        return options

    def complete_options(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options of a member, as other versions may have other defaults; the seed only if it is given."""
        kind = MECHANISMS.get(name)
        single = not issubclass(kind, CompositeMechanism)
        require(f"a member of {self.mechanism!r}", name, single, "a mechanism that is not made of others itself")
        options = kind.config_class.from_options(given).to_options()
        return {option: value for option, value in options.items() if option != "seed" or "seed" in given}

    def member_config(self, name: str, options: Mapping[str, Any]) -> MechanismConfig:
        """Return the config of a member; its seed is this one's unless it names its own."""
        return make_config(name, {"seed": self.seed, **options})


class JoinedState(tuple[Tensor, ...]):
    """The tensors of several states in a row; `kinds` are the types of these.

    Every combination of types has a subclass, so that `type(state)(*tensors)` is what can be split again: a named
    tuple, as all states are, which is what accelerate and others that move tensors make anew in this way.
    """

    kinds: ClassVar[tuple[Any, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rejoin, (self.kinds, *self)  # the class is made while running, where pickle cannot find it

    def split(self) -> Iterator[Any]:
        """Yield the states."""
        tensors = iter(self)
        for kind in self.kinds:
            yield kind(*islice(tensors, len(kind._fields)))


@functools.cache
def joined_kind(kinds: tuple[Any, ...]) -> type[JoinedState]:
    """Return the type of states of these types, joined."""
    names = [f"{name}_{number}" for number, kind in enumerate(kinds) for name in kind._fields]
    fields = namedtuple(JoinedState.__name__, names)  # type: ignore[misc]  # as many as the states have
    return type(JoinedState.__name__, (JoinedState, fields), {"kinds": kinds, "__module__": __name__})


def join_states(states: Sequence[Any]) -> JoinedState:
    """Return one state that holds the tensors of all."""
    return joined_kind(tuple(map(type, states)))(*chain.from_iterable(states))


def joined_as(state: JoinedState | None, states: Sequence[Any]) -> JoinedState:
    """Return states joined, of the very type of `state` if that fits: a compiled graph makes no types."""
    if state is None or state.kinds != tuple(map(type, states)):
        return join_states(states)
    return type(state)(*chain.from_iterable(states))


def _rejoin(kinds: tuple[Any, ...], *tensors: Tensor) -> JoinedState:
    return joined_kind(kinds)(*tensors)


class CompositeMechanism(Mechanism):
    """A mechanism whose parts are mechanisms; `members` holds them by name, in alphabetical order.

    Configs of saved models are written in that order, so it must not matter in which one they were named. A member
    keeps the name it is given, a former one too, as its weights are saved by it.
    """

    config: Any  # of the subclass's own config class
    takes_half = True  # each member for itself
    takes_sink = True

    def add_members(self, configs: Mapping[str, MechanismConfig], layers: Mapping[str, AttentionLayer]) -> None:
        """Make the members, each for its own view of the layer, and take over what holds if it holds for all."""
        self.members = nn.ModuleDict(
            {name: MECHANISMS.get(configs[name].mechanism)(configs[name], layers[name]) for name in sorted(configs)}
        )
        members = self.parts()
        self.constant_state = all(member.constant_state for member in members)
        self.static_steps = all(member.static_steps for member in members)
        self.subquadratic = all(member.subquadratic for member in members)
        self.continuous = all(member.continuous for member in members)
        self.prepares = any(member.prepares for member in members)
        self.scheduled = any(member.scheduled for member in members)
        self.averages = all(member.averages for member in members)
        self.growth = max(member.growth for member in members)
        self.takes_sink = any(member.takes_sink for member in members)
        self.reads_queries = any(member.reads_queries for member in members)
        self.reads_hidden = tuple({option: None for member in members for option in member.reads_hidden})

    def parts(self) -> list[Any]:
        """Return the members, which are all mechanisms."""
        return list(self.members.values())

    def heads_of_members(self, *heads: Tensor) -> list[Sequence[Tensor]]:
        """Return what each member gets of the layer's heads: all of them, unless a subclass shares them out."""
        return [heads] * len(self.members)

    def pairs_of_members(self, pairs: Pairs) -> list[Pairs]:
        """Return what each member gets of pairs: those of its heads."""
        heads, sinks = self.heads_of_members(pairs.query, pairs.key), self.sinks_of_members(pairs.sink)
        return [
            pairs._replace(query=query, key=key, sink=sink)
            for (query, key), sink in zip(heads, sinks, strict=True)
        ]

    def ask(
        self,
        heads: Sequence[Sequence[Tensor]],
        key_padding_mask: Tensor | None,
        sequence_ids: Tensor | None,
        state: Any,
        call: CallOptions,
        **exact: Any,
    ) -> tuple[list[Tensor], JoinedState | None]:
        """Return what each member makes of its query, key and value, and the state of all, None if none is kept.

        `exact` are the sliding window, soft cap and dropout of the layer, for members that keep softmax.
        """
        members = self.parts()
        outputs, states = [], []
        before = [None] * len(members) if state is None else state.split()
        sinks = self.sinks_of_members(call.sink)
        for member, own, earlier, sink in zip(members, heads, before, sinks, strict=True):
            options = member.keywords({**exact, "sink": sink, "hidden_states": call.hidden_states})
            heard = (*own, key_padding_mask, sequence_ids, earlier)
            output, after = member(*heard, keep_state=call.keep_state, **options)
            outputs.append(output)
            states.append(after)
        kept = call.keep_state and self.layer.causal
        return outputs, joined_as(state, states) if kept else None

    def fixed_state(self, state: Any, room: int) -> JoinedState:
        own = zip(self.parts(), state.split(), strict=True)
        return joined_as(state, [member.fixed_state(kept, room) for member, kept in own])

    def owned_state(self, state: Any) -> JoinedState:
        own = zip(self.parts(), state.split(), strict=True)
        return joined_as(state, [member.owned_state(kept) for member, kept in own])

    def sinks_of_members(self, sink: Tensor | None) -> list[Tensor | None]:
        """Return what each member gets of the layer's own sinks [H]."""
        members = self.parts()
        if sink is None:
            return [None] * len(members)
        shared = [own[0].flatten() for own in self.heads_of_members(sink[None, :, None])]
        return [own if member.takes_sink else None for member, own in zip(members, shared, strict=True)]

    def weights_of_members(
        self, heads: Sequence[Sequence[Tensor]], allowed: Tensor, call: CallOptions
    ) -> list[Tensor]:
        """Return the `weights` of each member for its query and key, and for its value if it is given that."""
        sinks = self.sinks_of_members(call.sink)
        return [
            member.run_hook(call._replace(sink=sink), "weights" if len(own) == 2 else "weights_given", *own, allowed)
            for member, own, sink in zip(self.parts(), heads, sinks, strict=True)
        ]

    def mechanisms_dropping_sinks(self) -> list[str]:
        return [name for member in self.parts() for name in member.mechanisms_dropping_sinks()]

    def join(self, earlier: Sequence[Mechanism]) -> None:
        found = single_mechanisms(earlier)
        for member in self.parts():
            member.join(found)

    def prepare(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, call: CallOptions = PLAIN
    ) -> None:
        for member, heads in zip(self.parts(), self.heads_of_members(query, key, value), strict=True):
            member.run_hook(call, "prepare", *heads, key_padding_mask)

    def before_forward(self) -> None:
        for member in self.parts():
            member.before_forward()


def single_mechanisms(mechanisms: Iterable[Mechanism]) -> list[Any]:
    """Return the mechanisms that are not made of others, and the members of those that are."""
    return [
        single
        for mechanism in mechanisms
        for single in (mechanism.parts() if isinstance(mechanism, CompositeMechanism) else [mechanism])
    ]
