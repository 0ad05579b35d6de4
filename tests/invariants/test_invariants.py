"""Every invariant for every registered mechanism, on every architecture, in every mode that can exist."""

from __future__ import annotations

import pytest

from hf_linattn import list_mechanisms
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.testing import ARCHITECTURES, CROSS_ARCHITECTURES, Check, checks_of
from hf_linattn.testing.invariants import COMPILERS
from tests.helpers import KINDS, STATES, is_plain_pattern

# beside the defaults of each mechanism, which are tested on every architecture; these on grouped queries and RoPE
VARIANTS = {
    "atrous": [{"block_size": 16, "window_size": 7, "dilation": 3}],
    "bigbird": [{"block_size": 8, "window_blocks": 1, "num_global": 5, "num_random": 2}],
    "by_head": [
        {"plan": {"performer": {"heads": 0, "num_features": 16}}},
        {"plan": {"local": {"heads": 1, "window_size": 9}, "linear": {"heads": 0, "decay": "learned"}}},
    ],
    "checkerboard": [{"block_size": 8, "window_size": 51}],
    "conv": [{"window_size": 19, "kernel_radius": 4}, {"window_size": 11, "form": "raw"}],
    "cosformer": [{"max_length": 10_000}],
    "deltanet": [{"feature_map": "elu", "gate": True}],
    "dynamic_sparse": [{"block_size": 16, "num_blocks": 2}],
    "evo": [{"window_size": 9, "num_rounds": 3}, {"window_size": 80, "kernel_radius": 2, "form": "raw"}],
    "fixed_pattern": [{"block_size": 8, "group_size": 20, "num_summary": 3, "num_groups": 2}],
    "mixed_chunk": [
        {"block_size": 8, "inside": "relu2"},
        {"block_size": 9, "linear": "performer", "linear_options": {"num_features": 16, "decay": "learned"}},
    ],
    "fusion": [
        {"members": {"local": {"window_size": 9, "block_size": 8}, "lsh": {"num_buckets": 4, "bucket_size": 8}}},
        {"members": {"streaming": {"window_size": 7, "block_size": 8}, "hedgehog": {}, "linformer": {"num_slots": 7}}},
    ],
    "gated_deltanet": [
        {"expand_key": 3, "expand_value": 2, "conv_size": 4, "beta_range": 2},
        {"rotation": "kept", "normalisation": "softmax", "output_norm": True},
    ],
    "gla": [{"feature_map": "favor_softmax"}, {"self_weight": "learned"}],
    "hedgehog": [{"feature_dim": 6, "decay": "learned", "self_weight": "learned"}],
    "learned_sparse": [{"block_size": 8, "reach": 3}, {"block_size": 8, "reach": 4, "top_blocks": 2}],
    "hybrid": [
        {"linear": "performer", "linear_options": {"num_features": 16}, "window_size": 9, "initial_share": 0.5},
        {"linear": "linear", "linear_options": {"decay": "learned"}, "window_size": 5, "initial_share": 1},
        {"window_scale": "maximum", "window_size": 6, "num_sink_tokens": 0, "initial_share": 1},
        {"window_size": 9, "num_sink_tokens": 2, "sink_logit": "learned", "initial_sink": 0.5, "initial_share": 0.5},
        {
            "window_scale": "maximum", "window_size": 6, "sink_logit": "learned", "initial_sink": 1.0,
            "initial_share": 0.3,
        },
    ],
    "linear": [{"feature_map": "relu"}, {"decay": "learned"}],
    "local": [
        {"block_size": 8, "window_size": 19},
        {"block_size": 8, "window_size": 19, "sink_logit": "learned", "initial_sink": 0.5},
    ],
    "longformer": [{"block_size": 8, "window_size": 11, "num_global": 3}],
    "lsh": [
        {"num_buckets": 4, "bucket_size": 8},
        {"num_buckets": 4, "bucket_size": 8, "num_rounds": 3, "shared_qk": True},
        {"num_buckets": 4, "bucket_size": 8, "sink_logit": "learned", "initial_sink": 0.5},
        {"num_buckets": 4, "bucket_size": 8, "num_rounds": 2, "shared_qk": True, "sink_logit": "one"},
    ],
    "linformer": [
        {"num_slots": 7, "block_size": 4, "sharing": "none"},
        {"num_slots": 7, "block_size": 16, "sink_logit": "learned", "initial_sink": 0.5},
    ],
    "nystrom": [{"num_landmarks": 7, "block_size": 8, "kernel_size": 5}, {"num_landmarks": 5, "block_size": 16}],
    "performer": [
        {"kernel": "hyperbolic", "num_features": 19, "self_weight": "learned"},
        {"kernel": "relu"},
        {"decay": "learned"},
    ],
    "radial": [{"block_size": 8, "window_blocks": 2}],
    "random_blocks": [{"block_size": 8, "num_random": 2}],
    "retention": [{"feature_map": "elu", "fastest": 0.5, "slowest": 0.1}],
    "streaming": [{"block_size": 8, "window_size": 11, "num_sink_tokens": 3}],
    "softmax": [{"sink_logit": "learned", "initial_sink": 0.5}],
    "sparse_transformer": [{"block_size": 8, "window_size": 11, "stride": 3, "num_strides": 2}],
    "synthesizer": [{"form": "factorised", "initial_mix": 0.4, "max_length": 200}],
    "vq": [{"num_codes": 7, "block_size": 8}],
}
CAUSAL_VARIANTS = {
    "hybrid": [
        {"num_hard_keys": 7, "window_size": 1, "num_sink_tokens": 2},
        {
            "num_hard_keys": 5, "window_size": 20, "linear": "linear", "linear_options": {"decay": "learned"},
            "initial_share": 1, "sink_logit": "learned", "initial_sink": 0.5,
        },
        {"num_hard_keys": 5, "window_size": 6, "linear": "deltanet", "initial_share": 0.3},
        {
            "linear": "deltanet", "linear_options": {"feature_map": "elu", "gate": True}, "window_size": 1,
            "initial_share": 0.3,
        },
    ],
    "streaming": [{"block_size": 8, "window_size": 9, "num_sink_tokens": 2, "positions": "streaming"}],
}
BIDIRECTIONAL_VARIANTS = {
    "hedgehog": [{"feature_dim": 6, "decay": "measured", "ridge": "learned"}],
    "linear": [{"feature_map": "relu", "ridge": "learned"}],
    "linformer": [
        {"num_slots": 7, "block_size": 16, "sharing": "none", "positions_per_slot": 3},
        {"num_slots": 7, "block_size": 4, "sharing": "none", "exact_block": True},
        {"num_slots": 9, "block_size": 16, "sink_logit": "one", "exact_block": True},
    ],
    "performer": [{"num_features": 16, "self_weight": "learned", "ridge": "learned"}],
}
CROSS_VARIANTS = {
    "linformer": [
        {"num_slots": 7, "sharing": "none", "positions_per_slot": 3}, {"num_slots": 9, "sink_logit": "learned"},
    ],
    "local": [
        {"window_size": 5, "keys_per_query": 1.5, "sink_logit": "one"}, {"window_size": 3, "keys_per_query": 0.3},
    ],
    "performer": [{"kernel": "hyperbolic", "num_features": 19}],
}
CHECKS = [
    check
    for mechanism in list_mechanisms()
    for options in [{}, *VARIANTS.get(mechanism, [])]
    for check in checks_of(mechanism, ["llama"] if options else [*ARCHITECTURES, *CROSS_ARCHITECTURES], **options)
] + [
    check
    for mechanism, variants in CROSS_VARIANTS.items()
    for options in variants
    for check in checks_of(mechanism, ["whisper"], **options)
] + [
    check
    for causal, chosen in ((True, CAUSAL_VARIANTS), (False, BIDIRECTIONAL_VARIANTS))
    for mechanism, variants in chosen.items()
    for options in variants
    for check in checks_of(mechanism, ["llama"], **options)
    if check.case.causal == causal
]


