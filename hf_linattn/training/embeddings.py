"""Embedding models of sentence-transformers: the original's embeddings teach, and retrieval measures."""

from __future__ import annotations

import logging
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linattn.errors import OptionError
from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.evaluation.embeddings import Texts, embedding_scores
from hf_linattn.evaluation.samples import Sample, shortened
from hf_linattn.inference import evaluation_mode, padding_token
from hf_linattn.report.schema import EMBEDDING
from hf_linattn.sentence_models import SentenceModel
from hf_linattn.training.arguments import Arguments, DataArguments, long_step
from hf_linattn.training.base_task import Task, TextEncoder, refuse, refuse_chosen_layers
from hf_linattn.training.classification import PaddingCollator
from hf_linattn.training.data import TrainingData, text_splits
from hf_linattn.training.losses.embeddings import EmbeddingDistillation, EmbeddingWeights
from hf_linattn.training.losses.loss_module import LossModule

logger = logging.getLogger(__name__)

LOOKED_AMONG = 16  # texts, for the samples of a report
# of other tasks: what they would be of
OF_OTHERS = {
    "kl_weight": "an embedding model predicts nothing",
    "completion_only": "an embedding model answers nothing",
    "stride": "a text is one window",
    "metrics": "it is of classifiers",
    "class_weights": "it is of classifiers",
    "fidelity_windows": "an embedding model generates no text",
    "position_windows": "an embedding model predicts no next token",
    "long_windows": "an embedding model predicts no next token",
    "label_smoothing_factor": "there are no labels to smooth",
    "neftune_noise_alpha": "the original would be given other embeddings of tokens",
    "top_k": "there are no logits to compare",
    "fading_teacher": "nothing else teaches",
    "tokenizer_name": "the tokenizer is that of the folder",
    "save_adapter": "an embedding model is saved as a folder of sentence-transformers, with the adapters merged",
}


