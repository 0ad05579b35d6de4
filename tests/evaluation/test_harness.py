"""Tasks from local rows against the harness's own from the same rows, and scores against a loop over items."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lm_eval import __file__ as lm_eval_file
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hf_linattn import DataError, OptionError, UnknownNameError, patch_model
from hf_linattn.evaluation import harness
from hf_linattn.evaluation.harness import load_task, run_task
from hf_linattn.evaluation.shared_prompts import SharedPrompts
from tests.helpers import WithoutFloat64, logits_of, make_tokenizer
from tests.models import make_model

TASK_FILES = Path(__file__).resolve().parents[2] / "recipes" / "tasks"
OWN = Path(lm_eval_file).parent / "tasks"


def words(count: int, seed: int) -> str:
    return " ".join(f"w{5 + (seed * 31 + i * (7 + seed)) % 85}" for i in range(count))


def choices(seed: int, count: int) -> dict[str, list[str]]:
    return {"text": [words(2 + i % 2, seed + 3 * i) for i in range(count)], "label": list("ABCD")[:count]}


# task -> where the harness has it, the split that is asked, a row
CASES: dict[str, tuple[str, str, Any]] = {
    "lambada_openai": (
        "lambada/lambada_openai.yaml", "test", lambda i: {"text": words(4 + 3 * (i % 3), i)},
    ),
    "piqa": (
        "piqa/piqa.yaml", "validation",
        lambda i: {"goal": words(3 + i % 5, i), "sol1": words(4, i + 1), "sol2": words(6, i + 2), "label": i % 2},
    ),
    "arc_easy": (
        "arc/arc_easy.yaml", "test",
        lambda i: {"id": str(i), "question": words(5, i), "choices": choices(i, 4 - i % 2), "answerKey": "ABC"[i % 3]},
    ),
    "boolq": (
        "super_glue/boolq/default.yaml", "validation",
        lambda i: {"question": words(4, i), "passage": words(9, i + 1), "answer": i % 3 == 0},
    ),
    "openbookqa": (
        "openbookqa/openbookqa.yaml", "test",
        lambda i: {"id": str(i), "question_stem": words(5, i), "choices": choices(i, 4), "answerKey": "DBCA"[i % 4]},
    ),
    "copa": (
        "super_glue/copa/default.yaml", "validation",
        lambda i: {"premise": f"{words(4, i)}.", "choice1": words(3, i + 1), "choice2": words(4, i + 2),
                   "question": ["cause", "effect"][i % 2], "idx": i, "label": i % 2},
    ),
    "rte": (
        "glue/rte/default.yaml", "validation",
        lambda i: {"sentence1": words(6, i), "sentence2": words(4, i + 1), "label": i % 2, "idx": i},
    ),
}  # fmt: skip


def rows_of(name: str, count: int = 12) -> list[dict[str, Any]]:
    return [CASES[name][2](i) for i in range(count)]


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory) -> Path:
    """The files that all tasks read, in the form that the recipes' task files name."""
    folder = tmp_path_factory.mktemp("tasks")
    files = {f"{name}_{split}": rows_of(name) for name, (_, split, _) in CASES.items() if name != "openbookqa"}
    files |= {"openbookqa_main_test": rows_of("openbookqa"), "arc_easy_validation": rows_of("arc_easy", 17)[12:]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer()
    made.eos_token = "[SEP]"
    return made


@pytest.fixture(scope="module")
def model():
    return make_model("llama", std=0.4, max_position_embeddings=256)


def test_every_task_has_a_case():
    assert harness.task_names(TASK_FILES) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_requests_are_those_the_harness_makes_of_the_same_rows(name, task_dir, monkeypatch):
    """The harness's own file, whose data set on the Hub is replaced by the same rows with the Hub's columns."""
    ours = load_task(name, TASK_FILES, task_dir)
    file, split, _ = CASES[name]
    rows = [{**row, "label": int(row["answer"])} if name == "boolq" else row for row in rows_of(name)]
    splits = datasets.DatasetDict({part: datasets.Dataset.from_list(rows) for part in ("train", "validation", "test")})
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name=None, **options: splits)
    own = TaskManager(include_defaults=False).load(str(OWN / file))["tasks"][name]
    made = []
    for task in (own, ours):
        task.set_config(key="num_fewshot", value=0)
        task.build_all_requests(limit=None)
        targets = [task.doc_to_target(instance.doc) for instance in task.instances]
        made.append([(x.request_type, x.doc_id, x.args, y) for x, y in zip(task.instances, targets, strict=True)])
        assert sorted(task._metric_fn_list) == sorted(own._metric_fn_list)
    assert made[0] == made[1] and len(made[0]) >= len(rows)
    assert split in ours.dataset


