"""Tables of plans that leave a few heads exact: what they recall, and what they cost."""

from __future__ import annotations

from benchmarks.result_files import ORIGINAL, Document
from benchmarks.tables.markdown import count, number, table


def heads_speed_parts(document: Document) -> list[str]:
    """Return time and bytes of a plan beside softmax, a row for each precision and number of threads."""
    rows = []
    for run in document["runs"]:
        source, prompt, token = run["provenance"], run["prompt"], run["token"]
        rows.append(
            [
                source["dtype"], source["threads"], f"{token['share']:.1%}", number(prompt["ratio"]),
                number(token["ratio"]["softmax"]), number(token["ratio"]["softmax, keys copied"]),
            ]
        )  # fmt: skip
    run = document["runs"][0]
    prompt, token = (run[name]["tokens"] for name in ("prompt", "token"))
    clock = "time of the process on the processor" if run["clock"] == "processor" else "time"
    heads = len(run["exact_heads"])
    what = (
        f"{run['model']} with {heads} key/value heads exact, the others in windows of"
        f" {run['window']['window_size']} tokens with {run['window']['num_sink_tokens']} first ones, on"
        f" {run['provenance']['device']}. Attention of all layers beside softmax: {clock}, as a ratio; the cache after"
        f" {count(token)} tokens as a share of softmax's bytes."
    )
    head = [
        "dtype", "threads", "cache", f"prompt of {count(prompt)}", f"a token after {count(token)}",
        "the same, beside a cache that copies all keys",
    ]  # fmt: skip
    return [what, table(head, rows)]


def heads_recall_parts(document: Document) -> list[str]:
    """Return what plans recall, with intervals, and their perplexity over the original's."""
    found: dict[str, dict[str, Document]] = {}
    for key, row in document["recall"].items():
        name, task, length = key.split(" | ")
        found.setdefault(name, {})[f"{task} {length}"] = row
    columns = list(dict.fromkeys(column for rows in found.values() for column in rows))
    texts = {key.split(" | ")[0]: row for key, row in document.get("perplexity", {}).items()}
    base = texts.get(ORIGINAL, {}).get("perplexity")
    lines = []
    for name, rows in found.items():
        cells = [_share(rows[column]) if column in rows else "" for column in columns]
        text = texts.get(name)
        lines.append([name, *cells, number(text["perplexity"] / base) if text and base else ""])
    samples = {row["num_samples"] for rows in found.values() for row in rows.values()}
    what = (
        f"{document['model']}, nothing trained: the share of answers that are written, with its 95 % interval,"
        f" {' or '.join(map(str, sorted(samples)))} prompts in each cell, of another seed than the plans were chosen"
        " by. Perplexity is on test books, over the original's."
    )
    return [what, table(["plan", *columns, "perplexity"], lines)]


def _share(row: Document) -> str:
    low, high = row["found_interval"]
    return f"{row['found']:.2f} ({low:.2f} to {high:.2f})"
