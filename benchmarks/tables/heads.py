"""Tables of plans that leave a few heads exact: what they recall, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise, product
from pathlib import PurePosixPath
from statistics import fmean

from benchmarks.result_files import AS_IT_COMES, CALIBRATED, ORIGINAL, Document
from benchmarks.tables.markdown import count, number, table, weights_said

NEEDLES = ("single_noise", "single_text", "single_uuid")
UNTRAINED = "nothing trained"
WHERE = ("processor", "dtype", "threads")  # columns of times


def heads_speed_parts(document: Document) -> list[str]:
    """Return time and bytes of a plan beside softmax, a row for each processor, precision and number of threads."""
    rows = []
    for run in document["runs"]:
        prompt, token = run["prompt"], run["token"]
        rows.append(
            [
                *_where(run), f"{token['share']:.1%}", number(prompt["ratio"]),
                number(token["ratio"]["softmax"]), number(token["ratio"]["softmax, keys copied"]),
            ]
        )  # fmt: skip
    run = document["runs"][0]
    prompt, token = (run[name]["tokens"] for name in ("prompt", "token"))
    heads = len(run["exact_heads"])
    what = (
        f"{run['model']} with {heads} key/value heads exact, the others in windows of"
        f" {run['window']['window_size']} tokens with {run['window']['num_sink_tokens']} first ones. Attention of all"
        f" layers beside softmax: time, as a ratio; the cache after {count(token)} tokens as a share of softmax's"
        f" bytes.{_clocks(document)}"
        f"{weights_said(run['model'], *_dtypes(document))}"
    )
    head = [
        *WHERE, "cache", f"prompt of {count(prompt)}", f"a token after {count(token)}",
        "the same, beside a cache that copies all keys",
    ]  # fmt: skip
    return [what, table(head, rows)]


def whole_model_section(document: Document) -> str:
    """Return what a whole model takes with such a plan and with softmax: a prompt, a token after it, and the cache."""
    rows = []
    for run in document["runs"]:
        for row in run["whole_model"]:
            prompt, token, cache = row["prompt_seconds"], row["seconds_per_token"], row["bytes"]
            rows.append(
                [
                    count(row["tokens"]), *_where(run),
                    *(f"{number(x['plan'])} s, softmax {number(x['softmax'])} s" for x in (prompt, token)),
                    *(f"{x['softmax'] / x['plan']:.2f}x" for x in (prompt, token)),
                    f"{cache['plan'] / 1e6:.1f} MB, softmax {cache['softmax'] / 1e6:.1f} MB",
                ]
            )  # fmt: skip
    run = document["runs"][0]
    what = (
        f"{run['model']} with {len(run['exact_heads'])} key/value heads exact and windows of"
        f" {run['window']['window_size']} tokens elsewhere.{_clocks(document)}"
        f"{weights_said(run['model'], *_dtypes(document))}"
    )
    head = ["tokens", *WHERE, "reading them", "one more token", "reading", "token", "cache"]
    return f"{what}\n\n" + table(head, rows)


def _where(run: Document) -> list[object]:
    return [run["provenance"][name] for name in ("device", "dtype", "threads")]


def _clocks(document: Document) -> str:
    """Say which rows have the processor's time, where they are not all."""
    threads = {run["provenance"]["threads"] for run in document["runs"] if run["clock"] == "processor"}
    return " With one thread, time is the processor's for the process." if threads == {1} else ""


def _dtypes(document: Document) -> list[str]:
    return [run["provenance"]["dtype"] for run in document["runs"]]


def heads_recall_parts(document: Document) -> list[str]:
    """Return what plans recall, with intervals, and their perplexity over the original's."""
    found: dict[str, dict[str, dict[str, Document]]] = {}  # plan -> length -> task -> row
    for key, row in document["recall"].items():
        name, task, length = key.split(" | ")
        found.setdefault(name, {}).setdefault(length, {})[task] = row
    tasks = list(dict.fromkeys(task for lengths in found.values() for rows in lengths.values() for task in rows))
    lines = [
        [name, count(int(length)), *(_share(rows[task]) if task in rows else "" for task in NEEDLES)]
        for name, lengths in found.items()
        for length, rows in sorted(lengths.items(), key=lambda item: int(item[0]))
    ]
    samples = {row["num_samples"] for key, row in document["recall"].items() if key.split(" | ")[1] in NEEDLES}
    what = (
        f"{document['model']}, nothing trained: the share of answers that are written, with its 95 % interval,"
        f" {' or '.join(map(str, sorted(samples)))} prompts in each cell, of another seed than the plans were chosen"
        f" by.{_weights(document)}"
    )
    return [what, table(["plan", "tokens", *NEEDLES], lines), *_suite_and_text(document, found, tasks)]


