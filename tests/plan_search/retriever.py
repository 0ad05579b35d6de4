"""A model made by hand in which one known key/value head finds what stands far back, and prompts for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import ChosenPlan, choose_plan
from tests.models import fill

LAYERS, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 2, 4, 2, 8
ANSWERS, QUERY, NOISE, VOCABULARY = range(1, 5), 5, range(6, 30), 30
FOUND = (1, 1)  # layer and key/value head that find the answer
SLOW = 3  # a dimension of heads that positions hardly turn
WINDOW = {"streaming": {"window_size": 4, "num_sink_tokens": 1, "block_size": 4}}


def make_retriever() -> LlamaForCausalLM:
    """Return a Llama whose head `FOUND` copies the one token of `ANSWERS` in a text to behind `QUERY`.

    All other heads and feed-forwards have small random weights. Hidden dimensions 0 to 3 say which answer a token is,
    4 that it is one, 5 that it asks, and 8 to 11 which answer is to come.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HEADS * HEAD_DIM, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEY_VALUE_HEADS, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8}, pad_token_id=0,
    )  # fmt: skip
    model = fill(LlamaForCausalLM(config), std=0.05)
    layer, head = FOUND
    attention, groups = model.model.layers[layer].self_attn, HEADS // KEY_VALUE_HEADS
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 12:] *= 10
        for which, token in enumerate(ANSWERS):
            embedding[token, [which, 4]] = 2.0
        embedding[QUERY, 5] = 2.0
        for asking in range(head * groups, (head + 1) * groups):
            attention.q_proj.weight[asking * HEAD_DIM + SLOW, 5] = 8.0
            attention.o_proj.weight[range(8, 12), [asking * HEAD_DIM + i for i in range(4)]] = 2.0
        attention.k_proj.weight[head * HEAD_DIM + SLOW, 4] = 8.0
        attention.v_proj.weight[[head * HEAD_DIM + i for i in range(4)], range(4)] = 1.0
        model.lm_head.weight[list(ANSWERS), range(8, 12)] = 1.0
    return model


def make_prompt(seed: int, length: int = 24, task: str = "find") -> Any:
    """Return a prompt with one answer in its first half, and the query at its end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(NOISE.start, NOISE.stop, (length,), generator=generator).tolist()
    place, answer = (int(torch.randint(1, n, (), generator=generator)) for n in (length // 2, 5))
    ids[place], ids[-1] = answer, QUERY
    return SimpleNamespace(task=task, length=length, distance=length - place, prompt_ids=ids, answer_ids=[answer])


def make_prompts() -> list[Any]:
    return [make_prompt(seed, length, task) for seed, (length, task) in enumerate([(24, "find"), (30, "seek")] * 2)]


def choose(model: Any, *keep: Any, **options: Any) -> ChosenPlan:
    """Choose a plan by the prompts, with a window in place of other heads, unless options say otherwise."""
    return choose_plan(model, None, *keep, **{"replace": WINDOW, "prompts": make_prompts(), **options})
