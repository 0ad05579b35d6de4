"""Mechanisms of other libraries beside ours, on the same inputs, through their public interfaces.

    pip install -c constraints.txt -e ".[peers]"
    python -m benchmarks.measure.peers                         # benchmarks/results/cpu_peers.json, and its table

`performer-pytorch`, `reformer-pytorch` and `local-attention` have the operation alone; Linformer's package has it with
its four projections, transformers has Longformer and BigBird as models: ours gets the same around it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import BertConfig, BertModel, BigBirdConfig, BigBirdModel, LongformerConfig, LongformerModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.measure.stopwatch import PLANS, Plan, Stopwatch, Timing
from benchmarks.render import write_tables
from benchmarks.result_files import PEERS_FILE, RESULTS
from hf_linattn import AttentionLayer, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS

LENGTHS = (1024, 4096)  # some take minutes at more
VOCABULARY = 512
NUM_FEATURES, NUM_SLOTS, WINDOW, BUCKET, ROUNDS, BLOCK, RANDOM_BLOCKS = 256, 256, 256, 64, 4, 64, 3


@dataclass(frozen=True)
class Side:
    """What is timed: from `leaves` to an output, and with `backward` to their gradients."""

    run: Callable[..., Tensor]
    leaves: list[Tensor]
    inputs: tuple[Any, ...] = ()

    def call(self, backward: bool) -> Callable[[], None]:
        """Return one forward pass, or one with its backward pass."""

        def step() -> None:
            with torch.set_grad_enabled(backward):
                output = self.run(*self.inputs)
                if backward:
                    torch.autograd.grad(output.sum(), self.leaves, allow_unused=True)

        return step


@dataclass(frozen=True)
class Peer:
    """Another library's mechanism: what makes both sides for a length, and what they do not share."""

    package: str
    interface: str
    mechanism: str
    modes: tuple[str, ...]
    sides: Callable[[Plan, int, bool], tuple[Side, Side, dict[str, Any]]]  # theirs, ours, and our options
    differs: str = ""


@dataclass(frozen=True)
class PeerRow:
    """Both at one length; `ratio` is their median time over ours."""

    package: str
    version: str
    interface: str
    mechanism: str
    options: dict[str, Any]
    mode: str
    direction: str
    length: int
    theirs: Timing
    ours: Timing
    ratio: float
    differs: str


def load(package: str) -> Any:
    """Import a package, without what it has to say; ImportError if it is not installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module(package.replace("-", "_"))
    except ImportError as error:
        raise ImportError(
            f"package {package!r} is not installed; run pip install -c constraints.txt -e '.[peers]'"
        ) from error


def make_layer(plan: Plan, name: str, options: dict[str, Any], causal: bool) -> nn.Module:
    """Return one of our mechanisms for the plan's heads."""
    layer = AttentionLayer(
        index=0, num_heads=plan.num_heads, num_key_value_heads=plan.num_heads, head_dim=plan.head_dim, causal=causal,
        scaling=plan.head_dim**-0.5, device=torch.device("cpu"), dtype=torch.float32,
    )  # fmt: skip
    return MECHANISMS.get(name)(make_config(name, options), layer)


def of_heads(
    plan: Plan, length: int, causal: bool, name: str, options: dict[str, Any], theirs: Callable[..., Tensor],
    shared: bool = False,
) -> tuple[Side, Side, dict[str, Any]]:  # fmt: skip
    """Both sides on random heads [1, H, N, D]; `shared`: theirs reads one tensor as query and key."""
    query, key, value = (torch.randn(1, plan.num_heads, length, plan.head_dim).requires_grad_() for _ in range(3))
    mechanism = make_layer(plan, name, options, causal)
    heads = [query, value] if shared else [query, key, value]
    inputs = (query, query, value) if shared else (query, key, value)
    return Side(theirs, heads, tuple(heads)), Side(lambda *x: mechanism(*x)[0], heads, inputs), options