def _suite_and_text(
    document: Document, found: dict[str, dict[str, dict[str, Document]]], tasks: list[str]
) -> list[str]:
    """Return the perplexity at every length and, of plans that were asked every task, the mean over these."""
    texts: dict[str, dict[str, float]] = {}  # length -> plan -> perplexity
    for key, row in document.get("perplexity", {}).items():
        name, length = key.split(" | ")
        texts.setdefault(length, {})[name] = row["perplexity"]
    columns = {
        f"perplexity, {count(int(length))} tokens": {name: f"{x / of[ORIGINAL]:.3f}" for name, x in of.items()}
        for length, of in sorted(texts.items(), key=lambda item: int(item[0]))
        if ORIGINAL in of
    }
    if not columns:
        return []
    what = "The perplexity of test books over the original's."
    for name, lengths in found.items():
        for length, rows in lengths.items():
            if len(rows) == len(tasks) > len(NEEDLES):
                mean = sum(row["found"] for row in rows.values()) / len(tasks)
                columns.setdefault(f"mean of {len(tasks)} tasks, {count(int(length))} tokens", {})[name] = number(mean)
                what = "The perplexity of test books over the original's, and the mean over the recall suite."
    return [what, table(["plan", *columns], [[name, *(c.get(name, "") for c in columns.values())] for name in found])]


def plan_grid_parts(document: Document) -> list[str]:
    """Return what plans of more or fewer heads and longer or shorter windows recall, hold, and lose by position."""
    recall, sizes, texts = document["recall"], document["state_bytes"], document["positions"]
    cells = {tuple(key.split(" | ")): row for key, row in recall.items()}
    names = [name for name in texts if all(any(key[:2] == (name, task) for key in cells) for task in NEEDLES)]
    (length,) = {int(key[2]) for key in cells}
    whole, edges = texts[ORIGINAL], texts[ORIGINAL]["edges"]
    rows = [
        [
            name, f"{sizes[name]['patched'] / 1e6:.1f} MB",
            *(_share(cells[name, task, str(length)]) for task in NEEDLES),
            f"{math.exp(texts[name]['loss'] - whole['loss']):.3f}",
            *(f"{loss - own:+.3f}" for loss, own in zip(texts[name]["losses"], whole["losses"], strict=True)),
        ]
        for name in names
    ]  # fmt: skip
    samples = " or ".join(map(str, sorted({row["num_samples"] for row in cells.values()})))
    what = (
        f"{document['model']}, nothing trained: the decoding state after {count(edges[-1])} tokens; the share of"
        f" answers that are written at {count(length)} tokens, with its 95 % interval, {samples} prompts in each cell,"
        f" of another seed than the plans were chosen by; on {whole['rows']} rows of {count(edges[-1])} tokens of test"
        " books the perplexity over the original's, and the loss above the original's, in nats, by position."
        f"{_weights(document)}"
    )
    positions = [f"{count(first)} to {count(last)}" for first, last in pairwise(edges)]
    return [what, table(["plan", "state", *NEEDLES, "perplexity", *positions], rows)]


def hard_key_plans_parts(document: Document) -> list[str]:
    """Return what plans with hard keys, and those of equal bytes, recall, and their perplexity over the original's."""
    recall, texts, sizes = document["recall"], document["perplexity"], document["state_bytes"]
    asked = dict.fromkeys(tuple(key.split(" | ")[::2]) for key in recall)  # plan and length
    ((text_length, whole),) = ((key.split(" | ")[1], row) for key, row in texts.items() if key.startswith(ORIGINAL))
    rows = []
    for name, length in sorted(asked, key=lambda cell: int(cell[1])):
        size = sizes.get(name.removesuffix(f", {CALIBRATED}"))
        found = [recall.get(f"{name} | {task} | {length}") for task in NEEDLES]
        rows.append(
            [
                name, f"{size['patched'] / 1e6:.1f} MB" if size else "", count(int(length)),
                ", ".join(dict.fromkeys(str(row["num_samples"]) for row in found if row)),
                *(_share(row) if row else "" for row in found),
                f"{texts[f'{name} | {text_length}']['perplexity'] / whole['perplexity']:.3f}",
            ]
        )  # fmt: skip
    state = next(iter(sizes.values()))
    what = (
        f"{document['model']}, nothing trained: the share of answers that are written, with its 95 % interval, and the"
        f" number of prompts of each kind; the state after {count(state['length'])} tokens, where softmax has"
        f" {state['original'] / 1e6:.1f} MB; the perplexity of test books of {count(int(text_length))} tokens over the"
        f" original's.{_weights(document)}"
    )
    return [what, table(["plan", "state", "tokens", "prompts", *NEEDLES, "perplexity"], rows)]


