"""Checkpoints saved before mechanisms and options were renamed load as ever: tests/data/make_old_checkpoints.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from hf_linattn import is_patched

FOLDERS = sorted((Path(__file__).parent / "data" / "checkpoints_before_renames").iterdir())
AUTO_CLASSES = {"llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM, "bart": AutoModelForSeq2SeqLM}


def load(folder: Path) -> PreTrainedModel:
    return AUTO_CLASSES[AutoConfig.from_pretrained(folder).model_type].from_pretrained(folder, dtype=torch.float64)


@torch.no_grad()
def differences(folder: Path, model: PreTrainedModel) -> Tensor:
    """Return how far the logits are from those that the version which saved the checkpoint computed."""
    inputs = load_file(folder / "expected.safetensors")
    expected = inputs.pop("logits")
    return (model(**inputs).logits - expected).abs()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_old_checkpoint_gives_the_same_logits_and_they_hang_on_its_mechanisms(folder, tmp_path):
    model, generator = load(folder), torch.Generator().manual_seed(0)
    kept = differences(folder, model)
    assert kept.max() < 1e-8
    model.save_pretrained(tmp_path)
    assert torch.equal(differences(folder, load(tmp_path)), kept)
    trained = [parameter for name, parameter in model.named_parameters() if ".hf_linattn." in name]
    for parameter in trained:
        parameter.data += 0.5 * torch.randn(parameter.shape, generator=generator)
    assert (differences(folder, model).max() > 1e-4) == bool(trained)


def test_auto_model_patches_an_old_checkpoint():
    assert all(is_patched(AutoModel.from_pretrained(folder)) for folder in FOLDERS)