def performer(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """FAVOR+ with as many features."""
    with contextlib.redirect_stdout(io.StringIO()):  # that it has no CUDA extension
        theirs = load("performer-pytorch").FastAttention(plan.head_dim, nb_features=NUM_FEATURES, causal=causal)
    return of_heads(plan, length, causal, "performer", {"num_features": NUM_FEATURES}, theirs)


def reformer(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """Shared queries and keys, with as many rounds, and buckets of the same size on average."""
    attention = load("reformer-pytorch").LSHAttention(bucket_size=BUCKET, n_hashes=ROUNDS, causal=causal)
    options = {"shared_qk": True, "num_rounds": ROUNDS, "bucket_size": BUCKET, "num_buckets": length // BUCKET}

    def theirs(query: Tensor, value: Tensor) -> Tensor:
        return attention(query[0], value[0])[0]

    return of_heads(plan, length, causal, "lsh", options, theirs, shared=True)


def local(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """The same window."""
    module = load("local-attention").LocalAttention(
        WINDOW, causal=causal, exact_windowsize=True, use_rotary_pos_emb=False
    )
    return of_heads(plan, length, causal, "local", {"window_size": WINDOW + 1}, module)


class Projected(nn.Module):
    """A mechanism between the four projections that a layer has, as Linformer's package has it."""

    def __init__(self, plan: Plan, mechanism: nn.Module):
        super().__init__()
        width = plan.num_heads * plan.head_dim
        self.in_projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out_projection = nn.Linear(width, width)
        self.num_heads, self.mechanism = plan.num_heads, mechanism

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in self.in_projections)
        return self.out_projection(self.mechanism(*heads)[0].transpose(1, 2).flatten(2))


def linformer(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """The paper's E and F, of a column per token."""
    width = plan.num_heads * plan.head_dim
    theirs = load("linformer").LinformerSelfAttention(width, length, k=NUM_SLOTS, heads=plan.num_heads)
    options = {"num_slots": NUM_SLOTS, "positions_per_slot": length // NUM_SLOTS}
    ours = Projected(plan, make_layer(plan, "linformer", options, causal))
    x = torch.randn(1, length, width).requires_grad_()
    return *(Side(side, [x, *side.parameters()], (x,)) for side in (theirs, ours)), options  # type: ignore[return-value]


def of_models(
    plan: Plan, length: int, name: str, options: dict[str, Any], theirs: nn.Module, **inputs: Tensor
) -> tuple[Side, Side, dict[str, Any]]:
    """One layer of their model beside one of a BERT of the same size."""
    ours = patch_model(BertModel(BertConfig(**sizes(plan, length)), add_pooling_layer=False), name, **options)
    tokens = torch.randint(VOCABULARY, (1, length))

    def side(model: nn.Module, **more: Tensor) -> Side:
        return Side(lambda: model(tokens, **more).last_hidden_state, list(model.parameters()))

    return side(theirs, **inputs), side(ours), options


def sizes(plan: Plan, length: int) -> dict[str, Any]:
    """Return a configuration of one layer, without dropout."""
    width = plan.num_heads * plan.head_dim
    return {
        "vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": plan.num_heads,
        "intermediate_size": 2 * width, "max_position_embeddings": length + 2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def longformer(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """The same window, and the first token global."""
    config = LongformerConfig(**sizes(plan, length), attention_window=2 * WINDOW, pad_token_id=1)
    theirs = LongformerModel(config, add_pooling_layer=False)
    chosen = F.one_hot(torch.zeros(1, dtype=torch.long), length)
    options = {"window_size": WINDOW + 1, "num_global": 1}
    return of_models(plan, length, "longformer", options, theirs, global_attention_mask=chosen)


def bigbird(plan: Plan, length: int, causal: bool) -> tuple[Side, Side, dict[str, Any]]:
    """The same window and as many random blocks."""
    config = BigBirdConfig(
        **sizes(plan, length), attention_type="block_sparse", block_size=BLOCK, num_random_blocks=RANDOM_BLOCKS
    )
    options = {"block_size": BLOCK, "num_random": RANDOM_BLOCKS, "num_global": BLOCK}
    return of_models(plan, length, "bigbird", options, BigBirdModel(config, add_pooling_layer=False))


BOTH, ONE = ("causal", "bidirectional"), ("bidirectional",)
PEERS = (
    Peer("performer-pytorch", "FastAttention", "performer", BOTH, performer),
    Peer("reformer-pytorch", "LSHAttention", "lsh", BOTH, reformer, "sees a key once for every round that finds it"),
    Peer("local-attention", "LocalAttention", "local", BOTH, local),
    Peer("linformer", "LinformerSelfAttention", "linformer", ONE, linformer),
    Peer("transformers", "LongformerModel", "longformer", ONE, longformer),
    Peer("transformers", "BigBirdModel", "bigbird", ONE, bigbird, "its last block is global, too"),
)


def measure(plan: Plan, peers: tuple[Peer, ...] = PEERS) -> list[PeerRow]:
    """Time both sides in turns at every length."""
    stopwatch, rows = Stopwatch(torch.device("cpu"), plan), []
    cases = [
        (peer, mode, direction, length)
        for peer in peers
        for mode in peer.modes
        for direction, lengths in (("forward", plan.lengths), ("forward+backward", plan.backward_lengths))
        for length in lengths
    ]
    for peer, mode, direction, length in tqdm(cases, desc="peers"):
        torch.manual_seed(0)
        theirs, ours, options = peer.sides(plan, length, mode == "causal")
        backward = direction == "forward+backward"
        seconds = stopwatch.compare({"theirs": theirs.call(backward), "ours": ours.call(backward)})
        timings = {side: Timing.of(values) for side, values in seconds.items()}
        version = importlib.metadata.version(peer.package)
        what = (peer.package, version, peer.interface, peer.mechanism, options, mode, direction, length)
        ratio = timings["theirs"].median / timings["ours"].median
        rows.append(PeerRow(*what, timings["theirs"], timings["ours"], ratio, peer.differs))
    return rows


def main(output: Annotated[Path, typer.Option(help="where the results go")] = RESULTS / PEERS_FILE) -> None:
    """Measure, write the JSON, and rewrite the tables generated from it."""
    for package in sorted({peer.package for peer in PEERS}):
        load(package)
    plan = dataclasses.replace(PLANS["cpu"], lengths=LENGTHS, backward_lengths=LENGTHS, budget=1.0, min_repeats=3)
    results = {
        "provenance": collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.measure.peers"),
        "rows": [dataclasses.asdict(row) for row in measure(plan)],
    }
    write_json(output, results)
    typer.echo(f"wrote {output}")
    if output == RESULTS / PEERS_FILE:
        write_tables()


if __name__ == "__main__":
    typer.run(main)
