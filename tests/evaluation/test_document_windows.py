"""Windows of long documents: what they hold, and how their answers are pooled."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from hf_linattn.errors import OptionError
from hf_linattn.evaluation.document_windows import DocumentWindows, windows_for
from tests.helpers import make_tokenizer, make_tokens
from tests.models import make_model


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(4, 9), stride=st.integers(0, 7), head=st.integers(0, 1), tail=st.integers(0, 1),
    body=st.integers(0, 40),
)  # fmt: skip
def test_windows_hold_every_token_and_overlap_as_asked(length, stride, head, tail, body):
    room = length - head - tail
    windows = DocumentWindows(length, min(stride, room) or None, head, tail)
    ids = [1] * head + list(range(100, 100 + body)) + [2] * tail
    found = windows.split(ids)
    assert all(len(window) <= length and len(window) == count + head + tail for window, count in found)
    assert all(window[:head] == [1] * head and window[len(window) - tail :] == [2] * tail for window, _ in found)
    parts = [window[head : len(window) - tail] for window, _ in found]
    assert {token for part in parts for token in part} == {*range(100, 100 + body)}
    assert all(later[0] - earlier[0] == windows.step for earlier, later in pairwise(parts))
    assert all(len(part) == room for part in parts[:-1]), "the last one alone is shorter"
    if body <= room:
        assert found == [(ids, body)]
    else:
        assert len(parts) < 2 or parts[-2][-1] < 99 + body, "no window is behind one that ends with the document"


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_pooled_logits_are_the_mean_over_windows_by_their_tokens(name):
    model = make_model(name, "ForSequenceClassification", std=0.4, num_labels=3).double()
    pad = model.config.pad_token_id
    windows = DocumentWindows(8, 4, head=1, tail=1, pad_token_id=pad + 7)  # the tokenizer's, which is not the model's
    rows = [make_tokens(1, n, seed=n)[0] for n in (23, 5, 8)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, True, pad)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    found = windows.pooled_logits(model, {"input_ids": ids, "attention_mask": mask})
    for row, pooled in zip(rows, found, strict=True):
        total, tokens, start = torch.zeros(3, dtype=torch.float64), 0, 0
        while True:
            part = row[1:-1][start : start + 6]
            with torch.no_grad():
                total += len(part) * model(input_ids=torch.cat([row[:1], part, row[-1:]])[None]).logits[0]
            tokens += len(part)
            if start + 6 >= len(row) - 2:
                break
            start += 4
        torch.testing.assert_close(pooled, total / tokens, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [[[], [7, 8, 9]], [[7, 8, 9], []], [[]]], ids=["first", "last", "alone"])
def test_a_document_without_a_token_counts_as_one_of_one_token(rows):
    model = make_model("bert", "ForSequenceClassification", num_labels=3)
    ids = torch.tensor([row + [0] * (4 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (4 - len(row)) for row in rows])
    found = DocumentWindows(8, 4, head=0, tail=0).pooled_logits(model, {"input_ids": ids, "attention_mask": mask})
    assert found.shape == (len(rows), 3) and found.isfinite().all()
    for row, pooled in zip(rows, found, strict=True):
        if row:
            torch.testing.assert_close(pooled, model(input_ids=torch.tensor([row])).logits[0], rtol=1e-4, atol=1e-5)


def test_the_ends_of_windows_are_those_of_the_tokenizer():
    tokenizer = make_tokenizer()
    assert (windows_for(tokenizer, 8).head, windows_for(tokenizer, 8).tail) == (0, 0)
    marks = [("[BOS]", 1), ("[SEP]", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("[BOS] $A [SEP]", special_tokens=marks)
    windows = windows_for(tokenizer, 8, 3)
    assert (windows.head, windows.tail, windows.room, windows.step) == (1, 1, 6, 3)
    with pytest.raises(OptionError, match="document_stride must be at most 6, the tokens of a document in a window"):
        windows_for(tokenizer, 8, 7)
