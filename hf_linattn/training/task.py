"""What a model makes of text, the next token, masked tokens, a class or an embedding, and all that follows from it."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from hf_linattn import architecture
from hf_linattn.config import require
from hf_linattn.errors import CheckpointError, UnsupportedModelError
from hf_linattn.evaluation import is_masked_language_model, perplexity
from hf_linattn.evaluation.label_metrics import problem_of
from hf_linattn.evaluation.perplexity import Window, documents_within
from hf_linattn.evaluation.samples import LENGTH, Sample, continued, filled
from hf_linattn.inference import accepted, evaluation_mode
from hf_linattn.positions.tables import first_position
from hf_linattn.reading import reading
from hf_linattn.sentence_models import SentenceModel, is_sentence_model
from hf_linattn.training.arguments import DataArguments, RecipeArguments
from hf_linattn.training.base_task import Task, TextEncoder, refuse
from hf_linattn.training.classification import Regression, SequenceClassification, SeveralLabels
from hf_linattn.training.conversations import answers_of
from hf_linattn.training.data import TrainingData, tokenize_and_pack
from hf_linattn.training.heads import trained_head
from hf_linattn.training.masking import PackedMaskingCollator

READABLE = "give a folder with a saved model, or the name of a model on the Hub and a connection to it"


class LanguageModeling(Task):
    """Tokens are predicted, from packed rows that documents share without seeing each other."""

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        for name in ("text_pair_column", "metrics", "class_weights", "document_window", "document_stride"):
            refuse(name, getattr(data, name), "it is of classifiers, and the model predicts tokens")

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        tokenizer, data = encoder
        limits = {"train": max_tokens, "validation": data.max_validation_tokens}
        least = data.max_validation_tokens is None or data.max_validation_tokens >= data.block_size
        require("max_validation_tokens", data.max_validation_tokens, least, f"at least block_size={data.block_size}")
        first = first_position(model)
        rows = {
            name: tokenize_and_pack(splits[name], tokenizer, data.block_size, limit, mixed=True)
            for name, limit in limits.items()
        }
        if first:
            rows = {
                name: dataset.map(lambda row: {"position_ids": row["position_ids"] + first})
                for name, dataset in rows.items()
            }
        return TrainingData(**rows, **self.collate(encoder, model))

    def collate(self, encoder: TextEncoder, model: PreTrainedModel) -> dict[str, Any]:
        """Return the collators, where rows are not stacked as they are."""
        return {}

    def score(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, batch_size: int) -> dict[str, Any]:
        tokenizer, data = encoder
        found = perplexity(
            model, tokenizer, test["text"], max_length=data.block_size, batch_size=batch_size,
            stride=self.stride(data), mask_probability=data.eval_mlm_probability,
            max_tokens=data.max_test_tokens or None, answers=answers_of(test),
        )  # fmt: skip
        return dict(found)

    def read_documents(self, encoder: TextEncoder, test: Dataset) -> tuple[list[Window], dict[str, int]]:
        """Return what is read of the test documents, and what is said of it; see `documents_within`."""
        tokenizer, data = encoder
        most = data.max_test_tokens or None
        return documents_within(tokenizer, test["text"], most, data.block_size, answers_of(test))

    def tests_some(self, encoder: TextEncoder, test: Dataset) -> bool:
        data, tested = encoder.options, encoder.options.tested(test)
        if super().tests_some(encoder, test):
            return True
        if not data.max_test_tokens or len(tested) * data.block_size <= data.max_test_tokens:
            return False  # and nothing is tokenised for it
        return answers_of(test) is None and "num_documents" in self.read_documents(encoder, tested)[1]

    def read_tokens(self, encoder: TextEncoder, test: Dataset) -> int:
        data = encoder.options
        documents, _ = self.read_documents(encoder, test)
        lengths = [len(document.input_ids) for document in documents]
        step = self.stride(data) or data.block_size
        overlap = data.block_size - step
        return sum(length + overlap * max(0, -(-(length - data.block_size) // step)) for length in lengths)


class CausalLanguageModeling(LanguageModeling):
    """Position i predicts token i + 1."""

    auto_class = AutoModelForCausalLM

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        super().check(model, data, recipe)
        ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
        options: Any = {"input_ids": ids, **accepted(model, use_cache=False)}
        with evaluation_mode(model), torch.no_grad():
            first, other = (model(**options, labels=ids + ids.new_tensor([[n, 0]])).loss for n in (0, 1))
        if not torch.equal(first, other):  # no token predicts the first one
            raise UnsupportedModelError(
                f"{type(model).__name__} computes its loss from labels that stand where the tokens do, and would learn"
                " to copy them; shift the labels in training code of your own, or convert a model that predicts the"
                " next token"
            )

    def stride(self, data: DataArguments) -> int | None:
        return data.stride or max(1, data.block_size // 2)

    def predicting(self, logits: Tensor) -> Tensor:
        return logits[:, :-1]

    def predicted(self, labels: Tensor) -> Tensor:
        return labels[:, 1:]

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        tokenizer, data = encoder
        texts = (row["text"] for row in test)  # type: ignore[index, call-overload]  # a row is a dict
        options: Any = {"length": min(LENGTH, data.block_size), "add_special_tokens": not data.completion_only}
        return continued(model, tokenizer, texts, count, **options)


class MaskedLanguageModeling(LanguageModeling):
    """Position i predicts token i, where that is masked."""

    auto_class = AutoModelForMaskedLM

    def check(self, model: PreTrainedModel, data: DataArguments, recipe: RecipeArguments) -> None:
        super().check(model, data, recipe)
        refuse("completion_only", data.completion_only, "a masked model answers nothing")
        refuse("stride", data.stride, "windows of a masked model do not overlap")
        refuse("fidelity_windows", recipe.fidelity_windows, "a masked model generates no text")
        refuse("position_windows", recipe.position_windows, "a masked model predicts no next token")
        refuse("long_windows", recipe.long_windows, "a masked model predicts no next token")

    def collate(self, encoder: TextEncoder, model: PreTrainedModel) -> dict[str, Any]:
        (tokenizer, data), known = encoder, model.config.get_text_config().vocab_size
        return {
            "collator": PackedMaskingCollator(tokenizer, data.mlm_probability, vocab_size=known),
            "evaluation_collator": PackedMaskingCollator(tokenizer, data.eval_mlm_probability, 0, known),
        }

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        tokenizer, data = encoder
        texts = (row["text"] for row in test)  # type: ignore[index, call-overload]  # a row is a dict
        return filled(model, tokenizer, texts, count, length=min(LENGTH, data.block_size))


CAUSAL, MASKED, CLASSIFICATION = CausalLanguageModeling(), MaskedLanguageModeling(), SequenceClassification()
PROBLEMS = {task.problem: task for task in (CLASSIFICATION, SeveralLabels(), Regression())}
TASKS: dict[str, Task] = {"causal": CAUSAL, "masked": MASKED, "classification": CLASSIFICATION}  # by head


def task_of(model: nn.Module) -> Task:
    """Return what a model, wrapped or not, predicts, by its class; `UnsupportedModelError` if none of these."""
    root = architecture.root_model(model)
    if architecture.classifies_texts(root):
        return PROBLEMS[problem_of(root.config)]
    return MASKED if is_masked_language_model(root) else CAUSAL


def saved_task(name_or_path: str) -> Task:
    """Return what a checkpoint predicts, as its config says, before any weight is loaded; raises as `load_model`."""
    with reading("model_name_or_path", name_or_path, READABLE):
        config = AutoConfig.from_pretrained(name_or_path)
    head = trained_head(name_or_path, config)
    return PROBLEMS[problem_of(config)] if head == "classification" else TASKS[head]


def load_model(name_or_path: str, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """Load a checkpoint as what it was saved as: a causal or masked language model, or a classifier of texts.

    Of an embedding model of sentence-transformers the encoder is returned.

    Raises:
        UnsupportedModelError, OptionError: it has another head, see `trained_head`; no weight is loaded.
        CheckpointError: it cannot be read, or has no weights for a part of the model, which would start at random.
    """
    if is_sentence_model("model_name_or_path", name_or_path):
        return SentenceModel(name_or_path, dtype).take_encoder()
    task = saved_task(name_or_path)
    with reading("model_name_or_path", name_or_path, READABLE):
        model, info = task.auto_class.from_pretrained(name_or_path, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"model_name_or_path={name_or_path!r} has no weights for {missing[0]!r} and lacks {len(missing)} tensors"
            f" of {type(model).__name__} in all, which would be random numbers; give a checkpoint that was saved with"
            " them"
        )
    return model
