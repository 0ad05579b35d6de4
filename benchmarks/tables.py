"""Markdown tables from the JSON files under `benchmarks/results`; no number is written by hand.

`write_tables` rewrites `benchmarks/results/README.md` and the generated sections of the project's README, each between
`<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.markdown import Document, options_text, replace_section, table
from benchmarks.memory_tables import depth_parts, long_inputs_tables
from hf_linattn.files import write_text
from hf_linattn.mechanisms import MECHANISMS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = (
    "cpu", "cpu_xeon", "cpu_emerald_rapids", "cpu_genoa", "cpu_granite_rapids", "cpu_granite_rapids_bfloat16", "gpu",
)  # fmt: skip
SPEED_FILES = tuple(f"{machine}{kind}.json" for machine in MACHINES for kind in ("", "_torch", "_compiled", "_triton"))
QUALITY = ("original", "control", "converted", "recovered")
ZERO_SHOT_FILE = "zero_shot.json"
SUPPORT_FILE = "support.json"
RETRIEVAL_FILE = "retrieval.json"
CALIBRATION_FILE = "calibration.json"
LONG_INPUTS_FILE = "cpu_long_inputs.json"
PEERS_FILE = "cpu_peers.json"
DEPTH_FILE, DEPTH_PLOT = "depth.json", "depth.png"
MQAR_FILE, MQAR_PLOT = "mqar.json", "mqar.png"
ORIGINAL, MEAN_OF_VALUES = "original", "mean of the values"  # rows of the zero-shot results that are no mechanism
RECIPE = re.compile(r"recipes/\S+\.yaml")  # in a command
RECIPE_NAME = re.compile(r"((?:\w+-)?(?:bert|gpt2|llama))-(.+?)(?:-seed\d+)?$")  # of a report of the board
MODEL_NAMES = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}

LENGTH = 16384  # tokens, of the targets
FASTER = {  # times faster than softmax at that length, at least, causal and bidirectional alike
    "linear": 35,
    "performer": 10,
    "hedgehog": 15,
    "local": 20,
    "sinks": 20,
    "linformer": 25,
    "longformer": 10,
    "bigbird": 10,
    "sparse_transformer": 6,
    "hybrid": 15,
    "lsh": 4,
}
BOARD_TARGETS = {  # recovered / best perplexity, at most
    "hybrid": 1.005,
    "hybrid-delta": 1.005,
    "hybrid-lsh": 1.005,
    "learned_exp": 1.05,
    "deltanet": 1.05,
    "local": 1.05,
    "sinks": 1.05,
    "longformer": 1.05,
    "lsh": 1.05,
    "linformer": 1.10,
    "hedgehog": 1.15,
    "performer": 1.25,
    "linear": 1.25,
}
FASTER_DECODING = {"linear": 20, "performer": 20}


@dataclass(frozen=True)
class Target:
    """A figure that a CPU run is held to."""

    name: str
    value: float
    at_least: float


def find_targets(document: Document) -> list[Target]:
    """Return the targets of all mechanisms that were measured."""
    targets = [
        Target(f"`{row['mechanism']}`, {row['mode']}: times faster", row["ratio"], FASTER[row["mechanism"]])
        for row in document["operations"]
        if row["direction"] == "forward" and row["length"] == LENGTH and row["mechanism"] in FASTER
    ]
    context = max(row["context"] for row in document["decoding"])
    targets += [
        Target(f"`{row['mechanism']}`, decoding after {context:,}: times faster", row["ratio"], at_least)
        for row in document["decoding"]
        if row["context"] == context and (at_least := FASTER_DECODING.get(row["mechanism"]))
    ]
    return [*targets, Target("decoding state, shortest over longest context", state_constancy(document), 1)]


def state_constancy(document: Document) -> float:
    """Return smallest over largest decoding state across contexts, the least of those that call theirs constant."""
    sizes: dict[str, list[int]] = {}
    for row in document["decoding"]:
        sizes.setdefault(row["mechanism"], []).append(row["state_bytes"])
    return min(min(held) / max(held) for name, held in sizes.items() if MECHANISMS.get(name).constant_state)


def describe(document: Document) -> str:
    """Return one line on the machine, the precision, the shapes and the versions."""
    source, plan, ceilings = (document[name] for name in ("provenance", "plan", "ceilings"))
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    settings = "".join(f", {name}={value}" for name, value in source.get("allocator", {}).items())
    backend = document.get("backend", "torch")  # there was no other before it was recorded
    settings += "" if backend == "auto" else f", backend `{backend}`"
    settings += ", compiled operations" if document.get("compiled_operations") else ""
    return (
        f"{source['device']}, {source['threads']} CPU threads, {source['dtype']}, batch 1, {plan['num_heads']} heads,"
        f" dimension {plan['head_dim']}; {versions}{settings}. In the same run a matrix product reached"
        f" {ceilings['matmul_gflops']:,.0f} GFLOP/s and a copy {ceilings['copy_gigabytes_per_second']:,.0f} GB/s."
    )


def operations_table(document: Document) -> str:
    """Return times faster than softmax against length, with the length from which it pays."""
    lengths = document["plan"]["lengths"]
    cells = {
        (row["mechanism"], row["mode"], row["direction"], row["length"]): f"{row['ratio']:.3g}"
        for row in document["operations"]
    }
    rows = []
    for crossover in document["crossovers"]:
        curve = tuple(crossover[name] for name in ("mechanism", "mode", "direction"))
        longest = max(length for *measured, length in cells if tuple(measured) == curve)
        faster_from = f"not up to {longest:,}" if crossover["length"] is None else f"{crossover['length']:,}"
        rows.append([*curve, *(cells.get((*curve, length), "") for length in lengths), faster_from])
    return table(["mechanism", "mode", "pass", *(f"{length:,}" for length in lengths), "faster from"], rows)


def decoding_table(document: Document) -> str:
    """Return the time of one new token and the bytes of the cache after each context."""
    rows = []
    for row in document["decoding"]:
        time = row["milliseconds_per_token"]
        rows.append(
            [
                row["mechanism"],
                f"{row['context']:,}",
                f"{time['median']:.3g} ({time['fastest']:.3g} to {time['slowest']:.3g})",
                f"{row['ratio']:.3g}",
                f"{row['state_bytes']:,}",
            ]
        )
    return table(["mechanism", "context", "ms per token", "times faster", "bytes of cache"], rows)


def milliseconds_table(document: Document) -> str:
    """Return every measured time of the operations with its spread, and the share that its floor takes of it."""
    rows = []
    for row in document["operations"]:
        time = row["milliseconds"]
        spread = f"{time['fastest']:.3g} to {time['slowest']:.3g}"
        shape = (row["mode"], row["direction"], f"{row['length']:,}", row["mechanism"])
        share = row.get("floor_share")  # softmax has none
        floor = "" if share is None else f"{share:.0%}"
        rows.append([*shape, f"{time['median']:.3g}", spread, time["repeats"], floor])
    head = ["mode", "pass", "length", "mechanism", "median ms", "fastest to slowest", "repeats", "floor"]
    return table(head, rows)


def targets_table(document: Document) -> str:
    """Return the acceptance targets beside what was measured."""
    rows = [
        [x.name, f"{x.at_least:g}", f"{x.value:.3g}", "yes" if x.value >= x.at_least else "no"]
        for x in find_targets(document)
    ]
    return table([f"target, {LENGTH:,} tokens forward", "at least", "measured", "reached"], rows)


def summary_table(document: Document) -> str:
    """Return one row per mechanism: how much faster it is at the longest length, from which on, and what it keeps."""
    longest, context = document["plan"]["lengths"][-1], document["plan"]["contexts"][-1]
    ratios = {
        (row["mechanism"], row["mode"]): f"{row['ratio']:.3g}"
        for row in document["operations"]
        if (row["direction"], row["length"]) == ("forward", longest)
    }
    pays = {
        (row["mechanism"], row["mode"]): "not yet" if row["length"] is None else f"{row['length']:,}"
        for row in document["crossovers"]
        if row["direction"] == "forward"
    }
    decoding = {
        row["mechanism"]: (f"{row['ratio']:.3g}", f"{row['state_bytes']:,}")
        for row in document["decoding"]
        if row["context"] == context
    }
    rows = []
    for name in document["options"]:
        cells = [x.get((name, mode), "") for mode in ("causal", "bidirectional") for x in (ratios, pays)]
        rows.append([f"`{name}`", *cells, *decoding.get(name, ("", ""))])
    modes = [x for mode in ("causal", "bidirectional") for x in (f"{mode}, {longest:,}", "faster from")]
    return table(["mechanism", *modes, f"decoding after {context:,}", "bytes of cache"], rows)


def recovery_table(reports: dict[str, Document]) -> str:
    """Return test perplexities: `reports` maps "<model>-<mechanism>" to its report.json."""
    rows = []
    for name, report in sorted(reports.items()):
        model, mechanism = name.split("-", 1)
        perplexity = {kind: report["perplexity"][kind] for kind in QUALITY}
        cells = [f"{perplexity[kind]:.2f}" for kind in QUALITY]
        rows.append([model, mechanism, *cells, f"{report['ratio']:.3f}"])
    return table(["model", "mechanism", *QUALITY, "recovered / best"], rows)


def board_table(reports: dict[str, Document]) -> str:
    """Return what every recipe of the board came to, beside what it was meant to reach, and its configuration.

    Numbers are means over the seeds; behind the ratio stand the smallest and the largest of them.
    """
    seeds: dict[tuple[str, str], list[Document]] = {}
    for name, report in reports.items():
        model, recipe = RECIPE_NAME.findall(name)[0]
        seeds.setdefault((model, recipe), []).append(report)
    rows = []
    for (model, recipe), several in sorted(seeds.items()):
        first, ratios = several[0], [report["ratio"] for report in several]
        target, ratio = BOARD_TARGETS.get(recipe), fmean(ratios)
        verdict = "" if target is None else f"{target:.3f} {'reached' if ratio <= target else 'missed'}"
        options = options_text(first["options"])
        what = f"`{first['mechanism']}`" + (f" `{options}`" if options else "")
        kinds = [report["perplexity"] for report in several]
        best = fmean(min(p["original"], p["control"]) for p in kinds)
        numbers = [f"{x:.2f}" for x in (best, *(fmean(p[kind] for p in kinds) for kind in ("converted", "recovered")))]
        spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        command = f"`{RECIPE.findall(first['provenance']['command'])[0]}`"
        tokens = f"{first['training']['tokens'] / 1e6:.1f} M"
        figures = [tokens, str(len(several)), *numbers, f"**{ratio:.3f}**{spread}"]
        rows.append([model, recipe, what, *figures, verdict, command])
    head = ["model", "recipe", "mechanism", "tokens", "seeds", "best", "converted", "recovered", "/ best", "target"]
    return table([*head, "configuration"], rows)


def retrieval_table(document: Document) -> str:
    """Return what an embedding model retrieved before and after its conversion, and the share that it kept."""
    rows = [row for row in document["stages"] if "recall" in row]
    tokens = sum(row["tokens"] for row in document["stages"])
    options = options_text(document["options"])
    kinds = ("recall", "article_accuracy")
    lines = [[row["stage"], *(f"{row[kind]:.4f} ({row[kind] / rows[0][kind]:.2%})" for kind in kinds)] for row in rows]
    what = (
        f"{document['model']} with `{document['mechanism']}` `{options}`, {tokens:,} training tokens,"
        f" {rows[0]['num_paragraphs']:,} paragraphs of the test split; in brackets the share of the original's."
    )
    return f"{what}\n\n{table(['model', 'recall@10', 'nearest neighbour from the same article'], lines)}"


def peers_table(document: Document) -> str:
    """Return how many times faster than other libraries' ours is, at every length."""
    lengths = sorted({row["length"] for row in document["rows"]})
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for row in document["rows"]:
        name = f"{row['package']} {row['version']}, `{row['interface']}`"
        key = (name, f"`{row['mechanism']}`", row["mode"], row["direction"], row["differs"])
        rows.setdefault(key, {})[row["length"]] = f"{row['ratio']:.3g}"
    lines = [[*key[:-1], *(cells.get(length, "") for length in lengths), key[-1]] for key, cells in rows.items()]
    return table(["theirs", "ours", "mode", "pass", *(f"{n:,}" for n in lengths), "what theirs does otherwise"], lines)


