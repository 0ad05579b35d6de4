"""Perplexity: exp of the mean negative log-likelihood of the scored tokens, on text the model was not fitted on.

    perplexity = exp(-1/T sum_t log p(x_t | context of t))

Documents are tokenised one by one, with the special tokens that the tokenizer adds, and never see each other.

- Causal models read strided windows (https://huggingface.co/docs/transformers/perplexity): every token but the first
  of each document is scored exactly once, with at least `max_length - stride` tokens of context where they exist.
  Of conversations that a chat template wrote, the answers alone are scored.
- Masked models get the pseudo-perplexity of one fixed set of masks: windows without overlap, a share of the tokens
  replaced by the mask token, and the loss on these alone. Of the masks of pretraining (Devlin et al. 2019) only the
  mask token is kept: tokens left as they are or replaced at random would blur the comparison of two models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import evaluate
import torch
from datasets import Features, Value
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from .. import architecture
from ..config import require, require_texts
from ..errors import DataError, OptionError, UnsupportedModelError
from ..inference import device_of, evaluation_mode, padding_token, progress_bar
from ..mechanisms.base import Mechanism
from ..pinning import NAME_IN_MEMORY
from ..positions.tables import position_tables
from .next_token import logits_of_parts, spaced_within

IGNORED_LABEL = -100
NOTHING_SCORED = {
    False: "documents has a token to score; give longer documents",
    True: "conversations that were read has a token of an answer to score; raise max_tokens, in a recipe"
    " max_test_tokens or max_test_documents, or give conversations with longer answers",
}  # by whether answers alone are scored
Places = Sequence[Sequence[int]]  # in a text: of each, [first character, one past the last]

_CITATION = """\
@article{jelinek1977perplexity,
  title={Perplexity -- a measure of the difficulty of speech recognition tasks},
  author={Jelinek, F. and Mercer, R. L. and Bahl, L. R. and Baker, J. K.},
  journal={The Journal of the Acoustical Society of America}, volume={62}, number={S1}, pages={S63}, year={1977}
}
"""
_INPUTS = """
Args:
    texts (list of str): the documents.
    model: a transformers model with a causal or masked language-modelling head, patched or not.
    tokenizer: the tokenizer of the model.
    max_length, stride, batch_size, seed, mask_probability, progress: as in `hf_linattn.evaluation.perplexity`.
Returns:
    dict with `perplexity` (float), `loss` (float, nats per scored token) and `num_tokens` (int, scored tokens).
