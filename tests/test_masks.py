"""Rules over pairs that transformers hands to mask functions, and masks of pairs: kept, or refused by name."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache, masking_utils
from transformers.models.aimv2.modeling_aimv2 import Aimv2TextConfig, Aimv2TextModel
from transformers.models.llama import modeling_llama
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalVisionConfig,
    Phi4MultimodalVisionModel,
)
from transformers.models.videoprism.modeling_videoprism import VideoPrismTextConfig, VideoPrismTextModel

from hf_linattn import UnsupportedModeError, get_mechanisms, patch_model, transformers_bridge, unpatch_model
from hf_linattn.attention_call import intercept_attention
from hf_linattn.support.tiny import tiny_config
from tests.helpers import OPTIONS, assert_close, make_patched, make_tokens
from tests.models import fill, make_model, make_sharing

LENGTH, WINDOW = 14, 5
IMAGES = torch.full((2, LENGTH), -1)
IMAGES[0, 2:5], IMAGES[0, 7:12], IMAGES[1, 1:6] = 0, 1, 0


def in_prefix(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (query < 4) & (key < 4)


def in_step(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (query - key) % 2 == 0


def nothing(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return query < 0


causal, causal_window = masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask
RULES: dict[str, tuple[Callable[..., Any], str]] = {
    "images": (partial(causal, block_sequence_ids=IMAGES), "block_sequence_ids"),
    "prefix": (partial(causal, or_mask_function=in_prefix), "or_mask_function or and_mask_function"),
    "step": (partial(causal, and_mask_function=in_step), "or_mask_function or and_mask_function"),
    "chunks": (masking_utils.create_chunked_causal_mask, "attention_chunk_size=5"),
}
# rules that come to what a causal layer does, but for the width of a window, which only softmax asks for
PLAIN: dict[str, Callable[..., Any]] = {
    "no images": partial(causal, block_sequence_ids=torch.full((2, LENGTH), -1)),
    "nothing more": partial(causal, or_mask_function=nothing),
    "window": partial(causal, and_mask_function=masking_utils.sliding_window_overlay(WINDOW)),
    "short chunk": masking_utils.create_chunked_causal_mask,
}


def padded(left: bool = False) -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 3 :] = 0
    return {"input_ids": make_tokens(2, LENGTH), "attention_mask": mask.flip(1) if left else mask}


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Of the real tokens."""
    with torch.no_grad():
        found = model(**inputs, use_cache=False).logits
    mask = inputs.get("attention_mask")
    return found[mask.bool()] if mask is not None and mask.dim() == 2 else found


@pytest.fixture
def ruled(monkeypatch):
    """Let Llama build its mask by another function."""

    def rule(create: Callable[..., Any]) -> None:
        monkeypatch.setattr(modeling_llama, "create_causal_mask", create)

    return rule


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("mask", [True, False])
def test_softmax_keeps_a_rule_and_others_refuse_it_by_name(name, mask, ruled):
    create, said = RULES[name]
    inputs = {k: v for k, v in padded().items() if mask or k == "input_ids"}
    plain = logits(make_model("llama"), inputs)
    ruled(create)
    want = logits(make_model("llama", attention_chunk_size=5), inputs)
    assert not torch.allclose(want, plain, atol=1e-3)
    assert_close(logits(make_patched("llama", "softmax", attention_chunk_size=5), inputs), want)
    plan = {"performer": {"layers": 1, **OPTIONS["performer"]}}
    mixed = patch_model(make_model("llama", attention_chunk_size=5), plan)
    with pytest.raises(UnsupportedModeError, match=f"masks pairs by {said}, which mechanism 'performer' of layer 1"):
        logits(mixed, inputs)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("left", [True, False])
def test_a_rule_that_comes_to_the_order_of_tokens_is_none(name, left, ruled):
    """Whatever it says of pads: chunks are counted from the first token behind those on the left."""
    inputs, rules = padded(left), {"attention_chunk_size": LENGTH, "sliding_window": WINDOW}
    patched = logits(make_patched("llama", **rules), inputs)
    ruled(PLAIN[name])
    assert torch.equal(logits(make_patched("llama", **rules), inputs), patched)
    want = logits(make_model("llama", **rules), inputs)
    assert_close(logits(make_patched("llama", "softmax", **rules), inputs), want)


