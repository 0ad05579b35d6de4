"""What conversions keep of models that look far back: the bundled recall teachers, trained on alike.

    python -m benchmarks.studies.recall_board          # benchmarks/results/recall_board.json and recall_board.png

The models are those of `recipes/pretrain.py --architecture llama-recall` and `gpt2-recall`. Each row converts one,
calibrates it, and has the original teach it on a mixture like that of its own training: text, and generated recall in
a quarter of the rows. All of them have the same batches, in the same order. Needles, pairs and losses by position are
of held-out text and of prompts that no training had. The study goes on with the rows that its file lacks.
"""

from __future__ import annotations

import copy
import hashlib
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter, ScalarFormatter
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.plot_labels import place_labels
from benchmarks.result_files import RECALL_BOARD_FILE, RECALL_BOARD_PLOT, RESULTS, ROOT, Document, check_same, resume
from benchmarks.studies.mqar import state_size
from benchmarks.tables.recall_board import mixture_loss, needle_share
from hf_linattn import calibrate, choose_plan, get_mechanisms, patch_model
from hf_linattn.atomic_io import write_json
from hf_linattn.calibration import what_is_fitted
from hf_linattn.evaluation import streaming_for
from hf_linattn.report.plots import ORIGINAL, PATCHED, blank_figure, save_figure
from hf_linattn.training.arguments import FinetuningArguments
from hf_linattn.training.data import TrainingData, load_text_splits
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.pretraining.items import Material
from hf_linattn.training.pretraining.measures import NEEDLE_LENGTH, NEEDLES, RECALL, measure_recall
from hf_linattn.training.pretraining.mixture import Mixture, Stage, text_tokens
from hf_linattn.training.trainers import RecoveryTrainer

MODELS = ("llama-recall", "gpt2-recall")
LENGTH = 1024  # tokens of a row, all that GPT-2 has positions for
BATCH_TOKENS, TOKENS, RATE = 2048, 1_000_000, 2e-3
CALIBRATION_BATCHES, SEED = 4, 1  # a seed that the teachers were not trained with
SAMPLES = 100
WEIGHTS = "model.safetensors"
_window = {"window_size": 60, "num_sink_tokens": 4}
Plan = Mapping[str, Any] | Callable[[PreTrainedModel, Any], Any]


def _kept(unit: str) -> Plan:
    """Return what chooses a quarter of the layers, or of the heads, that stay softmax beside windows."""

    def choose(model: PreTrainedModel, tokenizer: Any) -> Any:
        return choose_plan(
            model, tokenizer, 0.25, unit=unit, replace={"streaming": _window}, tasks=NEEDLES, num_prompts=4,
            lengths=(NEEDLE_LENGTH,),
        )  # fmt: skip

    return choose


def _windows_like(row: str) -> Plan:
    """Return what makes windows whose states take the bytes of a row's."""

    def choose(model: PreTrainedModel, tokenizer: Any) -> Any:
        plan: Any = ROWS[row]
        return streaming_for(model, bytes=state_size(patch_model(copy.deepcopy(model), plan), LENGTH))

    return choose


ROWS: dict[str, Plan] = {
    "softmax": {"softmax": {}},
    "a quarter of the layers": _kept("layer"),
    "a quarter of the heads": _kept("head"),
    "streaming": {"streaming": _window},
    "local": {"local": {"window_size": 64}},
    "linear": {"linear": {}},
    "performer": {"performer": {"num_features": 128}},
    "hedgehog": {"hedgehog": {"feature_dim": 128}},
    "learned_exp": {"learned_exp": {"feature_dim": 128}},
    "retention": {"retention": {"feature_dim": 128}},
    "gla": {"gla": {"feature_dim": 128}},
    "deltanet": {"deltanet": {"feature_dim": 128, "gate": True}},
    "gated_deltanet": {"gated_deltanet": {"expand_key": 2}},
    "linformer": {"linformer": {"num_slots": 32, "block_size": 32}},
    "lsh": {"lsh": {}},
    "hybrid": {"hybrid": {"window_size": 32, "num_sink_tokens": 4, "linear": "learned_exp"}},
    "hard keys": {"hybrid": {"window_size": 16, "num_hard_keys": 32, "linear": "gated_deltanet"}},
    "streaming, the bytes of gated_deltanet": _windows_like("gated_deltanet"),
    "streaming, the bytes of hard keys": _windows_like("hard keys"),
}


