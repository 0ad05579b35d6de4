"""The check of architectures: what it says of some, and that each of its parts can fail."""

from __future__ import annotations

import json
import logging
import re
from unittest.mock import Mock

import pytest
import torch
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

import hf_linattn
from hf_linattn import transformers_bridge as bridge
from hf_linattn.cache import RecurrentStateLayer
from hf_linattn.cli import app, common
from hf_linattn.errors import OptionError, UnknownNameError, UnsupportedModeError
from hf_linattn.masks import Masks
from hf_linattn.mechanisms.linear import LinearMechanism
from hf_linattn.support import CHECKS, architectures, check_architecture
from hf_linattn.support import check as checks
from hf_linattn.support.tiny import tiny_inputs, tiny_model

DECODER = ("called", "differs", "future", "cache", "left padding", "padding", "restored", "softmax")
PATCHED = {
    "gpt_neox": DECODER,  # names its cache otherwise
    "deepseek_v3": DECODER,  # latent attention, values of another width than keys
    "jamba": DECODER,  # attention and recurrent layers in turns
    "qwen3_next": DECODER,
    "mllama": DECODER,  # asks its cache how many keys it keeps
    "falcon_h1": DECODER,  # attention and recurrence in one layer
    "zamba2": DECODER,
    "albert": ("called", "differs", "padding", "restored", "softmax"),  # all layers are one
    "layoutlm": ("called", "differs", "padding", "restored", "softmax"),  # makes its own mask for all queries
    # both sides; its positions count padding
    "bart": ("called", "differs", "future", "cache", "padding", "restored", "softmax"),
    "whisper": ("called", "differs", "future", "restored", "softmax"),
    "moonshine": ("called", "differs", "future", "cache", "restored", "softmax"),  # widens its heads
    "moonshine_streaming": ("called", "differs", "future", "restored", "softmax"),
    "aimv2": ("called", "differs", "restored", "softmax"),  # its text side is causal where it is padded
    "videoprism": ("called", "differs", "restored", "softmax"),
    "vit": ("called", "differs", "restored", "softmax"),
    # its text side is causal by call, not by declaration
    "clip": ("called", "differs", "future", "restored", "softmax"),
}


# other tests have a model of each of these
ELSEWHERE = {x: [pytest.mark.exhaustive] for x in ("deepseek_v3", "falcon_h1", "qwen3_next")}


@pytest.mark.parametrize("model_type", [pytest.param(x, marks=ELSEWHERE.get(x, [])) for x in PATCHED])
def test_architectures_of_many_kinds_are_patched_by_one_code_path(model_type):
    found = check_architecture(model_type)
    assert (found.status, found.reason, found.passed) == ("patched", "", PATCHED[model_type])
    assert found.layers > 0


@pytest.mark.parametrize(
    ("model_type", "status", "reason"),
    [
        ("mamba", "not", "declares no attention layers"),
        ("t5", "not", "computes its attention itself"),
        ("deepseek_v32", "not", r"chooses its keys by a part of its own \(indexer\)"),
        ("t5gemma2", "not", "attends to the encoder's tokens and its own under one softmax"),
        ("diffllama", "not", "attends more than once in a forward, .* pass use_cache=False"),
        ("hrm_text", "not", "keeps the keys of layer 0 in another place of the cache .* pass use_cache=False"),
        ("gemma3", "partly", "called: given input_ids, .*vision.* never ran"),
        ("cosmos3_edge", "partly", r"called: visual.* and 1 more keep softmax, as .* does not declare them"),
        ("zamba", "untried", "no small ZambaForCausalLM could be made"),
    ],
)
def test_what_does_not_hold_is_said_with_its_reason(model_type, status, reason):
    found = check_architecture(model_type)
    assert found.status == status
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("mechanism", ["streaming", "local", "hybrid", "mixed_chunk"])
def test_a_mechanism_that_equals_softmax_on_short_inputs_is_tried_in_all_else(mechanism):
    found = check_architecture("gpt2", mechanism)
    assert (found.status, found.reason) == ("patched", "")
    assert found.passed == tuple(check for check in DECODER if check != "differs")


@pytest.mark.parametrize(
    ("mechanism", "options", "error", "message"),
    [
        ("liner", {}, UnknownNameError, "unknown mechanism 'liner'; did you mean linear"),
        ("streaming", {"window": 3}, OptionError, "mechanism 'streaming' has no option 'window'; did you mean"),
        ("streaming", {"window_size": 0}, OptionError, "window_size must be"),
    ],
)
def test_a_wrong_mechanism_is_no_verdict_on_the_architecture(mechanism, options, error, message):
    with pytest.raises(error, match=message):
        check_architecture("gpt2", mechanism, **options)


