"""What a run is held to, on a CPU, on a GPU and after recovery, and how far a measured run came."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.measure.fla_kernels import FLA_ALONE, FLA_MAPPED
from benchmarks.measure.stopwatch import FLASH
from benchmarks.result_files import Document
from hf_linattn.mechanisms import MECHANISMS

LENGTH = 16384  # tokens, of the targets
FORWARD, BOTH, BACKWARD = "forward", "forward+backward", "backward"
FASTER = {  # times faster than softmax at that length, at least, causal and bidirectional alike
    "linear": 35,
    "performer": 10,
    "hedgehog": 15,
    "local": 20,
    "streaming": 20,
    "linformer": 25,
    "longformer": 10,
    "bigbird": 10,
    "sparse_transformer": 6,
    "hybrid": 15,
    "lsh": 4,
    "gated_deltanet": 12,
}
FASTER_DECODING = {"linear": 20, "performer": 20, "gated_deltanet": 15, "lsh": 8}
# what a causal mechanism is held to: times faster than FlashAttention, forward and backward
FASTER_THAN_FLASH = {"linear": (8, 4), "hedgehog": (4, 2), "hybrid": (4, 2)}
STEP_MICROSECONDS = 30  # of a decoding step, at most
BOARD_TARGETS = {  # recovered / best perplexity, at most
    "hybrid": 1.005,
    "hybrid-delta": 1.005,
    "hybrid-lsh": 1.005,
    "learned_exp": 1.05,
    "deltanet": 1.05,
    "local": 1.05,
    "streaming": 1.05,
    "longformer": 1.05,
    "lsh": 1.05,
    "linformer": 1.10,
    "hedgehog": 1.15,
    "performer": 1.25,
    "linear": 1.25,
}
Key = tuple[str, str, str, int]  # mechanism or baseline, mode, pass, length


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
        if row["direction"] == FORWARD and row["length"] == LENGTH and row["mechanism"] in FASTER
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
    return min(min(size) / max(size) for name, size in sizes.items() if MECHANISMS.get(name).constant_state)


def find_gpu_targets(document: Document) -> list[Target]:
    """Return the targets of what was measured at their length; a step's are times that it is below its own."""
    times, targets = medians(document), []
    for name, wanted in FASTER_THAN_FLASH.items():
        for one, at_least in zip((FORWARD, BACKWARD), wanted, strict=True):
            own, flash = (times.get((x, "causal", one, LENGTH)) for x in (name, FLASH))
            if own and flash:
                targets.append(Target(f"`{name}`, {one}: FlashAttention / its time", flash / own, at_least))
    for fla in (FLA_MAPPED, FLA_ALONE):
        own, other = (times.get((x, "causal", FORWARD, LENGTH)) for x in ("linear", fla))
        if own and other:
            targets.append(Target(f"`linear`, forward: {fla} / its time", other / own, 1))
    for row in document["steps"]:
        if row["mechanism"] in FASTER_THAN_FLASH and row["graph_microseconds"]:
            below = STEP_MICROSECONDS / row["graph_microseconds"]
            targets.append(Target(f"`{row['mechanism']}`, a step: {STEP_MICROSECONDS} µs / its time", below, 1))
    return targets


def medians(document: Document) -> dict[Key, float]:
    """Return milliseconds, those of the backward pass alone among them: what both take less the forward pass.

    A length at which one of the two was not measured has none, nor has one at which both took no longer than one.
    """
    found = {
        (row["mechanism"], row["mode"], row["direction"], row["length"]): row["milliseconds"]["median"]
        for row in document["operations"]
    }
    rest = {
        (name, mode, BACKWARD, length): value - found[name, mode, FORWARD, length]
        for (name, mode, direction, length), value in found.items()
        if direction == BOTH and (name, mode, FORWARD, length) in found
    }
    return found | {key: value for key, value in rest.items() if value > 0}
