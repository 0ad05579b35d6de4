"""Embedding models of sentence-transformers: an encoder of transformers, and modules that pool its states.

A folder with `modules.json` says which modules follow each other. The first is the encoder, whose attention is
converted; pooling, dense layers and normalisation come from the folder as they are.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from . import architecture
from .errors import CheckpointError, DataError, UnsupportedModelError
from .inference import accepted, evaluation_mode, padding_token
from .reading import reading, require_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .evaluation.document_windows import DocumentWindows

PACKAGE = "sentence_transformers"
MODULES_FILE = "modules.json"
CONFIG_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"  # what its first module makes of a model of transformers
EMBEDDING, PAIRS = "SentenceTransformer", "CrossEncoder"  # what a folder may hold; others make no single embedding
ENCODER = "Transformer"  # the module that holds a model of transformers
KNOWN = ("Pooling", "Dense", "LayerNorm", "Normalize")  # modules that may follow it
PAIR_PROMPTS = (("query",), ("document", "passage", "corpus"))  # of a pair's texts, the first name that there is
COSINE = "cosine"
SHOWN = 40  # characters of a text in a message


def is_sentence_model(option: str, name: str) -> bool:
    """Return whether a folder, or a model of the Hub, holds an embedding model of sentence-transformers.

    A `CrossEncoder` of one module is none: its folder is that of a classifier of transformers.

    Raises:
        UnsupportedModelError: it holds another kind of model of sentence-transformers, such as a `SparseEncoder`.
        CheckpointError: it cannot be read.
    """
    require_place(option, name)
    modules = _read_json(option, name, MODULES_FILE)
    if modules is None:
        return False
    kind = (_read_json(option, name, CONFIG_FILE) or {}).get("model_type", EMBEDDING)
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    if kind == EMBEDDING or (kind == PAIRS and kinds == [ENCODER]):
        return kind == EMBEDDING
    raise UnsupportedModelError(
        f"{option}={name!r} is a {kind} of sentence-transformers with the modules {', '.join(kinds)}; give a"
        f" {EMBEDDING}, or a {PAIRS} of one {ENCODER}, or load it yourself and call patch_model"
    )


def encoder_folder(option: str, name: str) -> str:
    """Return where in a folder, or a model of the Hub, config and weights lie: empty, or a subfolder of modules.json.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not is_sentence_model(option, name):
        return ""
    return str(_read_json(option, name, MODULES_FILE)[0].get("path", ""))


def pair_activation(option: str, name: str) -> str | None:
    """Return what a `CrossEncoder` computes of its logits, a name of a class; None: the folder says nothing of it.

    Raises:
        CheckpointError: it cannot be read.
    """
    saved, config = (_read_json(option, name, file) or {} for file in (CONFIG_FILE, "config.json"))
    if saved.get("model_type") == PAIRS:
        return saved.get("activation_fn") or "torch.nn.modules.activation.Sigmoid"
    older = (config.get("sentence_transformers") or {}).get("activation_fn")
    return older or config.get("sbert_ce_default_activation_function")


def keep_pair_files(option: str, name: str, folder: Path) -> None:
    """Copy what makes a folder a `CrossEncoder` with its own activation and prompts; nothing where it is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    if (_read_json(option, name, CONFIG_FILE) or {}).get("model_type") != PAIRS:
        return
    for file in (CONFIG_FILE, MODULES_FILE, TRANSFORMER_FILE):
        if (path := _find(option, name, file)) is not None:
            shutil.copyfile(path, folder / file)


def _read_json(option: str, name: str, file: str) -> Any:
    """Return what a file of a folder, or of a model of the Hub, says; None where there is no such file."""
    path = _find(option, name, file)
    with reading(option, name, "give a folder with a saved model"):
        return path and json.loads(Path(path).read_text(encoding="utf-8"))


def _find(option: str, name: str, file: str) -> str | None:
    """Return where a file of a folder, or of a model of the Hub, lies; None where there is no such file."""
    from transformers.utils import cached_file

    with reading(option, name, "give a folder with a saved model, or the name of one on the Hub and a connection"):
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


class _Unsaved(nn.Module):
    """What stands in for an encoder where all but that is saved."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


