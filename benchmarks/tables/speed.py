"""Tables of speed: of operations, decoding and peers, and which targets are reached."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure.operations import BASELINES
from benchmarks.measure.targets import FORWARD, LENGTH, Target, find_targets
from benchmarks.result_files import Document
from benchmarks.tables.markdown import MODES, code, count, number, pivot, share, table, timed


def describe(document: Document) -> str:
    """Return one line on the machine, the precision, the shapes and the versions; a GPU's without CPU threads."""
    source, plan, ceilings = (document[name] for name in ("provenance", "plan", "ceilings"))
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    settings = "".join(f", {name}={value}" for name, value in source.get("allocator", {}).items())
    backend = document.get("backend", "torch")  # there was no other before it was recorded
    threads = "" if "cuda" in source["versions"] else f"{source['threads']} CPU threads, "
    settings += ", the tiles of older GPUs" if source.get("small_tiles") else ""
    settings += "" if backend == "auto" else f", backend `{backend}`"
    settings += ", compiled operations" if document.get("compiled_operations") else ""
    return (
        f"{source['device']}, {threads}{source['dtype']}, batch {plan.get('batch', 1)}, {plan['num_heads']} heads,"
        f" dimension {plan['head_dim']}; {versions}{settings}. In the same run a matrix product reached"
        f" {ceilings['matmul_gflops']:,.0f} GFLOP/s and a copy {ceilings['copy_gigabytes_per_second']:,.0f} GB/s."
    )


def operations_table(document: Document) -> str:
    """Return times faster than softmax against length, with the length from which it pays."""
    names, lengths, rows = ("mechanism", "mode", "direction"), document["plan"]["lengths"], []
    curves = pivot(document["operations"], names, "length", "ratio")
    for crossover in document["crossovers"]:
        curve = tuple(crossover[name] for name in names)
        ratios = curves[curve]
        faster_from = count(crossover["length"], f"not up to {max(ratios):,}")
        what = [timed(curve[0], document), *curve[1:]]
        rows.append([*what, *(number(ratios.get(length)) for length in lengths), faster_from])
    return table(["mechanism", "mode", "pass", *map(count, lengths), "faster from"], rows)


def decoding_table(document: Document) -> str:
    """Return the time of one new token and the bytes of the cache after each context."""
    rows = []
    for row in document["decoding"]:
        time = row["milliseconds_per_token"]
        milliseconds = f"{time['median']:.3g} ({time['fastest']:.3g} to {time['slowest']:.3g})"
        name, sizes = timed(row["mechanism"], document, BASELINES), [count(row[x]) for x in ("context", "state_bytes")]
        rows.append([name, sizes[0], milliseconds, number(row["ratio"]), sizes[1]])
    return table(["mechanism", "context", "ms per token", "times faster", "bytes of cache"], rows)


def graphs_section(document: Document) -> str:
    """Return what a token takes as one compiled graph, beside operations one by one and the products with weights."""
    source, rows = document["provenance"], document["rows"]
    what = (
        f"{source['device']}, {source['threads']} CPU thread, {source['dtype']}; the small Llama of the tables above"
        f" after {count(document['context'])} tokens, milliseconds of the processor for one more. The last column is"
        " the ratio of what both take beside the products."
    )
    head = ["attention", "default cache", "one graph", "the products alone", "ratio", "ratio beside the products"]
    cells = [
        [timed(row["mechanism"], document), *(number(row[x]["median"]) for x in ("eager", "compiled", "products")),
         number(row["ratio"]), number(row["ratio_beyond_products"])]
        for row in rows
    ]  # fmt: skip
    return "\n\n".join([what, table(head, cells)])


def milliseconds_table(document: Document) -> str:
    """Return every measured time of the operations with its spread, and the share that its floor takes of it."""
    rows = []
    for row in document["operations"]:
        time = row["milliseconds"]
        spread = f"{time['fastest']:.3g} to {time['slowest']:.3g}"
        shape = (row["mode"], row["direction"], count(row["length"]), timed(row["mechanism"], document, BASELINES))
        rows.append([*shape, number(time["median"]), spread, time["repeats"], share(row.get("floor_share"))])
    head = ["mode", "pass", "length", "mechanism", "median ms", "fastest to slowest", "repeats", "floor"]
    return table(head, rows)


def targets_table(document: Document) -> str:
    """Return the acceptance targets beside what was measured."""
    return judged(f"target, {LENGTH:,} tokens forward", find_targets(document))


def judged(title: str, targets: Sequence[Target]) -> str:
    """Return targets beside what was measured."""
    rows = [[x.name, f"{x.at_least:g}", number(x.value), "yes" if x.value >= x.at_least else "no"] for x in targets]
    return table([title, "at least", "measured", "reached"], rows)


def summary_table(document: Document) -> str:
    """Return one row per mechanism: how much faster it is at the longest length, from which on, and what it keeps."""
    longest, contexts = document["plan"]["lengths"][-1], document["plan"]["contexts"]
    ratios = {
        (row["mechanism"], row["mode"]): number(row["ratio"])
        for row in document["operations"]
        if (row["direction"], row["length"]) == (FORWARD, longest)
    }
    pays = {
        (row["mechanism"], row["mode"]): count(row["length"])
        for row in document["crossovers"]
        if row["direction"] == FORWARD
    }
    decoding = {
        row["mechanism"]: (number(row["ratio"]), count(row["state_bytes"]))
        for row in document["decoding"]
        if row["context"] == contexts[-1]
    }
    head = ["mechanism", *(x for mode in MODES for x in (f"{mode}, {longest:,}", "faster from"))]
    head += [f"decoding after {contexts[-1]:,}", "bytes of cache"] if contexts else []
    rows = []
    for name in document["options"]:
        cells = [x.get((name, mode), "") for mode in MODES for x in (ratios, pays)]
        rows.append([timed(name, document), *cells, *(decoding.get(name, ("", "")) if contexts else ())])
    return table(head, rows)


def start_table(document: Document) -> str:
    """Return how long the processor works until something has started."""
    source, rows = document["provenance"], [[row["started"], f"{row['seconds']:.2f}"] for row in document["rows"]]
    return f"{source['device']}.\n\n{table(['started', 'seconds of the processor'], rows)}"


def peers_table(document: Document) -> str:
    """Return how many times faster than other libraries' ours is, at every length."""
    lengths = sorted({row["length"] for row in document["rows"]})
    names = ("package", "version", "interface", "mechanism", "mode", "direction", "differs")
    rows = pivot(document["rows"], names, "length", "ratio")
    lines = [
        [f"{package} {version}, `{interface}`", code(ours), *how, *(number(ratios.get(n)) for n in lengths), differs]
        for (package, version, interface, ours, *how, differs), ratios in rows.items()
    ]
    return table(["theirs", "ours", "mode", "pass", *map(count, lengths), "what theirs does otherwise"], lines)
