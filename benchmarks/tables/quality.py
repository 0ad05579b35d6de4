"""Tables of quality: perplexity before and after calibration and recovery, retrieval, associative recall."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean

from benchmarks.measure.targets import BOARD_TARGETS
from benchmarks.result_files import MEAN_OF_VALUES, ORIGINAL, WINDOWS, Document
from benchmarks.tables.markdown import code, count, options_text, shown, table, with_options
from hf_linattn.config import make_config
from hf_linattn.evaluation.paired import mean_score, paired_difference

BASELINES = (ORIGINAL, MEAN_OF_VALUES)
QUALITY = ("original", "control", "converted", "recovered")
RECIPE_NAME = re.compile(r"((?:\w+-)?(?:bert|gpt2|llama))-(.+?)(?:-seed\d+)?$")  # of a report of the board
USABLE = 1.1  # of the original's perplexity at most, before any training
MODEL_NAMES = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}


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
        what = with_options(first["mechanism"], first["options"])
        kinds = [report["perplexity"] for report in several]
        best = fmean(min(p["original"], p["control"]) for p in kinds)
        numbers = [f"{x:.2f}" for x in (best, *(fmean(p[kind] for p in kinds) for kind in ("converted", "recovered")))]
        spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
        tokens = f"{first['training']['tokens'] / 1e6:.1f} M"
        figures = [tokens, str(len(several)), *numbers, f"**{ratio:.3f}**{spread}"]
        rows.append([model, recipe, what, *figures, verdict, code(f"recipes/models/{model}.yaml --row {recipe}")])
    head = ["model", "recipe", "mechanism", "tokens", "seeds", "best", "converted", "recovered", "x best", "target"]
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


def long_embeddings_table(document: Document) -> str:
    """Return how many paragraphs find their article, and how many more than where windows are averaged."""
    rows = {row["row"]: row for row in document["rows"]}
    windows, lines = rows[WINDOWS], []
    right = {name: [float(x) for x in row["right"]] for name, row in rows.items()}
    for name, row in rows.items():
        found, than = mean_score(right[name]), paired_difference(name, WINDOWS, right[name], right[WINDOWS])
        score = f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"
        more = "" if name == WINDOWS else f"{than.value:+.3f} ({than.low:+.3f} to {than.high:+.3f})"
        known = name if "mechanism" not in row else with_options(row["mechanism"], row["options"])
        lines.append([known, count(row["length"]), f"{row.get('trained', 0):,}", score, more])
    what = (
        f"{document['model']}, {len(windows['right'])} paragraphs of {windows['articles']} articles. In brackets the"
        " 95 % interval, as if paragraphs of an article were independent."
    )
    head = ["reader", "tokens read", "tokens trained", "own article is the nearest", "more than in windows"]
    return f"{what}\n\n{table(head, lines)}"


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
        ratio, options = row["perplexity"] / original, code(options_text(row["options"]))
        verdict = "" if row["mechanism"] == ORIGINAL else "yes" if ratio <= USABLE else "no"
        numbers = [f"{row['perplexity']:,.1f}", f"{ratio:,.3f}"]
        rows.append([shown(row["mechanism"], BASELINES), options, *numbers, verdict])
    return table(["mechanism", "options", "perplexity", "/ original", "usable untrained"], rows)


def zero_shot_table(document: Document, verdicts: Mapping[str, str]) -> str:
    """Return test perplexities before any training, and beside them whether a mechanism is usable so: `usable`."""
    models = list(document["rows"][0]["perplexity"])
    rows = []
    for row in document["rows"]:
        name, options = row["mechanism"], code(options_text(row["options"]))
        cells = [f"{row['perplexity'][x]:,.1f}" if x in row["perplexity"] else "" for x in models]
        rows.append([shown(name, BASELINES), options, *cells, verdicts.get(name, "")])
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
            name = [MODEL_NAMES.get(model, model), code(row["mechanism"]), code(options_text(row["options"]))]
            rows.append([*name, *perplexities, f"{way:z.0%}", f"{result['seconds']:.0f}"])
    return table(["model", "mechanism", "options", "converted", "calibrated", "best", "won back", "seconds"], rows)


def recall_table(document: Document) -> str:
    """Return the share of right answers of every converted model beside the bytes of its state, smallest first."""
    rows = [
        [
            code(row["mechanism"]),
            code(options_text(row["options"])),
            count(row["state_bytes"]),
            *(f"{row[stage]:.1%}" for stage in ("converted", "calibrated", "trained")),
        ]
        for row in sorted(document["rows"], key=lambda row: row["state_bytes"])
    ]
    return table(["mechanism", "options", "bytes of state", "converted", "calibrated", "trained"], rows)