@pytest.mark.parametrize("name", ["lambada_openai", pytest.param("openbookqa", marks=pytest.mark.exhaustive), "piqa"])
def test_examples_are_other_items_and_the_same_for_every_model(name, task_dir, model, tokenizer):
    task = load_task(name, TASK_FILES, task_dir)
    runs = [run_task(model, tokenizer, task, longer_than=40, seed=3) for _ in range(2)]
    assert min(runs[0].prompt_tokens) > 40 and runs[0] == runs[1]
    asked = {instance.doc_id: (instance.doc, instance.args[0]) for instance in task.instances}
    for doc, prompt in asked.values():
        assert prompt.count(task.doc_to_text(doc)) == 1
    built = {shots: harness._build(task, None, shots, 3) for shots in (runs[0].shots - 1, runs[0].shots)}
    prompts = {shots: dict((x.doc_id, x.args[0]) for x in instances) for shots, instances in built.items()}
    fewer, same = ([len(tokenizer(text)["input_ids"]) for text in own.values()] for own in prompts.values())
    assert min(fewer) <= 40 and tuple(same) == runs[0].prompt_tokens


@pytest.mark.parametrize(
    "mechanism", ["hedgehog", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("softmax", "local"))]
)
def test_the_batch_changes_nothing(mechanism, task_dir, tokenizer):
    """Likelihoods come from right-padded batches, generated answers from left-padded ones; the mode stays, too."""
    options = {"window_size": 4} if mechanism == "local" else {}
    patched = patch_model(make_model("llama", std=0.4, max_position_embeddings=256), mechanism, **options).train()
    for name in ("piqa", "lambada_openai"):
        task = load_task(name, TASK_FILES, task_dir)
        one, many = (run_task(patched, tokenizer, task, num_generated=None, batch_size=b) for b in (1, 16))
        assert one.answers == many.answers and one.prompt_tokens == many.prompt_tokens
        assert len({answer.generated for answer in one.answers}) > 3
        for metric, values in one.values.items():
            assert many.values[metric] == pytest.approx(values, abs=1e-4)
    assert all(module.training for module in patched.modules())


@pytest.mark.parametrize("mechanism", ["softmax", "local", "hedgehog", "hybrid", "lsh"])
def test_a_prompt_read_once_gives_what_the_harness_gives(mechanism, task_dir, tokenizer):
    """With two or three choices, LAMBADA's single ones, and a prompt of one token; lsh reads it with each choice."""
    options = {"window_size": 4} if mechanism in ("local", "hybrid") else {}
    patched = patch_model(make_model("llama", std=0.4, max_position_embeddings=256), mechanism, **options)
    likeliest = tokenizer.decode(logits_of(patched, torch.tensor([[7, 9]]))[0, -1].argmax())
    pairs = [("w8", " w9 w31"), ("", " w9 w31"), ("w7 w9", f" {likeliest}"), ("w7 w9", " w12 w13 w14")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    for name in ("arc_easy", "lambada_openai"):
        requests += harness._build(load_task(name, TASK_FILES, task_dir), None, 0, 0)
    given: Any = {"pretrained": patched, "tokenizer": tokenizer, "backend": "causal", "batch_size": 32}
    own = HFLM(**given).loglikelihood(requests)
    harness_model = SharedPrompts(**given)
    assert (harness_model.shared_from > 100) == (mechanism == "lsh")
    with WithoutFloat64():
        shared = harness_model.loglikelihood(requests)
    assert [greedy for _, greedy in shared] == [greedy for _, greedy in own] and shared[2][1]
    assert [score for score, _ in shared] == pytest.approx([score for score, _ in own], abs=1e-3)


def test_scores_and_answers_are_those_of_a_loop_over_items(task_dir, model, tokenizer):
    run = run_task(model, tokenizer, load_task("piqa", TASK_FILES, task_dir), num_generated=5)
    for i, row in enumerate(rows_of("piqa")):
        prompt = f"Question: {row['goal']}\nAnswer:"
        ids = tokenizer(prompt)["input_ids"]
        scores = []
        for choice in (row["sol1"], row["sol2"]):
            answer = tokenizer(choice)["input_ids"]
            logits = logits_of(model, torch.tensor([ids + answer])).double().log_softmax(-1)[0, len(ids) - 1 : -1]
            scores.append(float(logits.gather(-1, torch.tensor(answer)[:, None]).sum()))
        chosen = scores.index(max(scores))
        normed = [score / len(row[f"sol{j + 1}"]) for j, score in enumerate(scores)]
        assert run.answers[i].target == row["label"] and run.answers[i].chosen == chosen
        assert run.values["acc"][i] == (chosen == row["label"])
        assert run.values["acc_norm"][i] == (normed.index(max(normed)) == row["label"])
        assert run.prompt_tokens[i] == len(ids) and run.num_choices[i] == 2
        if i >= 5:
            assert run.answers[i].generated is None
            continue
        greedy = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=harness.GENERATED, pad_token_id=0, eos_token_id=2
        )  # fmt: skip
        text = tokenizer.decode(greedy[0, len(ids) :], skip_special_tokens=True)
        assert run.answers[i].generated.split() == text.split()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 40), ("repetition_penalty", 9.0), ("num_beams", 3), ("cache_implementation", "quantized")],
)
def test_what_a_checkpoint_says_of_generation_changes_no_answer(name, value, task_dir, model, tokenizer, monkeypatch):
    task = load_task("piqa", TASK_FILES, task_dir)
    wanted = run_task(model, tokenizer, task, limit=2, num_generated=None)
    monkeypatch.setattr(model.generation_config, name, value)
    assert run_task(model, tokenizer, task, limit=2, num_generated=None) == wanted


