"""Who trains adapters and leaves the mechanisms frozen is told, once, and nobody else."""

from __future__ import annotations

import pytest
from peft import LoraConfig, PrefixTuningConfig, get_peft_model

from hf_linattn import get_mechanisms, patch_model
from tests.helpers import make_tokens
from tests.models import make_model


@pytest.mark.parametrize(
    ("mechanism", "saved", "warns"),
    [("hedgehog", None, True), ("hedgehog", ["hf_linattn"], False), ("linear", None, False)],
)
def test_adapters_beside_frozen_mechanisms_are_warned_of_once(caplog, mechanism, saved, warns):
    model, ids = patch_model(make_model("llama"), mechanism), make_tokens(2, 9)
    model.train().requires_grad_(False)(ids)  # before PEFT comes nothing is trained, and nothing is wrong
    assert not caplog.records
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", modules_to_save=saved))
    for _ in range(2):
        wrapped.train()(ids)
    said = [record.getMessage() for record in caplog.records if "frozen" in record.getMessage()]
    assert len(said) == warns and all("modules_to_save=['hf_linattn']" in text for text in said)


@pytest.mark.parametrize(
    "adapters",
    [LoraConfig(r=2, target_modules="all-linear"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")],
)
def test_mechanisms_behind_adapters_are_frozen_as_those_before_them_are(caplog, adapters):
    """PEFT saves none of them: what a training did to them would be lost."""
    wrapped = patch_model(get_peft_model(make_model("llama"), adapters), "hedgehog")
    own = [p for mechanism in get_mechanisms(wrapped).values() for p in mechanism.parameters()]
    assert own and not any(p.requires_grad for p in own)
    wrapped.train()(make_tokens(2, 9))
    assert ("patch first" in caplog.text) == isinstance(adapters, LoraConfig)  # a prefix is no parameter of the model