"""


class PerplexityResult(TypedDict):
    """What `perplexity` returns.

    Attributes:
        perplexity: exp(loss).
        loss: nats per scored token.
        num_tokens: how many tokens were scored.
        document_tokens: how many of each document were read, where `max_tokens` left some out.
        num_documents: how many documents were read, conversations whole, where `max_tokens` left some out.
    """

    perplexity: float
    loss: float
    num_tokens: int
    document_tokens: NotRequired[int]
    num_documents: NotRequired[int]


class Window(NamedTuple):
    """What is read of a document [N], all of it or in one forward, and what is scored: [N], else `IGNORED_LABEL`."""

    input_ids: Tensor
    labels: Tensor


class Perplexity(evaluate.Metric):
    """`perplexity` as a metric of the `evaluate` library; built directly, so it needs no connection.

    Args:
        keep_in_memory: keep what is added in memory, and not in a file of the cache.
        **options: those of `evaluate.Metric`.

    Examples:
        >>> from hf_linattn.evaluation import Perplexity
        >>> metric = Perplexity()
        >>> metric.compute(texts=texts, model=model, tokenizer=tokenizer, max_length=512)  # doctest: +SKIP
        {'perplexity': 12.3, 'loss': 2.5, 'num_tokens': 40960}
    """

    def __init__(self, keep_in_memory: bool = True, **options: Any):
        super().__init__(keep_in_memory=keep_in_memory, **options)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="exp of the mean negative log-likelihood of the scored tokens of separate documents",
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=Features({"texts": Value("string")}),
            reference_urls=["https://huggingface.co/docs/transformers/perplexity"],
        )

    def _compute(
        self, texts: Sequence[str], model: nn.Module, tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> PerplexityResult:
        return perplexity(model, tokenizer, texts, **options)


def perplexity(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    max_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    mask_probability: float = 0.15,
    max_tokens: int | None = None,
    answers: Sequence[Places] | None = None,
    progress: bool | None = None,
) -> PerplexityResult:
    """Return the perplexity of a causal or masked language model on `texts`.

    The model is evaluated in eval mode. The result depends neither on `batch_size` nor on the global random state.

    Args:
        model: a model with a language-modelling head, patched or not, wrapped or not; its class says which kind.
        tokenizer: the model's own; a masked model's has a mask token.
        texts: documents; one without a scored token is skipped.
        max_length: tokens per window.
        stride: causal only: by how many tokens windows advance, below `max_length`; None is half of it.
        batch_size: windows per forward.
        seed: masked only: of the masks, which depend on it, on the texts and on the tokenizer alone.
        mask_probability: masked only: share of the tokens to predict; special tokens are never masked.
        max_tokens: of all documents; None: all. The first tokens of each are read; where these would be fewer than
            `max_length`, as many of fewer documents, spaced evenly; with `answers`, which end texts, whole documents.
        answers: causal only: of each text, the places [first character, one past the last] whose tokens alone are
            scored. The texts then are as a chat template wrote them, and get no special tokens more.
        progress: show a progress bar; None: where standard error is a terminal.

    Raises:
        OptionError: an option out of range, `max_length` beyond the positions there are, a loss that is not finite.
        DataError: `texts` is one string, holds no token to score, or a masked model's tokenizer has no mask token.
        UnsupportedModelError: the model has no language-modelling head.

    Examples:
        >>> from hf_linattn.evaluation import perplexity
        >>> perplexity(model, tokenizer, texts, max_length=512)["perplexity"]  # doctest: +SKIP
    """
    masked = is_masked_language_model(model)
    _check_options(model, max_length, stride, batch_size, mask_probability, masked)
    if masked and answers is not None:
        raise OptionError("answers: a masked model answers nothing; leave it out")
    documents, limited = documents_within(tokenizer, texts, max_tokens, max_length, answers)
    if masked:
        windows = list(_masked_windows(documents, tokenizer, max_length, seed, mask_probability))
    else:
        windows = list(_strided_windows(documents, max_length, stride or max(1, max_length // 2)))
    if not windows:
        raise DataError(f"texts: none of the {len(documents)} {NOTHING_SCORED[answers is not None]}")
    windows.sort(key=lambda window: len(window.input_ids), reverse=True)  # so that batches hold little padding
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    bar = progress_bar(batches, desc="perplexity", unit="batch", progress=progress)
    total, num_tokens = _sum_losses(model, bar, padding_token(model, tokenizer), masked)
    loss = total / num_tokens
    value = float(torch.tensor(loss, dtype=torch.float64).exp())
    return {"perplexity": value, "loss": loss, "num_tokens": num_tokens, **limited}  # type: ignore[typeddict-item]


def _sum_losses(model: nn.Module, batches: Iterable[list[Window]], pad: int, masked: bool) -> tuple[float, int]:
    """Return the sum of the losses of all scored tokens, in float64 and finite, and how many there are."""
    total, num_tokens = 0.0, 0
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            losses = _token_losses(model, batch, pad, masked)
            total += float(losses.cpu().double().sum())
            num_tokens += losses.numel()
    require_finite_loss(model, total)
    return total, num_tokens


def require_finite_loss(model: nn.Module, loss: float) -> None:
    """Raise `OptionError`, which names a model's first weight that is not finite, unless its loss is."""
    if math.isfinite(loss):
        return
    root = architecture.root_model(model)
    name = "" if root.name_or_path in ("", NAME_IN_MEMORY) else f" {root.name_or_path!r}"
    computing = ((path, x) for path, x in root.named_parameters() if x.dtype in architecture.COMPUTE_DTYPES)
    broken = next((path for path, x in computing if not (x.is_meta or bool(x.isfinite().all()))), None)
    look = f"its weight {broken!r} is not finite either: look at the training that saved it, or give another model"
    if broken is None:
        look = "its weights are finite: load it in float32 or bfloat16 where float16 overflows, or look at its logits"
    raise OptionError(f"the loss of {type(root).__name__}{name} is {loss}, which gives no perplexity; {look}")