def needs_recovery(document: Document) -> dict[str, list[str]]:
    """Return mechanism -> the options, as text, with which it does worse than the mean of the values on some model."""
    mean = next(row["perplexity"] for row in document["rows"] if row["mechanism"] == MEAN_OF_VALUES)
    worse: dict[str, list[str]] = {}
    for row in document["rows"]:
        if any(value > mean[model] for model, value in row["perplexity"].items()):
            worse.setdefault(row["mechanism"], []).append(options_text(row["options"]))
    return worse


def zero_shot_table(document: Document) -> str:
    """Return test perplexities before any training, and whether a mechanism does worse than the mean of the values."""
    worse = needs_recovery(document)
    models = list(document["rows"][0]["perplexity"])
    rows = []
    for row in document["rows"]:
        name, options = row["mechanism"], options_text(row["options"])
        baseline = name in (ORIGINAL, MEAN_OF_VALUES)
        verdict = "" if baseline else "yes" if options in worse.get(name, []) else "no"
        cells = [f"{row['perplexity'][x]:,.1f}" if x in row["perplexity"] else "" for x in models]
        rows.append([name if baseline else f"`{name}`", f"`{options}`" if options else "", *cells, verdict])
    columns = [MODEL_NAMES.get(model, model) for model in models]
    return table(["mechanism", "options", *columns, "worse than the mean: needs recovery"], rows)


