"""Tables of what length and depth cost in memory, of long contexts and of long prompts."""

from __future__ import annotations

from benchmarks.measure.prompts import NOTHING
from benchmarks.result_files import Document
from benchmarks.tables.markdown import MODES, code, number, pivot, table, timed

PEAKS = "peak_bytes_"  # begins the name of a count by rows of a batch and tokens of a row


def long_inputs_tables(document: Document) -> list[str]:
    """Return what long inputs cost: memory of a training step, a token after a long context, a prompt."""
    memory = pivot(document["memory"], ["mechanism"], "mode", "ratio")
    lines = [[timed(name, document), *(number(x.get(mode)) for mode in MODES)] for (name,), x in memory.items()]
    length = document["memory"][0]["length"]
    what = f"Most memory of forward and backward over {length:,} tokens, over that of operands and gradients."
    contexts = [str(context) for context in document["contexts"]]
    rows = [
        [
            timed(row["mechanism"], document),
            *(number(row["milliseconds_per_token"][context]["median"]) for context in contexts),
            number(row["long_over_short"]),
        ]
        for row in document["lengths"]
    ]
    head = ["mechanism", *(f"ms after {int(context):,}" for context in contexts), "ratio"]
    return [what, table(["mechanism", *MODES], lines), table(head, rows), prompts_table(document)]


def prompts_table(document: Document) -> str:
    """Return the seconds of a long prompt, read at once and in pieces."""
    whole, piece = sorted((int(tokens) for tokens in document["prompts"][0]["seconds"]), reverse=True)
    head = ["attention", f"{whole:,} tokens at once, seconds", f"{piece:,} at a time", "times faster"]
    rows = [
        [
            timed(row["attention"], document, [NOTHING]),
            *(number(row["seconds"][str(tokens)]) for tokens in (whole, piece)),
            number(row["times_faster"]),
        ]
        for row in document["prompts"]
    ]
    return table(head, rows)


def depth_parts(document: Document) -> list[str]:
    """Return what a training step takes at every depth, in hidden states, and how that grows from layer to layer."""
    curves = pivot(document["rows"], ["mechanism", "way"], "depth", "hidden_states")
    depths = sorted({row["depth"] for row in document["rows"]})
    lines = []
    for (mechanism, way), curve in curves.items():
        growth = (curve[depths[-1]] - curve[depths[0]]) / (depths[-1] - depths[0])
        cells = [f"{curve[depth]:.1f}" for depth in depths]
        lines.append([code(mechanism), way, *cells, f"{growth:.2f}", f"{curve[depths[-1]] / curve[depths[0]]:.2f}"])
    head = ["mechanism", "step", *(f"{depth} layers" for depth in depths), "per layer", "deepest / shallowest"]
    hidden_state = document["length"] * document["width"] * 4
    what = (
        f"Most bytes alive at once in a training step of a Llama of width {document['width']} over"
        f" {document['length']:,} tokens, beyond weights and their gradients, in hidden states of {hidden_state:,}"
        f" bytes. Chunks are of {document['chunk_size']} tokens."
    )
    return [what, table(head, lines)]


def plans_parts(document: Document) -> str:
    """Return the peak memory of the stages of recipes, and of one recipe with more rows at a time."""
    lines, whole = [], []
    for name, found in document["recipes"].items():
        for stage, plan in found.get("stages", {}).items():
            peak = f"{plan['peak_bytes'] / 1e9:.1f}"
            lines.append(
                [code(name), code(stage), f"{plan['tokens_at_once']:,}", str(plan["copies_of_the_weights"]), peak]
            )
        for part, peaks in found.items():
            if part.startswith(PEAKS):
                rows, length = map(int, part.removeprefix(PEAKS).split("x"))
                cells = [f"{bytes_ / 1e9:.1f}" for bytes_ in peaks.values()]
                whole.append([code(name), f"{rows} x {length:,}", *cells])
    stages = table(["recipe", "stage", "tokens at a time", "copies of the weights", "GB"], lines)
    shown = "The first recipe without its last stage, counted on all its layers; matrix products are left out:"
    return "\n\n".join(
        [stages, shown, table(["recipe", "rows at a time", "GB in `transfer`", "in `recovered_training`"], whole)]
    )
