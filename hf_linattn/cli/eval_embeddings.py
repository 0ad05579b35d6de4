"""`hf-linattn eval` of an embedding model: what it finds among the texts of files, read whole or in windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import LARGEST_COUNT, require, require_count
from ..errors import DataError, OptionError
from .common import DTYPES, placed, require_same_tokens
from .eval_classifier import RowOptions

if TYPE_CHECKING:
    from ..evaluation.embeddings import Texts


def embedding_scores(
    model: str, files: list[Path], max_length: int | None, batch_size: int, dtype: str | None, options: RowOptions
) -> tuple[Any, ...]:
    """Return the JSON document, and what is shown in its place.

    The cosine is to the original's embeddings of the same windows; without an original there is none.

    Raises:
        OptionError: texts that are longer than the positions, without windows.
        DataError: no texts, one text alone, or texts without a token.
    """
    from ..evaluation import embeddings, position_limit
    from ..evaluation.document_windows import windows_for
    from ..sentence_models import SentenceModel

    if not files:
        raise DataError("files is empty; give at least one file of texts, as .jsonl, .csv or .txt")
    require_count("batch_size", batch_size)
    require("dtype", dtype, dtype in (None, *DTYPES), f"one of {', '.join(DTYPES)}, or absent")
    texts, window = read_texts(files, options), options.document_window
    modules = SentenceModel(model, dtype or "auto", "model")
    encoder = placed(modules.take_encoder(), dtype)
    limit = position_limit(encoder)
    read, name = (max_length, "max_length") if window is None else (window, "document_window")
    if read is not None and limit is not None and read > limit:
        raise OptionError(
            f"{name}={read} is beyond the {limit} positions of {model!r}; give at most {limit}, with document_window"
            f" it reads longer texts in windows, and extend_positions (max_positions={read}) makes its table longer"
        )
    if window is None and options.document_stride is not None:
        raise OptionError(f"document_stride={options.document_stride}: there are no windows; leave it out")
    require("max_length", max_length, max_length is None or max_length >= 2, "at least 2")
    own = min(modules.tokenizer.model_max_length, limit or LARGEST_COUNT)
    windows = None if window is None else windows_for(modules.tokenizer, window, options.document_stride)
    length = max_length or (LARGEST_COUNT if windows else own)
    reading: dict[str, Any] = {"max_length": length, "batch_size": batch_size, "windows": windows}
    original = wanted(options.original, model, modules.tokenizer, dtype, texts, reading)
    found = embeddings.embedding_scores(modules, encoder, texts, original, **reading)
    count = found.pop("num_tokens")
    document = {
        "model": model, "original": options.original, "max_length": max_length or (None if windows else own),
        "document_window": window, "document_stride": None if windows is None else windows.step, "num_texts": count,
    }  # fmt: skip
    shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    return {**document, **found}, f"{shown} over {count:,} texts"


def read_texts(files: list[Path], options: RowOptions) -> Texts:
    """Return the texts of files, or their pairs."""
    from datasets import concatenate_datasets

    from ..evaluation.embeddings import Texts
    from ..training.data import text_of
    from ..training.files import load_file

    columns: dict[str, Any] = {"pair_column": options.text_pair_column}
    rows = [text_of(repr(str(file)), load_file("files", file), options.text_column, **columns) for file in files]
    texts = Texts.of(concatenate_datasets(rows))
    texts.check()
    return texts


def wanted(
    original: str | None, model: str, tokenizer: Any, dtype: str | None, texts: Texts, reading: dict[str, Any]
) -> Any:
    """Return the original's embeddings of the whole texts; it reads them in windows where they are too long for it.

    Raises:
        OptionError: it has another tokenizer than the model.
    """
    from ..evaluation import position_limit
    from ..evaluation.document_windows import windows_for
    from ..sentence_models import SentenceModel

    if original is None:
        return None
    modules = SentenceModel(original, dtype or "auto", "original")
    require_same_tokens("original", original, modules.tokenizer, model, tokenizer)
    encoder = placed(modules.take_encoder(), dtype)
    limit, windows = position_limit(encoder), reading["windows"]
    if limit is not None and reading["max_length"] > limit and (windows is None or windows.length > limit):
        windows = windows_for(modules.tokenizer, limit)
    prompts = texts.prompts(modules)[0]
    return modules.embed_texts(encoder, texts.whole, prompts=prompts, **reading | {"windows": windows})
