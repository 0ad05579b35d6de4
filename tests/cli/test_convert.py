"""`hf-linattn convert`: what it announces, fits, writes and refuses."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    EsmConfig,
    ViTConfig,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)
from typer.testing import CliRunner

import hf_linattn
from hf_linattn.cli import app, conversion
from hf_linattn.cli.choosing import TEXT_ROWS, text_batches
from hf_linattn.cli.conversion import processors
from hf_linattn.errors import CheckpointError
from hf_linattn.support.tiny import tiny_config, tiny_model
from hf_linattn.training.arguments import ModelArguments
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.test_cross_attention import bart

BASE_CARD = "---\nlicense: mit\nlanguage: en\n---\n\n# The original\n"
ROW = 64  # positions of the tiny GPT-2
WINDOW = json.dumps({"window_size": 8, "num_sink_tokens": 1})


def answer(*arguments: object, code: int = 0) -> str:
    """Return what a command prints on standard output, or all of it where it fails."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A tiny GPT-2 with a tokenizer and a card, beside a text of four rows."""
    folder = tmp_path_factory.mktemp("convert")
    make_model("gpt2", std=0.3).save_pretrained(folder / "tiny")
    make_tokenizer().save_pretrained(folder / "tiny")
    (folder / "tiny" / "README.md").write_text(BASE_CARD, encoding="utf-8")
    (folder / "text.txt").write_text(" ".join(f"w{5 + (i * i + i // 7) % 90}" for i in range(4 * ROW + 9)))
    return folder / "tiny"


def test_a_dry_run_announces_what_is_written_then_and_writes_nothing(original, tmp_path):
    arguments = [
        "convert", original, tmp_path / "out", "--mechanism", "hybrid", "--options", WINDOW, "--layers", "1",
        "--length", 40, "--calibrate", original.parent / "text.txt", "--calibration-tokens", 3 * ROW,
    ]  # fmt: skip
    announced = json.loads(answer(*arguments, "--dry-run", "--json"))
    shown = answer(*arguments, "--dry-run")
    assert list(tmp_path.iterdir()) == [] and not announced.pop("written")
    done, files = json.loads(answer(*arguments, "--json")), announced.pop("files")
    assert done.pop("written") and done.pop("card") == str(tmp_path / "out" / "README.md")
    assert done["calibration"].pop("seconds") > 0 and done["calibration"].pop("layers") == 1
    assert done["calibration"].pop("taken") in (0, 1) and announced == done
    assert announced["calibration"] == {"tokens": 3 * ROW}
    saved = load_file(tmp_path / "out" / "model.safetensors").values()
    assert sum(tensor.nbytes for tensor in saved) == announced["weight_bytes"]
    named = shown.split("to be written to")[1].partition(": ")[2].splitlines()[0]
    assert [file.partition(" (")[0] for file in named.split(", ")] == ["model.safetensors", *files]
    assert sorted(["model.safetensors", *files]) == sorted(file.name for file in (tmp_path / "out").iterdir())
    for part in ("hybrid(window_size=8, num_sink_tokens=1)", "softmax", "nothing was written", "calibrated on 192"):
        assert part in shown, part
    keys_and_values = 2 * 2 * make_model("gpt2").config.n_embd * 40 * 4  # of two layers, in float32
    assert announced["state"]["original"] - keys_and_values in range(64)
    assert announced["state"]["patched"] < announced["state"]["original"] and announced["state"]["length"] == 40


def test_a_dry_run_announces_as_many_files_of_weights_as_are_written(original, tmp_path):
    size = os.path.getsize(original / "model.safetensors")
    arguments = "convert", original, tmp_path / "out", "--mechanism", "linear", "--max-shard-size", f"{size // 3000}KB"
    announced, shown = json.loads(answer(*arguments, "--dry-run", "--json")), answer(*arguments, "--dry-run")
    answer(*arguments)
    written = len(list((tmp_path / "out").glob("model-*.safetensors")))
    assert written == announced["weight_files"] > 1 and f"{written} files model-*.safetensors (" in shown
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() and "), model.safetensors.index.json," in shown