def is_masked_language_model(model: nn.Module) -> bool:
    """Return whether the model is a masked (True) or a causal (False) language model, by its class.

    Args:
        model: a transformers model, patched or not, wrapped or not.

    Raises:
        UnsupportedModelError: it is neither, or it is causal by its class and reads the tokens that it is to predict.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn.evaluation import is_masked_language_model
        >>> is_masked_language_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10)))
        False
    """
    root = architecture.root_model(model)
    name = type(root).__name__
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if architecture.sees_ahead(root):
            raise UnsupportedModelError(
                f"{name} attends both ways here, so it reads the tokens that it is to predict; load the checkpoint"
                " with is_decoder=True, or with AutoModelForMaskedLM"
            )
        return False
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return True
    if root.can_generate() and not root.config.is_encoder_decoder:
        return False
    raise UnsupportedModelError(
        f"{name} has no causal or masked language-modelling head; load the checkpoint with AutoModelForCausalLM or"
        " AutoModelForMaskedLM"
    )


def position_limit(model: nn.Module) -> int | None:
    """Return how many positions a sequence may have: those of the learned position table, or fewer if mechanisms do.

    None if neither sets a limit (RoPE, for example).

    Args:
        model: a transformers model, patched or not, wrapped or not.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from hf_linattn.evaluation import position_limit
        >>> position_limit(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=64, vocab_size=10)))
        64
    """
    tables = position_tables(architecture.root_model(model), of_parts=True)
    own = (module.position_limit for module in model.modules() if isinstance(module, Mechanism))
    return min([*(end - first for first, end in tables.values()), *(limit for limit in own if limit)], default=None)


def _check_options(
    model: nn.Module, max_length: int, stride: int | None, batch_size: int, mask_probability: float, masked: bool
) -> None:
    """Raise `OptionError` for the first option that is out of range."""
    limit = position_limit(model)
    expected = "at least 2" if limit is None else f"2 to {limit}, the positions that the model has"
    require("max_length", max_length, 2 <= max_length <= (limit or math.inf), expected)
    if masked and stride is not None:
        raise OptionError(f"stride={stride}: windows of a masked model do not overlap; leave stride out")
    require("stride", stride, stride is None or 1 <= stride < max_length, f"1 to max_length - 1 = {max_length - 1}")
    require("batch_size", batch_size, batch_size >= 1, "at least 1")
    require("mask_probability", mask_probability, 0 < mask_probability <= 1, "above 0 and at most 1")


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], answers: Sequence[Places] | None
) -> list[Window]:
    """Return each document as a window of its own; see `perplexity` for `answers`."""
    texts = require_texts("texts", texts)
    if not texts:
        raise DataError("texts is empty; give at least one document")
    # verbose=False: a document longer than the model is the normal case here, and no reason to warn
    encoded = tokenizer(
        texts, add_special_tokens=answers is None, return_offsets_mapping=answers is not None,
        return_attention_mask=False, return_token_type_ids=False, verbose=False,
    )  # fmt: skip
    documents = [torch.tensor(ids, dtype=torch.long) for ids in encoded["input_ids"]]
    if answers is None:
        return [Window(ids, ids) for ids in documents]
    asked = [tokens_inside(*given) for given in zip(encoded["offset_mapping"], answers, strict=True)]
    return [Window(ids, ids.where(own, IGNORED_LABEL)) for ids, own in zip(documents, asked, strict=True)]


def tokens_inside(tokens: Places, places: Places) -> Tensor:
    """Return which tokens [N] begin in one of some places; both are [first character, one past the last] of a text.

    >>> tokens_inside([[0, 2], [2, 3], [3, 3], [3, 6]], [[2, 4]])
    tensor([False,  True, False,  True])
    """
    begins, ends = torch.tensor(tokens, dtype=torch.long).view(-1, 2, 1).unbind(1)
    first, last = torch.tensor(places, dtype=torch.long).view(-1, 2).unbind(1)
    return ((begins >= first) & (begins < last) & (ends > begins)).any(1)


