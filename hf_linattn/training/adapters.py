"""LoRA adapters: what a patched model trains where its weights stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linattn import get_mechanisms
from hf_linattn.architecture import attention_projections, root_model
from hf_linattn.calibration import own_parameters
from hf_linattn.errors import OptionError, did_you_mean
from hf_linattn.transformers_bridge import MECHANISM


def add_adapters(
    model: PreTrainedModel,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
    train_mechanisms: bool = True,
    seed: int = 0,
) -> PeftModel:
    """Freeze a patched model but for LoRA adapters (Hu et al. 2021, arXiv 2106.09685) and the mechanisms' parameters.

    Args:
        rank: of the adapters. alpha: their outputs count alpha / rank; None: 2 rank. dropout: of their inputs.
        target_modules: names as PEFT takes them; None: the query, key, value and output projections of all layers.
        train_mechanisms: whether the mechanisms' parameters are trained beside the adapters.
        seed: of the adapters' first weights; the global random state is left alone.

    Raises:
        OptionError: no module is called as a target says, or a target has its weight in common with another module,
            as a tied head has it.
    """
    mechanisms = get_mechanisms(model)
    root = root_model(model)
    targets = list(target_modules or (p for path in mechanisms for p in attention_projections(root, path)))
    _require_modules(model, targets)
    _require_own_weights(model, targets)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=dropout,
        target_modules=targets,
        modules_to_save=[MECHANISM] if train_mechanisms and own_parameters(mechanisms) else None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in root.modules()),
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # which PEFT asks of the model
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    # with a name, PEFT would look for its config at every checkpoint, to see whether the vocabulary has changed
    adapted.peft_config[adapted.active_adapter].base_model_name_or_path = ""  # type: ignore[index]
    return adapted  # type: ignore[return-value]


def _require_modules(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise `OptionError` for a target that is no module's name; PEFT asks for one of them all."""
    names = [name for name, _ in model.named_modules()]
    own = {name.rpartition(".")[2] for name in names} - {""}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            nearest = did_you_mean(target, (name for name in own if not name.isdigit()))
            raise OptionError(f"lora_target_modules has {target!r}, which is the name of no module{nearest}")


def _require_own_weights(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise `OptionError` for a target whose weight another module has too: merged, an adapter would change both."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            holders.setdefault(id(weight), []).append(name)
    for names in holders.values():
        for name, target in product(names if len(names) > 1 else [], targets):
            if name == target or name.endswith(f".{target}"):
                other = next(one for one in names if one != name)
                raise OptionError(
                    f"lora_target_modules has {target!r}, but the weight of {name} is that of {other}, too: merged, an"
                    " adapter of one would change both; leave it out, or untie them (tie_word_embeddings=False)"
                )