def equal_bytes_table(document: Document) -> str:
    """Return what states of equal bytes recall as they come and after `calibrate`, and their perplexity."""
    lines: list[list[object]] = []
    keys: list[str] = sorted(document[AS_IT_COMES], key=lambda key: int(key.split(" | ")[0]))
    for key, stage in product(keys, (AS_IT_COMES, CALIBRATED)):
        row, (size, name) = document.get(stage, {}).get(key), key.split(" | ")
        if row is None:  # nothing to fit, or not measured
            continue
        whole, needles = document[AS_IT_COMES][f"{size} | {ORIGINAL}"], row["recall"]
        over = math.exp(fmean(row["losses"]) - fmean(whole["losses"]))
        mean = fmean(found["found"] for found in needles.values())
        state = f"{document['state_bytes'][key] / 1e3:.1f} kB" if key in document["state_bytes"] else ""
        first = [state, name, stage if name != ORIGINAL else "", count(row["length"])]
        lines.append([*first, *(_share(found) for found in needles.values()), f"{mean:.2f}", f"{over:.3f}"])
    row = document[AS_IT_COMES][keys[0]]
    what = (
        f"{document['model']}, all heads alike: the bytes of a layer's state; the share of answers that are written to"
        f" prompts of that length, with its 95 % interval, {row['samples']} in each cell; their mean; the perplexity"
        f" of {row['rows']} rows of 2,048 tokens of test books over the original's.{_weights(document)}"
    )
    return f"{what}\n\n" + table(["state", "plan", "", "tokens", *row["recall"], "mean", "perplexity"], lines)


def recovered_plans_parts(document: Document, chosen: Document, untrained: str) -> list[str]:
    """Return what runs recall and their perplexity over the original's, beside the plan before any training.

    Args:
        chosen: results of `benchmarks.studies.choose_plan`. untrained: the plan's name there.
    """
    recall, texts = {**chosen["recall"], **document["recall"]}, document["perplexity"]
    lengths = sorted({int(key.split(" | ")[1]) for key in texts})
    named = {ORIGINAL: ORIGINAL, UNTRAINED: untrained}
    for run in document["runs"]:
        before = f"{run}, {UNTRAINED}"  # where its plan is not that of the other study
        named |= {name: name for name in (before, run) if f"{name} | {lengths[0]}" in texts}
    asked = sorted({int(key.split(" | ")[2]) for key in document["recall"]})
    cells: list[list[str]] = []
    for name, key in named.items():
        for length in asked:
            asked_of = (f" | {task} | {length}" for task in NEEDLES)
            found = [recall.get(f"{name}{cell}") or recall.get(f"{key}{cell}") for cell in asked_of]
            if any(found):
                prompts = dict.fromkeys(row["num_samples"] for row in found if row)
                shares = (_share(row) if row else "" for row in found)
                cells.append([name, count(length), ", ".join(map(str, prompts)), *shares])
    what = (
        f"{document['model']}: the share of answers that are written, with its 95 % interval, and the number of"
        f" prompts of each kind, of another seed than the plan was chosen by.{_weights(document)}"
    )
    columns = {
        f"perplexity, {count(length)} tokens": {
            name: f"{_perplexity(texts, name, length) / _perplexity(texts, ORIGINAL, length):.4f}" for name in named
        }
        for length in lengths
    } | _suite_means(document["recall"])  # fmt: skip
    text = "The perplexity of test books over the original's"
    text += ", and the mean over the recall suite." if len(columns) > len(lengths) else "."
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in named]
    how = [_how(name, run) for name, run in document["runs"].items()]
    return [*how, what, table(["model", "tokens", "prompts", *NEEDLES], cells), text, table(["model", *columns], rows)]


