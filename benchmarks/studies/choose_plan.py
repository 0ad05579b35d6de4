"""What a model recalls with a tenth of its heads exact: plans by `choose_plan`, and others, beside the original.

    python -m benchmarks.studies.choose_plan SmolLM2-135M-Instruct/ books/      # the JSON under benchmarks/results

Nothing is trained. Plans are chosen on prompts of their own seeds, and on the validation books where they go by text;
recall is of prompts of another seed, perplexity of rows of the test books. Results are written as they come: a run
that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import random
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.measure.provenance import collect_provenance
from benchmarks.result_files import CHOSEN_PLAN_FILE, ORIGINAL, RESULTS, check_same, resume
from hf_linattn import calibrate, choose_plan
from hf_linattn.advice.candidates import EVERY, most_layers
from hf_linattn.advice.trial import patched
from hf_linattn.atomic_io import write_json
from hf_linattn.chosen_plan import ChosenPlan, PlanRecord
from hf_linattn.config import make_config
from hf_linattn.evaluation.next_token import token_losses
from hf_linattn.evaluation.perplexity import position_limit
from hf_linattn.evaluation.recall import (
    RECALL_TASKS,
    RecallAnswer,
    RecallPrompt,
    answer_prompts,
    make_prompts,
    recall_rows,
)
from hf_linattn.plan_search.divergence_signal import DivergenceSignal
from hf_linattn.plan_search.gates import Gates, gated
from hf_linattn.plan_search.options import SearchOptions
from hf_linattn.plan_search.slope import slope
from hf_linattn.report import save_plan_picture

WINDOW = {"window_size": 256, "num_sink_tokens": 4}
KEEP, FEWER, MORE, SEEDS = 9, 5, 22, (0, 1, 2)
TASKS, LENGTHS, LENGTH = ("single_noise", "single_text", "single_uuid"), (1024, 2048, 4096), 2048
LONG_LENGTH, FEWER_ROWS = 8192, 4  # of text: rows this many times as long, this many times fewer
CHOICE = {"lengths": (1024,)}  # of `choose_plan`
DEFAULT = f"prompts of {LENGTH:,}"
FEWEST, LONGER_WINDOW = 4, {**WINDOW, "window_size": 512}
FEWEST_HEADS = f"{FEWEST} heads, windows of {LONGER_WINDOW['window_size']}"
COMMAND = "benchmarks.studies.choose_plan"
CAREFUL = {"num_prompts": 2, "rounds": KEEP, "lengths": (LENGTH,), "signal": "both"}  # and longer rows of text
CAREFUL_HEADS = f"{KEEP} heads by recall and text, a round each"
FIRST_HEADS, EXCHANGED = f"{KEEP} heads, seed 0", "one exchanged by hand"
GIVEN, TAKEN = [17, 0], {FIRST_HEADS: [17, 1], CAREFUL_HEADS: [15, 2]}  # heads of SmolLM2-135M, as those below
UUID_HEADS = f"{KEEP} heads by UUIDs alone"
FOR_UUIDS = [[7, 2], [8, 0], [18, 2], [20, 1], [20, 2], [21, 2], [22, 1], [23, 0], [23, 2]]  # exchanged, one by one
FAR = {"num_prompts": 2, "lengths": (LONG_LENGTH - 128,), "tasks": TASKS[:2]}  # with room for the answers
FAR_HEADS = f"{KEEP} heads, prompts of {LONG_LENGTH - 128:,}"
PROMPTS_SEED = 2000  # of the prompts that count; the method was chosen on others
BATCH_TOKENS = 8192  # of prompts that are read at once: beyond, on a CPU, copies of the cache cost more than it saves
TEXT_LENGTH, TEXT_ROWS = 1024, 4  # of the validation books, for plans by text and, longer ones, for `calibrate`
MEMORY_LENGTH = 4096

Plan = Any
FEWER_HEADS, MORE_HEADS, EQUAL_BYTES = f"{FEWER} heads", f"{MORE} heads", "windows of equal bytes"
WINDOWS_ALONE = ("windows alone", {"streaming": WINDOW})


class Study:
    """A model, texts, and the results so far."""

    def __init__(self, model: str, books: Path, dtype: torch.dtype, output: Path, command: str = COMMAND):
        self.model_path, self.books, self.output = model, books, output
        provenance = collect_provenance(torch.device("cpu"), dtype, command)
        said = {"model": Path(model).name, "prompts_seed": PROMPTS_SEED}
        self.found = resume(output, said, {"replace": {"streaming": WINDOW}, "provenance": provenance})
        check_same(output, "dtype", self.found["provenance"]["dtype"], provenance["dtype"])
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    def keep(self, group: str, name: str, measure: Callable[[], Any]) -> Any:
        """Return a result, measured and written unless that was done before."""
        results = self.found.setdefault(group, {})
        if name not in results:
            results[name] = measure()
            write_json(self.output, self.found)
        return results[name]

    def rows(self, split: str, length: int, count: int) -> list[torch.Tensor]:
        """Return rows of tokens [1, N] from the middle of as many books, in turns."""
        lines = (self.books / f"{split}.jsonl").read_text("utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        rows = []
        for number in range(count):
            text, place = texts[number % len(texts)], (1 + number // len(texts)) / 10
            part = text[int(place * len(text)) :][: 8 * length]
            rows.append(self.tokenizer(part, return_tensors="pt", verbose=False)["input_ids"][:, :length])
        return rows

    def calibrate(self, model: PreTrainedModel) -> None:
        """Fit the mechanisms of a converted model to rows of the validation books."""
        calibrate(model, [{"input_ids": row} for row in self.rows("validation", LENGTH, TEXT_ROWS)], progress=True)

    def choose(self, name: str, **options: Any) -> ChosenPlan:
        """Return a plan, chosen unless it was before."""

        def measure() -> dict[str, Any]:
            processor = time.process_time()
            given = {"keep": KEEP, "replace": {"streaming": WINDOW}, **CHOICE, **options}
            chosen = choose_plan(self.model, self.tokenizer, progress=True, **given)
            return {**json.loads(chosen.to_json()), "processor_seconds": time.process_time() - processor}

        return ChosenPlan.from_json(json.dumps(self.keep("choices", name, measure)))

    def answers(self, model: PreTrainedModel, task: str, length: int, samples: int) -> Any:
        """Return how many prompts of one kind and length a model answers."""
        limit = position_limit(model)
        prompts = make_prompts(task, self.tokenizer, length, count=samples, seed=PROMPTS_SEED, positions=limit)
        return recall_rows(answers_in_equal_rows(model, self.tokenizer, prompts))[0]

    def losses(self, model: PreTrainedModel, name: str, length: int, count: int) -> list[float]:
        """Return a model's loss on each of the rows of the test books."""
        rows = tqdm(self.rows("test", length, count), desc=f"{name}, text")
        return [float(token_losses(model, row).losses.mean()) for row in rows]

    def recall(self, name: str, plan: Plan, task: str, length: int, samples: int) -> None:
        """Count the right answers of a plan to prompts of one kind and length, again where fewer were asked before."""

        def measure() -> Any:
            with patched(self.model, plan) as model:
                return self.answers(model, task, length, samples)

        cell, results = f"{name} | {task} | {length}", self.found.setdefault("recall", {})
        if cell in results and results[cell]["num_samples"] < samples:
            del results[cell]
        self.keep("recall", cell, measure)

    def perplexity(self, name: str, plan: Plan, length: int, count: int) -> None:
        """Measure a plan on rows of the test books, again where others were read before: all plans are compared."""

        def measure() -> dict[str, Any]:
            with patched(self.model, plan) as model:
                losses = self.losses(model, name, length, count)
            loss = sum(losses) / len(losses)
            return {"loss": loss, "perplexity": math.exp(loss), "rows": count, "losses": losses}

        cell, results = f"{name} | {length}", self.found.setdefault("perplexity", {})
        if cell in results and results[cell]["rows"] != count:
            del results[cell]
        self.keep("perplexity", cell, measure)


