"""Markdown tables from the JSON files under `benchmarks/results`; no number is written by hand.

`write_tables` rewrites `benchmarks/results/README.md` and the generated sections of the project's README, each between
`<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.gpu_tables import gpu_parts, gpu_results_parts
from benchmarks.markdown import Document, options_text, replace_section, table
from benchmarks.memory_tables import depth_parts, long_inputs_tables, prompts_table
from benchmarks.speed_tables import (
    decoding_table,
    describe,
    milliseconds_table,
    operations_table,
    peers_table,
    summary_table,
    targets_table,
)
from hf_linattn.config import make_config
from hf_linattn.files import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = (
    "cpu", "cpu_xeon", "cpu_emerald_rapids", "cpu_genoa", "cpu_granite_rapids", "cpu_granite_rapids_bfloat16", "gpu",
)  # fmt: skip
SPEED_FILES = tuple(f"{machine}{kind}.json" for machine in MACHINES for kind in ("", "_torch", "_compiled", "_triton"))
README_FILES = (
    "cpu_granite_rapids.json", "cpu_granite_rapids_bfloat16.json", "gpu.json",
)  # fmt: skip
GPU_FILES = tuple(name for name in SPEED_FILES if name.startswith("gpu"))
QUALITY = ("original", "control", "converted", "recovered")
ZERO_SHOT_FILE = "zero_shot.json"
USABLE_FILE = "usable.json"
SUPPORT_FILE = "support.json"
RETRIEVAL_FILE = "retrieval.json"
CALIBRATION_FILE = "calibration.json"
LONG_INPUTS_FILES = ("cpu_long_inputs.json", "cpu_long_inputs_bfloat16.json")
PEERS_FILE = "cpu_peers.json"
DEPTH_FILE, DEPTH_PLOT = "depth.json", "depth.png"
MQAR_FILE, MQAR_PLOT = "mqar.json", "mqar.png"
ORIGINAL, MEAN_OF_VALUES = "original", "mean of the values"  # rows of the zero-shot results that are no mechanism
RECIPE_NAME = re.compile(r"((?:\w+-)?(?:bert|gpt2|llama))-(.+?)(?:-seed\d+)?$")  # of a report of the board
USABLE = 1.1  # of the original's perplexity at most, before any training
MODEL_NAMES = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}

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
        tokens = f"{first['training']['tokens'] / 1e6:.1f} M"
        figures = [tokens, str(len(several)), *numbers, f"**{ratio:.3f}**{spread}"]
        rows.append([model, recipe, what, *figures, verdict, f"`recipes/models/{model}.yaml --row {recipe}`"])
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


def usable(document: Document) -> dict[str, str]:
    """Return mechanism -> whether it is usable untrained, `yes` or `no`, with its defaults, if that was measured."""
    rows, verdicts = document["rows"], dict[str, str]()
    bound = USABLE * next(row["perplexity"] for row in rows if row["mechanism"] == ORIGINAL)
    for row in rows:
        name = row["mechanism"]
        if name != ORIGINAL and make_config(name, row["options"]) == make_config(name, {}):
            verdicts[name] = "yes" if row["perplexity"] <= bound else "no"
    return verdicts


def usable_table(document: Document) -> str:
    """Return perplexities of a larger model right after patching, and how far they are from the original's."""
    original = next(row["perplexity"] for row in document["rows"] if row["mechanism"] == ORIGINAL)
    rows = []
    for row in document["rows"]:
        ratio, options = row["perplexity"] / original, options_text(row["options"])
        baseline = row["mechanism"] == ORIGINAL
        verdict = "" if baseline else "yes" if ratio <= USABLE else "no"
        name = row["mechanism"] if baseline else f"`{row['mechanism']}`"
        rows.append([name, f"`{options}`" if options else "", f"{row['perplexity']:,.1f}", f"{ratio:,.3f}", verdict])
    return table(["mechanism", "options", "perplexity", "/ original", "usable untrained"], rows)


def zero_shot_table(document: Document, verdicts: Mapping[str, str]) -> str:
    """Return test perplexities before any training, and beside them whether a mechanism is usable so: `usable`."""
    models = list(document["rows"][0]["perplexity"])
    rows = []
    for row in document["rows"]:
        name, options = row["mechanism"], options_text(row["options"])
        baseline = name in (ORIGINAL, MEAN_OF_VALUES)
        cells = [f"{row['perplexity'][x]:,.1f}" if x in row["perplexity"] else "" for x in models]
        shown = name if baseline else f"`{name}`"
        rows.append([shown, f"`{options}`" if options else "", *cells, verdicts.get(name, "")])
    columns = [MODEL_NAMES.get(model, model) for model in models]
    return table(["mechanism", "options", *columns, "usable untrained"], rows)


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
    """Return what the project's README says about speed: of the machine measured last, and of GPUs."""
    parts = []
    for name in README_FILES:
        if name in documents:
            document = documents[name]
            parts += gpu_parts(document) if name in GPU_FILES else [describe(document), summary_table(document)]
    return "\n\n".join(parts)


def prompts_section(documents: dict[str, Document]) -> str:
    """Return what the project's README says about long prompts, in every precision."""
    parts = []
    for document in documents.values():
        source = document["provenance"]
        parts += [f"{source['device']}, {source['threads']} CPU threads, {source['dtype']}.", prompts_table(document)]
    return "\n\n".join(parts)


def results_page(
    documents: dict[str, Document],
    reports: dict[str, Document],
    long_inputs: dict[str, Document],
    peers: Document | None = None,
    depth: Document | None = None,
) -> str:
    """Return benchmarks/results/README.md."""
    parts = ["# Results", "Generated by `python -m benchmarks.run --tables-only` from the JSON files in this folder."]
    for name, document in documents.items():
        parts.append(f"## {name}")
        if name in GPU_FILES:
            parts += [*gpu_parts(document), *gpu_results_parts(document)]
            continue
        parts.append(describe(document))
        if name.startswith("cpu") and document["provenance"]["dtype"] == "float32":  # what the targets are for
            parts += ["### Targets", targets_table(document)]
        parts += ["### Times faster than softmax", operations_table(document)]
        parts += ["### Decoding", decoding_table(document), "### Milliseconds", milliseconds_table(document)]
    for name, document in long_inputs.items():
        parts += [f"## {name}", *long_inputs_tables(document)]
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
    documents, long_inputs = (
        {name: read(results / name) for name in names if (results / name).exists()}
        for names in (SPEED_FILES, LONG_INPUTS_FILES)
    )
    reports = recovery_reports(results)
    results.mkdir(parents=True, exist_ok=True)
    peers, depth = (read(file) if (file := results / name).exists() else None for name in (PEERS_FILE, DEPTH_FILE))
    write_text(results / "README.md", results_page(documents, reports, long_inputs, peers, depth))
    text = (root / "README.md").read_text(encoding="utf-8")
    text = replace_section(text, "benchmarks", speed_section(documents))
    text = replace_section(text, "prompts", prompts_section(long_inputs))
    text = replace_section(text, "recovery", recovery_table(reports) if reports else "")
    board = board_reports(results)
    text = replace_section(text, "board", board_table(board) if board else "")
    retrieved = results / RETRIEVAL_FILE
    text = replace_section(text, "retrieval", retrieval_table(read(retrieved)) if retrieved.exists() else "")
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