def calibration_table(document: Document, reports: dict[str, Document]) -> str:
    """Return perplexities before and after calibration, and how much of the way to the recipe's best that is.

    The way is measured in log-perplexity, from the converted model to the better of original and control: the best
    control of `reports`, those of the recipes.
    """
    control: dict[str, float] = {}
    for recipe, report in reports.items():
        model = recipe.split("-")[0]
        control[model] = min(report["perplexity"]["control"], control.get(model, math.inf))
    rows = []
    for row in document["rows"]:
        for model, result in row["models"].items():
            best = min(result["original"], control[model])
            way = math.log(result["zero_shot"] / result["calibrated"]) / math.log(result["zero_shot"] / best)
            perplexities = [f"{x:,.1f}" for x in (result["zero_shot"], result["calibrated"], best)]
            options = f"`{options_text(row['options'])}`" if row["options"] else ""
            name = [MODEL_NAMES.get(model, model), f"`{row['mechanism']}`", options]
            rows.append([*name, *perplexities, f"{way:z.0%}", f"{result['seconds']:.0f}"])
    return table(["model", "mechanism", "options", "converted", "calibrated", "best", "of the way", "seconds"], rows)


def recall_table(document: Document) -> str:
    """Return the share of right answers of every converted model beside the bytes of its state, smallest first."""
    rows = [
        [
            f"`{row['mechanism']}`",
            f"`{options_text(row['options'])}`" if row["options"] else "",
            f"{row['state_bytes']:,}",
            *(f"{row[stage]:.1%}" for stage in ("converted", "calibrated", "trained")),
        ]
        for row in sorted(document["rows"], key=lambda row: row["state_bytes"])
    ]
    return table(["mechanism", "options", "bytes of state", "converted", "calibrated", "trained"], rows)