def test_generated_text_is_compared_with_the_choices(task_dir, model, tokenizer, monkeypatch):
    rows = rows_of("piqa")
    said = [row["sol1"] if i % 2 else f"{row['sol2']} and more" for i, row in enumerate(rows)]
    said[:3] = "neither", "", "w"  # with "w" both begin
    monkeypatch.setattr(HFLM, "generate_until", lambda self, requests: said)
    run = run_task(model, tokenizer, load_task("piqa", TASK_FILES, task_dir), num_generated=None)
    expected = [None, None, None, *(0 if i % 2 else 1 for i in range(3, len(rows)))]
    assert [answer.written for answer in run.answers] == expected


# task that has no file of ours -> where the harness has it, a row
OWN_TASKS: dict[str, tuple[str, Any]] = {
    "winogrande": (
        "winogrande/default.yaml",
        lambda i: {"sentence": f"{words(3 + i % 3, i)} _ {words(2 + i % 2, i + 1)}", "option1": words(1, i + 2),
                   "option2": words(2, i + 3), "answer": "12"[i % 2]},
    ),
    "mrpc": ("glue/mrpc/default.yaml", lambda i: {"sentence1": words(4, i), "sentence2": words(3, i), "label": i % 2}),
    "cola": ("glue/cola/default.yaml", lambda i: {"sentence": words(5, i), "label": i % 2}),
    "gsm8k": ("gsm8k/gsm8k.yaml", lambda i: {"question": words(5, i), "answer": f"{words(3, i)}\n#### {i}"}),
}  # fmt: skip


def own_task(name: str, folder: Path, count: int = 8) -> Any:
    """A task of a file that a user wrote, and its rows."""
    include, row = OWN_TASKS[name]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(count)))
    data = {"dataset_kwargs": {"data_files": {split: "rows.jsonl" for split in ("train", "validation", "test")}}}
    file = {"include": include, "dataset_path": "json", "dataset_name": None, **data}
    (folder / f"{name}.yaml").write_text(json.dumps(file))
    return load_task(name, folder, folder)


