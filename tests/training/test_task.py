"""What models predict: texts with classes as rows, their score, and how predictions are weighed in a step."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from transformers import BartConfig, BartForCausalLM

from hf_linattn import patch_model
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.training.arguments import DataArguments, RecipeArguments
from hf_linattn.training.columns import check_columns
from hf_linattn.training.data import load_text_splits
from hf_linattn.training.losses.distillation import Teacher, distillation_loss
from hf_linattn.training.stages import recovery
from hf_linattn.training.task import CAUSAL, CLASSIFICATION, MASKED, PROBLEMS, TextEncoder, load_model, task_of
from hf_linattn.training.trainers import RecoveryTrainer
from tests.helpers import make_tokenizer
from tests.models import SPINE, fill, make_model, tiny_config
from tests.training.test_finetuning import make_data, make_text, make_training

CLASSIFIER = "ForSequenceClassification"
each_family = pytest.mark.parametrize("name", SPINE)


def classified(count: int, seed: int = 0) -> Dataset:
    texts = [make_text(3 + (seed + 5 * i) % 17, seed + i) for i in range(count)]
    return Dataset.from_dict({"text": texts, "label": [i % 3 for i in range(count)]})


def classifier(name: str, **options):
    return make_model(name, CLASSIFIER, num_labels=3, **options)


@pytest.mark.parametrize(
    ("name", "head", "task"),
    [
        ("gpt2", None, CAUSAL),
        ("bert", None, MASKED),
        ("bert", CLASSIFIER, CLASSIFICATION),
        ("bert", "LMHeadModel", CAUSAL),
    ],
)
def test_a_checkpoint_is_loaded_as_what_it_was_saved_as(tmp_path, name, head, task):
    model = make_model(name, head, **({"is_decoder": True} if head == "LMHeadModel" else {}))
    patch_model(model, "linear").save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded).__name__.removeprefix("HfLinattn") == type(model).__name__.removeprefix("HfLinattn")
    assert task_of(model) is task_of(loaded) is task


@each_family
def test_the_score_of_a_classifier_is_that_of_its_texts_one_by_one(name):
    model, tokenizer, test = classifier(name, std=0.4), make_tokenizer(), classified(11)
    patch_model(model, "linear")
    tokenizer.pad_token = "[MASK]"  # another one than the model's, as in Qwen2.5
    found = CLASSIFICATION.score(model, TextEncoder(tokenizer, DataArguments(block_size=9)), test, batch_size=4)
    losses, right = [], 0
    for text, label in zip(test["text"], test["label"], strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"][:9]])
        with torch.no_grad():
            probabilities = model(input_ids=ids).logits[0].double().softmax(-1)
        losses.append(-math.log(probabilities[label]))
        right += int(probabilities.argmax() == label)
    assert found["loss"] == pytest.approx(sum(losses) / 11, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / 11), rel=1e-5)
    assert (found["accuracy"], found["num_tokens"]) == (right / 11, 11)


def test_rows_of_a_classifier_are_drawn_from_everywhere_and_count_as_whole_windows():
    train = Dataset.from_dict({"text": [make_text(4, i) for i in range(40)], "label": [i // 20 for i in range(40)]})
    splits = DatasetDict({"train": train, "validation": train})
    options = DataArguments(block_size=8, max_validation_tokens=24)
    data = CLASSIFICATION.rows(splits, TextEncoder(make_tokenizer(), options), classifier("bert"), 100)
    assert (len(data.train), len(data.validation)) == (12, 3)
    assert set(data.train["labels"][:].tolist()) == {0, 1}, "the first 12 of a sorted data set have one class"


@each_family
def test_the_divergence_of_classes_is_that_of_a_loop(name):
    student, teacher = patch_model(classifier(name, std=0.3), "linear"), classifier(name, std=0.3, seed=1)
    splits = DatasetDict({"train": classified(6), "validation": classified(6)})
    data = CLASSIFICATION.rows(splits, TextEncoder(make_tokenizer(), DataArguments(block_size=12)), student, 72)
    batch = data.collator([data.train[i] for i in range(6)])
    labels = batch.pop("labels")
    with torch.no_grad():
        got, want = (m(**batch, output_hidden_states=True) for m in (student, teacher))
    loss, hidden = distillation_loss(
        got, want, labels, Teacher(kl_weight=2.0, hidden_weight=3.0), task_of(student),
        attention_mask=batch["attention_mask"],
    )  # fmt: skip
    p, q = (out.logits.double().softmax(-1) for out in (want, got))
    total = sum(float(p[i, c] * (p[i, c] / q[i, c]).log()) for i in range(6) for c in range(3))
    assert float(loss) == pytest.approx(2 * total / 6, rel=1e-4)
    pairs = list(zip(got.hidden_states[1:], want.hidden_states[1:], strict=True))
    errors = [
        fmean(float((g[b, i] - w[b, i]).square().sum() / w[b, i].square().sum()) for i in range(length))
        for g, w in pairs
        for b, length in enumerate(batch["attention_mask"].sum(1).tolist())
    ]
    assert float(hidden) == pytest.approx(3 * fmean(errors), rel=1e-4), "padding does not count, and rows count alike"


@pytest.mark.parametrize("head", [None, CLASSIFIER])
@each_family
def test_accumulated_batches_weigh_every_prediction_alike(tmp_path, name, head):
    """BERT's loss takes the number of masked tokens in a step, and averages over its own batch all the same."""
    original = classifier(name) if head else make_model(name)
    teacher = Teacher(
        patch_model(copy.deepcopy(original), "softmax"), kl_weight=0.5, hidden_weight=0.0 if head else 0.5
    )
    if head:
        splits = DatasetDict({"train": classified(8), "validation": classified(8)})
        data = CLASSIFICATION.rows(splits, TextEncoder(make_tokenizer(), DataArguments(block_size=16)), original, 128)
    else:
        data = make_data(original)
        data = replace(data, collator=data.evaluation_collator)  # the same masks in both runs
    data = replace(data, train=data.train.select(range(7)))  # of two steps the last has batches of two and of one
    found = []
    for size, accumulated in ((4, 1), (2, 2)):
        model = patch_model(copy.deepcopy(original), "linear")
        training = make_training(
            tmp_path, learning_rate=0.1, max_steps=2, optim="sgd", gradient_accumulation_steps=accumulated,
            max_grad_norm=1e9, warmup_steps=0, lr_scheduler_type="constant", save_strategy="no",
            remove_unused_columns=False, per_device_train_batch_size=size,
        )  # fmt: skip
        RecoveryTrainer(model, training, data, teacher).train()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in patch_model(original, "linear").parameters()])
    assert (found[0] - start).norm() > 1e-3
    assert (found[0] - found[1]).norm() < 1e-4 * (found[0] - start).norm()