def test_what_is_found_is_shown_where_its_file_cannot_be_written(monkeypatch, tmp_path):
    command = ["support", "llama", "--json", "--output"]
    refused = CliRunner().invoke(app, [*command, str(tmp_path)])
    assert refused.exit_code == 1 and "output must be the path of a file, in a folder" in refused.stderr
    monkeypatch.setattr(common, "write_json", Mock(side_effect=OSError("no space left on device")))
    failed = CliRunner().invoke(app, [*command, str(tmp_path / "found.json")])
    assert failed.exit_code == 1 and "no space left on device" in failed.stderr
    assert json.loads(failed.stdout)["architectures"][0]["status"] == "patched"


def test_each_part_of_the_check_can_fail(monkeypatch):
    def outcome() -> tuple[str, str]:
        found = check_architecture("llama")
        return found.status, found.reason.partition(":")[0]

    assert outcome() == ("patched", "")
    with monkeypatch.context() as broken:
        broken.setattr(bridge.Mechanism, "record_call", lambda self: None)
        assert outcome()[0] != "patched"
    with monkeypatch.context() as broken:
        broken.setattr(checks, "patch_model", lambda model, *a, **k: hf_linattn.patch_model(model, "softmax"))
        assert outcome() == ("partly", "differs")
    causal = LinearMechanism.causal_attention

    def leak(self, query, key, value, *given):
        output, state = causal(self, query, key, value, *given)
        return output + value.mean(), state

    with monkeypatch.context() as broken:
        broken.setattr(LinearMechanism, "causal_attention", leak)
        assert outcome() == ("partly", "future")
    with monkeypatch.context() as broken:
        broken.setattr(bridge, "masks_of", lambda *given: Masks())
        broken.setattr(bridge, "sequence_ids", lambda *given: None)  # which tell padding apart by its positions
        assert outcome() == ("partly", "left padding")
    with monkeypatch.context() as broken:
        broken.setattr(checks, "patch_model", lambda model, *a, **k: hf_linattn.patch_model(model, "linear"))
        assert outcome() == ("partly", "softmax")
    with monkeypatch.context() as broken:
        broken.setattr(checks, "unpatch_model", lambda model: model)
        assert outcome() == ("partly", "restored")

    def forget(self, key, value, *args, **kwargs):
        self.expected, self.state = False, None
        return key, value

    with monkeypatch.context() as broken:
        broken.setattr(bridge.StateLayer, "update", forget)
        assert outcome() == ("partly", "cache")


def test_every_model_type_is_known_once_and_unknown_ones_are_refused():
    known = architectures()
    assert len(known) > 500 and {"llama", "bert", "t5", "whisper", "vit"} <= known.keys()
    with pytest.raises(UnknownNameError, match=r"unknown model type 'lama'; did you mean llama"):
        check_architecture("lama")
    assert list(CHECKS) == list(DECODER)


@pytest.mark.parametrize("model_type", ["diffllama", "hrm_text"])
def test_a_cache_that_could_not_be_right_is_refused_and_without_it_the_model_works(model_type):
    model = hf_linattn.patch_model(tiny_model(model_type), "linear")
    ids = torch.randint(5, 90, (2, 7))
    with torch.no_grad():
        assert bool(model(input_ids=ids, use_cache=False).logits.isfinite().all())
        with pytest.raises(UnsupportedModeError, match="pass use_cache=False"):
            model(input_ids=ids, use_cache=True)


def test_beams_reorder_attention_and_recurrence_of_one_layer_alike():
    model = hf_linattn.patch_model(tiny_model("falcon_h1"), "linear")
    ids, order = tiny_inputs(model)["input_ids"], torch.tensor([1, 0])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
        assert all(isinstance(layer, RecurrentStateLayer) for layer in cache.layers)
        cache.reorder_cache(order)
        got = model(input_ids=ids[order][:, -1:], past_key_values=cache, use_cache=True).logits
        want = model(input_ids=ids[order], use_cache=False).logits[:, -1:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedModeError, match="crop"):
        cache.crop(-1)
    cache.reset()
    with torch.no_grad():
        again = model(input_ids=ids[order], past_key_values=cache, use_cache=True).logits[:, -1:]
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-4)


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    level = logging.getLogger("hf_linattn").level
    result = CliRunner().invoke(app, ["support", "gpt2", "mamba", "--output", str(tmp_path / "support.json")])
    assert result.exit_code == 0, result.output
    assert "1 patched, 1 not" in result.output and "gpt2" in result.output
    document = json.loads((tmp_path / "support.json").read_text())
    assert [row["status"] for row in document["architectures"]] == ["patched", "not"]
    assert logging.getLogger("hf_linattn").level == level
    wrong = CliRunner().invoke(app, ["support", "lama"])
    assert wrong.exit_code == 1 and "did you mean llama" in wrong.output
    wrong = CliRunner().invoke(app, ["support", "gpt2", "--mechanism", "liner"])
    assert wrong.exit_code == 1 and "did you mean linear" in wrong.output
    assert document["mechanism"] == "linear" and document["transformers"]