class Batches(TrainingData):
    """Batches that are made whole."""

    @property
    def row_tokens(self) -> float:
        return BATCH_TOKENS


class Original:
    """A teacher, its tokenizer, and what is made of its text."""

    def __init__(self, path: Path):
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @cached_property
    def materials(self) -> dict[str, Material]:
        """The splits of the documentation of Python's standard library."""
        return {
            name: Material(self.tokenizer, text_tokens(split, self.tokenizer))
            for name, split in load_text_splits().items()
        }

    def mixture(self, split: str, steps: int) -> Mixture:
        """Return batches of text and recall of a split."""
        return Mixture(self.materials[split], split, [Stage(LENGTH, 1.0, RECALL)], steps, BATCH_TOKENS, SEED)

    def converted(self, plan: Plan) -> PreTrainedModel:
        """Return a copy with a plan, untrained."""
        chosen = plan(self.model, self.tokenizer) if callable(plan) else plan
        copied = copy.deepcopy(self.model).requires_grad_(True)  # as a teacher the original was frozen
        return patch_model(copied, chosen)

    def measured(self, model: PreTrainedModel) -> Document:
        """Return needles, pairs and losses by position on what no training had."""
        return measure_recall(model.eval(), self.materials["test"], LENGTH, SAMPLES)

    def teach(self, model: PreTrainedModel, tokens: int, rate: float) -> None:
        """Train a converted model on its own tokens and on what the original predicts."""
        steps = tokens // BATCH_TOKENS
        data = Batches(
            self.mixture("train", steps), self.mixture("validation", 1), lambda batches: batches[0],
            lambda batches: batches[0],
        )  # type: ignore[arg-type]  # a Mixture is no table, but all that a Trainer asks of one  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            arguments = FinetuningArguments(
                output_dir=folder, max_steps=steps, learning_rate=rate, lr_scheduler_type="cosine",
                warmup_steps=steps // 10, weight_decay=0.1, adam_beta2=0.98, max_grad_norm=1.0, seed=SEED,
                per_device_train_batch_size=1, train_sampling_strategy="sequential", use_cpu=True, bf16=False,
                eval_strategy="no", save_strategy="no", load_best_model_at_end=False, report_to="none",
                remove_unused_columns=False, logging_steps=max(1, steps // 10), disable_tqdm=True,
            )  # fmt: skip
            teacher = Teacher(self.model, kl_weight=1.0, ce_weight=0.5)
            RecoveryTrainer(model, arguments, data, teacher).train()


def measure(original: Original, plan: Plan, tokens: int, rate: float) -> Document:
    """Return a row: what a plan keeps at first, calibrated and taught."""
    started = time.perf_counter()
    model = original.converted(plan)
    mechanisms = get_mechanisms(model)
    row: Document = {
        "plan": [[m.config.mechanism, m.config.to_options()] for m in mechanisms.values()],
        "state_bytes": state_size(model, LENGTH), "tokens": tokens, "rate": rate,
        "converted": original.measured(model),
    }  # fmt: skip
    if what_is_fitted(mechanisms):
        batches = original.mixture("train", CALIBRATION_BATCHES)
        calibrate(model, [{"input_ids": batches[i]["input_ids"]} for i in range(CALIBRATION_BATCHES)])
        row["calibrated"] = original.measured(model)
    original.teach(model, tokens, rate)
    return {**row, "trained": original.measured(model), "seconds": time.perf_counter() - started}