def test_classes_are_numbers_or_names_that_the_model_knows(tmp_path):
    model, tokenizer, options = classifier("bert"), make_tokenizer(), DataArguments(block_size=8)
    model.config.label2id = {"bad": 0, "fair": 1, "good": 2}
    named = Dataset.from_dict({"text": ["w7", "w8"], "label": ["good", "bad"]})
    assert CLASSIFICATION.encode(named, TextEncoder(tokenizer, options), model.config)["labels"][:].tolist() == [2, 0]
    for label, message in (("god", "did you mean good"), (-1, "label -1 is none of the model's 3 classes")):
        wrong = Dataset.from_dict({"text": ["w7"], "label": [label]})
        with pytest.raises(DataError, match=message):
            CLASSIFICATION.score(model, TextEncoder(tokenizer, options), wrong, 2)
    named.to_json(tmp_path / "train.jsonl")
    file = tmp_path / "train.jsonl"
    with pytest.raises(DataError, match="label_column='class' is not a column of the train split"):
        load_text_splits(train_file=file, label_column="class")
    Dataset.from_dict({"text": ["w7"] * 4, "label": [0.5] * 4}).to_json(file)
    with pytest.raises(
        DataError, match=r"label_column='label' .* holds float64; name a column of integers, booleans or strings"
    ):
        load_text_splits(train_file=file, label_column="label")
    table = tmp_path / "train.csv"
    table.write_text("text,label\nw7,1\nw8,\nw9,0\n")  # in which pandas reads numbers
    with pytest.raises(DataError, match=r"no value in 1 of 3 rows, so that the integers .* as float64; leave these"):
        load_text_splits(train_file=table, label_column="label")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_label_that_no_budget_reaches_is_refused_too(split):
    options = DataArguments(block_size=8, max_validation_tokens=8, max_test_documents=1)
    rows = {name: classified(30) for name in ("train", "validation", "test")}
    unread = 29 if split == "test" else Dataset.from_dict({"place": range(30)}).shuffle(seed=0)["place"][-1]
    labels = rows[split]["label"][:]
    labels[unread] = 7
    encoder, model = TextEncoder(make_tokenizer(), options), classifier("bert")
    CLASSIFICATION.rows(DatasetDict(rows), encoder, model, 8)
    rows[split] = Dataset.from_dict({"text": rows[split]["text"][:], "label": labels})
    with pytest.raises(DataError, match="label 7 is none of the model's 3 classes"):
        CLASSIFICATION.rows(DatasetDict(rows), encoder, model, 8)


