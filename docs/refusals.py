"""What a patched model cannot do, as data: the section "What cannot exist" of mechanisms.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_linattn.errors import HfLinattnError, PatchError, UnsupportedModeError, UnsupportedModelError


@dataclass(frozen=True)
class Refusal:
    """Something that raises `error`: what it is, why it has no answer, what to do instead. All in markdown."""

    what: str
    error: type[HfLinattnError]
    reason: str
    instead: str


REFUSALS: dict[str, Refusal] = {
    "no attention": Refusal(
        "a model that declares no attention layers: Mamba, Bloom",
        UnsupportedModelError,
        "either it has none, or its code predates transformers' attention interface",
        "a model that goes through that interface",
    ),
    "position bias": Refusal(
        "a model that adds a learned position bias to every score: T5",
        UnsupportedModelError,
        "it computes its attention itself, and a number for every pair has no subquadratic form here",
        "a model with rotary or absolute positions",
    ),
    "idle layer": Refusal(
        "a layer that never calls the mechanism attached to it",
        UnsupportedModelError,
        "the model would only look patched; found after the first evaluation forward",
        "leave the layer out of `layers=` or `cross_attention=`",
    ),
    "shared heads": Refusal(
        "tensor parallelism over the heads of a layer whose mechanism has parameters or choices for each head",
        UnsupportedModelError,
        "each process has some of the heads, and the mechanism those of all; found when patched, or loaded by a plan",
        "one of the mechanisms that the message lists, or a plan that leaves attention whole",
    ),
    "no floating dtype": Refusal(
        "a quantised model that nowhere says the floating dtype it computes in",
        UnsupportedModelError,
        "mechanisms keep their parameters and states in that dtype",
        "set `model.config.dtype`",
    ),
    "missing form": Refusal(
        "a mechanism without the causal or bidirectional form that a layer needs",
        UnsupportedModeError,
        "its `modes` do not have it",
        "one of the mechanisms that the message lists",
    ),
    "other direction": Refusal(
        "another `is_causal` than at the time of patching",
        UnsupportedModeError,
        "a layer is patched for one of the two forms",
        "unpatch the model, change it, patch it again",
    ),
    "4-D mask": Refusal(
        "an attention mask [batch, heads, queries, keys], one for all queries apart; `softmax` takes it",
        UnsupportedModeError,
        "it is a matrix over pairs",
        "a 2-D key mask [batch, length]; for packed documents `position_ids` that restart at 0",
    ),
    "rule": Refusal(
        "a rule of the model over pairs, such as images whose tokens see each other (`block_sequence_ids`); `softmax`"
        " obeys it",
        UnsupportedModeError,
        "a mechanism would read the input in the order of its tokens",
        "`softmax` in that layer, or inputs without images",
    ),
    "other mask": Refusal(
        "an attention mask of another batch or length than the input's, with what the cache holds",
        UnsupportedModeError,
        "there is no telling which tokens it means",
        "a column for each token",
    ),
    "attentions": Refusal(
        "`output_attentions=True`",
        UnsupportedModeError,
        "N x N matrices are never built",
        "`original_attention(model)`, or `attention_matrix(...)` of a mechanism",
    ),
    "other attention": Refusal(
        "`set_attn_implementation` of a patched model, and its class called with its config",
        PatchError,
        "it would answer by softmax, and be saved as what it is not",
        "`original_attention(model)`, `unpatch_model(model)`; an Auto class makes a patched model from the config",
    ),
    "pages": Refusal(
        "continuous batching: `generate_batch`, `cache_implementation=\"paged\"`",
        UnsupportedModeError,
        "its pages hold keys for softmax, a mechanism keeps a decoding state",
        "`generate` with a padded batch",
    ),
    "no matrix": Refusal(
        "`attention_matrix(...)` of a mechanism that does not write `weights`",
        UnsupportedModeError,
        "without the formula there is nothing to show",
        "write `weights`",
    ),
    "too long": Refusal(
        "an input that reaches beyond a learned position table",
        UnsupportedModeError,
        "attention is not the limit, the table is",
        "a shorter input, or `extend_positions` before the model is patched",
    ),
    "nothing to extend": Refusal(
        "`extend_positions` of a model without a table: relative biases (T5), ALiBi (Bloom), a grid of patches (ViT)",
        UnsupportedModelError,
        "no part of it ends at a length, or it is an image's",
        "nothing is needed; images: `interpolate_pos_encoding=True`, where the model takes it",
    ),
    "unsplit feed-forward": Refusal(
        "`chunk_feed_forward` of a feed-forward that is no module of its own (OPT, BART) or chooses experts (Mixtral)",
        UnsupportedModelError,
        "the layer's forward computes it between other things; a router's choices are recorded for a loss",
        "gradient checkpointing alone",
    ),
    "crop": Refusal(
        "cropping a decoding state, as assisted generation does",
        UnsupportedModeError,
        "it sums up the past",
        "decode without rolling back, or deep-copy the cache before",
    ),
    "state to softmax": Refusal(
        "a decoding state under the original attention, or in a layer that keeps softmax",
        UnsupportedModeError,
        "softmax needs the keys, which the state no longer has",
        "a cache of its own",
    ),
    "shared keys": Refusal(
        "a cache for layers that share keys (Gemma 3n, Gemma 4), of which some keep `softmax` and others do not",
        UnsupportedModeError,
        "a decoding state has no keys for those that keep it",
        "the same for layers that share keys, or `use_cache=False`",
    ),
    "static cache": Refusal(
        "`cache_implementation=\"static\"`, or a `StaticCache`, with a mechanism whose state grows (all but"
        " `softmax`) or whose steps look at it",
        UnsupportedModeError,
        "its room and its one graph are made before the first token",
        "the default cache, or a mechanism that the error names",
    ),
    "unreadable keys": Refusal(
        "going on from a quantised cache that softmax filled",
        UnsupportedModeError,
        "its keys cannot be read",
        "a new cache or an unquantised one",
    ),
}