class Embeddings(Task):
    """A text, cut to `block_size` tokens, becomes a row of numbers; rows are padded to the longest of their batch.

    There are no labels: the original's embeddings teach. Where they are those of windows, the control learns from them
    as well; else it would learn what it knows, and there is none. For the score see `embedding_scores`, beside the
    embeddings that teach.
    """

    problem = EMBEDDING
    has_own_loss = True
    reads_windows = True
    of_control = frozenset({"hidden_weight", "document_window", "document_stride"})

    def __init__(self, modules: SentenceModel):
        self.modules = modules
        self.tokenizer: Any = modules.tokenizer
        self._wanted: Tensor | None = None

    def check_options(self, arguments: Arguments) -> None:
        given = {name: value for group in arguments for name, value in vars(group).items()}
        for name, reason in OF_OTHERS.items():
            refuse(name, given[name], reason)
        for name, default in {"ce_weight": 1.0, "temperature": 1.0}.items():
            refuse(name, given[name] if given[name] != default else None, "there are no predictions to compare")
        refuse_chosen_layers(arguments.model)
        check_weights(arguments)

    def compares_rows(self, arguments: Arguments) -> bool:
        return arguments.recipe.similarity_weight != 0

    @classmethod
    def select(cls, splits: DatasetDict, data: DataArguments) -> DatasetDict:
        return text_splits(splits, data.text_column, pair_column=data.text_pair_column)

    def rows(self, splits: DatasetDict, encoder: TextEncoder, model: PreTrainedModel, max_tokens: int) -> TrainingData:
        data = encoder.options
        limits = {"train": max_tokens, "validation": data.max_validation_tokens}
        rows = {}
        for name, limit in limits.items():
            # a row counts as block_size tokens
            chosen = splits[name].shuffle(seed=0) if name == "train" else splits[name]
            texts = texts_of(chosen)
            count = len(texts) if limit is None else min(len(texts), max(1, limit // data.block_size))
            own = self.modules.pair_prompts if "text_pair" in chosen.column_names else (self.modules.prompt,)
            prompts = [*islice(cycle(own), count)]
            encoded = self.modules.encode(texts[:count], data.block_size, name, prompts)
            rows[name] = Dataset.from_dict({**encoded, "labels": list(range(count))}).with_format("torch")
        if "test" in splits:  # now, and not after hours
            test = Texts.of(data.tested(splits["test"]))
            test.check()
            parts = test.whole, test.queries, test.answers
            for part, prompts in zip(parts, test.prompts(self.modules), strict=True):
                self.modules.encode(part, data.block_size, "test", prompts)
        limit = self.tokenizer.model_max_length
        self.tokenizer.model_max_length = max(limit, data.block_size)  # what is saved reads what was trained on
        collator = PaddingCollator(padding_token(model, self.tokenizer))
        return TrainingData(**rows, collator=collator, evaluation_collator=collator)

    def trainee(self, run: Any, model: nn.Module) -> nn.Module:
        if isinstance(model, LossModule):  # attention transfer
            return model
        weights = weights_of(run.arguments)
        at_once = run.arguments.training.per_device_eval_batch_size
        return EmbeddingDistillation(model, run.original(), self.modules, weights, run.windows, at_once)

    def measure(
        self, run: Any, model: PreTrainedModel, options: DataArguments, windows: DocumentWindows | None = None
    ) -> dict[str, Any]:
        size = run.arguments.training.per_device_eval_batch_size
        texts, longest = Texts.of(options.tested(run.splits["test"])), run.arguments.data.block_size
        if self._wanted is None:  # as they teach: once, whatever is compared
            self._wanted = self.modules.embed_texts(
                run.original(), texts.whole, max_length=longest, batch_size=size, windows=run.windows,
                prompts=texts.prompts(self.modules)[0],
            )  # fmt: skip
        reading: dict[str, Any] = {"max_length": options.block_size, "batch_size": size, "windows": windows}
        return embedding_scores(self.modules, model, texts, self._wanted, **reading)

    def samples(self, model: PreTrainedModel, encoder: TextEncoder, test: Dataset, count: int) -> list[Sample]:
        """Return what a model finds for the first texts, among the first `LOOKED_AMONG`."""
        texts = Texts.of(test.select(range(min(len(test), LOOKED_AMONG))))
        options: dict[str, Any] = {"max_length": encoder.options.block_size, "batch_size": 4}
        _, *prompts = texts.prompts(self.modules)
        queries, answers = (
            self.modules.embed_texts(model, part, prompts=own[: len(part)], **options)
            for part, own in zip((texts.queries[:count], texts.answers), prompts, strict=True)
        )
        nearest = (queries @ answers.T).argmax(1).tolist()
        rows = zip(texts.queries[:count], texts.answers, (texts.answers[i] for i in nearest), strict=False)
        return [Sample(*map(shortened, row)) for row in rows]

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        self.modules.save(model, folder)

    @torch.no_grad()
    def answers(self, model: PreTrainedModel, input_ids: Tensor) -> Tensor:
        with evaluation_mode(model):
            return self.modules.embed(model, {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})


def texts_of(rows: Dataset) -> list[str]:
    """Return all texts of rows, those of pairs beside each other."""
    columns = [rows[name] for name in ("text", "text_pair") if name in rows.column_names]
    return [text or "" for row in zip(*columns, strict=True) for text in row]


def weights_of(arguments: Arguments) -> EmbeddingWeights:
    """Return the weights of the loss; what is not said counts once, similarity only where texts have others beside."""
    recipe, usual = arguments.recipe, 1.0 if smallest_batch(arguments) > 1 else 0.0
    cosine, similarity = recipe.cosine_weight, recipe.similarity_weight
    return EmbeddingWeights(
        recipe.hidden_weight, 1.0 if cosine is None else cosine, usual if similarity is None else similarity
    )


def smallest_batch(arguments: Arguments) -> int:
    """Return how many texts the smallest batch of a run holds; a stage of longer ones has fewer at a time."""
    return min(arguments.training.per_device_train_batch_size, long_step(arguments)[0])


def check_weights(arguments: Arguments) -> None:
    """Raise `OptionError` where nothing teaches, or texts are to be compared that come one at a time."""
    weights, given = weights_of(arguments), arguments.recipe.similarity_weight
    alone = smallest_batch(arguments) == 1 and given != 0
    if alone and (given or not any(weights)):
        longest = max(arguments.data.block_size, arguments.distillation.long_block_size or 0)
        raise OptionError(
            f"similarity_weight={given}: a batch of one text has no others to compare it with; give a"
            f" per_device_train_batch_size of at least {-(-2 * longest // arguments.data.block_size)}, or"
            " similarity_weight 0"
        )
    if not any(weights):
        raise OptionError("cosine_weight, similarity_weight and hidden_weight are 0; nothing teaches, raise one")
    if alone:
        logger.warning("similarity_weight: 0 is taken, as a batch of one text has no others to compare it with")