def draw(document: Document, path: Path) -> None:
    """Write the plot: needles and perplexity after the training against bytes, a panel for each of them and model."""
    models = list(document["originals"])
    figure, panels = blank_figure("Recall and perplexity after the same training", 2 * len(models), len(models))
    labels = []
    for panel, (model, found) in zip(panels, product(models, (True, False)), strict=True):
        near: dict[tuple[float, float], dict[str, tuple[int, float]]] = {}  # points that share a label
        for row in (row for row in document["rows"] if row["model"] == model):
            size, share, loss = row["state_bytes"], needle_share(row["trained"]), mixture_loss(row["trained"])
            value, group = (share, round(share, 1)) if found else (math.exp(loss), round(loss, 1))
            near.setdefault((round(math.log10(size), 1), group), {})[row["name"]] = (size, value)
            colour = ORIGINAL if row["name"] == "softmax" else PATCHED
            panel.plot(size, value, color=colour, marker="o", markersize=3)
        panel.set_xscale("log")
        panel.margins(x=0.12, y=0.1)
        panel.set_xlabel("bytes of decoding state")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        panel.xaxis.set_major_formatter(EngFormatter(unit="B"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel(f"{model}: {'needles found at 512 tokens' if found else 'perplexity of the mixture'}")
        if found:
            panel.yaxis.set_major_formatter(PercentFormatter(1))
        else:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ScalarFormatter())
            panel.yaxis.set_minor_formatter(NullFormatter())
        labels.append([(textwrap.fill(", ".join(points), 50), max(points.values())) for points in near.values()])
    for panel, of_panel in zip(panels, labels, strict=True):
        place_labels(panel, of_panel)
    save_figure(figure, path)


def main(
    teachers: Annotated[Path, typer.Option(help="the folder that has the models")] = ROOT / "recipes" / "pretrained",
    output: Annotated[Path, typer.Option(help="the JSON file, which is gone on with")] = RESULTS / RECALL_BOARD_FILE,
    tokens: Annotated[int, typer.Option(help="that a row is taught with")] = TOKENS,
    rate: Annotated[float, typer.Option(help="the peak of the learning rate")] = RATE,
    minutes: Annotated[float, typer.Option(help="no row begins after that many")] = float("inf"),
) -> None:
    """Measure what is missing, row by row, and write the JSON and the plot beside it."""
    started = time.perf_counter()
    task = {
        "length": LENGTH, "batch_tokens": BATCH_TOKENS, "recall": RECALL, "samples": SAMPLES, "seed": SEED,
        "tokens": tokens, "rate": rate,
    }  # fmt: skip
    document = resume(output, {"task": task}, {"runs": [], "teachers": {}, "originals": {}, "rows": []})
    present = [name for name in MODELS if (teachers / name).is_dir()]
    if not present:
        raise typer.BadParameter(
            f"{teachers} has neither of {', '.join(MODELS)}; train one: python recipes/pretrain.py --architecture"
            f" {MODELS[0]} --output_dir {teachers / MODELS[0]}"
        )
    weights = {name: hashlib.sha256((teachers / name / WEIGHTS).read_bytes()).hexdigest() for name in present}
    for name, found in document["teachers"].items():
        check_same(output, f"the digest of {name}'s weights", found, weights.get(name, found))
    document["runs"].append(collect_provenance(torch.device("cpu"), torch.float32, "benchmarks.studies.recall_board"))
    done = {(row["model"], row["name"]) for row in document["rows"]}
    missing = [key for key in product(present, ROWS) if key not in done]
    originals: dict[str, Original] = {}
    for name, title in tqdm(missing, desc="rows"):
        if time.perf_counter() - started > 60 * minutes:
            break
        original = originals.setdefault(name, Original(teachers / name))
        if name not in document["originals"]:
            document["teachers"][name] = weights[name]
            document["originals"][name] = original.measured(original.model)
        row = measure(original, ROWS[title], tokens, rate)
        document["rows"].append({"model": name, "name": title, **row, "run": len(document["runs"]) - 1})
        write_json(output, document)
        draw(document, output.with_name(RECALL_BOARD_PLOT))
    typer.echo(f"{output} has {len(document['rows'])} of {len(MODELS) * len(ROWS)} rows")


if __name__ == "__main__":
    typer.run(main)
