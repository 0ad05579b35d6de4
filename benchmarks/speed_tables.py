"""Markdown tables of speed: of operations, decoding and peers, and which targets are reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.markdown import Document, table
from hf_linattn.mechanisms import MECHANISMS

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
FASTER_DECODING = {"linear": 20, "performer": 20}


@dataclass(frozen=True)
class Target:
    """A figure that a run is held to."""

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
    """Return one line on the machine, the precision, the shapes and the versions; a GPU's without CPU threads."""
    source, plan, ceilings = (document[name] for name in ("provenance", "plan", "ceilings"))
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    settings = "".join(f", {name}={value}" for name, value in source.get("allocator", {}).items())
    backend = document.get("backend", "torch")  # there was no other before it was recorded
    threads = "" if "cuda" in source["versions"] else f"{source['threads']} CPU threads, "
    settings += "" if backend == "auto" else f", backend `{backend}`"
    settings += ", compiled operations" if document.get("compiled_operations") else ""
    return (
        f"{source['device']}, {threads}{source['dtype']}, batch {plan.get('batch', 1)}, {plan['num_heads']} heads,"
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
    return judged(f"target, {LENGTH:,} tokens forward", find_targets(document))


def judged(title: str, targets: Sequence[Target]) -> str:
    """Return targets beside what was measured."""
    rows = [[x.name, f"{x.at_least:g}", f"{x.value:.3g}", "yes" if x.value >= x.at_least else "no"] for x in targets]
    return table([title, "at least", "measured", "reached"], rows)


def summary_table(document: Document) -> str:
    """Return one row per mechanism: how much faster it is at the longest length, from which on, and what it keeps."""
    longest, contexts = document["plan"]["lengths"][-1], document["plan"]["contexts"]
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
        if row["context"] == contexts[-1]
    }
    head = ["mechanism", *(x for mode in ("causal", "bidirectional") for x in (f"{mode}, {longest:,}", "faster from"))]
    head += [f"decoding after {contexts[-1]:,}", "bytes of cache"] if contexts else []
    rows = []
    for name in document["options"]:
        cells = [x.get((name, mode), "") for mode in ("causal", "bidirectional") for x in (ratios, pays)]
        rows.append([f"`{name}`", *cells, *(decoding.get(name, ("", "")) if contexts else ())])
    return table(head, rows)


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
