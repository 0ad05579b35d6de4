"""Classifiers of pairs, of several labels and of numbers, weights of classes, and texts that cannot be learnt from."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Sequence
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from hf_linattn import patch_model
from hf_linattn.errors import DataError, OptionError
from hf_linattn.sentence_models import CONFIG_FILE, PAIRS
from hf_linattn.training.arguments import DISTILLATION, Arguments, DataArguments, RecipeArguments, parse_arguments
from hf_linattn.training.classification import class_weights
from hf_linattn.training.finetuning import validation_loss
from hf_linattn.training.labels import class_numbers
from hf_linattn.training.losses.attention_transfer import AttentionTransfer
from hf_linattn.training.losses.distillation import Teacher, distillation_loss
from hf_linattn.training.task import CLASSIFICATION, PROBLEMS, TextEncoder, task_of
from hf_linattn.training.trainers import RecoveryTrainer
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.training.test_finetuning import REQUIRED, make_text, make_training

HEAD = "ForSequenceClassification"
NAMES = {"label2id": {"a": 0, "b": 1, "c": 2}, "id2label": {0: "a", 1: "b", 2: "c"}}
SEVERAL = {"num_labels": 3, "problem_type": "multi_label_classification", **NAMES}
PROBLEM_IDS = ["regression", "several", "one"]
TEXTS = [make_text(3 + i % 6, i) for i in range(8)]


def rows_of(model, labels, data=None):
    texts = Dataset.from_dict({"text": TEXTS, "label": labels})
    options = data or DataArguments(block_size=12)
    task = task_of(model)
    splits = DatasetDict({"train": texts, "validation": texts, "test": texts})
    return task.rows(task.select(splits, options), TextEncoder(make_tokenizer(), options), model, 96)


def test_several_labels_are_yes_or_no_each():
    model = make_model("bert", HEAD, std=0.5, **SEVERAL)
    labels = [["a"], ["b", "c"], [], ["a", "c"], ["b"], ["a", "b", "c"], [], ["c"]]
    data, task = rows_of(model, labels), task_of(model)
    assert task is PROBLEMS["multi_label_classification"]
    given = [[float(name in row) for name in "abc"] for row in labels]
    assert data.validation["labels"][:].tolist() == given
    encoder = TextEncoder(make_tokenizer(), DataArguments(block_size=12))
    test = Dataset.from_dict({"text": TEXTS, "label": labels})
    found = task.score(model, encoder, test, batch_size=3)
    loss, whole = 0.0, 0
    for text, row in zip(TEXTS, given, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([encoder.tokenizer(text)["input_ids"][:12]])).logits[0].tolist()
        shares = [1 / (1 + math.exp(-z)) for z in logits]
        loss -= sum(math.log(p if y else 1 - p) for p, y in zip(shares, row, strict=True)) / 3
        whole += [float(z > 0) for z in logits] == row
    assert found["loss"] == pytest.approx(loss / 8, rel=1e-5) and found["accuracy"] == whole / 8
    assert validation_loss(model, data, 3) == pytest.approx(loss / 8, rel=1e-5)
    with pytest.raises(DataError, match=r"label 'd' is none of the model's 3 classes"):
        rows_of(model, [["a"], ["d"]] * 4)
    with pytest.raises(DataError, match="label: 2 of 8 texts have no list of labels; leave them out, or give an"):
        rows_of(model, [*labels[:6], None, None])
    with pytest.raises(DataError, match=r"label \[0.0, 2.0, 1.0\] is no list of 3 numbers"):
        rows_of(model, [[0.0, 2.0, 1.0]] * 8)
    for wrong in ([0, 1, 0], [False, True, True], [True, False], ["a", "b", "a"]):
        with pytest.raises(DataError, match=rf"label {re.escape(str(wrong))} does not name classes, each once; give "):
            rows_of(model, [wrong, []] * 4)


def test_integers_given_to_a_classifier_of_several_labels_are_refused_with_what_it_takes():
    two = make_model("bert", HEAD, num_labels=2, problem_type="multi_label_classification")
    wanted = "name a column of lists of labels, as problem_type='multi_label_classification' has them; .* set 'single_"
    with pytest.raises(DataError, match=f"label_column='label' of the train split holds int64; {wanted}"):
        rows_of(two, [0, 1] * 4, DataArguments(block_size=12, label_column="label"))
    with pytest.raises(DataError, match=r"label \[1, 0\] may be yes and no, or both .*; give the numbers 1.0 and 0.0"):
        rows_of(two, [[0, 1], [1, 0]] * 4)
    both = rows_of(two, [[0, 1], [1]] * 4).train["labels"][:].tolist()
    assert sorted(both) == [[0.0, 1.0]] * 4 + [[1.0, 1.0]] * 4


def test_a_number_is_learnt_by_squares():
    model, labels = make_model("bert", HEAD, std=0.5, num_labels=1), [0.5 * i for i in range(8)]
    data, task = rows_of(model, labels), task_of(model)
    assert task is PROBLEMS["regression"]
    encoder = TextEncoder(make_tokenizer(), DataArguments(block_size=12, metrics=["mean_squared_error", "pearson"]))
    found = task.score(model, encoder, Dataset.from_dict({"text": TEXTS, "label": labels}), batch_size=3)
    got = []
    for text in TEXTS:
        with torch.no_grad():
            got.append(float(model(input_ids=torch.tensor([encoder.tokenizer(text)["input_ids"][:12]])).logits))
    squares = sum((a - b) ** 2 for a, b in zip(got, labels, strict=True)) / 8
    assert found["loss"] == pytest.approx(squares, rel=1e-5) == found["mean_squared_error"]
    assert validation_loss(model, data, 3) == pytest.approx(squares, rel=1e-5)
    with pytest.raises(DataError, match="label: 8 of 8 texts have no number"):
        rows_of(model, [math.nan] * 8)
    with pytest.raises(DataError, match=r"label: 2 of 8 texts have a number beyond 3.4e\+38, such as inf.*scale the"):
        rows_of(model, [*labels[:6], math.inf, -1e300])
    with pytest.raises(DataError, match="holds string; name a column of numbers"):
        rows_of(model, ["a"] * 8)


@pytest.mark.parametrize("problem", [{"num_labels": 1}, SEVERAL, {"num_labels": 2}], ids=PROBLEM_IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_problem_is_learnt_in_half_precision(tmp_path, monkeypatch, problem, dtype):
    """Before PyTorch 2.12 the squared error between two dtypes has no gradient."""
    squares = torch.nn.functional.mse_loss

    def older(got, wanted, **options):
        found = squares(got, wanted, **options)
        return found if got.dtype == wanted.dtype else found.detach()

    monkeypatch.setattr(torch.nn.functional, "mse_loss", older)
    model = patch_model(make_model("bert", HEAD, std=0.3, **problem), "linear")
    labels = {1: [0.3 * i for i in range(8)], 2: [0, 1] * 4, 3: [["a"], ["b", "c"]] * 4}[problem["num_labels"]]
    data = rows_of(model, labels)
    batch = data.collator([data.train[i] for i in range(8)])
    exact = float(model.eval()(**batch).loss.detach())
    trainer = RecoveryTrainer(model.to(dtype).train(), make_training(tmp_path), data)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=8)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(exact, rel=0.03)
    assert any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("problem", [{"num_labels": 1}, {"num_labels": 2}], ids=["regression", "class weights"])
def test_attention_transfer_of_a_classifier_has_the_loss_of_its_own(tmp_path, problem):
    classifier = patch_model(make_model("bert", HEAD, std=0.3, **problem), "hedgehog")
    model = AttentionTransfer(classifier)
    weights = None if problem["num_labels"] == 1 else ["balanced"]
    data = rows_of(classifier, [0, 1, 1, 1] * 2, DataArguments(block_size=12, class_weights=weights))
    batch = data.collator([data.train[i] for i in range(8)])
    expected = float(model(**batch)["loss"].detach())
    found = RecoveryTrainer(model, make_training(tmp_path), data).compute_loss(model, batch)
    assert float(found.detach()) == expected


@pytest.mark.parametrize("problem", [{"num_labels": 1}, SEVERAL], ids=PROBLEM_IDS[:2])
def test_the_divergence_of_a_problem_is_its_formula(problem):
    student, teacher = (make_model("bert", HEAD, std=0.4, seed=seed, **problem) for seed in (0, 1))
    labels = [0.5 * i for i in range(8)] if "problem_type" not in problem else [["a"], ["b", "c"]] * 4
    data = rows_of(student, labels)
    batch = data.collator([data.train[i] for i in range(8)])
    wanted = batch.pop("labels")
    with torch.no_grad():
        got, want = student(**batch), teacher(**batch)
    loss, _ = distillation_loss(got, want, wanted, Teacher(kl_weight=2.0, temperature=1.5), task_of(student))
    z, y = got.logits.double(), want.logits.double()
    if "problem_type" in problem:
        q, p = (x.div(1.5).sigmoid() for x in (z, y))
        each = 1.5**2 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean(-1)
    else:
        each = (z - y).square()[:, 0]
    assert float(loss) == pytest.approx(2 * float(each.mean()), rel=1e-4)


def test_pairs_are_cut_together_and_have_token_types():
    tokenizer, model = make_tokenizer(), make_model("bert", HEAD, num_labels=2)
    marks = [("[BOS]", 1), ("[SEP]", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "[BOS] $A [SEP]", "[BOS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    options = DataArguments(block_size=9, text_pair_column="other")
    columns = {"text": ["w5 w6 w7 w8 w9", "w5"], "other": ["w10 w11 w12 w13", "w14 w15"], "label": [0, 1]}
    splits = DatasetDict(dict.fromkeys(("train", "validation", "test"), Dataset.from_dict(columns)))
    data = CLASSIFICATION.rows(CLASSIFICATION.select(splits, options), TextEncoder(tokenizer, options), model, 100)
    batch = data.collator([data.validation[0], data.validation[1]])
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 2, 10, 11, 12, 2], [1, 5, 2, 14, 15, 2, 0, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0, 0]]
    labels = batch.pop("labels")
    with torch.no_grad():
        alone = model(**{name: x[1:, :6] for name, x in batch.items()}).logits
        assert not torch.equal(alone, model(input_ids=batch["input_ids"][1:, :6]).logits), "token types are read"
        expected = torch.nn.functional.cross_entropy(model(**batch).logits, labels)
    assert validation_loss(model, data, 2) == pytest.approx(float(expected), rel=1e-5)
    alike = DataArguments(block_size=9, text_pair_column="second")
    with pytest.raises(DataError, match="text_pair_column='second' is not a column of the train split"):
        CLASSIFICATION.select(splits, alike)


def test_weights_of_classes_multiply_the_loss_of_training_and_validation(tmp_path):
    labels = [0, 0, 0, 0, 0, 1, 1, 2]
    options = DataArguments(block_size=12, class_weights=["balanced"])
    model = patch_model(make_model("bert", HEAD, std=0.4, num_labels=3), "linear")
    data = rows_of(model, labels, data=options)
    assert data.class_weights == pytest.approx((8 / 15, 8 / 6, 8 / 3))
    batch = data.collator([data.train[i] for i in range(8)])
    wanted = batch.pop("labels")
    with torch.no_grad():
        losses = -model(**batch).logits.double().log_softmax(-1)[range(8), wanted]
    weights = torch.tensor(data.class_weights, dtype=torch.float64)[wanted]
    expected = float((weights * losses).mean())
    trainer = RecoveryTrainer(model, make_training(tmp_path), data)
    for training in (True, False):
        found = trainer.compute_loss(model.train(training), {**batch, "labels": wanted}, num_items_in_batch=8)
        assert float(found) == pytest.approx(expected, rel=1e-5)
    assert validation_loss(model, data, 3) == pytest.approx(expected, rel=1e-5)
    assert class_weights([1.0, 2.0, 3.0], torch.tensor(labels), model.config) == (1.0, 2.0, 3.0)
    with pytest.raises(OptionError, match=r"class_weights=\[1.0, 2.0\]: give 3, one for each of LABEL_0"):
        class_weights([1.0, 2.0], torch.tensor(labels), model.config)
    with pytest.raises(OptionError, match="no training text is of 'LABEL_2'"):
        class_weights("balanced", torch.tensor([0, 1]), model.config)
    for wrong in (["balance"], ["1", "-2"], ["nan"]):
        with pytest.raises(OptionError, match="class_weights must be 'balanced', or numbers above 0"):
            DataArguments(class_weights=wrong)


def test_texts_that_cannot_be_learnt_from_are_named():
    model = make_model("bert", HEAD, num_labels=2)
    with pytest.raises(DataError, match="label: all 8 texts of the train split have 1; give texts of the others"):
        rows_of(model, [1] * 8)
    with pytest.raises(DataError, match="label: all 2 texts of the test split have 0; shuffle the test texts"):
        rows_of(model, [0, 1, 1, 0, 0, 1, 0, 1], data=DataArguments(block_size=12, max_test_documents=2))
    cut = {tokens: DataArguments(block_size=12, max_validation_tokens=tokens) for tokens in (12, 24, 48)}
    assert set(rows_of(model, [0, 0, 0, 0, 1, 1, 1, 1], data=cut[48]).validation["labels"][:].tolist()) == {0, 1}
    assert len(rows_of(model, [0, 0, 0, 0, 1, 1, 1, 1], data=cut[12]).validation) == 1, "one text is no one class"
    drawn = Dataset.from_dict({"row": range(8)}).shuffle(seed=0)["row"][:2]
    with pytest.raises(DataError, match=r"label: all 2 texts of the validation split have 0.*max_validation_tokens"):
        rows_of(model, [int(row not in drawn) for row in range(8)], data=cut[24])
    with pytest.raises(DataError, match=r"label None is none of the model's 2 classes"):
        rows_of(model, [0, 1, None, 1, 0, 1, 0, 1])
    with pytest.raises(DataError, match=r"label -1 is none of the model's 2 classes"):  # as GLUE's test split
        rows_of(model, [0, 1, -1, 1, 0, 1, 0, 1])
    tokenizer, options = make_tokenizer(), DataArguments(block_size=12)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("#", "")
    texts = Dataset.from_dict({"text": ["w5", "# #"], "label": [0, 1]})
    with pytest.raises(DataError, match="the train split holds the text '# #', of which the tokenizer leaves"):
        CLASSIFICATION.encode(texts, TextEncoder(tokenizer, options), model.config, "train")


def test_a_data_set_that_numbers_its_classes_otherwise_is_read_by_their_names():
    encoder = TextEncoder(make_tokenizer(), DataArguments(block_size=12))
    texts = Dataset.from_dict({"text": TEXTS[:4], "label": [0, 1, 2, 1]})
    config = make_model("bert", HEAD, num_labels=3, **NAMES).config
    named = {("c", "a", "b"): [2, 0, 1, 0], ("x", "y", "z"): [0, 1, 2, 1], ("C", "A", "b"): [2, 0, 1, 0]}
    named["C", "A", "B", "x"] = [2, 0, 1, 0]  # no text is of the last
    for names, expected in named.items():
        named = texts.cast_column("label", ClassLabel(names=[*names]))
        assert CLASSIFICATION.encode(named, encoder, config)["labels"][:].tolist() == expected
    unknown = texts.cast_column("label", ClassLabel(names=["C", "A", "x"]))
    with pytest.raises(DataError, match="label 'x' is none of the model's 3 classes"):
        CLASSIFICATION.encode(unknown, encoder, config)
    cased = make_model("bert", HEAD, num_labels=2, id2label={0: "A", 1: "a"}, label2id={"A": 0, "a": 1}).config
    named = texts.select([0, 1]).cast_column("label", ClassLabel(names=["a", "A"]))
    assert CLASSIFICATION.encode(named, encoder, cased)["labels"][:].tolist() == [1, 0]
    lists = Dataset.from_dict({"text": TEXTS[:3], "label": [[0], [1, 2], []]})
    named = lists.cast_column("label", Sequence(ClassLabel(names=["c", "a", "b"])))
    found = PROBLEMS["multi_label_classification"].encode(named, encoder, make_model("bert", HEAD, **SEVERAL).config)
    assert found["labels"][:].tolist() == [[0, 0, 1], [1, 1, 0], [0, 0, 0]]
    missing = texts.cast_column("label", ClassLabel(names=["a", "b", "c"])).map(lambda row: {"label": -1})
    with pytest.raises(DataError, match="label -1 is none of the model's 3 classes"):
        CLASSIFICATION.encode(missing, encoder, config)


def test_class_numbers_that_mean_other_classes_in_each_split_are_refused():
    unnamed, named = (make_model("bert", HEAD, num_labels=3, **names) for names in ({}, NAMES))
    splits = {"train": ["a", "b", "c", "a"] * 2, "test": ["b", "c", "b", "c"] * 2}
    splits = {split: Dataset.from_dict({"text": TEXTS, "label": labels}) for split, labels in splits.items()}
    splits = {split: texts.class_encode_column("label") for split, texts in splits.items()}
    splits["validation"], options = splits["train"], DataArguments(block_size=12)
    encoder = TextEncoder(make_tokenizer(), options)
    with pytest.raises(DataError, match="numbers of the train split mean a, b, c, those of the test split b, c, and"):
        CLASSIFICATION.rows(CLASSIFICATION.select(DatasetDict(splits), options), encoder, unnamed, 96)
    CLASSIFICATION.rows(CLASSIFICATION.select(DatasetDict(splits), options), encoder, named, 96)
    splits["test"] = splits["test"].cast_column("label", ClassLabel(names=["a", "b"]))
    CLASSIFICATION.rows(CLASSIFICATION.select(DatasetDict(splits), options), encoder, unnamed, 96)


def test_the_tokenizer_that_is_saved_reads_as_many_tokens_as_a_classifier_was_trained_on():
    tokenizer, options = make_tokenizer(), DataArguments(block_size=12)
    tokenizer.model_max_length = 6
    rows = Dataset.from_dict({"text": TEXTS, "label": [0, 1] * (len(TEXTS) // 2)})
    splits = CLASSIFICATION.select(DatasetDict(train=rows, validation=rows, test=rows), options)
    CLASSIFICATION.rows(splits, TextEncoder(tokenizer, options), make_model("bert", HEAD, num_labels=2), 96)
    assert tokenizer.model_max_length == 12


def test_a_number_that_is_the_name_of_another_class_is_refused():
    stars = {"1": 0, "2": 1, "3": 2}
    assert class_numbers(["3", "1"], stars, 3) == [2, 0] and class_numbers([1, 0], {"0": 0, "1": 1}, 2) == [1, 0]
    with pytest.raises(DataError, match="label 1 may be class 1 or the class with this name, number 0; give names as"):
        class_numbers([1, 1], stars, 3)


@pytest.mark.parametrize("activation", ["torch.nn.modules.activation.Sigmoid", "torch.nn.Identity", None])
def test_labels_teach_no_cross_encoder_whose_scores_come_out_of_an_activation(tmp_path, activation):
    def check(*flags: str) -> Arguments:
        given = ["--model_name_or_path", str(tmp_path), *REQUIRED[2:], "--use_cpu", "true", *flags]
        arguments = parse_arguments(given, DISTILLATION)
        PROBLEMS["regression"].check_options(arguments)
        return arguments

    (tmp_path / "config.json").write_text("{}")
    check()
    older = {"sbert_ce_default_activation_function": activation}
    for file, kind in (("config.json", older), (CONFIG_FILE, {"model_type": PAIRS, "activation_fn": activation})):
        (tmp_path / file).write_text(json.dumps(kind))
        if "Identity" in str(activation) or (activation is None and file == "config.json"):
            check()
            continue
        with pytest.raises(OptionError, match=r"CrossEncoder .* 'torch.nn.modules.activation.Sigmoid'; the squared"):
            check()
        taught = "--kl_weight", "1", "--ce_weight", "0", "--control", "none"
        with pytest.raises(OptionError, match=r"learning_rates must be one rate, as .* cannot choose, got .0.0003, "):
            check(*taught)
        assert not check(*taught, "--learning_rate", "1e-3").training.load_best_model_at_end


def test_options_of_classifiers_are_refused_elsewhere():
    recipe = RecipeArguments()
    options = {"metrics": ["accuracy"], "class_weights": ["balanced"], "text_pair_column": "x", "document_window": 8}
    for name in ("bert", "gpt2"):
        model = make_model(name)
        for option, value in options.items():
            with pytest.raises(OptionError, match=f"{option}=.*: it is of classifiers, and the model predicts tokens"):
                task_of(model).check(model, DataArguments(**{option: value}), recipe)
    number = make_model("bert", HEAD, num_labels=1)
    with pytest.raises(OptionError, match="class_weights=balanced: the classifier's problem is regression"):
        task_of(number).check(number, DataArguments(class_weights=["balanced"]), recipe)
    with pytest.raises(OptionError, match="layers='auto': layers are chosen by what is predicted of tokens"):
        task_of(number).check_options(parse_arguments([*REQUIRED, "--layers", "auto"]))
    with pytest.raises(OptionError, match="metric 'accuracy' is of"):
        task_of(number).check(number, DataArguments(metrics=["accuracy"]), recipe)
