"""How the checkpoints of `checkpoints_before_renames` were made, which tests/test_old_checkpoints.py loads.

Run at the last commit before mechanisms and options were renamed (71786a3 and the commit that added this file):

    python -m tests.data.make_old_checkpoints tests/data/checkpoints_before_renames

Each is a tiny random model, patched and saved with `save_pretrained`, and beside it `expected.safetensors` has tokens,
their mask and the logits that the saved model computed from them in float64. The module for `trust_remote_code`, which
is the same beside all of them and is not read here, is left out. Run again it would write today's names.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    LlamaConfig,
    PreTrainedModel,
)

from hf_linattn import list_mechanisms, patch_model
from hf_linattn.mechanisms import MECHANISMS

VOCAB_SIZE, LENGTH = 12, 24
TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LLAMA = LlamaConfig(
    **TOKENS, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, max_position_embeddings=32,
)  # fmt: skip
BERT = BertConfig(
    **TOKENS, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
BART = BartConfig(
    **TOKENS, d_model=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=32, dropout=0.0, decoder_start_token_id=1,
    forced_eos_token_id=None,
)  # fmt: skip
MODELS = {
    "llama": (LLAMA, AutoModelForCausalLM),
    "bert": (BERT, AutoModelForMaskedLM),
    "bart": (BART, AutoModelForSeq2SeqLM),
}
# small enough that no mechanism is exact, or large, on the tokens here
SMALL = {
    "block_size": 4, "window_size": 5, "num_slots": 5, "bucket_size": 4, "num_buckets": 4, "group_size": 8,
    "num_summary": 2, "window_blocks": 1, "num_random": 1, "num_blocks": 1, "reach": 1, "num_global": 2,
    "num_features": 6, "num_codes": 4, "max_length": 24, "num_landmarks": 4, "kernel_size": 3, "dilation": 2,
}  # fmt: skip
SINKS = {"sink": "one", "num_sinks": 2, "window_size": 5, "block_size": 4}


class Case(NamedTuple):
    """One checkpoint: a model, the arguments of `patch_model` behind it, and its options."""

    model: str
    plan: Any
    options: dict[str, Any]


def small(name: str, **options: Any) -> dict[str, Any]:
    known = MECHANISMS.get(name).config_class.__dataclass_fields__
    return {option: value for option, value in SMALL.items() if option in known} | options


def cases() -> dict[str, Case]:
    """Every mechanism in a Llama, and what says more by name: options, plans, members, other forms and layers."""
    found = {name: Case("llama", name, small(name)) for name in list_mechanisms()}
    for name in ("fixed", "flash", "hybrid", "random", "sinks"):
        found[f"{name}_bert"] = Case("bert", name, small(name))
    found["hybrid_options"] = Case(
        "llama", "hybrid", {"sink": "learned", "initial_sink": -1.0, "num_sinks": 2, "window_size": 4}
    )
    found["sinks_options"] = Case("llama", "sinks", {**SINKS, "positions": "streaming"})
    found["flash_options"] = Case("llama", "flash", {"sink": "one", "block_size": 4, "linear": "performer"})
    found["local_options"] = Case("bert", "local", {"sink": "learned", "window_size": 5, "block_size": 4})
    found["plan_dict"] = Case(
        "llama", {"sinks": {"layers": 0, **SINKS}, "flash": {"layers": "1", **small("flash", sink="learned")}}, {}
    )
    found["plan_list"] = Case(
        "llama",
        [
            {"mechanism": "sinks", "layers": [0], "heads": "0", "options": SINKS},
            {"mechanism": "sinks", "layers": [0], "heads": 1, "options": {**SINKS, "num_sinks": 1}},
            {"mechanism": "random", "layers": 1, "options": small("random", sink="one")},
        ],
        {},
    )
    heads = {"flash": {"heads": 0, **small("flash", sink="learned")}, "linear": [1]}
    found["by_head_dict"] = Case("llama", "by_head", {"plan": heads})
    members = {"flash": small("flash", sink="learned"), "linear": {}, "sinks": SINKS}
    found["fusion_members"] = Case("llama", "fusion", {"members": members, "shares": None})
    shares = {"random": 3.0, "linear": 1.0}
    found["fusion_shares"] = Case(
        "llama", "fusion", {"members": {"random": small("random"), "linear": {}}, "shares": shares}
    )
    across = {"linformer": {"num_slots": 5, "sink": "learned"}}
    found["cross_attention"] = Case("bart", "sinks", {"num_sinks": 1, "window_size": 5, "cross_attention": across})
    return found


def tokens_for(model: str) -> dict[str, Tensor]:
    """Two rows, the second with padding where models of that kind have it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB_SIZE, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    padded = slice(0, 3) if model == "llama" else slice(LENGTH - 3, LENGTH)
    ids[1, padded], mask[1, padded] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model == "bart":
        inputs["decoder_input_ids"] = torch.randint(2, VOCAB_SIZE, (2, LENGTH), generator=generator)
    return inputs


def make(case: Case) -> PreTrainedModel:
    """All weights are random, those of the mechanisms too, so that one that is not loaded shows."""
    config, auto_class = MODELS[case.model]
    torch.manual_seed(0)
    model = patch_model(auto_class.from_config(config), case.plan, **case.options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape))
    return model.eval()


def write(folder: Path, case: Case) -> None:
    make(case).save_pretrained(folder)
    (folder / "configuration_hf_linattn.py").unlink()
    inputs = tokens_for(case.model)
    loaded = MODELS[case.model][1].from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = loaded(**inputs).logits
    save_file({**inputs, "logits": logits}, folder / "expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    for name, case in cases().items():
        write(output / name, case)


if __name__ == "__main__":
    main()
