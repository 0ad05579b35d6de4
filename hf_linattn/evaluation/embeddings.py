"""What an embedding model of sentence-transformers is worth: what it finds, and how near it is to its original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import DataError
from ..sentence_models import SHOWN, SentenceModel
from .document_windows import DocumentWindows
from .retrieval import halves, retrieval_of_pairs

METRICS = ("recall_at_1", "recall_at_10", "cosine")


@dataclass(frozen=True)
class Texts:
    """Texts to embed whole, and what is looked for by what: the second half of each by its first, or given pairs."""

    whole: list[str]
    queries: list[str]
    answers: list[str]
    paired: bool = False  # given

    @classmethod
    def of(cls, rows: Any) -> Texts:
        """Read the columns `text` and, for pairs, `text_pair` of a data set."""
        if "text_pair" not in rows.column_names:
            whole = list(rows["text"])
            return cls(whole, *halves(whole))
        pairs = list(rows["text"]), [second or "" for second in rows["text_pair"]]
        return cls([*pairs[0], *pairs[1]], *pairs, paired=True)

    def prompts(self, modules: SentenceModel) -> tuple[list[str], list[str], list[str]]:
        """Return the prompts of `whole`, `queries` and `answers`: of given pairs those for queries and for documents.

        They are those of `encode_query` and `encode_document` of sentence-transformers.
        """
        query, document = modules.pair_prompts if self.paired else (modules.prompt, modules.prompt)
        queries, answers = [query] * len(self.queries), [document] * len(self.answers)
        return [*queries, *answers] if self.paired else queries, queries, answers

    def check(self) -> None:
        """Raise `DataError` for texts that nothing can be looked for in."""
        if len(self.queries) < 2:
            raise DataError(f"{len(self.queries)} text to look for another in; give two or more")
        for text, half in zip(self.whole, self.queries, strict=False):
            if not half.strip():
                raise DataError(
                    f"the text {text[:SHOWN]!r} is too short to have a first half to find its second by; leave it"
                    " out, or give pairs with text_pair_column"
                )


def embedding_scores(
    modules: SentenceModel, encoder: nn.Module, texts: Texts, wanted: Tensor | None = None, *, max_length: int,
    batch_size: int = 32, windows: DocumentWindows | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what `retrieval_of_pairs` says, `num_tokens`, how many texts were looked for, and `cosine`.

    `cosine` is the mean over the whole texts of the cosine to `wanted`, the original's embeddings of them [texts, D].

    Args:
        modules: make embeddings of the encoder's states. max_length: tokens to which each text is cut.
        windows: in which the encoder reads each text, their embeddings averaged; None: whole.
    """
    options: dict[str, Any] = {"max_length": max_length, "batch_size": batch_size, "windows": windows}

    def embed(part: Sequence[str], prompts: Sequence[str]) -> Tensor:
        return modules.embed_texts(encoder, part, prompts=prompts, **options)

    of_whole, of_queries, of_answers = texts.prompts(modules)
    found = retrieval_of_pairs(embed(texts.queries, of_queries), embed(texts.answers, of_answers), texts.answers)
    found["num_tokens"] = len(texts.queries)
    if wanted is not None:
        found["cosine"] = float((embed(texts.whole, of_whole).double() * wanted.double()).sum(-1).mean())
    return found