def copy_masks(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As Accelerate does on the way to a layer on another device."""
    return args, {name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()}


def test_what_is_said_of_a_mask_holds_for_copies_of_it_on_other_devices(ruled):
    model, inputs = patch_model(make_model("llama", sliding_window=WINDOW), {"linear": 1}), padded(left=True)
    ruled(PLAIN["window"])
    want = logits(model, inputs)
    model.model.layers[1].self_attn.register_forward_pre_hook(copy_masks, with_kwargs=True, prepend=True)
    assert torch.equal(logits(model, inputs), want)
    ruled(RULES["images"][0])
    with pytest.raises(UnsupportedModeError, match="masks pairs by block_sequence_ids, which mechanism 'linear'"):
        logits(model, inputs)


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("plan", ["linear", "softmax"])
def test_what_is_said_of_a_mask_holds_where_a_model_drops_queries(plan, kept):
    """As Gemma 4 does before the layers that attend to the keys of others."""
    model, given = patch_model(make_sharing("Gemma4", sliding_window=WINDOW), plan), padded(left=True)
    want = model(**given, use_cache=False).logits[:, -kept:]
    hidden = model.model.embed_tokens(given["input_ids"])
    asked = {"config": model.config, "inputs_embeds": hidden, "past_key_values": None, "position_ids": None}
    options = {**asked, "attention_mask": given["attention_mask"], "block_sequence_ids": torch.full((2, LENGTH), -1)}
    masks = {"full_attention": causal(**options), "sliding_attention": causal_window(**options)}
    assert masks["sliding_attention"].shape == (2, 1, LENGTH, LENGTH)
    got = model(given["input_ids"], attention_mask=masks, logits_to_keep=kept, use_cache=False).logits
    assert_close(got, want)


@torch.no_grad()
@pytest.mark.parametrize("padded_rows", [True, False])
@pytest.mark.parametrize(
    "plan",
    ["nystrom", {"gated_deltanet": {"rotation": "kept", "conv_size": 4}},
     {"gated_deltanet": {"rotation": "kept", "output_gate": True}},
     {"fusion": {"members": {"nystrom": {}, "linear": {}}}}],
    ids=["nystrom", "conv", "gate", "fusion"],
)  # fmt: skip
def test_no_query_is_dropped_where_others_or_the_input_are_read(plan, padded_rows):
    model = fill(patch_model(make_sharing("Gemma4"), plan))
    given = padded(left=True) if padded_rows else {"input_ids": make_tokens(2, 40)}
    want = model(**given, use_cache=False).logits[:, -1:]
    got = model(**given, logits_to_keep=1).logits
    assert_close(got, want)


@torch.no_grad()
@pytest.mark.parametrize("plan", ["linear", "softmax", {"linear": {"heads": 0}}])
def test_padded_rows_go_on_behind_a_cache_where_a_model_drops_queries(plan):
    """The key mask covers the tokens of the cache too."""
    model, given = patch_model(make_sharing("Gemma4"), plan), padded(left=True)
    mask = given["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want, cache = model(**given, position_ids=positions, use_cache=False).logits, DynamicCache(config=model.config)
    for part in torch.arange(LENGTH).split([LENGTH - 5, 4, 1]):
        last = int(part[-1]) + 1
        got = model(
            given["input_ids"][:, part], attention_mask=mask[:, :last], position_ids=positions[:, part],
            past_key_values=cache,
        ).logits  # fmt: skip
        assert_close(got * mask[:, part, None], want[:, part] * mask[:, part, None])


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("plan", ["linear", "softmax"])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q"])
def test_packed_rows_stay_apart_where_a_model_drops_queries(plan, kept, by):
    model, ids = make_sharing("Gemma4"), make_tokens(1, 16)
    starts = {"position_ids": torch.cat([torch.arange(9), torch.arange(7)])[None]}
    starts |= {"cu_seq_lens_q": torch.tensor([0, 9, 16], dtype=torch.int32)} if by == "cu_seq_lens_q" else {}
    patch_model(model, plan)
    want = model(ids[:, 9:], use_cache=False).logits[:, -kept:]
    assert_close(model(ids, **starts, use_cache=False, logits_to_keep=kept).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_drops_queries_is_freed_at_once_and_its_copy_is_one_of_its_own(copied):
    model, given = patch_model(make_sharing("Gemma4"), "linear"), {"input_ids": make_tokens(2, 40)}
    want, other = model(**given, logits_to_keep=1).logits, copied(model)
    parts = [weakref.ref(part) for part in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(part() for part in parts)
    finally:
        gc.enable()
    assert torch.equal(other(**given, logits_to_keep=1).logits, want)


@torch.no_grad()
def test_softmax_keeps_a_rule_when_decoding(ruled):
    ruled(RULES["prefix"][0])
    ids, results = make_tokens(2, LENGTH), []
    for model in (make_model("llama"), make_patched("llama", "softmax")):
        cache = model(ids[:, :6], use_cache=True).past_key_values
        steps = [model(ids[:, i : i + n], past_key_values=cache).logits for i, n in ((6, 3), (9, 1), (10, 4))]
        results.append(torch.cat(steps, 1))
    assert_close(results[1], results[0])


BOTH = torch.bool, torch.float32


# gemma2, whose scores have a cap, adds masks only
@pytest.mark.parametrize(("name", "kind"), [*product(("bert", "llama"), BOTH), ("gemma2", torch.float32)])
def test_softmax_takes_a_mask_of_pairs_and_others_refuse_it(name, kind):
    """True or false, or what is added to the scores."""
    drawn = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    pairs = (drawn < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    pairs = pairs if kind == torch.bool else torch.where(pairs, drawn, torch.finfo(kind).min)
    inputs = {"input_ids": make_tokens(2, LENGTH), "attention_mask": pairs}
    want = logits(make_model(name), inputs)
    assert_close(logits(make_patched(name, "softmax"), inputs), want)
    with pytest.raises(UnsupportedModeError, match=r"attention_mask.* has 4 dimensions \(2, 1, 14, 14\); .* softmax"):
        logits(make_patched(name), inputs)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_columns_of_tokens_to_come_are_left_out_and_missing_ones_refused(mechanism):
    """As transformers does, which reads a mask from the first token on."""
    model, inputs = make_patched("llama", mechanism), padded()
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    want = model(**inputs).logits
    cache = model(inputs["input_ids"][:, :6], attention_mask=inputs["attention_mask"][:, :6], use_cache=True)
    got = model(
        inputs["input_ids"][:, 6:10], attention_mask=inputs["attention_mask"], past_key_values=cache.past_key_values
    ).logits
    assert_close(got, want[:, 6:10])
    with pytest.raises(UnsupportedModeError, match=r"attention_mask is \(2, 4\), but the call .* 14 tokens"):
        model(inputs["input_ids"][:, 10:], attention_mask=torch.ones(2, 4), past_key_values=cache.past_key_values)
    assert cache.past_key_values.get_seq_length() == 10


@pytest.mark.parametrize(("queries", "keys", "offset", "first"), [(4, 10, 6, 0), (4, 8, 6, 2), (6, 6, 0, 0)])
def test_a_compiled_mask_has_no_columns_of_tokens_to_come(queries, keys, offset, first):
    mask = padded(left=True)["attention_mask"].bool()
    make = torch.compile(transformers_bridge.attention_mask, backend="eager", fullgraph=True)
    got = make(2, queries, keys, offset, mask, kv_offset=first)
    assert torch.equal(got, mask[:, first : offset + queries])


@torch.no_grad()
def test_a_rule_behind_a_static_cache_has_no_columns_of_tokens_to_come(ruled):
    model, inputs = patch_model(make_model("llama", sliding_window=WINDOW), "linear"), padded(left=True)
    ids, mask = inputs.values()
    want, cache, start = model(ids, attention_mask=mask).logits, StaticCache(model.config, max_cache_len=LENGTH), 0
    ruled(PLAIN["window"])
    for end in (2, 6, 10, LENGTH):  # the window becomes full in the second
        got, real = model(ids[:, start:end], attention_mask=mask, past_key_values=cache), mask[:, start:end].bool()
        assert_close(got.logits[real], want[:, start:end][real])
        start = end


WINDOWED = {
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral": {},
}  # fmt: skip


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", WINDOWED)
def test_softmax_keeps_a_sliding_window_that_a_model_says_in_its_mask_alone(name, left):
    """Mistral hands its window to the attention function, too; the others do not."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **WINDOWED[name])).eval()
    inputs = padded(left)
    want, generated = logits(model, inputs), model.generate(**inputs, max_new_tokens=4, do_sample=False)
    patch_model(model, "softmax")
    assert_close(logits(model, inputs), want)
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).tolist() == generated.tolist()