def test_a_task_with_each_choice_in_a_prompt_of_its_own(tmp_path, model, tokenizer):
    task = own_task("winogrande", tmp_path)
    run = run_task(model, tokenizer, task, num_generated=None)
    for i, answer in enumerate(run.answers):
        row, scores = OWN_TASKS["winogrande"][1](i), []
        end = tokenizer(row["sentence"].split("_ ")[1])["input_ids"]
        for option in (row["option1"], row["option2"]):
            ids = tokenizer(row["sentence"].split("_")[0] + option)["input_ids"]
            logits = logits_of(model, torch.tensor([ids + end])).double().log_softmax(-1)[0, len(ids) - 1 : -1]
            scores.append(float(logits.gather(-1, torch.tensor(end)[:, None]).sum()))
        chosen = scores.index(max(scores))
        assert (answer.target, answer.chosen, answer.generated) == (i % 2, chosen, None)
        assert run.values["acc"][i] == (chosen == i % 2) and run.num_choices[i] == 2
    assert len(set(run.values["acc"])) == 2
    assert min(run_task(model, tokenizer, task, limit=2, longer_than=20).prompt_tokens) > 20


def test_metrics_of_all_items_together_are_left_out(tmp_path, model, tokenizer):
    assert [*run_task(model, tokenizer, own_task("mrpc", tmp_path), limit=3).values] == ["acc"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cola", "task 'cola' is of output_type 'multiple_choice' with the metrics mcc; take one of loglikelihood or"),
        ("gsm8k", "task 'gsm8k' is of output_type 'generate_until' with the metrics exact_match; take one of logl"),
    ],
)
def test_a_task_without_choices_or_accuracy_is_refused_before_it_runs(name, message, tmp_path):
    with pytest.raises(DataError, match=message):
        own_task(name, tmp_path)


def test_likelihoods_that_are_not_finite_are_refused(task_dir, tokenizer):
    model = make_model("llama", max_position_embeddings=256)
    model.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(OptionError, match=r"^log_likelihood must be finite, .*, got \[nan\]$"):
        run_task(model, tokenizer, load_task("piqa", TASK_FILES, task_dir), limit=2)


def broken(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "piqa_validation.jsonl").write_text(text)
    return folder


def test_what_is_missing_or_malformed_is_named(task_dir, model, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match=r"unknown task 'piqua'; did you mean piqa\?"):
        load_task("piqua", TASK_FILES, task_dir)
    with pytest.raises(OptionError, match="task_files must be a folder of task files"):
        load_task("piqa", tmp_path, task_dir)
    with pytest.raises(DataError, match=r"task_dir='.*' has no piqa_validation.jsonl, which task 'piqa' reads"):
        load_task("piqa", TASK_FILES, tmp_path)
    with pytest.raises(DataError, match=r"task 'piqa' cannot be read from task_dir='.*rows'"):
        load_task("piqa", TASK_FILES, broken(tmp_path / "rows", '{"goal": \n'))
    with pytest.raises(DataError, match=r"task 'piqa' cannot be read from task_dir='.*columns'.*piqa.yaml reads"):
        load_task("piqa", TASK_FILES, broken(tmp_path / "columns", '{"goal": "w5"}\n'))
    files = tmp_path / "files"
    files.mkdir()
    (files / "piqa.yaml").write_text("dataset_path: json\n")
    with pytest.raises(DataError, match=r"task_files: '.*piqa.yaml' is no task file: 'include'; it needs `include`"):
        load_task("piqa", files, task_dir)
    task = load_task("copa", TASK_FILES, task_dir)
    with pytest.raises(DataError, match="longer_than=2000: the 11 examples that task 'copa' has make no prompt"):
        run_task(model, tokenizer, task, longer_than=2000)
    short = make_model("llama", max_position_embeddings=24)
    patched = patch_model(make_model("llama", max_position_embeddings=256), "synthesizer", max_length=24)
    for read, positions in ((short, None), (patched, None), (model, 24)):
        with pytest.raises(OptionError, match=r"'piqa' has prompts of \d+ tokens with the answer, and the model 24"):
            run_task(read, tokenizer, load_task("piqa", TASK_FILES, task_dir), positions=positions)
    for name in ("limit", "longer_than", "batch_size"):
        with pytest.raises(OptionError, match=f"{name} must be"):
            run_task(model, tokenizer, task, **{name: 0})
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"run pip install 'hf_linattn\[harness\]'"):
        load_task("piqa", TASK_FILES, task_dir)


def test_the_hub_is_read_without_a_task_dir(monkeypatch):
    asked = []

    def refuse(path: str, name: str | None = None, **options: Any) -> None:
        asked.append((path, name, options))
        raise OSError("no connection")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="task 'boolq' cannot be read from the Hub: no connection; give a task_dir"):
        load_task("boolq", TASK_FILES)
    assert asked == [("aps/super_glue", "boolq", {})]
