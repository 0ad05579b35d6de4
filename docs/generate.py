"""Write the generated sections of the documentation from what mechanisms and checks say, and from what was measured.

python -m docs.generate
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.result_files import (
    CALIBRATION_FILE,
    CHOSEN_PLAN_FILE,
    HARD_KEY_PLANS_FILE,
    HEADS_FILE,
    MQAR_FILE,
    PLAN_GRID,
    RECALL_SUITE,
    RECOVERED_PLANS_FILE,
    RESULTS,
    SUPPORT_FILE,
    USABLE_FILE,
    ZERO_SHOT_FILE,
    board_reports,
    read,
    recovery_reports,
)
from benchmarks.tables.heads import (
    hard_key_plans_parts,
    heads_recall_parts,
    heads_speed_parts,
    plan_grid_parts,
    recall_suite_table,
    recovered_plans_parts,
)
from benchmarks.tables.markdown import replace_section, table, weights_said
from benchmarks.tables.quality import (
    MODEL_NAMES,
    calibration_table,
    recall_table,
    usable,
    usable_table,
    zero_shot_table,
)
from docs import command_line, mechanism_page
from docs.mechanism_page import escape, modes, state
from docs.pictures import DOCUMENT, HEADS, LAYER, LENGTH, MODEL, OWN_OPTIONS
from docs.refusals import REFUSALS
from hf_linattn import mechanism_table
from hf_linattn.atomic_io import write_text
from hf_linattn.feature_maps import FEATURE_MAPS
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import CROSS_INVARIANTS, INVARIANTS, MODES

STATUSES = ("patched", "partly", "not", "untried")
FOLDER = Path(__file__).parent
MECHANISM_PAGES = "mechanisms"  # below it


def overview() -> str:
    """Return the table of all mechanisms."""
    rows, verdicts = [], usable(read(RESULTS / USABLE_FILE))
    for name in MECHANISMS.names():
        mechanism = MECHANISMS.get(name)
        cells = [modes(mechanism), state(mechanism), escape(mechanism.limit.text), escape(mechanism.citation)]
        rows.append([link(name), verdicts.get(name, ""), *cells])
    return table(["mechanism", "usable untrained", "modes", "decoding state", "exactness limit", "source"], rows)


def link(name: str) -> str:
    """Return a mechanism's name with a link to its page."""
    return f"[`{name}`]({MECHANISM_PAGES}/{name}.md)"


def pictures() -> str:
    """Return what the pictures of the mechanisms' pages show."""
    own = ", ".join(map(link, OWN_OPTIONS))
    heads = " and ".join(map(str, HEADS))
    return (
        f"Layer {LAYER} of the bundled {MODEL_NAMES[MODEL]}, heads {heads}, counted from 0, on the first {LENGTH}"
        f" tokens of the documentation of Python's `{DOCUMENT}`, a text of the test split. Options are those of the"
        f" table below but for {own}, whose defaults look like others'."
    )


def feature_maps() -> str:
    """Return the table of feature maps."""
    rows = []
    for name in FEATURE_MAPS.names():
        summary = (inspect.getdoc(FEATURE_MAPS.get(name)) or "").partition("\n")[0]
        rows.append([f"`{name}`", escape(summary)])
    return table(["feature map", "formula"], rows)


def zero_shot() -> str:
    """Return the table of perplexities before any training, with where they come from."""
    document = read(RESULTS / ZERO_SHOT_FILE)
    evaluation = document["evaluation"]
    tokens = " and ".join(f"{count:,}" for count in dict.fromkeys(evaluation["num_tokens"].values()))
    text = (
        f"The bundled models on the {evaluation['data']}: {evaluation['documents']} documents, {tokens} scored tokens,"
        f" windows of {evaluation['max_length']} tokens. Causal models' advance by {evaluation['stride']};"
        f" BERT predicts the {evaluation['mask_probability']:.0%} of its tokens that are masked."
    )
    return f"{text}\n\n{zero_shot_table(document, usable(read(RESULTS / USABLE_FILE)))}"


def usable_untrained() -> str:
    """Return the table of what a larger model is right after patching, with what it was asked."""
    document = read(RESULTS / USABLE_FILE)
    evaluation = document["evaluation"]
    text = (
        f"{evaluation['model']} on the {evaluation['data']}: the first {evaluation['rows']} rows of"
        f" {evaluation['length']:,} tokens, each alone."
        f"{weights_said(evaluation['model'], document['provenance']['dtype'])}"
    )
    return f"{text}\n\n{usable_table(document)}"


def calibration() -> str:
    """Return the table of perplexities after calibration alone, with what it was given."""
    document = read(RESULTS / CALIBRATION_FILE)
    given = document["calibration"]
    text = f"{given['tokens']:,} tokens of the training split in {given['batches']} batches; scored as above."
    return f"{text}\n\n{calibration_table(document, recovery_reports() | board_reports())}"


def recall() -> str:
    """Return the table of associative recall, with what the models were asked and how they were trained."""
    document = read(RESULTS / MQAR_FILE)
    task, training = document["task"], document["training"]
    text = (
        f"{task['pairs']} pairs in {task['length']} tokens of {task['vocabulary']} kinds, chance {task['chance']:.1%};"
        f" {training['steps']} steps of {training['batch_size']} sequences after the conversion."
    )
    return f"{text}\n\n{recall_table(document)}"