def label(check: Check) -> str:
    """Return mechanism[options]-architecture-mode-invariant."""
    options = ",".join(f"{k}={v}" for k, v in check.case.options.items())
    return f"{check.case.mechanism}[{options}]-{check.case.architecture}-{check.case.mode}-{check.invariant}"


COMPILES = "12 checkpointing and compile"  # takes half the time of all invariants
COSTS = "11 linear cost"  # hardly an option changes how they grow
ALWAYS = {("bert", "bidirectional"), ("llama", "causal"), ("bart", "cross")}
# what an option can break, by number: the formula, which has pads, borders and no future too
OF_OPTIONS = {"9"}
NEIGHBOURS = {"5", "10"}  # beside large neighbours, and large numbers: of options one for each kind of state
OF_PATTERNS = {"4", "7", "9", "10"}  # of a choice of blocks and nothing else: `local` and `bigbird` have the others
# of these, what both forms have from the formula, by number: an option that both have is checked in the causal one
OF_ONE_FORM = {"5", "10"}
# what other architectures have from those of `ALWAYS`, by number: without a model their heads are the same
WITHOUT_MODEL = {"1", "8", "9", "10"}
# what GPT-2 has from others, by number, too: `test_integration` decodes it
NOT_OF_GPT2 = {"4"}
# made of the operations of others, the first of `linear`: those have the backward pass compiled, both forms counted
FEATURES = {"cosformer", "hedgehog", "learned_exp", "performer", "t2r", "taylor"}
OF_OTHERS = FEATURES | {"bigbird", "by_head", "dynamic_sparse", "evo", "fusion", "mixed_chunk", "streaming"}
# those that cost what others cost: maps whose operation is that of `linear`, and choices of blocks
COSTING = {"causal": {*FEATURES, *filter(is_plain_pattern, list_mechanisms())}}
COSTING["cross"] = COSTING["causal"] | OF_OTHERS
# and a causal form has counted what is no state: one of each kind is counted in both
COSTING["bidirectional"] = COSTING["cross"] | {
    x for x in list_mechanisms() if x not in KINDS and "causal" in MECHANISMS.get(x).modes
}
# those that are compiled, by mode: one for each kind of state, and for each way to what has none
COMPILED = {
    "causal": {*STATES, "gated_deltanet"} - OF_OTHERS - {"softmax"},
    "bidirectional": {"linear"},
    "cross": {"linear"},
}