def documents_within(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most: int | None, least: int,
    answers: Sequence[Places] | None = None,
) -> tuple[list[Window], dict[str, int]]:  # fmt: skip
    """Return documents of `most` tokens in all, each as a window of its own, and what a `PerplexityResult` says of it.

    That is nothing where they have no more.

    least: of a document that is read, as far as it has and `most` allows; there are fewer documents for it.
    """
    require("max_tokens", most, most is None or most >= 1, "at least 1, or None")
    documents = _tokenize(tokenizer, texts, answers)
    lengths = [len(document.input_ids) for document in documents]
    if most is None or sum(lengths) <= most:
        return documents, {}
    if answers is not None:
        chosen = spaced_within(lengths, most)
        return [documents[i] for i in chosen], {"num_documents": len(chosen)}
    left, longer = most, sorted(lengths)
    while longer and longer[0] * len(longer) <= left:  # whole
        left -= longer.pop(0)
    size, limited = left // len(longer), {}
    if size < min(least, most):  # so little context would tell no model from another
        size = min(least, most)
        chosen = spaced_within([min(length, size) for length in lengths], most)
        documents, limited = [documents[i] for i in chosen], {"num_documents": len(chosen)}
    if any(len(document.input_ids) > size for document in documents):
        limited |= {"document_tokens": size}
    return [Window(ids[:size], labels[:size]) for ids, labels in documents], limited


def _strided_windows(documents: Sequence[Window], max_length: int, stride: int) -> Iterator[Window]:
    """Yield windows that score every token but the first of each document once, as far as it is to be scored."""
    for document, wanted in documents:
        scored = 1
        for begin in range(0, len(document), stride):
            if scored >= len(document):
                break
            labels = wanted[begin : begin + max_length].clone()
            labels[: scored - begin] = IGNORED_LABEL
            scored = begin + len(labels)
            if bool((labels != IGNORED_LABEL).any()):
                yield Window(document[begin : begin + max_length], labels)


def _masked_windows(
    documents: Sequence[Window], tokenizer: PreTrainedTokenizerBase, max_length: int, seed: int, probability: float
) -> Iterator[Window]:
    """Yield windows without overlap, in which some tokens are replaced by the mask token and scored."""
    if tokenizer.mask_token_id is None:
        raise DataError("mask_token=None: a masked language model needs a tokenizer that has a mask token")
    special = torch.tensor(tokenizer.all_special_ids)
    generator = torch.Generator().manual_seed(seed)
    for document, _ in documents:
        chosen = (torch.rand(len(document), generator=generator) < probability) & ~torch.isin(document, special)
        input_ids = document.masked_fill(chosen, tokenizer.mask_token_id)
        labels = document.masked_fill(~chosen, IGNORED_LABEL)
        for begin in range(0, len(document), max_length):
            window = Window(input_ids[begin : begin + max_length], labels[begin : begin + max_length])
            if bool((window.labels != IGNORED_LABEL).any()):
                yield window


def _token_losses(model: nn.Module, windows: Sequence[Window], pad_token_id: int, masked: bool) -> Tensor:
    """Return the negative log-likelihoods [T] of the scored tokens of a batch of windows, in at least float32."""
    device = device_of(model)
    input_ids = pad_sequence([w.input_ids for w in windows], batch_first=True, padding_value=pad_token_id).to(device)
    labels = pad_sequence([w.labels for w in windows], batch_first=True, padding_value=IGNORED_LABEL).to(device)
    attention_mask = pad_sequence([torch.ones_like(w.input_ids) for w in windows], batch_first=True).to(device)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if masked:
        return _losses(model(**inputs).logits, labels)
    parts, first = [], 1
    for logits, targets in logits_of_parts(model, inputs):
        parts.append(_losses(logits, labels[:, first : first + targets.shape[1]]))
        first += targets.shape[1]
    return torch.cat(parts)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihoods [T] of the labels [B, N] that are scored."""
    scored = labels != IGNORED_LABEL
    logits, labels = logits[scored.to(logits.device)], labels[scored]
    precision = torch.promote_types(logits.dtype, torch.float32)
    return cross_entropy(logits.to(precision), labels.to(logits.device), reduction="none")
