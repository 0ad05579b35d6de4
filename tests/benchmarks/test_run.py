"""The benchmark runner at tiny sizes, and the tables made from its results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import render, run
from benchmarks.measure import operations, peers, prompts, stopwatch, targets
from benchmarks.result_files import COMPILED_DECODING_FILE, DEPTH_PLOT, LONG_INPUTS_FILES, RESULTS, Document
from benchmarks.studies import depth, heads, long_inputs, retrieval, wikitext
from benchmarks.tables import markdown, memory, quality, speed
from hf_linattn import DataError, UnknownNameError
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.ops.common.growing import SPARE
from hf_linattn.testing import MODES
from tests.helpers import make_tokenizer, pages_with_markers
from tests.models import make_model

pytestmark = pytest.mark.tools

PLAN = run.PLANS["quick"]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The results of one quick run of the command itself."""
    app = run.typer.Typer()
    app.command()(run.main)
    path = tmp_path_factory.mktemp("results") / "quick.json"
    CliRunner().invoke(app, ["--quick", "--output", str(path)], catch_exceptions=False)
    return json.loads(path.read_text())


def test_every_mechanism_with_a_target_is_measured_in_every_mode_at_every_length(document: Document) -> None:
    measured = {(r["mechanism"], r["mode"], r["direction"], r["length"]) for r in document["operations"]}
    assert measured == {
        (name, mode, direction, length)
        for name in ("softmax", *targets.FASTER)
        for mode in MECHANISMS.get(name).modes & set(MODES)
        for direction, lengths in (("forward", PLAN.lengths), ("forward+backward", PLAN.backward_lengths))
        for length in lengths
    }


def test_ratios_are_softmax_over_the_mechanism(document: Document) -> None:
    baseline = {
        (r["mode"], r["direction"], r["length"]): r["milliseconds"]["median"]
        for r in document["operations"]
        if r["mechanism"] == "softmax"
    }
    for row in document["operations"]:
        time, softmax = row["milliseconds"], baseline[row["mode"], row["direction"], row["length"]]
        assert row["ratio"] == pytest.approx(softmax / time["median"])
        assert 0 < time["fastest"] <= time["median"] <= time["slowest"]
        assert time["repeats"] >= PLAN.min_repeats


def test_floors() -> None:
    ceilings = {"matmul_gflops": 100.0, "copy_gigabytes_per_second": 10.0}
    assert operations.floor_seconds(5e9, 1e8, ceilings) == pytest.approx(0.05)
    assert operations.floor_seconds(1e8, 1e9, ceilings) == pytest.approx(0.1)


def test_every_mechanism_has_a_floor(document: Document) -> None:
    """At least its operands are moved, backward three times as many bytes."""
    bandwidth = document["ceilings"]["copy_gigabytes_per_second"] * 1e9
    for row in document["operations"]:
        if row["mechanism"] == "softmax":
            assert row["floor_share"] is None
        else:
            moved = (4 if row["direction"] == "forward" else 12) * row["length"] * PLAN.num_heads * PLAN.head_dim * 4
            assert row["floor_share"] * row["milliseconds"]["median"] / 1e3 >= moved / bandwidth * 0.999


