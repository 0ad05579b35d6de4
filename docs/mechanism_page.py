"""One page per mechanism: what its class says, its picture, its options, and its rows of what was measured."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from benchmarks.result_files import (
    CALIBRATION_FILE,
    MEAN_OF_VALUES,
    MQAR_FILE,
    ORIGINAL,
    PAGES_FILE,
    PEERS_FILE,
    RESULTS,
    USABLE_FILE,
    ZERO_SHOT_FILE,
    Document,
    board_reports,
    read,
    recovery_reports,
)
from benchmarks.tables.markdown import options_text, table
from benchmarks.tables.quality import (
    board_table,
    calibration_table,
    recall_table,
    recovery_table,
    usable,
    usable_table,
    zero_shot_table,
)
from benchmarks.tables.speed import peers_table, summary_table
from docs import pictures
from hf_linattn import UnsupportedModeError
from hf_linattn.mechanisms import MECHANISMS, Mechanism
from hf_linattn.mechanisms.composite import CompositeMechanism
from hf_linattn.testing import Case

PICTURES = "../mechanisms.md#pictures"  # how to read what a page shows, as the others
BEFORE, AFTER = "../mechanisms.md#before-any-training", "../mechanisms.md#after-calibration"
USABLE = "../mechanisms.md#usable-untrained"
RECALL = "../mechanisms.md#associative-recall"
RECOVERED, SPEED = "../results.md", "../../benchmarks/README.md"
ALL_SPEEDS = "../../benchmarks/results/README.md"
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


def page(name: str) -> str:
    """Return the page of one mechanism."""
    mechanism = MECHANISMS.get(name)
    parts = [
        f"# {name}",
        escape(inspect.getdoc(mechanism) or ""),
        facts(mechanism),
        f"## [Weights]({PICTURES})",
        *weights(name),
        "## Options",
        options(mechanism),
    ]
    measured = list(results(name))
    if measured:
        parts += ["## Measured", *measured]
    return "\n\n".join(parts) + "\n"


def facts(mechanism: type[Mechanism]) -> str:
    """Return what a mechanism declares of itself, as a list."""
    file = f"{mechanism.__module__.replace('.', '/')}.py"
    lines = {
        "modes": modes(mechanism),
        "decoding state": state(mechanism),
        "exactness limit": escape(mechanism.limit.text),
        "source": escape(mechanism.citation),
        "code": f"[{file}](../../{file})",
    }
    return "\n".join(f"- {what}: {text}" for what, text in lines.items())


def modes(mechanism: type[Mechanism]) -> str:
    """Return the forms it has."""
    return ", ".join(sorted(mechanism.modes))


def state(mechanism: type[Mechanism]) -> str:
    """Return how its decoding state grows."""
    if issubclass(mechanism, CompositeMechanism):
        return "that of its parts"
    return "constant" if mechanism.constant_state else "grows with the context"


def options(mechanism: type[Mechanism]) -> str:
    """Return the table of its options."""
    rows = [
        [f"`{option.name}`", f"`{option.default!r}`", option.metadata["help"]]
        for option in dataclasses.fields(mechanism.config_class)
    ]
    return table(["option", "default", "meaning"], rows)


def weights(name: str) -> Iterator[str]:
    """Yield its pictures, each with its options; without an attention matrix, why there is none."""
    for file, given in pictures.settings(name).items():
        try:
            case = Case(name, pictures.MODEL, causal=True, options=given)
            query, key, value = case.heads(length=2)
            case.make().attention_matrix(query, key, value=value)
        except UnsupportedModeError as error:
            yield f"No picture: {escape(str(error))}."
        else:
            yield f"With `{options_text(given)}`:" if given else "With its defaults:"
            yield f"![{pictures.caption(name, given)}]({file})"


def results(name: str) -> Iterator[str]:
    """Yield a heading and a table for everything that was measured of a mechanism; its speed on one processor."""
    reports = {"board": board_reports(), "recovery": recovery_reports()}
    own = {
        kind: {recipe: report for recipe, report in found.items() if report["mechanism"] == name}
        for kind, found in reports.items()
    }
    zero_shot = only(read(RESULTS / ZERO_SHOT_FILE), name, ORIGINAL, MEAN_OF_VALUES)
    calibrated = only(read(RESULTS / CALIBRATION_FILE), name)
    larger = read(RESULTS / USABLE_FILE)
    peers = only(read(RESULTS / PEERS_FILE), name)
    tables = [
        ("Usable untrained", USABLE, usable_table(only(larger, name, ORIGINAL))),
        ("Perplexity before any training", BEFORE, zero_shot_table(zero_shot, usable(larger))),
        ("Perplexity after calibration", AFTER, calibration_table(calibrated, reports["recovery"] | reports["board"])),
        ("Perplexity after recovery", RECOVERED, board_table(own["board"])),
        ("Perplexity of BERT after recovery", RECOVERED, recovery_table(own["recovery"])),
        ("Associative recall", RECALL, recall_table(only(read(RESULTS / MQAR_FILE), name))),
        ("Times faster than softmax", SPEED, speed(name)),
        ("Times faster than other libraries", SPEED, peers_table(peers)),
    ]
    for heading, how, body in tables:
        if body.count("\n") > (2 if how == USABLE else 1):  # more than a head, and than the original
            yield f"### [{heading}]({how})"
            yield body


def speed(name: str) -> str:
    """Return the speed of a mechanism on one processor, and a link to all others; nothing if it was not timed."""
    document = read(RESULTS / PAGES_FILE)
    if name not in document["options"]:
        return ""
    source, own = document["provenance"], {**document, "options": {name: document["options"][name]}}
    where = f"{source['device']}, {source['threads']} CPU threads, {source['dtype']} (`{PAGES_FILE}`)."
    return f"{where} [All lengths, training, other processors and a GPU]({ALL_SPEEDS}).\n\n{summary_table(own)}"


def only(document: Document, *names: str) -> Document:
    """Return results with the rows of these mechanisms alone."""
    return {**document, "rows": [row for row in document["rows"] if row["mechanism"] in names]}


def escape(text: str) -> str:
    """Return text of a class as markdown: papers linked and, outside `code`, formulas without formatting."""
    text = re.sub(r"`[^`]*`|[*_|]", lambda match: match[0] if match[0].startswith("`") else "\\" + match[0], text)
    return ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", text)