def test_calibrate_fits_what_is_saved_on_whole_rows_of_the_text(original, tmp_path):
    text = original.parent / "text.txt"
    shown = answer(
        "convert", original, tmp_path / "out", "--mechanism", "hedgehog", "--calibrate", text, "--length", 0
    )
    ids = torch.tensor([int(word[1:]) for word in text.read_text().split()[: 4 * ROW]]).view(4, ROW)
    expected = hf_linattn.patch_model(make_model("gpt2", std=0.3), "hedgehog")
    untrained = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    hf_linattn.calibrate(expected, [{"input_ids": ids}])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(saved[name], tensor, atol=1e-5) for name, tensor in expected.state_dict().items())
    assert not all(torch.equal(saved[name], tensor) for name, tensor in untrained.items()), "it was fitted"
    assert "calibrated on 256 tokens of text.txt" in shown and "--mechanism hedgehog" in shown.split("recover: ")[1]
    measure = f"hf-linattn eval {tmp_path / 'out'} test.txt --suite language --original {original}"
    assert measure in shown, "on no text that was fitted to"
    assert f"--mechanism hedgehog --train_file {text} --output_dir" in shown, "the next command is complete"


def test_an_encoder_decoder_writes_texts_and_no_recipe_is_named(original, tmp_path):
    """BART's class is one that fills masks, too."""
    bart(torch.float32).save_pretrained(tmp_path / "bart")
    make_tokenizer().save_pretrained(tmp_path / "bart")
    shown = answer("convert", tmp_path / "bart", tmp_path / "out", "--mechanism", "linear", "--length", 0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "AutoModelForSeq2SeqLM.from_pretrained(" in card and "pipeline_tag: text-generation" in card
    assert "recover:" not in shown and "train and measure it with your own code" in " ".join(shown.split())


def test_a_size_of_files_that_is_infinite_is_refused(original, tmp_path):
    shown = answer("convert", original, tmp_path / "o", "--mechanism", "linear", "--max-shard-size", "infGB", code=1)
    assert "max_shard_size must be a size like 5GB or 500MB, got 'infGB'" in shown


def test_a_plan_comes_from_a_file_or_is_chosen(original, tmp_path):
    plan = [{"mechanism": "local", "layers": [1], "heads": [0], "options": {"window_size": 8}}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    run = partial(answer, "convert", original)
    named = json.loads(run(tmp_path / "named", "--plan", tmp_path / "plan.json", "--json", "--length", 0))
    assert named["attention"] == [
        {"attention": "local(window_size=8) in key/value heads 0, softmax in the others", "layers": "1"},
        {"attention": "softmax", "layers": "0"},
    ]
    choice = ["--signal", "divergence", "--text", original.parent / "text.txt", "--options", WINDOW, "--length", 0]
    auto = json.loads(run(tmp_path / "auto", "--plan", "auto", *choice, "--json"))
    assert (tmp_path / "auto" / "plan.json").exists() and len(auto["kept"]) == 1, "a tenth of a few, at least one"
    shown = run(tmp_path / "again", "--plan", tmp_path / "auto" / "plan.json", "--length", 0)
    first, again = (json.loads((tmp_path / name / "plan.json").read_text()) for name in ("auto", "again"))
    assert again["kept"] == auto["kept"] and again["plan"] == first["plan"]
    assert f"--plan {tmp_path / 'again' / 'plan.json'} --train_file text.txt" in shown
    recipe = ModelArguments("gpt2", plan=str(tmp_path / "again" / "plan.json"))
    assert type(recipe.plan) is list and recipe.plan == first["plan"], "the recipe takes the file"
    with pytest.raises(CheckpointError, match=r"plan='absent\.json' cannot be read: .* give JSON, or a JSON file"):
        ModelArguments("gpt2", plan="absent.json")


@pytest.mark.parametrize(("name", "positions"), [("roberta", 62), ("gpt2", ROW), ("llama", ROW)])
def test_texts_are_cut_to_the_positions_that_serve_them(original, name, positions):
    (batch,) = text_batches(make_tokenizer(), [original.parent / "text.txt"], model := make_model(name))
    assert batch["input_ids"].shape == (1, positions) and torch.isfinite(model(**batch).logits).all()


def test_the_longest_rows_of_a_file_are_read(tmp_path):
    rows = [*(f"w{5 + i}" for i in range(12)), " ".join(f"w{5 + i}" for i in range(40))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    batches = text_batches(make_tokenizer(), [tmp_path / "rows.jsonl"], make_model("llama"))
    assert len(batches) == TEXT_ROWS and batches[0]["input_ids"].shape[1] >= 40


REFUSED = {
    "--plan atuo": r"CheckpointError: plan='atuo' cannot be read: .*give auto, or a JSON file",
    '--plan plan.json --options {"window_size":8}': r"options must be absent where plan is a file",
    "--plan plan.json --options {": r"options must be a JSON object",
    "--plan plan.json --signal divergence": r"signal must be absent where no plan is chosen; give keep, or plan auto",
    "--mechanism linear --text a.txt": r"text must be absent where no plan is chosen; .* got \['a.txt'\]",
    "--mechanism linear --seed 1": r"seed must be absent where no plan is chosen",
    "--plan auto --layers 0": r"layers='0' is for a mechanism alone",
    "--plan auto --keep few": r"keep must be a share like 0.1",
    "--mechanism hedgehog --calibrate missing.txt": r"DataError: calibrate='.*' does not exist; give the path of a",
    "--plan auto --text latin.txt": r"DataError: text='.*' cannot be read as text: .*; give a text file in UTF-8",
    "--mechanism hedgehog --calibrate short.txt": r"calibrate: no document has the 64 tokens of one row",
    "--mechanism hedgehog --calibrate text.txt --calibration-tokens 63": r"calibration_tokens .* >= 64",
    "--mechanism streaming --calibrate text.txt": r"nothing of its own that could be fitted; leave calibrate out",
    "--plan auto --calibrate text.txt": r"nothing of its own that could be fitted; leave calibrate out",
    "--plan auto --mechanism hedgehog --calibrate short.txt": r"calibrate: no document has the 64 tokens of one row",
    "--plan auto --length 65": r"length reaches 65 tokens, but the model has 64 positions",
    "--plan auto --max-shard-size 5GBs": r"max_shard_size must be a size like 5GB or 500MB, got '5GBs'",
    "--mechanism hedgehog --calibrate text.txt --length 65": r"length reaches 65 tokens",
    "--mechanism linear --calibration-tokens 64": r"tokens must be absent where nothing is fitted; .* got 64",
    "--mechanism linear --dtype flaot16": r"unknown dtype 'flaot16'; did you mean float16",
    "--mechanism linear --dtype bf16": r"unknown dtype 'bf16'",
    "--mechanism linear --length 65": r"length reaches 65 tokens, but the model has 64 positions",
    "--mechanism linear --max-shard-size=-5MB": r"max_shard_size must be a size like 5GB or 500MB, got '-5MB'",
    "--mechanism linear --max-shard-size big": r"max_shard_size must be a size like 5GB",
    "--mechanism linear --base-model a/b/c": r"base_model must be a name on the Hub",
    '--mechanism {"linear":0} --layers 1': r"layers must be absent where mechanism is a plan",
    '--mechanism {"linear":0} --options {"decay":"learned"}': r"options must be absent where mechanism is a plan",
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items(), ids=str)
def test_what_is_wrong_is_refused_by_name_before_anything_is_written(
    original, tmp_path, monkeypatch, arguments, message
):
    for takes_long in ("choose_plan", "calibrate"):
        monkeypatch.setattr(hf_linattn, takes_long, Mock(side_effect=AssertionError))
    (tmp_path / "short.txt").write_text("w5 w6")
    (tmp_path / "text.txt").write_text((original.parent / "text.txt").read_text())
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    files = {name: str(tmp_path / name) for name in ("missing.txt", "short.txt", "text.txt", "latin.txt")}
    given = [files.get(part, part) for part in arguments.split()]
    said = answer("convert", original, tmp_path / "out", *given, code=1).strip().splitlines()[-1]
    assert re.search(message, said), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [(["--mechanism", "hedgehog"], 0), (["--mechanism", "hedgehog", "--calibrate", "text.txt"], 1),
     (["--plan", "auto", "--signal", "divergence", "--text", "text.txt", "--options", WINDOW], 1)],
    ids=["patched", "fitted", "chosen"],
)  # fmt: skip
def test_what_takes_long_is_done_on_the_default_device(original, tmp_path, monkeypatch, arguments, moved):
    monkeypatch.chdir(original.parent)
    moves = Mock(side_effect=conversion.to_default_device)
    monkeypatch.setattr(conversion, "to_default_device", moves)
    answer("convert", "tiny", tmp_path / "out", *arguments, "--length", 0, "--dtype", "float16")
    assert moves.call_count == moved
    (dtype,) = {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtype == torch.float16
    (batch,) = text_batches(make_tokenizer(), [Path("text.txt")], make_model("gpt2").to("meta"))
    assert {tensor.device.type for tensor in batch.values()} == {"meta"}, "where the model is"


@pytest.mark.parametrize("place", ["text.txt/out", "closed/out", "closed"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_a_model_is_read(tmp_path, monkeypatch, place):
    (tmp_path / "text.txt").write_text("w5")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed" or not mode & os.W_OK)
    said = answer("convert", "no model", tmp_path / place, "--mechanism", "linear", "--dry-run", code=1)
    assert re.search(r"output must be the path of a folder that can be made and written to, got '.*'", said), said


def test_the_card_of_a_conversion_says_what_it_is_and_that_nothing_was_trained(original, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer("convert", original, "runs/out", "--mechanism", "linear", "--length", 40, "--base-model", "me/tiny-gpt2")
    card = ModelCard.load("runs/out/README.md")
    assert (card.data.base_model, card.data.license, card.data.language) == ("me/tiny-gpt2", "mit", "en")
    assert {"hf_linattn", "linear", "untrained"} <= set(card.data.tags) and card.data.pipeline_tag == "text-generation"
    assert card.text.lstrip().startswith("# tiny-gpt2 with linear attention\n\n**UNTRAINED.**")
    for part in (
        "linear in place of softmax attention in 2 of 2 attention layers", "were not measured",
        'AutoModelForCausalLM.from_pretrained("runs/out")', "| `linear` | 0-1 |", "Katharopoulos", "mit.",
    ):  # fmt: skip
        assert part in card.text, part
    again = answer("convert", original, "dry", "--mechanism", "linear", "--length", 40, "--dry-run", "--json")
    state = json.loads(again)["state"]
    kilobytes = f"{state['patched'] / 1000:.1f} kB instead of {state['original'] / 1000:.0f} kB"
    assert f"decoding state of {kilobytes} at 40 tokens" in card.text


@pytest.mark.parametrize("named", [True, False])
def test_a_card_has_no_path_of_the_machine_and_a_folder_that_nothing_names_is_said(
    original, tmp_path, monkeypatch, named
):
    monkeypatch.chdir(original.parent.parent)
    relative, text = f"{original.parent.name}/tiny", original.parent / "text.txt"
    for number, model in enumerate([original, relative, f"../{original.parent.parent.name}/{relative}"]):
        places = ["convert", model, tmp_path / str(number), "--mechanism", "hedgehog", "--length", 0]
        arguments = [str(x) for x in [*places, f"--calibrate={text}", *(["--base-model", "me/tiny"] * named)]]
        monkeypatch.setattr("sys.argv", ["hf-linattn", *arguments])
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        said = "the card names no original; give --base-model owner/name"
        assert result.stderr.splitlines().count(said) == (not named)
        card = (tmp_path / str(number) / "README.md").read_text()
        assert f"hf-linattn convert tiny {number} --mechanism hedgehog --length 0 --calibrate=text.txt" in card
        assert str(tmp_path.parent) not in card and relative not in card


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_model_of_text_without_a_tokenizer_is_warned_of(tmp_path, name):
    """By `convert` and by `push`, which ends here without a connection."""
    model = make_model("gpt2") if name == "gpt2" else tiny_model(name)
    model.save_pretrained(tmp_path / "model")
    arguments = ["convert", tmp_path / "model", tmp_path / "out", "--mechanism", "linear"]
    runs = {"model": CliRunner().invoke(app, [str(argument) for argument in arguments])}
    runs["out"] = CliRunner().invoke(app, ["push", str(tmp_path / "out"), "me/model"])
    for folder, run in runs.items():
        place = str(tmp_path / folder)
        assert run.stderr.count(f"={place!r} has no tokenizer") == (name == "gpt2"), run.stderr
        assert run.stderr.count(f"(NAME).save_pretrained({place!r})") == (name == "gpt2")
    make_tokenizer().save_pretrained(tmp_path / "out")
    assert "no tokenizer" not in CliRunner().invoke(app, ["push", str(tmp_path / "out"), "me/model"]).stderr


OF_MECHANISMS = {
    ("--mechanism", "local", "--window_size", "8"): """mechanisms local, .*: give --options '{"window_size": 8}'""",
    ("--window-size=256",): """--window-size, .* mechanisms .*, ...: give --options '{"window_size": 256}'""",
    ("--decay", "learned", "--json"): """ give --options '{"decay": "learned"}'""",
    ("--widnow_size", "256"): "No such option: --widnow_size *│",
}


@pytest.mark.parametrize("given", OF_MECHANISMS, ids=" ".join)
def test_an_option_of_a_mechanism_is_said_how_to_give(given):
    assert re.search(OF_MECHANISMS[given], answer("convert", "model", "out", *given, code=2))


def test_a_licence_that_lies_in_a_file_comes_along(original, tmp_path):
    model = make_model("bert", "Model")
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "LICENSE").write_text("as you like")
    (tmp_path / "base" / "README.md").write_text("---\n- no mapping\n---\n")
    shown = answer("convert", tmp_path / "base", tmp_path / "out", "--mechanism", "linear")
    assert "train and measure it with your own" in shown
    assert (tmp_path / "out" / "LICENSE").read_text() == "as you like"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.license_link) == ("other", "LICENSE")
    assert card.data.pipeline_tag == "feature-extraction" and "decoding state" not in card.text


def test_a_length_is_refused_where_there_is_no_decoding_state(tmp_path):
    for model, message in ((make_model("bert"), "has no decoding state"), (bart(), "is for a decoder alone")):
        name = model.config.model_type
        model.save_pretrained(tmp_path / name)
        arguments = ["convert", tmp_path / name, tmp_path / "out", "--mechanism", "linear", "--json"]
        assert message in answer(*arguments, "--length", 8, code=1) and not (tmp_path / "out").exists()
        assert json.loads(answer(*arguments, "--dry-run"))["state"] is None


WORDS = ["w5", "w6", "[UNK]"]
VOCABULARIES = {
    "bert": {"vocab.txt": "\n".join(WORDS)},
    "gpt2": {"vocab.json": json.dumps({word: i for i, word in enumerate(WORDS)}), "merges.txt": "#version: 0.2\n"},
    "llama": {"tokenizer.json": make_tokenizer().backend_tokenizer.to_str()},
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_of_vocabulary_files_alone_goes_along_and_a_damaged_one_is_refused(tmp_path, name):
    make_model(name).config.save_pretrained(tmp_path)
    assert processors(str(tmp_path)) == {}, "there is none yet"
    for file, text in VOCABULARIES[name].items():
        (tmp_path / file).write_text(text)
    found = processors(str(tmp_path))
    assert list(found) == ["tokenizer_config.json"] and found["tokenizer_config.json"].get_vocab()["w6"] in (1, 6)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"model='.*' cannot be read"):
        processors(str(tmp_path))


DAMAGED = [
    ("bert", {"vocab.txt": "[PAD]\n[CLS]\nw5"}, r"the vocabulary in vocab.txt has no '\[UNK\]'"),
    ("bert", {"vocab.txt": ""}, "the vocabulary in vocab.txt has no "),
    ("bert", {"vocab.txt": b"\xff\xfe"}, "not contain valid UTF-8, in vocab.txt"),
    ("gpt2", {"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "a b"}, ", in merges.txt or vocab.json"),
    ("gpt2", {"vocab.json": '{"a": 0', "merges.txt": ""}, ", in merges.txt or vocab.json"),
    ("llama", {"tokenizer.json": "{}"}, ", in tokenizer.json"),
    ("llama", {**VOCABULARIES["llama"], "tokenizer_config.json": "[]"}, ", in tokenizer_config.json or token"),
]


@pytest.mark.parametrize(("name", "files", "reason"), DAMAGED)
def test_damaged_files_of_a_tokenizer_are_named(tmp_path, name, files, reason):
    make_model(name).config.save_pretrained(tmp_path)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=f"^model=.* cannot be read: .*{reason}.*; it needs a tokenizer"):
        processors(str(tmp_path))


def test_a_model_without_a_tokenizer_goes_without(tmp_path):
    for kind in (ViTConfig, EsmConfig):  # Esm's tokenizer opens the vocabulary that it was not given
        tiny_config(kind).save_pretrained(tmp_path)
        assert processors(str(tmp_path)) == {}


def test_of_a_model_that_hears_alone_no_tokenizer_is_made(tmp_path):
    """As `AutoProcessor` makes one of nothing for Whisper, and fails in it for Wav2Vec2."""
    for kind, extractor in ((WhisperConfig, WhisperFeatureExtractor()), (Wav2Vec2Config, Wav2Vec2FeatureExtractor())):
        tiny_config(kind).save_pretrained(tmp_path)
        extractor.save_pretrained(tmp_path)
        found = processors(str(tmp_path))
        assert list(found) == ["preprocessor_config.json"]
        assert type(found["preprocessor_config.json"]) is type(extractor)


def test_a_processor_goes_beside_the_converted_model(tmp_path):
    given = WhisperProcessor(WhisperFeatureExtractor(feature_size=8), make_tokenizer())
    WhisperForConditionalGeneration(tiny_config(WhisperConfig)).save_pretrained(tmp_path / "original")
    given.save_pretrained(tmp_path / "original")
    places = tmp_path / "original", tmp_path / "out"
    document = json.loads(answer("convert", *places, "--mechanism", "linear", "--json"))
    assert document["processors"] == ["tokenizer_config.json", "processor_config.json"]
    assert AutoProcessor.from_pretrained(tmp_path / "out").to_dict() == given.to_dict()
    (places[0] / "processor_config.json").rename(places[0] / "preprocessor_config.json")  # as transformers 4 wrote it
    assert list(processors(str(places[0]))) == ["tokenizer_config.json", "preprocessor_config.json"]