@pytest.mark.slow  # a process for each mechanism and mode
def test_what_long_inputs_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of a step; tokens are timed after both contexts, the prompt at once and in pieces, of all."""
    shape = run.Plan(lengths=(), backward_lengths=(), contexts=(16, 48), budget=0.0, head_dim=16, num_layers=2)
    for name, value in {"PLANS": {"cpu": shape}, "SHORT": 16, "LONG": 48, "MEMORY_LENGTH": 2048}.items():
        monkeypatch.setattr(long_inputs, name, value)
    monkeypatch.setattr(prompts, "PROMPT", 40)
    monkeypatch.setattr(prompts, "PIECE", 16)
    path = tmp_path / "long.json"
    long_inputs.main(path, "bfloat16", ["linear", "bigbird"])
    results = json.loads(path.read_text())
    operands = 8 * 8 * 2048 * 16 * 2  # bytes of query, key, value, output and their gradients
    for row in results["memory"]:
        assert row["ratio"] == pytest.approx(row["peak_bytes"] / operands) and row["ratio"] > 0.5
    assert [row["mechanism"] for row in results["lengths"]] == ["linear"]
    assert set(results["lengths"][0]["milliseconds_per_token"]) == {"16", "48"}
    assert [row["attention"] for row in results["prompts"]] == ["softmax", prompts.NOTHING, "linear"]
    fewest = [min(row["seconds"].values()) for row in results["prompts"]]
    for row, seconds in zip(results["prompts"], fewest, strict=True):
        assert set(row["seconds"]) == {"40", "16"}
        assert row["times_faster"] == pytest.approx(fewest[0] / seconds)
    assert all("`linear`" in part for part in memory.long_inputs_tables(results)[1:])
    assert "| no attention | " in render.prompts_section({"long": results})


def test_what_a_plan_of_a_few_exact_heads_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are those of one head of four in all tokens, beside windows, and the room that heads have to grow."""
    times = run.Plan((), (), (), budget=0.0, min_repeats=1, max_repeats=1)
    for name, value in {
        "EXACT": ((1, 0),), "WINDOW": {"window_size": 5, "num_sink_tokens": 2}, "TIMES": times,
    }.items():  # fmt: skip
        monkeypatch.setattr(heads, name, value)
    make_model("llama").save_pretrained(tmp_path / "model")
    path, options = tmp_path / "heads.json", {"prompt": 20, "context": 700, "length": [40]}
    for dtype in ("float32", "bfloat16", "float32"):  # the last run replaces the first
        heads.main(str(tmp_path / "model"), path, dtype, **options)
    newest, other = json.loads(path.read_text())["runs"]
    assert [x["provenance"]["dtype"] for x in (newest, other)] == ["float32", "bfloat16"]
    (windows, shared), token = newest["prompt"]["kinds"], newest["token"]
    assert windows["layers"] == shared["layers"] == 1 and "plan" in shared["options"]
    assert newest["prompt"]["seconds"]["plan"] == pytest.approx(windows["seconds"] + shared["seconds"])
    copies = token["bytes"]["softmax"] / (2 * 2 * 2 * 8 * 4)  # layers, heads, key and value, numbers, bytes
    assert 700 < copies < 710
    assert 0.25 < token["share"] < 0.25 * (700 + SPARE + 60) / 700
    assert set(token["ratio"]) == {"softmax", heads.COPIED}
    assert newest["whole_model"][0]["bytes"]["softmax"] == 40 * 2 * 2 * 2 * 8 * 4


def test_a_prompt_in_pieces_leaves_the_cache_it_leaves_at_once() -> None:
    model = make_model("llama")
    whole, pieces = (prompts.prefill(model, 40, tokens) for tokens in (None, 16))
    for layer, other in zip(whole.layers, pieces.layers, strict=True):
        assert layer.keys.shape[2] == 40
        torch.testing.assert_close(layer.keys, other.keys)


def test_no_attention_returns_values() -> None:
    """A layer's attention is its two projections of values: no query and no key plays a part."""
    model = make_model("llama", num_key_value_heads=make_model("llama").config.num_attention_heads)
    prompts.leave_attention_out(model)
    layer, hidden = model.model.layers[0].self_attn, torch.randn(2, 5, model.config.hidden_size)
    cosines = torch.ones(2, 5, layer.head_dim)
    output, _ = layer(hidden, (cosines, 0 * cosines), None)
    torch.testing.assert_close(output, layer.o_proj(layer.v_proj(hidden)))