def answers_in_equal_rows(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[RecallPrompt]
) -> list[RecallAnswer]:
    """Return what a model answers to prompts, those of one length together: on a CPU, pads cost more than they save.
    """
    numbers: dict[int, list[int]] = defaultdict(list)  # of the prompts of each length
    for number, prompt in enumerate(prompts):
        numbers[len(prompt.prompt_ids)].append(number)
    found: dict[int, RecallAnswer] = {}
    for length, own in numbers.items():
        size = max(1, BATCH_TOKENS // length)
        answers = answer_prompts(model, tokenizer, [prompts[number] for number in own], batch_size=size)
        found.update(zip(own, answers, strict=True))
    return [found[number] for number in range(len(prompts))]


class TextLoss(DivergenceSignal):
    """Minus the loss of the text's own tokens, the mean in nats: what perplexity sees of a head."""

    name = "loss"

    def value(self, gates: Gates, values: Tensor, example: Mapping[str, Any]) -> Tensor:
        """Return the signal [] of a batch with these gates [U]: the higher, the better."""
        logits = gates.run(values, example).logits[:, :-1]
        return -F.cross_entropy(logits.flatten(0, 1).float(), example["input_ids"][:, 1:].flatten())


def heads_by_loss(model: PreTrainedModel, text: list[dict[str, Tensor]]) -> list[int]:
    """Return the numbers of the heads that `slope` keeps exact where the loss of text is its signal."""
    with gated(model, make_config("streaming", WINDOW), "head") as gates, torch.no_grad():
        scores = slope(gates, TextLoss(text), SearchOptions(), KEEP)
    return sorted(scores.topk(KEEP).indices.tolist())


def all_heads(record: PlanRecord) -> list[list[int]]:
    """Return [layer, key/value head] of all heads."""
    return [[layer, head] for layer, count in enumerate(record.heads) for head in range(count)]


def steepest(record: PlanRecord, count: int) -> list[list[int]]:
    """Return the `count` heads of the largest scores."""
    return sorted(all_heads(record), key=lambda place: -record.scores[place[0]][place[1]])[:count]


def other_plans(study: Study, first: ChosenPlan) -> Iterator[tuple[str, Plan]]:
    """Yield the plans beside the chosen one."""
    record = first.record
    heads = all_heads(record)
    yield FEWER_HEADS, first.keeping(steepest(record, FEWER))
    yield MORE_HEADS, first.keeping(steepest(record, MORE))
    if all(head in heads for head in FOR_UUIDS):
        yield UUID_HEADS, first.keeping(FOR_UUIDS)
    for seed in SEEDS[1:]:
        yield f"{KEEP} heads, seed {seed}", study.choose(f"seed {seed}", seed=seed)
    for seed in SEEDS:
        chosen = f"{DEFAULT}, seed {seed}"
        yield f"{KEEP} heads, {chosen}", study.choose(chosen, seed=seed, lengths=None)
    text = [{"input_ids": row} for row in study.rows("validation", TEXT_LENGTH, TEXT_ROWS)]
    yield f"{KEEP} heads by divergence on text", study.choose("text", signal="divergence", batches=text)
    by_loss = study.keep("heads by loss", str(KEEP), lambda: heads_by_loss(study.model, text))
    yield f"{KEEP} heads by loss of text", first.keeping([heads[number] for number in by_loss])
    for seed in SEEDS:
        yield f"{KEEP} heads at random, seed {seed}", first.keeping(random.Random(seed).sample(heads, KEEP))
    converted = most_layers(len(record.heads))
    every = [[layer, head] for layer, head in heads if layer not in converted]
    yield f"every {EVERY}th layer", first.keeping(every)
    yield EQUAL_BYTES, equal_windows(record, LENGTH)


def exchanged(name: str, plan: ChosenPlan) -> Iterator[tuple[str, Plan]]:
    """Yield a plan with one head in place of another, if it has that: tried by hand on prompts of a third seed."""
    kept, taken = plan.record.kept, TAKEN[name]
    if taken in kept:
        yield f"{name}, {EXCHANGED}", plan.keeping([GIVEN if head == taken else head for head in kept])


def fewest_heads(study: Study) -> dict[str, Plan]:
    """Return the plans of few heads and longer windows: of all seeds, and of one by prompts of two lengths."""
    options: dict[str, dict[str, Any]] = {f"seed {seed}": {"seed": seed, "lengths": (LENGTH,)} for seed in SEEDS}
    options["prompts of two lengths"] = {"seed": 0, "lengths": (TEXT_LENGTH, LENGTH)}
    how: dict[str, Any] = {"keep": FEWEST, "replace": {"streaming": LONGER_WINDOW}}
    named = {f"{FEWEST_HEADS}, {name}": given for name, given in options.items()}
    return {name: study.choose(name, **how, **given) for name, given in named.items()}


def equal_windows(record: PlanRecord, length: int) -> Plan:
    """Return windows in all heads with as many keys as a plan of exact heads and windows has after `length` tokens."""
    count, sinks = sum(record.heads), WINDOW["num_sink_tokens"] - 1
    keys = record.num_kept * length + (count - record.num_kept) * (WINDOW["window_size"] + sinks)  # of all heads
    return {"streaming": {**WINDOW, "window_size": keys // count - sinks}}


def peak_bytes(model: str, dtype: str) -> int:
    """Return the most memory of a process that chooses by one prompt of `MEMORY_LENGTH` tokens."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(model)
    choose_plan(loaded, tokenizer, KEEP, tasks=TASKS[:1], lengths=(MEMORY_LENGTH,))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of a causal language model")],
    books: Annotated[Path, typer.Argument(help="folder with validation.jsonl and test.jsonl, a text on each line")],
    samples: Annotated[int, typer.Option(help="prompts of each kind and length")] = 100,
    rows: Annotated[int, typer.Option(help="rows of text for the perplexity")] = 24,
    dtype: Annotated[str, typer.Option(help="of the weights")] = "bfloat16",
    output: Annotated[Path, typer.Option(help="the JSON file")] = RESULTS / CHOSEN_PLAN_FILE,
) -> None:
    """Choose, measure, and write the JSON, and the picture of the first plan beside it."""
    study = Study(model, books, getattr(torch, dtype), output)
    first = study.choose("seed 0", seed=0)
    text = [{"input_ids": row} for row in study.rows("validation", LENGTH, TEXT_ROWS)]
    careful = study.choose(CAREFUL_HEADS, seed=0, batches=text, **CAREFUL)
    compared: list[tuple[str, Plan]] = [(CAREFUL_HEADS, careful), (ORIGINAL, None)]
    compared += [*exchanged(CAREFUL_HEADS, careful), *exchanged(FIRST_HEADS, first)]
    compared.append((FAR_HEADS, study.choose(FAR_HEADS, seed=0, **FAR)))
    main_rows = [(FIRST_HEADS, first), *compared, WINDOWS_ALONE]
    for length, task in product(LENGTHS, TASKS):
        for name, plan in main_rows:
            study.recall(name, plan, task, length, samples)
    for task, (name, plan) in product(TASKS, compared):
        study.recall(name, plan, task, LONG_LENGTH, samples)
    for name, plan in main_rows:
        study.perplexity(name, plan, LENGTH, rows)
    others = dict(other_plans(study, first))
    fewest = fewest_heads(study)
    for name, plan in {**others, **fewest}.items():
        for task in TASKS:
            study.recall(name, plan, task, LENGTH, samples)
        study.perplexity(name, plan, LENGTH, rows)
    (small, *_) = fewest.items()
    for length, task in product(LENGTHS, TASKS):
        study.recall(*small, task, length, samples)
    few = [*main_rows, (FEWER_HEADS, others[FEWER_HEADS]), small]
    for name, plan in [*few, (EQUAL_BYTES, equal_windows(first.record, LONG_LENGTH))]:
        study.perplexity(name, plan, LONG_LENGTH, rows // FEWER_ROWS)
    for task in RECALL_TASKS:
        for name, plan in [*few, (EQUAL_BYTES, others[EQUAL_BYTES])]:
            study.recall(name, plan, task, LENGTH, samples)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        study.keep("memory", str(MEMORY_LENGTH), lambda: pool.submit(peak_bytes, model, dtype).result())
    picture = save_plan_picture(first, output.with_suffix(".png"))
    typer.echo(f"wrote {output} and {picture.name}")


if __name__ == "__main__":
    typer.run(main)
