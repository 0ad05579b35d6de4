"""Tensor parallelism: processes share out the heads of a layer; mechanisms are right there, or refused by name."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_linattn import UnsupportedModelError, get_mechanisms, is_patched, list_mechanisms, patch_model
from hf_linattn.architecture import describe_layers
from hf_linattn.attention_modules import self_attention_modules
from hf_linattn.config import make_config
from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.tensor_parallel import heads_apart
from tests.helpers import OPTIONS, Snapshot, assert_close, each_of, generate, logits_of, make_patched, make_tokens
from tests.models import make_model

ROOT = Path(__file__).parents[1]
PROCESSES = 2
LEARNED = "hedgehog"


def modes_of(name: str) -> frozenset[str]:
    return MECHANISMS.get(name).modes


def splitting() -> list[tuple[str, str]]:
    """Return the mechanisms that say they split, in each of their forms."""
    names = [name for name in list_mechanisms() if MECHANISMS.get(name).splits]
    return [(name, mode) for name in names for mode in sorted(modes_of(name) - {"cross"})]


@pytest.mark.parametrize(("name", "mode"), splitting())
def test_heads_that_are_said_to_be_apart_get_alone_what_they_get_among_all(name, mode):
    """At a length of many blocks, where drawn and learned choices differ from head to head."""
    layer = next(iter(describe_layers(model := make_model("llama"), self_attention_modules(model)).values()))
    layer = replace(layer, num_heads=8, num_key_value_heads=4, causal=mode == "causal")
    mechanism = MECHANISMS.get(name)(make_config(name, OPTIONS.get(name, {})), layer).eval()
    if any(True for _ in mechanism.parameters()):
        assert not heads_apart(mechanism)
        return
    query, key, value = torch.randn(1, 8, 520, 8), *torch.randn(2, 1, 4, 520, 8)
    with torch.no_grad():
        whole = mechanism(query, key, value)[0]
        parts = zip(query.chunk(2, dim=1), key.chunk(2, dim=1), value.chunk(2, dim=1), strict=True)
        halves = [mechanism(*part)[0] for part in parts]
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, atol=1e-5, rtol=1e-5)


@functools.cache
def able() -> list[str]:
    """Return the mechanisms that are right where heads are shared out."""
    first = {name: next(iter(get_mechanisms(make_patched("llama", name)).values())) for name in list_mechanisms()}
    return [name for name, mechanism in first.items() if heads_apart(mechanism)]


@pytest.mark.parametrize("mechanism", each_of([name for name in list_mechanisms() if "causal" in modes_of(name)]))
def test_a_mechanism_is_patched_into_shared_heads_or_refused_by_name(mechanism):
    model = make_model("llama")
    model._tp_size = PROCESSES  # as transformers leaves it; the plan is the model's own
    if mechanism in able():
        patch_model(model, mechanism, **OPTIONS.get(mechanism, {}))
        return
    snapshot = Snapshot.of(model)
    with pytest.raises(UnsupportedModelError) as error:
        patch_model(model, mechanism, **OPTIONS.get(mechanism, {}))
    message = str(error.value)
    assert repr(mechanism) in message and f"{PROCESSES} processes" in message and ", ".join(able()) in message
    snapshot.assert_kept(model)
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if "self_attn" not in name}
    patch_model(model, mechanism, **OPTIONS.get(mechanism, {}))  # the plan leaves attention whole


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("linear", {"decay": "learned"}),
        ("softmax", {"sink_logit": "one"}),
        ("softmax", {"sink_logit": "learned"}),
        ("retention", {"feature_map": "elu"}),
        ("by_head", {"plan": {"linear": "0"}}),
    ],
)
def test_an_option_of_each_head_is_refused_too(mechanism, options):
    model = make_model("llama")
    model._tp_size = PROCESSES
    with pytest.raises(UnsupportedModelError, match=f"mechanism {mechanism!r} has parameters or choices"):
        patch_model(model, mechanism, **options)


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_heads_that_processes_cannot_share_out_are_refused(mechanism):
    model = make_model("llama")
    model._tp_size = 4
    with pytest.raises(UnsupportedModelError, match=r"num_key_value_heads=2, which 4 tensor-parallel processes"):
        patch_model(model, mechanism)


@pytest.fixture
def process_group():
    """The first of two processes, the other of which need not exist: what it would send is not waited for."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    yield distributed.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    distributed.destroy_process_group()


