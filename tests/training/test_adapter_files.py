"""Adapters on disk: what is loaded computes what was saved, by any way in, and never onto softmax or another model."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_linattn import get_mechanisms, is_patched, patch_model
from hf_linattn.errors import CheckpointError, OptionError, PatchError, UnsupportedModelError
from hf_linattn.plan import PatchConfig
from hf_linattn.report import Report
from hf_linattn.support.tiny import tiny_model
from hf_linattn.training import adapter_files, load_adapter
from hf_linattn.training.adapters import add_adapters
from hf_linattn.training.stages.adapter import AdapterStage
from tests.helpers import Snapshot
from tests.models import make_model
from tests.recipes.test_distill import flags, run
from tests.recipes.test_finetune import material

__all__ = ["material"]
IDS = torch.arange(5, 16)[None]


def original():
    return make_model("llama", std=0.3)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def patched(max_positions: int | None = None):
    return patch_model(original(), "hybrid", layers="1", window_size=4, max_positions=max_positions)


def saved(folder: Path, train_mechanisms: bool = True, max_positions: int | None = None, **options) -> torch.Tensor:
    """Write the adapter of a model whose adapters and mechanisms were changed, and return its logits."""
    original().save_pretrained(folder / "base")
    model, options = patched(max_positions), {"max_positions": max_positions, **options}
    adapted = add_adapters(model, rank=2, train_mechanisms=train_mechanisms)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or ".hf_linattn." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapter_files.save_adapter(adapted, folder / "adapter", str(folder / "base"), **options)
    return logits_of(adapted)


WAYS = {
    "load_adapter": lambda folder: load_adapter(original(), folder / "adapter"),
    "merged": lambda folder: load_adapter(original(), str(folder / "adapter")).merge_and_unload(),
    "PeftModel": lambda folder: PeftModel.from_pretrained(original(), folder / "adapter"),
    "AutoPeftModelForCausalLM": lambda folder: AutoPeftModelForCausalLM.from_pretrained(folder / "adapter"),
    "AutoModel": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "adapter"),
    "empty at first": lambda folder: PeftModel.from_pretrained(original(), folder / "adapter", low_cpu_mem_usage=True),
}


@pytest.mark.parametrize(
    ("train_mechanisms", "max_positions"),
    [(True, None), (False, None), (True, 128)],
    ids=["trained", "fitted", "long"],
)
def test_every_way_in_patches_the_model_first(tmp_path, train_mechanisms, max_positions):
    expected = saved(tmp_path, train_mechanisms, max_positions)
    assert not torch.allclose(logits_of(patched(max_positions)), expected)
    already = {"patched already": lambda folder: load_adapter(patched(max_positions), folder / "adapter")}
    for name, load in (WAYS | already).items():
        model = load(tmp_path)
        assert is_patched(model), name
        torch.testing.assert_close(logits_of(model), expected, msg=name)
    files = "adapter/adapter_model.safetensors", "base/model.safetensors"
    sizes = [(tmp_path / file).stat().st_size for file in files]
    assert sizes[0] < sizes[1] / 2
    trained = load_adapter(original(), tmp_path / "adapter", is_trainable=True)
    assert trained.training and any("lora" in name for name, p in trained.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("train_mechanisms", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mechanism", "counter", "options"),
    [("learned_sparse", "num_kept", {}), ("performer", "forwards", {"redraw_interval": 10})],
)
def test_integers_of_a_mechanism_stay_what_they_are(tmp_path, mechanism, counter, options, dtype, train_mechanisms):
    count = 70_001  # no number of bfloat16, and beyond all of float16
    model = patch_model(original(), mechanism, **options)
    for part in get_mechanisms(model).values():
        getattr(part, counter).fill_(count)
    adapted = add_adapters(model, rank=2, train_mechanisms=train_mechanisms)
    adapter_files.save_adapter(adapted, tmp_path, "base", dtype=dtype)
    state = load_file(tmp_path / "adapter_model.safetensors")
    assert {x.dtype for name, x in state.items() if not name.endswith(counter)} == {dtype}
    loaded = get_mechanisms(load_adapter(original(), tmp_path))
    assert [int(getattr(part, counter)) for part in loaded.values()] == [count] * len(loaded)


def test_two_adapters_one_after_another_are_one(tmp_path):
    saved(tmp_path)
    model = load_adapter(original(), tmp_path / "adapter").merge_and_unload()
    adapted = add_adapters(model, rank=3, alpha=6, seed=1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    adapter_files.save_adapter(adapted, tmp_path / "both", "base", before=tmp_path / "adapter")
    both = load_adapter(original(), tmp_path / "both")
    assert both.peft_config["default"].r == 5
    torch.testing.assert_close(logits_of(both), logits_of(adapted), rtol=1e-4, atol=1e-5)


def test_adapters_of_embeddings_are_added_up_too(tmp_path):
    """Their names end without `.weight`."""
    targets = ["q_proj", "embed_tokens"]
    models = []
    for seed, rank in ((0, 2), (1, 3)):
        base = models[0].merge_and_unload() if models else patched()
        models.append(add_adapters(base, rank=rank, target_modules=targets, seed=seed))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.add_(0.1 * parameter.requires_grad)
        before = tmp_path / "0" if seed else None
        adapter_files.save_adapter(models[-1], tmp_path / str(seed), "base", before=before)
    both = load_adapter(original(), tmp_path / "1")
    torch.testing.assert_close(logits_of(both), logits_of(models[-1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        partial(make_model, "bert", "ForTokenClassification"),
        partial(make_model, "llama", "Model"),
        partial(tiny_model, "whisper"),
    ],
)
def test_an_adapter_of_a_head_that_no_recipe_trains_is_saved(tmp_path, make):
    adapted = add_adapters(patch_model(make(), "hedgehog"), rank=2)
    adapter_files.save_adapter(adapted, tmp_path, "base")
    assert json.loads((tmp_path / adapter_files.CONFIG_FILE).read_text())["task_type"] is None
    loaded = load_adapter(make(), tmp_path)
    for key, weight in adapted.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], weight), key


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_weight_that_two_modules_have_is_refused(target):
    """Merged, it would change the embeddings of tokens with the head."""
    model = patch_model(make_model("llama", tie_word_embeddings=True), "linear")
    before = Snapshot.of(model)
    with pytest.raises(OptionError, match=f"lora_target_modules has '{target}', but the weight of .* is that of"):
        add_adapters(model, rank=2, target_modules=["q_proj", target])
    before.assert_kept(model)


def test_every_target_is_the_name_of_a_module():
    """PEFT asks for one of them, and passes over what is misspelt."""
    model = patch_model(make_model("llama"), "linear")
    before = Snapshot.of(model)
    with pytest.raises(OptionError, match="lora_target_modules has 'qproj', which is the name of no module; did you"):
        add_adapters(model, rank=2, target_modules=["k_proj", "qproj"])
    before.assert_kept(model)


def test_what_does_not_fit_leaves_the_model_as_it_was(tmp_path):
    saved(tmp_path)
    folder = tmp_path / "adapter"
    larger = make_model("llama", std=0.3, intermediate_size=96, num_attention_heads=8)
    before = logits_of(larger)
    with pytest.raises(CheckpointError, match=r"belongs to another model: .* is of .*, the model's of .*; give the"):
        load_adapter(larger, folder)
    assert not is_patched(larger) and torch.equal(logits_of(larger), before)
    other = make_model("gpt2", std=0.3)
    with pytest.raises(CheckpointError, match=r"belongs to another model: .*; give the one it was trained on"):
        load_adapter(other, folder)
    assert not is_patched(other) and torch.equal(logits_of(other), logits_of(make_model("gpt2", std=0.3)))
    with pytest.raises(PatchError, match="is patched otherwise than the adapter was trained with"):
        load_adapter(patch_model(original(), "linear"), folder)
    with pytest.raises(PatchError, match="is patched otherwise"):
        PeftModel.from_pretrained(patch_model(original(), "linear"), folder)
    with pytest.raises(UnsupportedModelError, match=r"model must be a transformers PreTrainedModel .*, got NoneType"):
        load_adapter(None, folder)
    state = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(state.items())[1:]), folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="belongs to another model: the adapter has no 'base_model"):
        load_adapter(original(), folder)
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"path=.*cannot be read: .*; give a folder that a recipe wrote"):
        load_adapter(original(), folder)
    add_adapters(patch_model(original(), "linear"), rank=2).save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"holds an adapter of type .*LORA, which is not one of this library"):
        load_adapter(original(), tmp_path / "plain")
    with pytest.raises(OptionError, match="path must be a folder, or a name on the Hub, got None"):
        load_adapter(original(), None)


def changed_config(folder: Path, **changes) -> Path:
    """Return a copy of an adapter whose config says something else."""
    file = shutil.copytree(folder / "adapter", folder / "changed") / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file.parent


@pytest.mark.parametrize("make", [original, patched])
def test_after_an_error_the_same_parameters_are_trained_in_the_same_modules(tmp_path, make):
    saved(tmp_path)
    model, path = make(), changed_config(tmp_path, r=8)
    model.get_input_embeddings().requires_grad_(False)
    halfway = make()  # PEFT adapts the first layer before it comes to a module that it does not know
    halfway.model.layers[1].self_attn.q_proj = torch.nn.Sequential(halfway.model.layers[1].self_attn.q_proj)
    for given, folder, reason in ((model, path, "is of"), (halfway, tmp_path / "adapter", "is not supported")):
        modules = dict(given.named_modules())
        trained = {name: parameter.requires_grad for name, parameter in given.named_parameters()}
        with pytest.raises(CheckpointError, match=f"belongs to another model: .* {reason}"):
            load_adapter(given, folder)
        assert dict(given.named_modules()) == modules and not hasattr(given, "peft_config")
        assert {name: parameter.requires_grad for name, parameter in given.named_parameters()} == trained


@pytest.mark.parametrize("make", [original, patched])
def test_a_loader_of_pefts_that_fails_leaves_the_model_as_it_was(tmp_path, make):
    saved(tmp_path)
    halfway, model, path = make(), make(), changed_config(tmp_path, r=8)
    halfway.model.layers[1].self_attn.q_proj = torch.nn.Sequential(halfway.model.layers[1].self_attn.q_proj)
    reasons = [(model, path, "belongs to another model"), (halfway, tmp_path / "adapter", "is not supported")]
    if make is original:
        others = make_model("gpt2", std=0.3), make_model("llama", std=0.3, num_attention_heads=8)
        reasons += zip(others, [tmp_path / "adapter"] * 2, ["No modules were targeted", "belongs to an"], strict=True)
    for given, folder, reason in reasons:
        given.get_input_embeddings().requires_grad_(False)
        before, modules, was_patched = logits_of(given), dict(given.named_modules()), is_patched(given)
        trained = {name: parameter.requires_grad for name, parameter in given.named_parameters()}
        with pytest.raises(ValueError, match=reason):
            PeftModel.from_pretrained(given, folder)
        assert dict(given.named_modules()) == modules and not hasattr(given, "peft_config")
        assert {name: parameter.requires_grad for name, parameter in given.named_parameters()} == trained
        assert is_patched(given) is was_patched and torch.equal(logits_of(given), before)


def test_a_model_that_has_adapters_keeps_them(tmp_path):
    expected = saved(tmp_path)
    base = original()
    own = get_peft_model(original(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted, before = load_adapter(base, tmp_path / "adapter"), logits_of(own)
    for model in (adapted, base, own):
        with pytest.raises(PatchError, match=r"has adapters already; give .* adapted\.unload\(\) of the PeftModel"):
            load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(adapted), expected)
    assert torch.equal(logits_of(own), before) and is_patched(base) and not is_patched(own)
    adapted.load_adapter(tmp_path / "adapter", "beside")
    adapted.set_adapter("beside")
    torch.testing.assert_close(logits_of(adapted), expected)
    torch.testing.assert_close(logits_of(load_adapter(adapted.unload(), tmp_path / "adapter")), expected)


@pytest.mark.parametrize("way", ["load_adapter", "PeftModel"])
def test_a_second_adapter_of_another_plan_is_refused(tmp_path, way):
    for window in (8, 3):
        adapted = add_adapters(patch_model(original(), "local", window_size=window), rank=2)
        adapter_files.save_adapter(adapted, tmp_path / f"of {window}", "a-llama")
    shutil.copytree(tmp_path / "of 8", tmp_path / "adapter")
    first = WAYS[way](tmp_path)
    with pytest.raises(PatchError, match="patched otherwise than the adapter was trained with"):
        first.load_adapter(tmp_path / "of 3", "beside")
    assert [m.config.window_size for m in get_mechanisms(first).values()] == [8, 8]


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"v_proj": 1}}, {"rank_pattern": {"v_proj": 3}}, {"use_rslora": True}, {"use_dora": True},
        {"layers_to_transform": [1]}, {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"modules_to_save": ["lm_head", "hf_linattn"]},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_an_adapter_of_pefts_own_options_is_loaded_as_it_was(tmp_path, options):
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["hf_linattn"], **options}
    adapted = get_peft_model(patched(), LoraConfig(**given), adapter_name="mine")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (x for x in adapted.parameters() if x.requires_grad):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapter_files.save_adapter(adapted, tmp_path / "adapter", "a-llama")
    torch.testing.assert_close(logits_of(load_adapter(original(), tmp_path / "adapter")), logits_of(adapted))
    if set(options) & set(adapter_files.NO_SUM):
        with pytest.raises(OptionError, match=f"{next(iter(options))}=.*have no sum"):
            adapter_files.save_adapter(adapted, tmp_path / "sum", "a-llama", before=tmp_path / "adapter")
        assert not (tmp_path / "sum").exists()


@pytest.mark.parametrize(("name", "expected"), [("r", "an"), ("max_positions", "None or an")])
def test_numbers_of_a_config_are_looked_at(tmp_path, name, expected):
    saved(tmp_path)
    with pytest.raises(OptionError, match=f"{name} must be {expected} integer >= 1, got 'a'"):
        load_adapter(original(), changed_config(tmp_path, **{name: "a"}))


def test_a_recipe_leaves_an_adapter_of_both_its_trainings(material, tmp_path):
    out = tmp_path / "out"
    longer = {"long_tokens": 384, "long_block_size": 48, "transfer_tokens": 0, "calibration_tokens": 256}
    given = flags(material, out, control="none", save_adapter="beside", **longer)
    report = run(given)
    assert run(given) == report, "done already"
    merged = AutoModelForCausalLM.from_pretrained(out)
    model = load_adapter(AutoModelForCausalLM.from_pretrained(material["model_name_or_path"]), out / "adapter")
    assert {m.config.mechanism for m in get_mechanisms(model).values()} == {"hybrid"}
    assert model.peft_config["default"].r == 4, "of two trainings with adapters of rank 2"
    torch.testing.assert_close(logits_of(model), logits_of(merged), rtol=1e-4, atol=1e-5)
    card = (out / "adapter" / "README.md").read_text()
    assert "load_adapter(AutoModelForCausalLM.from_pretrained(base)" in card and "library_name: peft" in card
    assert Report.load(out / "adapter") == report
    alone = shutil.copytree(out, tmp_path / "alone")
    context = Mock()
    context.directory.path, context.arguments.distillation.save_adapter = alone, "alone"
    assert "model.safetensors" in AdapterStage().compute(context)["removed"]
    left = {file.name for file in alone.iterdir()}
    assert {"adapter", "report.json", "tokenizer.json"} <= left and not {"model.safetensors", "config.json"} & left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_adapter": "with"}, "save_adapter must be 'beside' or 'alone', or absent, got 'with'"),
        ({"save_adapter": "alone", "lora_rank": None}, "save_adapter must be absent where lora_rank is, got 'alone'"),
    ],
)
def test_options_that_cannot_be(material, tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        run(flags(material, tmp_path / "out", **changes))


def test_the_config_says_how_it_is_loaded(tmp_path):
    saved(tmp_path, max_positions=128, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert "import hf_linattn.training.adapter_files" in config["peft_type"] and config["max_positions"] == 128
    mechanisms = [layer.mechanism for layer in PatchConfig.from_dict(config["hf_linattn"]).layers.values()]
    assert mechanisms == ["hybrid"] and config["base_model_name_or_path"].endswith("base")
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {x.dtype for x in state.values()} == {torch.bfloat16}
    with pytest.raises(PatchError, match="is patched with 64 positions, and the adapter was trained with 128; give"):
        load_adapter(patched(), tmp_path / "adapter")
