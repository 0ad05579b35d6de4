"""The sentences of a card: what was measured, and which attention serves which layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import KEPT, PatchConfig, read_entries
from ..registry import MECHANISMS

UNITS = ("B", "kB", "MB", "GB", "TB")  # of 1,000 each


@dataclass(frozen=True)
class Measured:
    """What was measured of a converted model beside softmax attention; None: it was not.

    Attributes:
        accuracy, perplexity, squared_error, recall: of the model, and of the better softmax model, on a test split;
            the recall is the share of texts whose other half, or pair, is among the ten most similar.
        speed: how many times as fast it reads, and at how many tokens.
        state: bytes of the decoding state of one sequence, softmax's, and after how many tokens.
    """

    accuracy: tuple[float, float] | None = None
    perplexity: tuple[float, float] | None = None
    squared_error: tuple[float, float] | None = None
    recall: tuple[float, float] | None = None
    speed: tuple[float, int] | None = None
    state: tuple[int, int, int] | None = None


def measured_sentence(measured: Measured) -> str:
    """Return what was measured in one sentence, accuracy before perplexity; empty where nothing was.

    >>> measured_sentence(Measured(accuracy=(0.86, 0.87), speed=(3.4, 4096), state=(1_200_000, 188_000_000, 4096)))
    'Keeps 98.9 % of the accuracy (86.0 % against 87.0 % with softmax attention), reads 3.4 times faster at 4,096 tokens, has a decoding state of 1.2 MB instead of 188 MB at 4,096 tokens.'
    """  # noqa: E501  an output of a doctest is one line
    said = []
    for name, shares in {"accuracy": measured.accuracy, "recall at 10": measured.recall}.items():
        if shares is None:
            continue
        own, best = shares
        both = f"{100 * own:.1f} % against {100 * best:.1f} % with softmax attention"
        kept = f"keeps {100 * own / best:.1f} % of the {name}" if best else f"has as {name}"
        said.append(f"{kept} ({both})")
    if measured.perplexity is not None:
        own, best = measured.perplexity
        both = f"{own:,.2f} against {best:,.2f} with softmax attention"
        said.append(f"has {own / best:.3f} times the perplexity ({both})")
    if measured.squared_error is not None:
        own, best = measured.squared_error
        said.append(f"has a mean squared error of {own:,.4g} against {best:,.4g} with softmax attention")
    if measured.speed is not None:
        ratio, length = measured.speed
        times = f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"
        said.append(f"reads {times} at {length:,} tokens")
    if measured.state is not None:
        own, original, length = measured.state
        said.append(f"has a decoding state of {in_bytes(own)} instead of {in_bytes(original)} at {length:,} tokens")
    text = ", ".join(said)
    return text and f"{text[0].upper()}{text[1:]}."


def in_bytes(count: int) -> str:
    """Return a number of bytes in units of 1,000.

    >>> in_bytes(512), in_bytes(1_234_567), in_bytes(188_000_000), in_bytes(999_600)
    ('512 B', '1.2 MB', '188 MB', '1.0 MB')
    """
    # 999.5 of a unit are rounded to 1,000, which is 1.0 of the next
    power = next((power for power in range(len(UNITS) - 1, 0, -1) if count >= 0.9995 * 1000**power), 0)
    value = count / 1000**power
    return f"{value:.1f} {UNITS[power]}" if power and value < 9.95 else f"{value:.0f} {UNITS[power]}"


def layers_in_words(patches: Mapping[str, PatchConfig]) -> list[tuple[str, str]]:
    """Return rows of what serves which attention layers, those that keep softmax at the end.

    patches: path of a part of the model -> its patch; the whole model is under `""`.

    >>> layers_in_words({"": PatchConfig.from_plan({"hybrid": "0-2", "local": {"layers": 3, "window_size": 64}}, 6)})
    [('hybrid', '0-2'), ('local(window_size=64)', '3'), ('softmax', '4-5')]
    """
    return [row for path, config in patches.items() for row in _rows(config, f"{path}: " if path else "")]


def _rows(config: PatchConfig, place: str) -> Iterator[tuple[str, str]]:
    left = set(range(config.num_layers)) - set(config.layers)
    for group in config.to_dict()["groups"]:
        yield _attention(group["mechanism"], group["options"]), place + _ranges(group["layers"])
    if left:
        yield KEPT, place + _ranges(sorted(left))
    if config.cross is not None:
        yield from _rows(config.cross, f"{place}cross-attention ")


def _attention(name: str, options: Mapping[str, Any]) -> str:
    """Return a mechanism with the options that are not its defaults, or what serves the heads of a layer."""
    if name == "by_head":
        members = [
            f"{_attention(entry.mechanism, entry.options)} in {_heads(entry.places.get('heads'))}"
            for entry in read_entries(options["plan"], ("heads",))
        ]
        return f"{', '.join(members)}, {KEPT} in the others"
    changed = [f"{key}={value!r}" for key, value in changed_options(name, options).items()]
    return f"{name}({', '.join(changed)})" if changed else name


def changed_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mechanism that are not its defaults.

    >>> changed_options("local", {"window_size": 64, "seed": 0})
    {'window_size': 64}
    """
    default = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(MECHANISMS.get(name).config_class)
    }
    return {key: value for key, value in options.items() if key not in default or value != default[key]}


def _heads(heads: object) -> str:
    listed = _ranges(heads) if isinstance(heads, list) else str(heads)
    return "all key/value heads" if heads is None else f"key/value heads {listed}"


def _ranges(indices: Sequence[int]) -> str:
    """Return sorted whole numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
