"""Start a causal model as a weak induction circuit: it already looks for what followed the same token before.

An induction circuit (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022,
arXiv 2209.11895) has a head that passes on to each position the token before it, and in a later layer a head whose
queries, the present token, match what the first head passed on, and which copies what stands there. Each half is of no
use without the other, which is why training finds them late. Here a model starts out with both, weak as they are, and
all of it is trained on.

That a start near what attention has to become helps, and that recall is what it helps with, is known from mimetic
initialization (Trockman and Kolter 2023, arXiv 2305.09828); which weights are set here is this library's own choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM

BACK = 8.0  # length of what a key and a query share per frequency, where the query is one position further
SHARPNESS = 24.0  # queries that look for the same token, relative to their keys
FIRST, LATER, FEED_FORWARD = 0.25, 0.2, 0.1  # scales of what is written: by the first attention, later ones, and MLPs
POSITIONS = 3  # a position table starts in the first of that many parts of the width, tokens are read in the others


class Attention(NamedTuple):
    """Views of the weights of one layer.

    Attributes:
        query: [query heads, head size, width]. key, value: [key heads, head size, width].
        output: [width, query heads, head size]. feed_forward: what the MLP writes with.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    feed_forward: Tensor


def start_llama_with_induction(model: LlamaForCausalLM) -> None:
    """Set the weights of an untrained Llama.

    Without a position table, what all positions have in common must say "one position back": the embeddings get a
    common part, which keys and queries of the first layer turn into a pair of rotations that are one position apart.
    """
    config, embeddings = model.config, model.get_input_embeddings().weight.data
    width, size = config.hidden_size, config.head_dim
    embeddings += config.initializer_range
    layers = [_llama_attention(layer, size) for layer in model.model.layers]
    common = torch.full((width,), width**-0.5)
    rates = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(size // 2) / (size // 2))
    few = size // 4  # the fast rotations tell neighbours apart
    here, before = torch.zeros(size), torch.zeros(size)
    here[:few] = 1
    before[:few], before[size // 2 : size // 2 + few] = rates[:few].cos(), -rates[:few].sin()
    gain = BACK * (2 / width) ** 0.5  # the common part is 1 / sqrt(2) of a normalized input
    layers[0].key.add_(gain * torch.outer(here, common))
    layers[0].query.add_(gain * torch.outer(before, common))
    _link(layers, torch.eye(width) - torch.outer(common, common))


def start_gpt2_with_induction(model: GPT2LMHeadModel) -> None:
    """Set the weights of an untrained GPT-2: sinusoids in a part of the width tell neighbours apart."""
    config, table = model.config, model.transformer.wpe.weight.data
    width, size = config.n_embd, config.n_embd // config.n_head
    part = min(width // POSITIONS // 2 * 2, size // 2 * 2)
    rates = 1 / 1_000 ** (torch.arange(part // 2) / (part // 2))
    angles = torch.arange(config.n_positions)[:, None] * rates
    table.zero_()
    model.transformer.wte.weight.data[:, :part] = 0
    table[:, :part] = torch.cat([angles.sin(), angles.cos()], dim=1) * 2 * config.initializer_range
    layers = [_gpt2_attention(block, size) for block in model.transformer.h]
    pairs = torch.arange(part // 2)
    here, before = torch.zeros(size, width), torch.zeros(size, width)
    here[:part, :part] = torch.eye(part)
    # sin(a - r) = sin a cos r - cos a sin r, and cos(a - r) = cos a cos r + sin a sin r
    before[:part, :part] = torch.diag(rates.cos().repeat(2))
    before[pairs, pairs + part // 2], before[pairs + part // 2, pairs] = -rates.sin(), rates.sin()
    gain = BACK**0.5
    layers[0].key.add_(gain * here)
    layers[0].query.add_(gain * before)
    _link(layers, torch.diag((torch.arange(width) >= part).float()))


def _link(layers: Sequence[Attention], content: Tensor) -> None:
    """Have the second layer look where the first one passed on a token like the present, and copy what stands there.

    Args:
        content: [width, width], the projection onto that part of the width where the tokens are.
    """
    for layer in layers:
        layer.output.mul_(LATER)
        layer.feed_forward.mul_(FEED_FORWARD)
    first, second = layers[:2]
    group = len(second.query) // len(second.key)
    first.output.mul_(FIRST / LATER)
    for weight in (first.value, second.key, second.value):
        weight.copy_(weight @ content)
    value = first.value.repeat_interleave(group, dim=0)
    passed_on = torch.einsum("ohs,hsi->oi", first.output, value)
    looked_for = second.key.repeat_interleave(group, dim=0) @ passed_on
    second.query.copy_(looked_for * (SHARPNESS * second.key.std() / looked_for.std()))
    second.output.copy_(second.value.repeat_interleave(group, dim=0).permute(2, 0, 1) / group)


def _llama_attention(layer: Any, size: int) -> Attention:
    """Return views of a Llama layer's weights."""
    attention = layer.self_attn
    query, key, value = (
        projection.weight.data.unflatten(0, (-1, size))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    output = attention.o_proj.weight.data.unflatten(1, (-1, size))
    return Attention(query, key, value, output, layer.mlp.down_proj.weight.data)


def _gpt2_attention(block: Any, size: int) -> Attention:
    """Return views of a GPT-2 block's weights, which lie transposed."""
    query, key, value = (
        part.T.unflatten(0, (-1, size)) for part in block.attn.c_attn.weight.data.chunk(3, dim=1)
    )
    output = block.attn.c_proj.weight.data.T.unflatten(1, (-1, size))
    return Attention(query, key, value, output, block.mlp.c_proj.weight.data)