def recall_suite_table(documents: Iterable[Document]) -> str:
    """Return what models recall by `hf-linattn eval --suite recall`, beside the original where it was asked as well.

    A mean over kinds of prompts has the interval that those of the kinds come to (Zou and Donner 2008, Statistics in
    Medicine 27:1693-1702): its ends are as far away as the root of the summed squares, over the number of kinds.
    """
    lines: list[list[object]] = []
    for document in documents:
        name = f"`{PurePosixPath(document['model']).name}`"
        asked: dict[int, list[Document]] = {}  # length -> rows
        for row in document["rows"]:
            if row["metric"] == "found" and "depth" not in row["facts"]:
                asked.setdefault(row["facts"]["length"], []).append(row)
        for length, rows in asked.items():
            for row in rows:
                shares = ("" if row[kind] is None else _interval(row[kind]) for kind in ("original", "converted"))
                difference = "".join(_interval(pair, "+") for pair in row["differences"])
                lines.append([name, f"`{row['name']}`", count(length), row["num_items"], *shares, difference])
            if len(rows) > 1:
                mean = _mean_of_kinds(rows) if document["original"] else _own_mean(rows)
                lines.append([name, f"the mean of {len(rows)}", count(length), *mean])
    return table(["model", "test", "tokens", "prompts", "original", "converted", "difference"], lines)


def _mean_of_kinds(rows: list[Document]) -> list[object]:
    of, to = (fmean(row[kind]["value"] for row in rows) for kind in ("original", "converted"))
    pairs = [pair for row in rows for pair in row["differences"]]
    low, high = (
        to - of + sign * math.hypot(*(pair[end] - pair["value"] for pair in pairs)) / len(rows)
        for end, sign in (("low", -1), ("high", 1))
    )
    difference = _interval({"value": to - of, "low": low, "high": high}, "+")
    return [sum(row["num_items"] for row in rows), f"{of:.3f}", f"{to:.3f}: {to / of:.0%}", difference]


def _own_mean(rows: list[Document]) -> list[object]:
    count, mean = sum(row["num_items"] for row in rows), fmean(row["converted"]["value"] for row in rows)
    return [count, "", f"{mean:.3f}", ""]


def _interval(score: Document, sign: str = "") -> str:
    return f"{score['value']:{sign}.2f} ({score['low']:{sign}.2f} to {score['high']:{sign}.2f})"


def _suite_means(recall: dict[str, Document]) -> dict[str, dict[str, str]]:
    """Return a column for each length: the mean over all tasks, of the models that were asked all of them."""
    found: dict[str, dict[str, list[float]]] = {}  # length -> model -> shares
    for key, row in recall.items():
        name, _, length = key.split(" | ")
        found.setdefault(length, {}).setdefault(name, []).append(row["found"])
    columns = {}
    for length, models in found.items():
        most = max(map(len, models.values()))
        if most > len(NEEDLES):
            title = f"mean of {most} tasks, {count(int(length))} tokens"
            columns[title] = {
                name: number(sum(shares) / most) for name, shares in models.items() if len(shares) == most
            }
    return columns


def _how(name: str, run: Document) -> str:
    best = min(run["evaluations"], key=lambda tried: tried["loss"])
    last = run["evaluations"][-1]
    longer = run.get("lengthened")
    fate = "went on with longer rows" if longer else "are what is measured"
    whose = "its weights" if run.get("keeps_best", True) else "the weights of the last step"
    around = run["teaching"].get("lora_target_modules")
    where = f" around {', '.join(around)}" if around else ""
    processes = f" in each of {run['processes']} processes" if run.get("processes", 1) > 1 else ""
    on = f"{run['device']} with {run['threads']} thread{'s' * (run['threads'] > 1)}{processes}"
    text = (
        f"`{name}`: LoRA of rank {run['teaching']['lora_rank']}{where}, {count(run['tokens'])} training tokens,"
        f" learning rate {run['learning_rate']:g}, on {on}. Of {len(run['evaluations'])} evaluations that of step"
        f" {best['step']} of {last['step']} was the best ({best['loss']:.4f} nats; the last {last['loss']:.4f}), and"
        f" {whose} {fate}. Its loss by position on held-out text, {_changed(run['positions'])} nats."
    )
    if longer:
        text += (
            f" The last {count(longer['tokens'])} tokens were rows of twice the length: by these the loss by position,"
            f" {_changed(longer['positions'])} nats."
        )
    return text


def _changed(positions: Document) -> str:
    changes, last = [row["loss"] for row in positions["change"]], positions["before"][-1]["last"]
    return f"in {len(changes)} buckets up to {count(last)} tokens, changed by {min(changes):.3f} to {max(changes):.3f}"


def _weights(document: Document) -> str:
    return weights_said(document["model"], document["provenance"]["dtype"])


def _perplexity(texts: Document, name: str, length: int) -> float:
    return texts[f"{name} | {length}"]["perplexity"]


def _share(row: Document) -> str:
    low, high = row["found_interval"]
    return f"{row['found']:.2f} ({low:.2f} to {high:.2f})"