OTHERWISE = {
    "aimv2": (Aimv2TextConfig, Aimv2TextModel),
    "videoprism": (VideoPrismTextConfig, VideoPrismTextModel),
    "phi4": (Phi4MultimodalVisionConfig, Phi4MultimodalVisionModel),
}


def make_otherwise(name: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Return a model whose masks are of another order than its modules say, padded inputs, and which are no pads."""
    config_class, model_class = OTHERWISE[name]
    torch.manual_seed(0)
    model = fill(model_class(tiny_config(config_class)))
    if name == "phi4":
        real = torch.ones(2, 4, 4, dtype=torch.bool)  # of the patches of a picture
        real[1, :, 3:] = False
        return model, {"pixel_values": torch.randn(2, 3, 32, 32), "patch_attention_mask": real}, real.flatten(1)
    inputs = padded()
    return model, inputs, inputs["attention_mask"].bool()


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_softmax_obeys_a_mask_of_another_order_than_the_module_says_and_others_refuse_it(name, implementation):
    """Eager attention obeys one that masks nothing, too; VideoPrism has no other."""
    model, inputs, real = make_otherwise(name)
    if name != "videoprism":
        model.set_attn_implementation(implementation)
    whole = {x: torch.ones_like(y) if x.endswith("mask") else y for x, y in inputs.items()}

    def outputs() -> Tensor:  # VideoPrism has one token more
        return torch.cat([model(**given).last_hidden_state[:, : real.shape[1]][real] for given in (inputs, whole)])

    want = outputs()
    patch_model(model, "softmax")
    assert_close(outputs(), want)
    with intercept_attention(get_mechanisms(model)):
        assert_close(outputs(), want)
    unpatch_model(model)
    patch_model(model, "linear")
    with pytest.raises(UnsupportedModeError, match=r"is_causal=\w+ was asked of layer 0, .* 'linear' cannot be"):
        model(**inputs)
    if name != "phi4":  # which makes a mask where it is given none
        assert bool(model(inputs["input_ids"]).last_hidden_state.isfinite().all())


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
@pytest.mark.parametrize(("name", "least"), [("llama", 0), ("roberta", 2)])
def test_the_positions_of_pads_between_documents_mean_nothing(name, least, mechanism):
    """RoBERTa's pads have a position below all others, where its second document seemed to go on with the first."""
    model, ids = make_patched(name, mechanism), make_tokens(1, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1]])
    alone = logits(model, {"input_ids": ids[:, 5:], "position_ids": torch.arange(3)[None] + least})
    for pad in (-1, 0, 1, 90) if name == "llama" else (1, 2):
        own = torch.tensor([[0, 1, 2, 0, 0, 0, 1, 2]]) + least
        positions = own.where(mask.bool(), pad)
        found = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 5:]
        assert_close(found.detach(), alone)


def test_a_document_whose_first_token_is_masked_begins_with_its_next_one():
    model, ids = make_patched("llama", "linear"), make_tokens(1, 8)
    mask, positions = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    alone = logits(model, {"input_ids": ids[:, 5:], "position_ids": positions[:, 5:]})
    found = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 5:]
    assert_close(found.detach(), alone)