def test_a_converted_model_is_refused_before_its_weights_are_read(process_group, tmp_path):
    for mechanism in (LEARNED, "linear"):
        make_patched("llama", mechanism).save_pretrained(tmp_path / mechanism)
    split = {"distributed_config": DistributedConfig(tp_size=PROCESSES), "dtype": torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "linear", **split)
    assert loaded.model.layers[0].self_attn.q_proj.weight.to_local().shape == (16, 32)
    (tmp_path / LEARNED / "model.safetensors").write_bytes(b"nothing that could be read")
    with pytest.raises(UnsupportedModelError, match=f"{LEARNED!r} has parameters or choices for each head"):
        AutoModelForCausalLM.from_pretrained(tmp_path / LEARNED, **split)
    kept = AutoModelForCausalLM.from_config(loaded.config)  # which names the processes of another model
    assert is_patched(kept)


def share_out(model, mesh) -> None:
    """Split the projections of all layers by PyTorch's own tensor parallelism."""
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan)


def test_projections_that_pytorch_split_are_found(process_group):
    model = make_model("llama")
    share_out(model, process_group)
    with pytest.raises(UnsupportedModelError, match=rf"{PROCESSES} processes, but mechanism '{LEARNED}'"):
        patch_model(model, LEARNED)
    assert logits_of(patch_model(model, "linear"), make_tokens(1, 9)).shape == (1, 9, 96)


def test_projections_that_are_split_after_patching_are_found_in_the_first_forward(process_group):
    model = make_patched("llama", LEARNED)
    share_out(model, process_group)
    with pytest.raises(UnsupportedModelError, match="patched with 4 heads and is called with 2"):
        logits_of(model, make_tokens(1, 9))


def test_weights_that_are_put_together_for_each_call_are_no_tensor_parallelism(process_group):
    model = make_model("llama")
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=process_group)
    assert is_patched(patch_model(model, LEARNED))


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(tmp_path):
    """Patched after loading, and converted before it: logits, decoding and what is saved again."""
    make_model("llama").save_pretrained(tmp_path / "original")
    names = [name for name in able() if "causal" in modes_of(name)]
    for mechanism in (*names, LEARNED):
        make_patched("llama", mechanism).save_pretrained(tmp_path / mechanism)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [*launcher, "-m", "tests.test_tensor_parallel", str(tmp_path), *names]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    for rank in range(PROCESSES):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert results.pop(LEARNED) == ["UnsupportedModelError"] * 2
        for mechanism in names:
            expected = make_patched("llama", mechanism)
            for got in results[mechanism]:
                assert_close(torch.tensor(got["logits"]), logits_of(expected, make_tokens(2, 9)))
                assert got["tokens"] == generate(expected, make_tokens(2, 9))[0].tolist()
    for mechanism in names:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"{mechanism}-saved")
        expected = logits_of(make_patched("llama", mechanism), make_tokens(2, 9))
        assert torch.equal(logits_of(saved, make_tokens(2, 9)), expected)


def main(folder: Path, names: list[str]) -> None:
    """Be one of the processes: write what it computes to RANK.json."""
    split = {"distributed_config": DistributedConfig(tp_size=PROCESSES), "dtype": torch.float32}
    results: dict[str, list] = {}
    for mechanism in (*names, LEARNED):
        results[mechanism] = []
        for source in ("original", mechanism):
            try:
                model = AutoModelForCausalLM.from_pretrained(folder / source, **split).eval()
                if source == "original":
                    patch_model(model, mechanism, **OPTIONS.get(mechanism, {}))
            except UnsupportedModelError as error:
                results[mechanism].append(type(error).__name__)
                continue
            ids = make_tokens(2, 9)
            logits, tokens = logits_of(model, ids).tolist(), generate(model, ids)[0].tolist()
            results[mechanism].append({"logits": logits, "tokens": tokens})
        if mechanism != LEARNED:
            model.save_pretrained(folder / f"{mechanism}-saved")
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