def test_what_depth_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is one hidden state per layer, on disk none; without, what a layer makes, counted by hand."""
    shape = run.Plan(lengths=(), backward_lengths=(), contexts=(), budget=0.0, num_heads=2, head_dim=16)
    for name, value in {"PLAN": shape, "LENGTH": 1024, "DEPTHS": (2, 3, 5), "CHUNK_SIZE": 64}.items():
        monkeypatch.setattr(depth, name, value)
    chunked = {way: dataclasses.replace(x, chunk_size=x.chunk_size and 64) for way, x in depth.WAYS.items()}
    monkeypatch.setattr(depth, "WAYS", chunked)
    depth.main(tmp_path / "depth.json")
    results = json.loads((tmp_path / "depth.json").read_text())
    assert (tmp_path / DEPTH_PLOT).stat().st_size > 10_000
    hidden_state, wide = 1024 * 32 * 4, 256 // 32  # bytes; of the feed-forward, in hidden states
    for mechanism in ("linear", "softmax"):
        rows = [row for row in results["rows"] if row["mechanism"] == mechanism]
        sizes = [{row["depth"]: row["peak_bytes"] for row in rows if row["way"] == way} for way in depth.WAYS]
        plain, checkpointing, chunks, disk = sizes
        for curve, least, most in ((plain, 4 * wide + 6, 4 * wide + 12), (checkpointing, 1, 1.01), (chunks, 1, 1.01)):
            assert least <= (curve[5] - curve[3]) / hidden_state / 2 <= most
        assert disk[2] == disk[3] == disk[5] < chunks[2] < checkpointing[2] < plain[2]
    text = "\n".join(memory.depth_parts(results))
    assert "| `linear` | checkpointing, chunks, inputs on disk |" in text and "1.00 |" in text


def test_peers_are_timed_beside_ours() -> None:
    """A peer that is our mechanism six times over; both sides get what they need for gradients."""

    def sides(plan: run.Plan, length: int, causal: bool) -> tuple[peers.Side, peers.Side, dict]:
        layer = peers.make_layer(plan, "linear", {}, causal)

        def theirs(*heads: torch.Tensor) -> torch.Tensor:
            return sum(layer(*heads)[0] for _ in range(6))

        return peers.of_heads(plan, length, causal, "linear", {}, theirs)

    plan = run.Plan(lengths=(2048,), backward_lengths=(1024,), contexts=(), budget=0.0)
    peer = peers.Peer("torch", "six times", "linear", ("causal",), sides, "it is done six times")
    rows = peers.measure(plan, (peer,))
    assert [(row.direction, row.length) for row in rows] == [("forward", 2048), ("forward+backward", 1024)]
    assert all(row.version == torch.__version__ and 1.5 < row.ratio < 24 for row in rows)
    text = speed.peers_table({"rows": [dataclasses.asdict(row) for row in rows]})
    assert "it is done six times" in text and "six times" in text.splitlines()[2]


@pytest.mark.parametrize("interface", ["LongformerModel", "BigBirdModel"])
def test_peers_of_transformers_compute_the_same_shapes(interface: str) -> None:
    peer = next(peer for peer in peers.PEERS if peer.interface == interface)
    theirs, ours, _ = peer.sides(run.PLANS["cpu"], 1024, False)
    assert theirs.run().shape == ours.run().shape == (1, 1024, 512)


def test_a_missing_peer_is_named() -> None:
    with pytest.raises(ImportError, match=r"'no-such-attention' is not installed; run pip install .*\[peers\]"):
        peers.load("no-such-attention")


def test_state_bytes(document: Document) -> None:
    """Linear: S and z per head and layer in float32, at any context; softmax: every key and value."""
    sizes = {(r["mechanism"], r["context"]): r["state_bytes"] for r in document["decoding"]}
    heads, dim, layers = PLAN.num_heads, PLAN.head_dim, PLAN.num_layers
    for context in PLAN.contexts:
        assert sizes["softmax", context] == 2 * layers * heads * context * dim * 4
        assert sizes["linear", context] == layers * heads * (dim * (dim + 1) + 1) * 4
    assert targets.state_constancy(document) == 1


def test_crossover_is_where_a_mechanism_stays_ahead() -> None:
    timing = stopwatch.Timing.of([1.0])
    ratios = {64: 1.5, 128: 0.9, 256: 1.1, 512: 4.0}
    rows = [operations.OperationRow("linear", "causal", "forward", n, timing, ratio) for n, ratio in ratios.items()]
    assert operations.find_crossovers(rows) == [operations.Crossover("linear", "causal", "forward", 256)]
    assert operations.find_crossovers(rows[:2]) == [operations.Crossover("linear", "causal", "forward", None)]


def test_competitors_compute_the_same_attention_shapes_and_gradients() -> None:
    clock = stopwatch.Stopwatch(torch.device("cpu"), PLAN)
    for backward in (False, True):
        competitors = operations.operation_competitors(clock, ["linear"], "causal", 16, backward, torch.float32)
        assert list(competitors) == ["softmax", "linear"]
        for attend in competitors.values():
            attend()


def test_competitors_take_turns_of_a_call_that_warms_up_and_a_timed_one() -> None:
    turns: list[str] = []
    competitors = {name: lambda name=name: turns.append(name) for name in "ab"}
    seconds = stopwatch.Stopwatch(torch.device("cpu"), PLAN).compare(competitors)
    assert turns == ["a", "a", "b", "b"] * PLAN.min_repeats
    assert {name: len(values) for name, values in seconds.items()} == {"a": PLAN.min_repeats, "b": PLAN.min_repeats}


def test_tables_are_written_between_the_markers_and_nowhere_else(document: Document, tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    (results / "recovery").mkdir(parents=True)
    (results / "cpu_granite_rapids.json").write_text(json.dumps(document))
    perplexity = {"original": 10.0, "control": 8.0, "converted": 90.0, "recovered": 8.4}
    (results / "recovery" / "gpt2-linear.json").write_text(json.dumps({"perplexity": perplexity, "ratio": 1.05}))
    docs = pages_with_markers(tmp_path, "old")

    render.write_tables(tmp_path)
    first = {name: (docs / name).read_text() for name in render.SECTIONS}
    render.write_tables(tmp_path)

    assert {name: (docs / name).read_text() for name in render.SECTIONS} == first
    for text in first.values():
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "\nbetween\n" in first["results.md"]
    assert "| gpt2 | linear | 10.00 | 8.00 | 90.00 | 8.40 | 1.050 |" in first["results.md"]
    assert speed.summary_table(document) in first["speed.md"]
    page = (results / "README.md").read_text()
    for make in (speed.operations_table, speed.decoding_table, speed.milliseconds_table):
        assert make(document) in page


def test_the_board_says_what_was_reached_and_what_was_missed() -> None:
    def report(name: str, ratio: float) -> dict:
        perplexity = {"original": 10.0, "control": 8.0, "converted": 90.0, "recovered": 8 * ratio}
        options, training = {"window_size": 32}, {"tokens": 999_424}
        return {
            "perplexity": perplexity, "ratio": ratio, "mechanism": "hybrid", "options": options, "training": training,
        }  # fmt: skip

    ratios = {"gpt2-hybrid": 1.05, "gpt2-lolcats": 1.05, "llama-hybrid": 1.0, "llama-hybrid-seed1": 1.006}
    ratios |= {"llama-streaming": 1.05, "wikitext-llama-lolcats-linear-seed2": 1.1}
    text = quality.board_table({name: report(name, ratio) for name, ratio in ratios.items()})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [row[9] for row in rows] == ["1.005 missed", "", "1.005 reached", "1.050 reached", ""]
    assert rows[0][3:9] == ["1.0 M", "1", "8.00", "90.00", "8.40", "**1.050**"]
    assert rows[2][3:9] == ["1.0 M", "2", "8.00", "90.00", "8.02", "**1.003** (1.000 to 1.006)"]
    assert rows[2][2] == "`hybrid` `window_size=32`" and rows[2][10] == "`recipes/models/llama.yaml --row hybrid`"
    names = [["llama", "hybrid"], ["llama", "streaming"], ["wikitext-llama", "lolcats-linear"]]
    assert [row[:2] for row in rows[2:]] == names


def test_retrieval_is_shown_beside_the_share_that_was_kept() -> None:
    scored = {"recall": 0.5, "article_accuracy": 0.9, "num_paragraphs": 1835}
    stages = [
        {"stage": "original", "tokens": 0, **scored},
        {"stage": "calibrated", "tokens": 96},
        {"stage": "recovered", "tokens": 4000, **scored, "recall": 0.495},
    ]
    document = {"model": "mini", "mechanism": "linear", "options": {"decay": "learned"}, "stages": stages}
    text = quality.retrieval_table(document)
    assert "4,096 training tokens, 1,835 paragraphs" in text
    assert "| recovered | 0.4950 (99.00%) | 0.9000 (100.00%) |" in text


def test_recall_is_shown_from_the_smallest_state_to_the_largest() -> None:
    large = {"mechanism": "linear", "options": {}, "state_bytes": 33288, "converted": 0.1, "calibrated": 0.1}
    small = {**large, "mechanism": "hedgehog", "state_bytes": 8328, "calibrated": 0.625}
    text = quality.recall_table({"rows": [{**large, "trained": 1.0}, {**small, "trained": 0.75}]})
    first, second = text.splitlines()[2:]
    assert first == "| `hedgehog` |  | 8,328 | 10.0% | 62.5% | 75.0% |"
    assert second == "| `linear` |  | 33,288 | 10.0% | 10.0% | 100.0% |"


def test_the_summary_has_a_row_for_every_mechanism(document: Document) -> None:
    lines = speed.summary_table(document).splitlines()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert list(rows) == [markdown.timed(name, document) for name in targets.FASTER]
    wanted = ("linear", "causal", "forward", max(PLAN.lengths))
    ratio = next(
        r["ratio"]
        for r in document["operations"]
        if (r["mechanism"], r["mode"], r["direction"], r["length"]) == wanted
    )
    assert rows["`linear`"][0] == f"{ratio:.3g}"
    state = PLAN.num_layers * PLAN.num_heads * (PLAN.head_dim * (PLAN.head_dim + 1) + 1) * 4
    assert rows["`linear`"][5] == f"{state:,}"


@pytest.mark.parametrize(
    "make", [speed.summary_table, speed.operations_table, speed.decoding_table, speed.milliseconds_table]
)
def test_a_name_has_the_options_that_were_no_defaults(document: Document, make: Callable[[Document], str]) -> None:
    assert every_hybrid_of(make(document)) == {"`hybrid` `window_size=64`"}


def test_long_inputs_and_graphs_name_such_options_too() -> None:
    results = RESULTS / LONG_INPUTS_FILES[0], RESULTS / COMPILED_DECODING_FILE
    long, graphs = (json.loads(path.read_text()) for path in results)
    for part in memory.long_inputs_tables(long)[1:]:
        assert every_hybrid_of(part) == {"`hybrid` `window_size=64, initial_share=1.0`"}  # there was no gate yet
        assert "| `linear` |" in part
    assert every_hybrid_of(speed.graphs_section(graphs)) == {"`hybrid` `window_size=64`"}


def every_hybrid_of(text: str) -> set[str]:
    cells = {cell.strip() for line in text.splitlines() for cell in line.split("|")}
    return {cell for cell in cells if "hybrid" in cell}


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="benchmarks:begin"):
        markdown.replace_section("no markers here", "benchmarks", "table")


def test_targets_are_judged_on_the_measured_values() -> None:
    operations = [
        {"mechanism": name, "mode": "causal", "direction": "forward", "length": 16384, "ratio": ratio}
        for name, ratio in (("linear", 36.0), ("performer", 9.9))
    ]
    decoding = [
        {"mechanism": name, "context": context, "ratio": 30.0, "state_bytes": size}
        for name, size in (("softmax", 1), ("linear", 7), ("performer", 9))
        for context in (1024, 32768)
    ]
    text = speed.targets_table({"operations": operations, "decoding": decoding})
    assert [line.split("|")[-2].strip() for line in text.splitlines()[2:]] == ["yes", "no", "yes", "yes", "yes"]


def test_articles_are_told_apart_by_their_titles(tmp_path: Path) -> None:
    long = " ".join(["word"] * retrieval.LEAST_WORDS)
    lines = ["", " = First = ", "", f" {long} one ", " = = Section = = ", f" {long} two ", " too short ", ""]
    file = tmp_path / "wiki"
    file.write_text("\n".join([*lines, " = Empty = ", " = Second = ", f" {long} = three "]))
    assert retrieval.read_paragraphs(file) == [[f"{long} one", f"{long} two"], [f"{long} = three"]]
    with pytest.raises(DataError, match="does not exist; give the folder"):
        retrieval.read_paragraphs(tmp_path / "absent")


def test_articles_become_json_lines(tmp_path: Path) -> None:
    for split, name in wikitext.FILES.items():
        (tmp_path / name).write_text(f" = {split} = \n \n One . \n = = Part = = \n Two . \n\n = Other = \n Three . \n")
    wikitext.main(tmp_path, tmp_path / "out")
    for split in wikitext.FILES:
        texts = [json.loads(line)["text"] for line in (tmp_path / "out" / f"{split}.jsonl").read_text().splitlines()]
        assert texts == [f"= {split} =\nOne .\n= = Part = =\nTwo .\n", "= Other =\nThree .\n"]


def test_an_embedding_model_is_converted_taught_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("bert", std=0.3).bert.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    for split, file in retrieval.FILES.items():
        lines = [f" = Article {i} = \n" + " ".join(f"w{5 + (i * j) % 80}" for j in range(30)) for i in range(1, 9)]
        (tmp_path / file).write_text("\n".join(lines * (4 if split == "train" else 1)))
    for name, value in {"BLOCK": 16, "BATCH": 2, "CALIBRATED": 2}.items():
        monkeypatch.setattr(retrieval, name, value)
    options = {"decay": "learned"}
    document = retrieval.run(str(tmp_path / "model"), tmp_path, "hedgehog", options, 512, 1e-3, tmp_path / "work")
    stages = {row["stage"]: row for row in document["stages"]}
    assert list(stages) == ["original", "calibrated", "transferred", "recovered"]
    assert sum(row["tokens"] for row in document["stages"]) == 512
    scored = [stages[name] for name in ("original", "recovered")]
    assert all(row["num_paragraphs"] == 8 and 0 <= row["recall"] <= 1 for row in scored)
    assert stages["recovered"]["validation_loss"] < 1


def test_a_mechanism_without_the_backend_is_not_timed_with_another(tmp_path):
    with pytest.raises(typer.BadParameter, match="local: with --backend compile it is one of"):
        run.main(mechanism=["linear", "local"], backend="compile", quick=True, output=tmp_path / "speed.json")
    with pytest.raises(UnknownNameError, match="compile"):
        run.main(backend="compiled", quick=True, output=tmp_path / "speed.json")
    assert not list(tmp_path.iterdir())
