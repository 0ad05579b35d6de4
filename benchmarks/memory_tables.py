"""Markdown tables of what length and depth cost in memory, of long contexts and of long prompts."""

from __future__ import annotations

from benchmarks.markdown import Document, table
from benchmarks.prompts import NOTHING


def long_inputs_tables(document: Document) -> list[str]:
    """Return what long inputs cost: memory of a training step, a token after a long context, a prompt."""
    memory: dict[str, dict[str, str]] = {}
    for row in document["memory"]:
        memory.setdefault(row["mechanism"], {})[row["mode"]] = f"{row['ratio']:.3g}"
    modes, length = ("causal", "bidirectional"), document["memory"][0]["length"]
    lines = [[f"`{name}`", *(held.get(mode, "") for mode in modes)] for name, held in memory.items()]
    what = f"Most memory of forward and backward over {length:,} tokens, over that of operands and gradients."
    contexts = [str(context) for context in document["contexts"]]
    rows = [
        [
            f"`{row['mechanism']}`",
            *(f"{row['milliseconds_per_token'][context]['median']:.3g}" for context in contexts),
            f"{row['long_over_short']:.3g}",
        ]
        for row in document["lengths"]
    ]
    head = ["mechanism", *(f"ms after {int(context):,}" for context in contexts), "ratio"]
    return [what, table(["mechanism", *modes], lines), table(head, rows), prompts_table(document)]


def prompts_table(document: Document) -> str:
    """Return the seconds of a long prompt, read at once and in pieces."""
    whole, piece = sorted((int(tokens) for tokens in document["prompts"][0]["seconds"]), reverse=True)
    head = ["attention", f"{whole:,} tokens at once, seconds", f"{piece:,} at a time", "times faster"]
    rows = [
        [
            row["attention"] if row["attention"] == NOTHING else f"`{row['attention']}`",
            *(f"{row['seconds'][str(tokens)]:.3g}" for tokens in (whole, piece)),
            f"{row['times_faster']:.3g}",
        ]
        for row in document["prompts"]
    ]
    return table(head, rows)


def depth_parts(document: Document) -> list[str]:
    """Return what a training step takes at every depth, in hidden states, and how that grows from layer to layer."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in document["rows"]:
        curves.setdefault((row["mechanism"], row["way"]), {})[row["depth"]] = row["hidden_states"]
    depths = sorted({row["depth"] for row in document["rows"]})
    lines = []
    for (mechanism, way), curve in curves.items():
        growth = (curve[depths[-1]] - curve[depths[0]]) / (depths[-1] - depths[0])
        cells = [f"{curve[depth]:.1f}" for depth in depths]
        lines.append([f"`{mechanism}`", way, *cells, f"{growth:.2f}", f"{curve[depths[-1]] / curve[depths[0]]:.2f}"])
    head = ["mechanism", "step", *(f"{depth} layers" for depth in depths), "per layer", "deepest / shallowest"]
    hidden_state = document["length"] * document["width"] * 4
    what = (
        f"Most bytes alive at once in a training step of a Llama of width {document['width']} over"
        f" {document['length']:,} tokens, beyond weights and their gradients, in hidden states of {hidden_state:,}"
        f" bytes. Chunks are of {document['chunk_size']} tokens."
    )
    return [what, table(head, lines)]
