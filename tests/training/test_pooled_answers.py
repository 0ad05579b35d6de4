"""A teacher that reads documents in windows reads each of them once."""

from __future__ import annotations

import torch

from hf_linattn.evaluation.document_windows import DocumentWindows
from hf_linattn.training.losses.distillation import Teacher
from hf_linattn.training.losses.pooled_answers import PooledAnswers
from tests.models import make_model

WINDOWS = DocumentWindows(9, 5, head=1, tail=1)
LENGTHS = (23, 7, 16, 9)


def batch_of(documents, length):
    """Documents padded on the right to a length."""
    ids, mask = torch.zeros(len(documents), length, dtype=torch.long), torch.zeros(len(documents), length).long()
    for row, document in enumerate(documents):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(len(documents), dtype=torch.long)}


def test_a_document_is_read_once_whatever_batch_it_comes_in():
    model, generator = make_model("bert", "ForSequenceClassification").eval(), torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 50, (length,), generator=generator) for length in LENGTHS]
    read = []
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(len(kwargs["input_ids"])), with_kwargs=True)
    teacher = Teacher(model, kl_weight=1.0, windows=WINDOWS)
    for order, length in (((0, 1), 23), ((2, 1, 0), 40), ((3, 2, 1, 0, 3), 24)):
        batch = batch_of([documents[i] for i in order], length)
        got = teacher.outputs(model, batch).logits
        expected = torch.cat([WINDOWS.pooled_logits(model, batch_of([documents[i]], LENGTHS[i])) for i in order])
        torch.testing.assert_close(got, expected)
    own = [len(WINDOWS.split(document.tolist())) for document in documents]
    asked_here = sum(own[i] for order in ((0, 1), (2, 1, 0), (3, 2, 1, 0, 3)) for i in order)
    assert sum(read) - asked_here == sum(own), "each document's windows once, beside those that this test read"


def test_documents_that_differ_in_one_token_or_in_their_length_are_others():
    model = make_model("bert", "ForSequenceClassification").eval()
    document = torch.arange(3, 20)
    changed = document.clone()
    changed[-2] += 1
    answers = PooledAnswers()
    for other in (document, document[:-1], changed):
        got = answers.read(model, WINDOWS, batch_of([other], 20))
        torch.testing.assert_close(got, WINDOWS.pooled_logits(model, batch_of([other], 20)))


def test_teachers_do_not_share_what_they_answered():
    models = [make_model("bert", "ForSequenceClassification", seed=seed).eval() for seed in (0, 1)]
    teachers = [Teacher(model, windows=WINDOWS) for model in models]
    batch = batch_of([torch.arange(3, 20)], 17)
    found = [teacher.outputs(teacher.model, batch).logits for teacher in teachers]
    assert (found[0] - found[1]).abs().max() > 1e-4