def speed_section(documents: dict[str, Document]) -> str:
    """Return what the project's README says about speed."""
    parts = []
    for document in documents.values():
        parts += [describe(document), summary_table(document)]
    return "\n\n".join(parts)


def results_page(
    documents: dict[str, Document],
    reports: dict[str, Document],
    long_inputs: Document | None = None,
    peers: Document | None = None,
    depth: Document | None = None,
) -> str:
    """Return benchmarks/results/README.md."""
    parts = ["# Results", "Generated by `python -m benchmarks.run --tables-only` from the JSON files in this folder."]
    for name, document in documents.items():
        parts += [f"## {name}", describe(document)]
        if name.startswith("cpu") and document["provenance"]["dtype"] == "float32":  # what the targets are for
            parts += ["### Targets", targets_table(document)]
        parts += ["### Times faster than softmax", operations_table(document)]
        parts += ["### Decoding", decoding_table(document), "### Milliseconds", milliseconds_table(document)]
    if long_inputs:
        parts += [f"## {LONG_INPUTS_FILE}", *long_inputs_tables(long_inputs)]
    if peers:
        parts += [f"## {PEERS_FILE}", "Times faster than other libraries' implementations.", peers_table(peers)]
    if depth:
        parts += [f"## {DEPTH_FILE}", *depth_parts(depth), f"![peak bytes against depth]({DEPTH_PLOT})"]
    if reports:
        parts += ["## Test perplexity", recovery_table(reports)]
    return "\n\n".join(parts) + "\n"


def write_tables(root: Path = ROOT) -> None:
    """Rewrite the results page and the README's generated sections from whatever result files exist."""
    results = root / "benchmarks" / "results"
    documents = {name: read(results / name) for name in SPEED_FILES if (results / name).exists()}
    reports = recovery_reports(results)
    results.mkdir(parents=True, exist_ok=True)
    files = [results / name for name in (LONG_INPUTS_FILE, PEERS_FILE, DEPTH_FILE)]
    others = [read(file) if file.exists() else None for file in files]
    write_text(results / "README.md", results_page(documents, reports, *others))
    text = (root / "README.md").read_text(encoding="utf-8")
    text = replace_section(text, "benchmarks", speed_section(documents))
    text = replace_section(text, "recovery", recovery_table(reports) if reports else "")
    board = board_reports(results)
    text = replace_section(text, "board", board_table(board) if board else "")
    retrieved = results / RETRIEVAL_FILE
    text = replace_section(text, "retrieval", retrieval_table(read(retrieved)) if retrieved.exists() else "")
    depth = others[-1]
    text = replace_section(text, "depth", "\n\n".join(depth_parts(depth)) if depth else "")
    write_text(root / "README.md", text)


def board_reports(results: Path = RESULTS) -> dict[str, Document]:
    """Return "<model>-<recipe>[-seed<n>]" -> the report of that recipe."""
    return {path.stem: read(path) for path in sorted((results / "board").glob("*.json"))}


def recovery_reports(results: Path = RESULTS) -> dict[str, Document]:
    """Return "<model>-<mechanism>" -> the report of that recipe."""
    return {path.stem: read(path) for path in sorted((results / "recovery").glob("*.json"))}


def read(path: Path) -> Document:
    """Return a JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))
