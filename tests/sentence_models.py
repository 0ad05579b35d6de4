"""A tiny embedding model in the format of sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers import make_tokenizer
from tests.models import make_model


def save_sentence_model(folder: Path, pooling: str = "mean", normalize: bool = True, **config: Any) -> str:
    """Write a tiny BERT with pooling, and return the path of its folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    encoder, tokenizer = make_model("bert", "Model", std=0.4, **config), make_tokenizer()
    tokenizer.padding_side = "right"
    encoder.save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    first = Transformer(str(folder / "encoder"), max_seq_length=encoder.config.max_position_embeddings)
    modules = [first, Pooling(encoder.config.hidden_size, pooling), *([Normalize()] if normalize else [])]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder / "model"), create_model_card=False)
    return str(folder / "model")