def is_enough(check: Check) -> bool:
    """Whether no other check stands for this one.

    Every mechanism is checked on one causal and one bidirectional architecture, and every architecture with one
    mechanism per kind of state; a model meets a mechanism through heads, masks and states alone.
    """
    case, number = check.case, check.invariant.split()[0]
    if not case.options:
        if (case.architecture, case.mode) in ALWAYS:
            return number in OF_PATTERNS or not is_plain_pattern(case.mechanism)
        others = WITHOUT_MODEL | NOT_OF_GPT2 if case.architecture == "gpt2" else WITHOUT_MODEL
        return case.mechanism in STATES and number not in others
    of_both = VARIANTS.get(case.mechanism, [])
    if number == "4":  # with the last of its options, which go together
        return case.mechanism in STATES and case.options == of_both[-1]
    twice = case.mode == "bidirectional" and case.options in of_both
    enough = number in OF_OPTIONS or (number in NEIGHBOURS and case.mechanism in STATES)
    return enough and not (twice and number in OF_ONE_FORM)


def marks_of(check: Check) -> list[pytest.MarkDecorator]:
    """Mark a check slow if others compile or count the same, or exhaustive if others stand for it."""
    case = check.case
    usual = (case.architecture, case.mode) in ALWAYS and not case.options
    if check.invariant == COMPILES:
        return [] if usual and case.mechanism in COMPILED[case.mode] else [pytest.mark.slow]
    if check.invariant == COSTS:
        return [] if usual and case.mechanism not in COSTING[case.mode] else [pytest.mark.slow]
    return [] if is_enough(check) else [pytest.mark.exhaustive]


def parameter(check: Check):
    return pytest.param(check, id=label(check), marks=marks_of(check))


@pytest.mark.parametrize("check", map(parameter, CHECKS))
def test_invariant(check: Check, record_property, monkeypatch) -> None:
    case = check.case
    if case.mechanism in OF_OTHERS:
        monkeypatch.setitem(COMPILERS, case.architecture, "eager")
    record_property("invariant", (case.mechanism, case.architecture, case.mode, check.invariant))
    check.run()
