"""choose_plan on models that are offloaded, copied to several processes, or sharded."""

from __future__ import annotations

import accelerate
import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_linattn import OptionError, choose_plan
from tests.helpers import make_tokens
from tests.models import make_model

TEXT = [{"input_ids": make_tokens(2, 12)}]


def test_parameters_that_offloading_replaces_are_trained_as_before():
    model, options = make_model("llama"), {"replace": {"local": {"window_size": 4}}, "signal": "divergence"}
    model.model.norm.requires_grad_(False)
    expected = choose_plan(model, None, 1, batches=TEXT, **options)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert choose_plan(model, None, 1, batches=TEXT, **options).record.kept == expected.record.kept
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == flags
    model(**TEXT[0], labels=TEXT[0]["input_ids"]).loss.backward()


def test_a_model_in_parts_is_refused_and_copies_are_not():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        copied = nn.parallel.DistributedDataParallel(make_model("llama"))
        assert choose_plan(copied, None, 1, signal="divergence", replace="linear", batches=TEXT).record.kept
        with pytest.raises(OptionError, match=r"FSDP.*call choose_plan before the model is wrapped"):
            choose_plan(fully_shard(make_model("llama")), None, 1, signal="divergence", batches=TEXT)
    finally:
        distributed.destroy_process_group()