def test_what_makes_no_sense_for_a_task_is_refused():
    recipe, data = RecipeArguments(), DataArguments(block_size=8)
    for task, model in ((MASKED, make_model("bert")), (CLASSIFICATION, classifier("bert"))):
        with pytest.raises(OptionError, match=r"stride=4: .* leave it out"):
            task.check(model, replace(data, stride=4), recipe)
        with pytest.raises(OptionError, match=r"fidelity_windows=2: .* generates no text; leave it out"):
            task.check(model, data, replace(recipe, fidelity_windows=2))
    unknown = make_model("bert", CLASSIFIER, num_labels=3, problem_type="regression")
    with pytest.raises(OptionError, match=r"num_labels=3 .* give a classifier of one problem"):
        CLASSIFICATION.check(unknown, data, recipe)
    splits = DatasetDict({"train": classified(4), "validation": classified(4)})
    for own, padded in ((None, False), (None, True), (-1, True), (1000, True)):
        tokenizer, model = make_tokenizer(), classifier("gpt2", pad_token_id=own)
        tokenizer.pad_token = "[PAD]" if padded else None
        message = f"pad_token: the tokenizer has {tokenizer.pad_token!r}, the model's config {own}"
        with pytest.raises(DataError, match=message.replace("[", r"\[")):
            CLASSIFICATION.rows(splits, TextEncoder(tokenizer, data), model, 64)
        with pytest.raises(DataError, match=message.replace("[", r"\[")):
            CLASSIFICATION.score(model, TextEncoder(tokenizer, data), classified(4), 2)


@pytest.mark.parametrize("kind", ["uint8", "bool", "int64"])
def test_labels_may_be_unsigned_or_booleans(kind):
    features = Features({"text": Value("string"), "label": Value(kind)})
    rows = Dataset.from_dict({"text": ["w7", "w8"], "label": [1, 0]}, features=features)
    check_columns("the train split", rows, {"text_column": "text", "label_column": "label"}, False)
    encoder = TextEncoder(make_tokenizer(), DataArguments(block_size=8))
    encoded = CLASSIFICATION.encode(rows, encoder, classifier("bert").config)
    assert encoded["labels"][:].dtype == torch.int64 and encoded["labels"][:].tolist() == [1, 0]


def test_a_reloaded_model_is_compared_wherever_its_weights_lie(tmp_path):
    """A file has weights begin at any multiple of eight bytes, and a matrix times one row is rounded by that."""
    model = patch_model(make_model("bert", "ForSequenceClassification", std=0.4, num_labels=3), "linear").eval()
    model.save_pretrained(tmp_path)
    for parameter in model.parameters():
        moved = torch.empty(parameter.numel() + 2)[2:].view(parameter.shape)
        parameter.data = moved.copy_(parameter.data)
    recovery.verify_saved(model, tmp_path, torch.arange(5, 12)[None], PROBLEMS["single_label_classification"])
    assert all(parameter.data_ptr() % recovery.ALIGNMENT == 0 for parameter in model.parameters())


def test_a_model_whose_loss_is_of_no_next_token_is_refused():
    """The decoders of BART and its kind compare each position with its own label, and would learn to copy it."""
    CAUSAL.check(make_model("llama"), DataArguments(), RecipeArguments())
    with pytest.raises(UnsupportedModelError, match="BartForCausalLM computes its loss from labels that stand where"):
        CAUSAL.check(fill(BartForCausalLM(tiny_config(BartConfig))), DataArguments(), RecipeArguments())
