"""Answers that are found by searching a prompt's text, and a model that gives them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationMixin,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_linattn.evaluation.recall import RecallPrompt

BUNDLED = Path(__file__).resolve().parents[2] / "recipes" / "pretrained" / "llama"


@cache
def bundled_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def listing(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 2 else " and ".join(items)


def asked_keys(text: str) -> list[str]:
    asked = re.findall(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned", text)
    return re.split(r", and |, ", asked[-1]) if asked else []


def values_of(key: str, text: str) -> list[str]:
    return re.findall(rf"for {re.escape(key)} is: ([\w-]+)\.", text)


def read_needles(text: str) -> str:
    return listing([value for key in asked_keys(text) for value in values_of(key, text)])


def read_hops(text: str) -> str:
    others = [re.findall(rf"for {key} is the same as the one for ([\w-]+)\.", text) for key in asked_keys(text)]
    return listing([value for other in others for name in other for value in values_of(name, text)])


def read_variables(text: str) -> str:
    text = text.rpartition("Memorize and track")[2]
    value = re.findall(r"assigned the value (\d+)", text)
    found: list[str] = []
    for name, given in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        if given in (*value, *found):
            found.append(name)
    return " ".join(found)


def read_common(text: str) -> str:
    words = re.findall(r"\d+\. (\w+)", text.rpartition("Below is a numbered list")[2])
    counts = Counter(words).most_common(10)
    return " ".join(f"{i}. {word}" for i, (word, _) in enumerate(counts, 1))


def read_frequent(text: str) -> str:
    coded = text.rpartition("coded words. ")[2].partition("\nQuestion")[0] if "\nQuestion" in text else ""
    return listing([word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", coded)).most_common(3)])


def read_phone_book(text: str) -> str:
    names = re.findall(r"phone number of ([\w ]+) in the provided", text)
    return " ".join(re.findall(rf"^{names[-1]}: ([\d-]+)$", text, re.MULTILINE)) if names else ""


def read_copy(text: str) -> str:
    start = re.findall(r"that starts with: ([\w ]+)\.", text)
    found = re.findall(rf"\b{start[-1]} ((?:\w+ ){{7}}\w+)", text.partition("\nCopy")[0]) if start else []
    return " ".join(found)


def read_choice(text: str) -> str:
    value = read_needles(text)
    return " ".join(re.findall(rf"^([A-D])\. {value}$", text, re.MULTILINE)) if value else ""


READERS: Mapping[str, Callable[[str], str]] = {
    "variable_tracking": read_variables, "multi_hop": read_hops, "common_words": read_common,
    "frequent_words": read_frequent, "phone_book": read_phone_book, "copying": read_copy,
    "multiple_choice": read_choice,
}  # fmt: skip


def read_answer(prompt: RecallPrompt, tokenizer: PreTrainedTokenizerBase, view: int | None = None) -> str:
    """Return what the last `view` tokens of a prompt say, "" where they do not."""
    ids = prompt.prompt_ids[-view:] if view else prompt.prompt_ids
    return READERS.get(prompt.task, read_needles)(tokenizer.decode(ids))


class ReaderModel(PreTrainedModel, GenerationMixin):
    """A causal model that says what it reads in a prompt's text, and keeps the tokens it has seen in its cache."""

    config_class = LlamaConfig

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[RecallPrompt], view: int | None = None):
        super().__init__(LlamaConfig(num_hidden_layers=1, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.said: dict[tuple[int, ...], list[int]] = {}
        for prompt in prompts:
            text = " " + read_answer(prompt, tokenizer, view)
            self.said[tuple(prompt.prompt_ids)] = [*tokenizer(text, add_special_tokens=False)["input_ids"], 0]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        new = input_ids[:, None, :, None].float()
        seen = past_key_values.update(new, new, 0)[0][:, 0, :, 0].long()
        count = logits_to_keep or input_ids.shape[1]
        logits = torch.zeros(len(seen), count, self.config.vocab_size)
        masks = torch.ones_like(seen) if attention_mask is None else attention_mask
        for row, (ids, mask) in enumerate(zip(seen, masks, strict=True)):
            first = int((mask == 0).long().cumprod(0).sum())  # pads on the left
            for place in range(count):
                logits[row, place, self.next_token(ids[first : ids.numel() - count + place + 1].tolist())] = 20.0
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def next_token(self, ids: list[int]) -> int:
        for prompt, said in self.said.items():
            written = ids[len(prompt) :]
            if tuple(ids[: len(prompt)]) == prompt and said[: len(written)] == written and len(written) < len(said):
                return said[len(written)]
        return 0
