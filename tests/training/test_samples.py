"""What a model makes of a few texts, beside an answer computed one token at a time."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_linattn import patch_model
from hf_linattn.training.arguments import DataArguments
from hf_linattn.training.task import TextEncoder, task_of
from tests.helpers import logits_of, make_tokenizer
from tests.models import make_model
from tests.training.test_finetuning import make_text
from tests.training.test_problems import HEAD, NAMES, SEVERAL

ENCODER = TextEncoder(make_tokenizer(), DataArguments(block_size=9))
TEXTS = [make_text(length, length) for length in (4, 11, 9, 3, 20)]


def samples(model, count=2, **columns):
    test = Dataset.from_dict({"text": TEXTS, **columns})
    return task_of(model).samples(model, ENCODER, test, count)


def test_a_causal_model_goes_on_greedily_after_the_beginnings_of_texts_that_are_long_enough():
    model = patch_model(make_model("llama", std=0.4), "hybrid", window_size=4)
    found = samples(model)
    assert [len(found), samples(model, count=0), len(samples(model, count=9))] == [2, [], 3]
    for sample, text in zip(found, (TEXTS[1], TEXTS[2]), strict=True):
        words = text.split()
        assert (sample.prompt, sample.truth) == (" ".join(words[:5]), " ".join(words[5:9]))
        ids = ENCODER.tokenizer(sample.prompt)["input_ids"]
        for _ in range(4):
            ids.append(int(logits_of(model, torch.tensor([ids]))[0, -1].argmax()))
        assert sample.answer == ENCODER.tokenizer.decode(ids[5:], skip_special_tokens=True)


def test_a_masked_model_fills_the_middle_of_a_text():
    model = patch_model(make_model("bert", std=0.4), "linear")
    (sample,) = samples(model, count=1)
    words = TEXTS[0].split()
    assert sample.truth == words[2] and sample.prompt == " ".join([*words[:2], "[MASK]", words[3]])
    logits = logits_of(model, torch.tensor([ENCODER.tokenizer(sample.prompt)["input_ids"]]))
    assert sample.answer == ENCODER.tokenizer.decode(logits[0, 2].argmax()[None], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "labels", "truth", "say"),
    [
        (NAMES | {"num_labels": 3}, [0, 0, 1, 1, 2], ["a", "b"], lambda z: "abc"[int(z.argmax())]),
        (SEVERAL, [["a"], [], ["b", "c"], [], []], ["a", "b, c"],
         lambda z: ", ".join(name for name, x in zip("abc", z, strict=True) if x > 0) or "none"),
        ({"num_labels": 1}, [0.5, 0.0, 1.25, 0.0, 0.0], ["0.500", "1.250"], lambda z: f"{float(z):.3f}"),
    ],
    ids=["class", "labels", "number"],
)  # fmt: skip
def test_a_classifier_says_labels_of_texts_from_all_over_the_split(options, labels, truth, say):
    model = make_model("bert", HEAD, std=0.5, **options)
    found = samples(model, label=labels)
    assert [sample.truth for sample in found] == truth
    for sample, text in zip(found, (TEXTS[0], TEXTS[2]), strict=True):
        logits = logits_of(model, torch.tensor([ENCODER.tokenizer(text)["input_ids"][:9]]))[0]
        assert (sample.prompt, sample.answer) == (text, say(logits))