class SentenceModel:
    """What makes embeddings of an encoder's states: the modules of a folder, without the encoder itself.

    Args:
        name: a folder, or the name of a model on the Hub. dtype: of the encoder. option: named it.

    Attributes:
        tokenizer: of the model; its `model_max_length` is the `max_seq_length` that is saved.
        prompt: before every text, else empty. pair_prompts: before what is looked for by, and before what is found.

    Raises:
        UnsupportedModelError: sentence-transformers is not installed, a module is none of those that are known,
            prompts are left out of pooling, or embeddings are compared by more than their angle.
        CheckpointError: the folder cannot be read, or holds no embedding model.
    """

    def __init__(self, name: str, dtype: str | torch.dtype = "auto", option: str = "model_name_or_path"):
        if not is_sentence_model(option, name):
            if not Path(name).is_dir() and _find(option, name, "config.json") is None:
                raise CheckpointError(
                    f"{option}={name!r}: there is no such folder, and no such model of the Hub was found; give a"
                    " folder with an embedding model, or the name of one on the Hub and a connection"
                )
            raise CheckpointError(
                f"{option}={name!r} is no {EMBEDDING} with a {MODULES_FILE}, so nothing says how its states become an"
                " embedding; give an embedding model that sentence-transformers saved"
            )
        if importlib.util.find_spec(PACKAGE) is None:
            raise UnsupportedModelError(
                f"{option}={name!r} is an embedding model of sentence-transformers, which is not installed; run"
                " pip install 'hf_linattn[embeddings]'"
            )
        from sentence_transformers import SentenceTransformer

        with reading(option, name, "give a model that sentence-transformers saved"), _quiet():
            self._whole: Any = SentenceTransformer(name, device="cpu", model_kwargs={"dtype": dtype})
        kinds = [type(module).__name__ for module in self._whole]
        unknown = next((kind for kind in kinds[1:] if kind not in KNOWN), None)
        if kinds[0] != ENCODER or "Pooling" not in kinds[1:] or unknown is not None:
            raise UnsupportedModelError(
                f"{option}={name!r} has the modules {', '.join(kinds)}; what is converted is a {ENCODER}, then"
                f" Pooling, and after it any of {', '.join(KNOWN[1:])}"
            )
        if "message" in self._whole[0].modality_config or self._whole[0].processing_kwargs:
            raise UnsupportedModelError(
                f"{option}={name!r} reads texts through the chat template of its tokenizer, or with processing_kwargs"
                " of its own, which is not supported; save it with tokenizer.chat_template = None and without"
                " processing_kwargs, if that is how it was trained"
            )
        given = self._whole.prompts
        self.prompt = given.get(self._whole.default_prompt_name) or ""
        self.pair_prompts = tuple(
            next((given[role] or "" for role in roles if role in given), self.prompt) for roles in PAIR_PROMPTS
        )
        prompt = next(filter(None, (self.prompt, *self.pair_prompts)), "")
        if prompt and not all(getattr(module, "include_prompt", True) for module in self._whole):
            raise UnsupportedModelError(
                f"{option}={name!r} leaves the prompt {prompt!r} out of its pooling (include_prompt=False), which is"
                " not supported; save it without prompts"
            )
        similarity = str(self._whole.similarity_fn_name or COSINE)
        if similarity != COSINE and kinds[-1] != "Normalize":
            raise UnsupportedModelError(
                f"{option}={name!r} compares embeddings by similarity_fn_name={similarity!r}, in which their lengths"
                f" count, while cosines are taught and scored; save it with similarity_fn_name={COSINE!r}, or with a"
                " Normalize module"
            )
        self.tokenizer = self._whole.tokenizer
        if self.tokenizer.pad_token_id is None:
            raise DataError(f"pad_token: the tokenizer of {name!r} has none; a batch of texts needs one, set it")
        self.encoder: PreTrainedModel | None = self._whole[0].model
        self._whole[0].model = None  # else it would stay in memory beside those that are trained
        self._pooling = list(self._whole)[1:]
        for module in self._pooling:
            module.float().eval().requires_grad_(False)

    def take_encoder(self) -> PreTrainedModel:
        """Return the encoder that was loaded, once; it is not kept here."""
        encoder, self.encoder = self.encoder, None
        if encoder is None:
            raise CheckpointError("the encoder was taken already; load the folder again")
        return encoder

    @contextmanager
    def holding(self, encoder: nn.Module | None) -> Iterator[Any]:
        """Give the `SentenceTransformer` with an encoder in its place, for a while; None: one that saves nothing."""
        self._whole[0].model = _Unsaved() if encoder is None else architecture.root_model(encoder)
        try:
            yield self._whole
        finally:
            self._whole[0].model = None

    def save(self, encoder: nn.Module | None, folder: str | Path) -> None:
        """Write a folder that `SentenceTransformer(folder)` loads, without its encoder for None, and no card."""
        with self.holding(encoder) as whole:
            whole.save_pretrained(str(folder), create_model_card=False)

    def encode(
        self, texts: Sequence[str], max_length: int, split: str = "test", prompts: Sequence[str] | None = None
    ) -> dict[str, list[list[int]]]:
        """Return `input_ids` and `attention_mask` of texts, with the prompt of each, cut to `max_length` tokens.

        prompts: None: the model's own, its `default_prompt_name`, for all.

        Raises:
            DataError: the tokenizer leaves no token of a text.
        """
        prompts = [self.prompt] * len(texts) if prompts is None else prompts
        encoded = self.tokenizer(
            [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
            truncation=True, max_length=max_length, verbose=False,
            return_special_tokens_mask=True, return_token_type_ids=False,
        )  # fmt: skip
        for text, special in zip(texts, encoded["special_tokens_mask"], strict=True):
            if all(special):
                raise DataError(
                    f"the {split} split holds the text {text[:SHOWN]!r}, of which the tokenizer leaves no token;"
                    " leave it out"
                )
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def pool(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return embeddings [B, D] of states [B, N, W], by the modules of the folder and its `truncate_dim`."""
        features = {"token_embeddings": states.float(), "attention_mask": attention_mask}
        for module in self._pooling:
            features = module.to(states.device)(features)
        return features["sentence_embedding"][..., : self._whole.truncate_dim]

    def embed(
        self, encoder: nn.Module, inputs: Mapping[str, Tensor], windows: DocumentWindows | None = None
    ) -> Tensor:
        """Return embeddings [B, D] of length 1 for `input_ids` and `attention_mask` [B, N], padded on the right.

        windows: in which the encoder reads each text, their embeddings averaged by their tokens; None: whole.
        """

        def read(ids: Tensor, mask: Tensor) -> Tensor:
            states = encoder(input_ids=ids, attention_mask=mask, **accepted(encoder, use_cache=False))
            return self.pool(states.last_hidden_state, mask)

        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        found = read(ids, mask) if windows is None else windows.pooled(read, ids, mask)
        return F.normalize(found, dim=-1)

    def embed_texts(
        self,
        encoder: nn.Module,
        texts: Sequence[str],
        *,
        max_length: int,
        batch_size: int = 32,
        windows: DocumentWindows | None = None,
        prompts: Sequence[str] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """Return the embeddings of texts, of length 1, in float32 on the CPU: [texts, D]; `prompts` as in `encode`."""
        from .evaluation.retrieval import in_batches  # needs the extra [eval], which a conversion does without

        encoded = self.encode(texts, max_length, prompts=prompts)["input_ids"]
        device, pad = architecture.root_model(encoder).device, padding_token(encoder, self.tokenizer)

        def read(chosen: Sequence[int]) -> Tensor:
            ids = [torch.tensor(encoded[i], device=device) for i in chosen]
            batch = {
                "input_ids": pad_sequence(ids, True, pad),
                "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            }
            return self.embed(encoder, batch, windows)

        with evaluation_mode(encoder), torch.no_grad():
            return in_batches(read, [len(row) for row in encoded], batch_size, progress)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what sentence-transformers says of every model that it loads out of the log."""
    logger = logging.getLogger(PACKAGE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