def heads_recall() -> str:
    """Return what plans that keep a few heads recall."""
    return "\n\n".join(heads_recall_parts(read(RESULTS / CHOSEN_PLAN_FILE)))


def plan_grid() -> str:
    """Return what shares of the heads and lengths of the windows keep, a table for each model."""
    files = sorted((RESULTS / PLAN_GRID).glob("*.json"))
    return "\n\n".join(part for file in files for part in plan_grid_parts(read(file)))


def hard_key_plans() -> str:
    """Return what plans recall that have hard keys in their other heads."""
    return "\n\n".join(hard_key_plans_parts(read(RESULTS / HARD_KEY_PLANS_FILE)))


def recovered_plans() -> str:
    """Return what plans recall after a recovery."""
    document, chosen = read(RESULTS / RECOVERED_PLANS_FILE), read(RESULTS / CHOSEN_PLAN_FILE)
    return "\n\n".join(recovered_plans_parts(document, chosen, "9 heads, seed 0"))


def recall_suite() -> str:
    """Return what `hf-linattn eval` counts of conversions."""
    return recall_suite_table(read(file) for file in sorted((RESULTS / RECALL_SUITE).glob("*.json")))


def heads_speed() -> str:
    """Return what they cost."""
    return "\n\n".join(heads_speed_parts(read(RESULTS / HEADS_FILE)))


def missing_forms() -> str:
    """Return which mechanisms lack a causal or bidirectional form, or a decoding state of constant size."""
    known = {name: MECHANISMS.get(name) for name in MECHANISMS.names()}
    rows = [
        [link(name), mode, ", ".join(f"`{other}`" for other in known if mode in known[other].modes)]
        for name, mechanism in known.items()
        for mode in MODES
        if mode not in mechanism.modes
    ]
    forms = table(["mechanism", "form it lacks", "mechanisms that have it"], rows)
    growing = ", ".join(link(name) for name, mechanism in known.items() if not mechanism.constant_state)
    return "\n\n".join(
        [
            forms,
            "A decoding state of constant size is missing where a later query may need any earlier key again:"
            f" {growing}. Their caches grow with the context.",
        ]
    )


def refusals() -> str:
    """Return the table of what raises an error, with the reason and the alternative."""
    rows = [
        [refusal.what, f"[`{refusal.error.__name__}`](errors.md#{refusal.error.__name__.lower()})", refusal.reason,
         refusal.instead]
        for refusal in REFUSALS.values()
    ]  # fmt: skip
    return table(["what", "error", "why", "instead"], rows)


def invariants() -> str:
    """Return the table of the checks, numbered as they are."""
    return _checks(INVARIANTS)


def cross_invariants() -> str:
    """The same for cross-attention."""
    return _checks(CROSS_INVARIANTS)


def _checks(checks: Mapping[str, Callable[..., object]]) -> str:
    numbered = sorted(checks, key=lambda name: int(name.split()[0]))
    rows = [[name, escape(inspect.getdoc(checks[name]) or "")] for name in numbered]
    return table(["invariant", "what holds"], rows)


def support() -> str:
    """Return how many architectures are patched, partly patched and not, and a table of each kind."""
    document = read(RESULTS / SUPPORT_FILE)
    rows = document["architectures"]
    kinds = {status: [row for row in rows if row["status"] == status] for status in STATUSES}
    counts = ", ".join(f"**{len(found)}** {status}" for status, found in kinds.items())
    parts = [f"transformers {document['transformers']}, mechanism `{document['mechanism']}`: {counts}."]
    for status, found in kinds.items():
        what = "what holds" if status == "patched" else "why"
        cells = [
            [f"`{row['model_type']}`", f"`{row['model_class']}`", ", ".join(row["passed"]) if what == "what holds"
             else escape(row["reason"])]
            for row in found
        ]  # fmt: skip
        parts += [f"## {status.capitalize()}", table(["architecture", "class", what], cells)]
    return "\n\n".join(parts)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "mechanisms.md": {
        "overview": overview,
        "usable": usable_untrained,
        "zero-shot": zero_shot,
        "calibration": calibration,
        "recall": recall,
        "pictures": pictures,
        "feature-maps": feature_maps,
        "missing-forms": missing_forms,
        "refusals": refusals,
    },
    "heads.md": {
        "recall": heads_recall,
        "grid": plan_grid,
        "hard-keys": hard_key_plans,
        "recovered": recovered_plans,
        "recall-suite": recall_suite,
        "speed": heads_speed,
    },
    "invariants.md": {"invariants": invariants, "cross": cross_invariants},
    "support.md": {"support": support},
    "command-line.md": {"exit-codes": command_line.exit_codes, "commands": command_line.commands},
}


def pages() -> Mapping[str, Callable[[], str]]:
    """Return the path of every generated page below this folder -> what makes its text."""
    found: dict[str, Callable[[], str]] = {name: partial(with_sections, name) for name in SECTIONS}
    found[f"../hf_linattn/{mechanism_table.FILE.name}"] = mechanism_table.make_table
    return found | {f"{MECHANISM_PAGES}/{name}.md": partial(mechanism_page.page, name) for name in MECHANISMS.names()}


def with_sections(name: str) -> str:
    """Return a page with its generated sections as they should be."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    for section, body in SECTIONS[name].items():
        text = replace_section(text, section, body())
    return text


if __name__ == "__main__":
    for name, text in pages().items():
        write_text(FOLDER / name, text())
