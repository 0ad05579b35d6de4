"""Classifiers of texts and of pairs of texts: one class, several labels, or a number for each."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn.config import require, require_finite
from hf_linattn.errors import DataError, OptionError
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.evaluation.label_metrics import REGRESSION, SEVERAL, SINGLE, chosen_metrics, label_scores
from hf_linattn.evaluation.samples import Sample, shortened
from hf_linattn.inference import evaluation_mode
from hf_linattn.sentence_models import PAIRS, SHOWN, pair_activation
from hf_linattn.training.arguments import NONE, Arguments, DataArguments, RecipeArguments
from hf_linattn.training.arguments.data import BALANCED
from hf_linattn.training.base_task import Task, TextEncoder, refuse, refuse_chosen_layers
from hf_linattn.training.columns import CLASSES, NUMBERS
from hf_linattn.training.data import TrainingData, text_splits
from hf_linattn.training.heads import check_classes
from hf_linattn.training.labels import by_name, check_names, check_several, class_numbers, numbers_of

logger = logging.getLogger(__name__)
TOKENS = ("input_ids", "attention_mask", "token_type_ids")


class SequenceClassification(Task):
    """A text, cut to `block_size` tokens, predicts its class; rows are padded to the longest of their batch.

    Labels are class numbers, or names that the model's config knows. With a `text_pair_column` a row holds
    two texts, cut together, with token types where the model has them. Its perplexity is that of the classes, exp of
    the mean negative log-likelihood of the right one; the score also has the metrics that were chosen.
    """

    auto_class = AutoModelForSequenceClassification
    reads_windows = joins_pairs = True
    problem: ClassVar[str] = SINGLE
    label_kinds: ClassVar[tuple[str, ...]] = CLASSES

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        refuse("completion_only", data.completion_only, "a classifier answers nothing")
        refuse("stride", data.stride, "a text is one window")
        refuse("fidelity_windows", recipe.fidelity_windows, "a classifier generates no text")
        refuse("position_windows", recipe.position_windows, "a classifier predicts no next token")
        refuse("long_windows", recipe.long_windows, "a classifier predicts no next token")
        check_classes(model.name_or_path, model.config)
        chosen_metrics(self.problem, data.metrics)
        if self.problem != SINGLE:
            refuse("class_weights", data.class_weights, f"the classifier's problem is {self.problem}, not one class")
        if data.text_pair_column:
            refuse("document_window", data.document_window, "windows of two texts have no rule")

    def check_options(self, arguments: Arguments) -> None:
        super().check_options(arguments)
        refuse_chosen_layers(arguments.model)

    @classmethod
    def select(cls, splits: DatasetDict, data: DataArguments) -> DatasetDict:
        columns = data.text_column, data.label_column
        return text_splits(splits, *columns, pair_column=data.text_pair_column, label_kinds=cls.label_kinds)

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        config: Any = model.config
        data, collator = encoder.options, PaddingCollator.of(encoder.tokenizer, config)
        check_names(splits, numbers_of(config))
        for texts in splits.values():  # whole ones: a label beyond the limits shows a mistake, too
            self.numbers(by_name(texts, numbers_of(config)), config)
        limits = {"train": max_tokens, "validation": data.max_validation_tokens}
        rows = {}
        for name, limit in limits.items():
            # a row counts as block_size tokens; data sets may be sorted by class
            chosen = splits[name]
            count = len(chosen) if limit is None else min(len(chosen), max(1, limit // data.block_size))
            if name == "train" or count < len(chosen):
                chosen = chosen.shuffle(seed=0)
            rows[name] = self.encode(chosen.select(range(count)), encoder, config, name)
            more = "" if limit is None else f", or raise max_{name}_tokens"
            remedy = f"give texts of the others in this split{more}"
            check_several(name, rows[name]["labels"][:], remedy)
        if "test" in splits:  # now, and not after hours
            test = self.encode(data.tested(splits["test"]), encoder, config, "test")
            check_several("test", test["labels"][:], "shuffle the test texts, or raise max_test_documents")
        limit = encoder.tokenizer.model_max_length
        encoder.tokenizer.model_max_length = max(limit, data.block_size)  # what is saved reads what was trained on
        given: Any = data.class_weights  # numbers by now, or a word
        weights = class_weights(given, rows["train"]["labels"][:], config)
        return TrainingData(**rows, collator=collator, evaluation_collator=collator, class_weights=weights)

    def encode(self, texts: Dataset, encoder: TextEncoder, config: Any, split: str = "test") -> Dataset:
        """Return `input_ids`, `attention_mask`, for pairs `token_type_ids`, and the `labels`.

        Raises:
            DataError: a label that the model does not have, or a text of which no token is left.
        """
        labels = self.numbers(by_name(texts, numbers_of(config)), config)
        pairs = [second or "" for second in texts["text_pair"]] if "text_pair" in texts.column_names else None
        encoded = encoder.tokenizer(
            list(texts["text"]), pairs, truncation=True, max_length=encoder.options.block_size, verbose=False,
            return_special_tokens_mask=True, **({} if pairs else {"return_token_type_ids": False}),
        )  # fmt: skip
        for text, special in zip(texts["text"], encoded["special_tokens_mask"], strict=True):
            if all(special):
                raise DataError(
                    f"the {split} split holds the text {text[:SHOWN]!r}, of which the tokenizer leaves no token;"
                    " leave it out"
                )
        columns = {name: encoded[name] for name in TOKENS if name in encoded}
        return Dataset.from_dict({**columns, "labels": labels}).with_format("torch")

    def numbers(self, labels: Sequence[Any], config: Any) -> list[Any]:
        """Return labels as the model's loss takes them."""
        return class_numbers(labels, numbers_of(config), config.num_labels)

    def score(
        self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int,
        windows: DocumentWindows | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return `loss`, `num_tokens`, how many texts there are, the chosen metrics, and the `perplexity` of classes.

        windows: in which the model reads each text, its answers pooled; None: whole.
        """
        logits, labels = self.judge(model, encoder, test, batch_size, windows)
        loss = float(self.loss(logits, labels))
        predictions, references = self.predictions(logits).tolist(), self.references(labels).tolist()
        scores = label_scores(self.problem, predictions, references, encoder.options.metrics)
        likelihood = {} if self.problem == REGRESSION else {"perplexity": float(torch.tensor(loss).double().exp())}
        return {**likelihood, "loss": loss, "num_tokens": len(labels), **scores}

    def judge(
        self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int,
        windows: DocumentWindows | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the logits [B, K] of texts and their labels; `OptionError` for logits that are not finite."""
        collator: Any = PaddingCollator.of(encoder.tokenizer, model.config)
        rows, found = self.encode(test, encoder, model.config), []
        batches: Any = DataLoader(rows, batch_size, collate_fn=collator)  # type: ignore[arg-type]
        with evaluation_mode(model), torch.no_grad():
            for batch in tqdm(batches, desc="classification", unit="batch"):
                inputs = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
                logits = model(**inputs).logits if windows is None else windows.pooled_logits(model, inputs)
                found.append(logits.cpu().double())
        logits = torch.cat(found)
        require_finite("logits", logits[~logits.isfinite()].tolist())
        return logits, rows["labels"][:]

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        """Return what the model says of texts from all over the split, which may be sorted by class."""
        count = min(count, len(test))
        chosen = test.select([place * len(test) // count for place in range(count)])
        if not count:
            return []
        logits, labels = self.judge(model, encoder, chosen, batch_size=1)
        pairs = chosen["text_pair"][:] if "text_pair" in chosen.column_names else [None] * count
        texts = [
            "\n".join(shortened(part) for part in parts if part) for parts in zip(chosen["text"], pairs, strict=True)
        ]
        said = [
            [self.word(x, model.config) for x in column]
            for column in (self.references(labels), self.predictions(logits))
        ]
        return [Sample(*row) for row in zip(texts, *said, strict=True)]

    def word(self, label: Tensor, config: Any) -> str:
        """Return a label, or a prediction, as people say it."""
        return str(config.id2label[int(label)])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a text, for logits [B, K]."""
        return F.cross_entropy(logits, labels)

    def predictions(self, logits: Tensor) -> Tensor:
        """Return what logits [B, K] say, as the metrics take it."""
        return logits.argmax(-1)

    def references(self, labels: Tensor) -> Tensor:
        """Return labels as the metrics take them."""
        return labels


class SeveralLabels(SequenceClassification):
    """A text has any number of labels: a list of names or class numbers, or as many numbers 0.0 and 1.0 as labels.

    Its loss, and the divergence from a teacher, are means over the labels, each of them yes or no; the perplexity is
    that of such an answer.
    """

    problem = SEVERAL
    label_kinds = ("a list",)

    def numbers(self, labels: Sequence[Any], config: Any) -> list[Any]:
        known, count = numbers_of(config), config.num_labels
        missing, rows = sum(given is None for given in labels), []
        if missing:
            raise DataError(
                f"label: {missing} of {len(labels)} texts have no list of labels; leave them out, or give an empty"
                " list to those without any"
            )
        for given in labels:
            if given and isinstance(given[0], float):
                if len(given) != count or not {*given} <= {0.0, 1.0}:
                    raise DataError(f"label {given!r} is no list of {count} numbers 0.0 or 1.0; give names of labels")
                rows.append(list(given))
                continue
            chosen = {*class_numbers(given, known, count)}
            if len(chosen) < len(given) or bool in map(type, given):
                raise DataError(
                    f"label {given!r} does not name classes, each once; give their names or numbers, or {count}"
                    " numbers 0.0 or 1.0"
                )
            if count == 2 and list(given) == [1, 0]:
                raise DataError(
                    "label [1, 0] may be yes and no, or both of the model's 2 labels; give the numbers 1.0 and 0.0, or"
                    " names of labels"
                )
            rows.append([float(number in chosen) for number in range(count)])
        return rows

    def predicted(self, labels: Tensor) -> Tensor:
        return labels.new_zeros(len(labels))

    def divergence(self, teacher: Any, got: Tensor, want: Tensor) -> Tensor:
        got, want = (x.to(torch.promote_types(x.dtype, torch.float32)) / teacher.temperature for x in (got, want))
        crossed = F.binary_cross_entropy_with_logits(got, want.sigmoid(), reduction="none")
        own = F.binary_cross_entropy_with_logits(want, want.sigmoid(), reduction="none")
        return teacher.temperature**2 * (crossed - own).mean(-1).sum()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def predictions(self, logits: Tensor) -> Tensor:
        return (logits > 0).long()

    def references(self, labels: Tensor) -> Tensor:
        return labels.long()

    def word(self, label: Tensor, config: Any) -> str:
        return ", ".join(config.id2label[number] for number in label.nonzero().flatten().tolist()) or "none"


class Regression(SequenceClassification):
    """A text has a number. Its loss, and the divergence from a teacher, are squared errors."""

    problem = REGRESSION
    label_kinds = NUMBERS

    def check_options(self, arguments: Arguments) -> None:
        super().check_options(arguments)
        name = arguments.model.model_name_or_path or ""
        activation = pair_activation("model_name_or_path", name)
        taught = not arguments.distillation.ce_weight and arguments.recipe.control == NONE  # by the original alone
        if activation is not None and not activation.endswith(".Identity") and not taught:
            raise OptionError(
                f"model_name_or_path={name!r} is a {PAIRS} of sentence-transformers with the activation_fn"
                f" {activation!r}; the squared error from its labels would be that of what the activation reads. Have"
                " the original alone teach it, in the recipe distill with kl_weight 1, ce_weight 0 and control none;"
                " or save it with activation_fn torch.nn.Identity(), if its labels are what the model gives without"
            )
        if activation is not None and not activation.endswith(".Identity"):
            rates = arguments.recipe.learning_rates or ()
            expected = "one rate, as the error from labels, without the activation, cannot choose"
            require("learning_rates", rates, len(rates) < 2, expected)
            logger.info("the last weights are kept: validation has the error from labels, without the activation")
            arguments.training.load_best_model_at_end = False

    def numbers(self, labels: Sequence[Any], config: Any) -> list[float]:
        missing = sum(label is None or label != label for label in labels)
        if missing:
            raise DataError(f"label: {missing} of {len(labels)} texts have no number; leave them out")
        most = torch.finfo(torch.float32).max
        if beyond := [label for label in labels if abs(label) > most]:
            raise DataError(
                f"label: {len(beyond)} of {len(labels)} texts have a number beyond {most:.1e}, such as {beyond[0]}, of"
                " which no loss can be taken; scale the labels, or leave these texts out"
            )
        return [float(label) for label in labels]

    def predicted(self, labels: Tensor) -> Tensor:
        return torch.zeros_like(labels)

    def divergence(self, teacher: Any, got: Tensor, want: Tensor) -> Tensor:
        return (got.float() - want.float()).square().sum()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        precise = logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
        return F.mse_loss(precise, labels.to(precise.dtype))

    def predictions(self, logits: Tensor) -> Tensor:
        return logits[:, 0]

    def word(self, label: Tensor, config: Any) -> str:
        return f"{float(label):.3f}"


@dataclass(frozen=True)
class PaddingCollator:
    """Stack texts of several lengths, padded on the right: on the left, absolute positions would be others."""

    pad_token_id: int
    pad_token_type_id: int = 0

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, config: Any) -> PaddingCollator:
        """Pad with what a classifier knows as padding: one that reads its last token looks for that in front of it.

        Raises:
            DataError: neither model nor tokenizer has a token for it, or the model lacks the one that it looks for, or
                has no embedding for it.
        """
        text_config = config.get_text_config()
        own = getattr(text_config, "pad_token_id", None)
        found: Any = tokenizer.pad_token_id if own is None else own
        size = getattr(text_config, "vocab_size", math.inf)
        if found is None or not 0 <= found < size or (own is None and "pad_token_id" in text_config):
            raise DataError(
                f"pad_token: the tokenizer has {tokenizer.pad_token!r}, the model's config {own!r}; a batch of texts"
                " of several lengths needs one that the model has an embedding for, set both and save them"
            )
        return cls(found, tokenizer.pad_token_type_id)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        names = [name for name in TOKENS if name in rows[0]]
        columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in names}
        padding = dict(zip(TOKENS, (self.pad_token_id, 0, self.pad_token_type_id), strict=True))
        padded = {name: pad_sequence(x, True, padding[name]) for name, x in columns.items()}
        return {**padded, "labels": torch.stack([torch.as_tensor(row["labels"]) for row in rows])}


def weighted_loss(logits: Tensor, labels: Tensor, weights: Sequence[float], smoothing: float = 0.0) -> Tensor:
    """Return mean_i w_i nll_i, w_i the weight of text i's class, for logits [B, K] and classes [B].

    The mean is over texts and not over weights, so that every batch counts alike.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    each = torch.tensor(weights, device=logits.device, dtype=precise.dtype)
    return F.cross_entropy(precise, labels, each, reduction="sum", label_smoothing=smoothing) / len(labels)


def class_weights(given: Sequence[float] | str | None, labels: Tensor, config: Any) -> tuple[float, ...] | None:
    """Return what the loss of each class is multiplied by: as given, or N / (K N_c), so that all count alike.

    N: texts, K: classes, N_c: texts of a class.

    Raises:
        OptionError: not one weight for each class, or a class without a text to be balanced by.
    """
    if given is None:
        return None
    names = [config.id2label[number] for number in range(config.num_labels)]
    if given != BALANCED:
        if len(given) != len(names):
            raise OptionError(f"class_weights={list(given)}: give {len(names)}, one for each of {', '.join(names)}")
        return tuple(float(weight) for weight in given)
    counts = Counter(labels.tolist())
    for number, name in enumerate(names):
        if not counts[number]:
            raise OptionError(f"class_weights={BALANCED!r}: no training text is of {name!r}; give a list of weights")
    return tuple(len(labels) / (len(names) * counts[number]) for number in range(len(names)))
