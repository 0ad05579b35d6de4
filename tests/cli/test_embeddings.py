"""`hf-linattn eval` and `convert` of embedding models: what they find, and folders that load."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import AutoTokenizer

import hf_linattn
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.sentence_models import CONFIG_FILE, MODULES_FILE, TRANSFORMER_FILE, encoder_folder, is_sentence_model
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_embeddings import in_windows, scores
from tests.sentence_models import save_sentence_model
from tests.test_cli import answer, refuse

TABLE = 8
TEXTS = [" ".join(f"w{5 + (seed * seed + 3 * i) % 50}" for i in range(2 + 3 * seed)) for seed in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An embedding model with 8 positions, and rows."""
    folder = tmp_path_factory.mktemp("embeddings")
    save_sentence_model(folder, max_position_embeddings=TABLE)
    rows = [{"text": text, "title": f"w{5 + i} w{6 + i}"} for i, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "long.jsonl").write_text(json.dumps({"text": "w5 w6"}) + "\n" + json.dumps({"text": "w"}) + "\n")
    return folder


def test_it_is_converted_with_its_modules_and_scored_beside_its_original(folder, tmp_path):
    out, options = tmp_path / "out", ("--mechanism", "linear", "--max-positions", 16)
    announced = json.loads(answer("convert", folder / "model", out, *options, "--json", "--dry-run"))
    assert not out.exists()
    done = json.loads(answer("convert", folder / "model", out, *options, "--json"))
    written = sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())
    assert sorted([*announced["files"], "model.safetensors"]) == written
    assert done["model_class"] == "BertModel" and done["processors"] == ["tokenizer_config.json"]
    model, original = (SentenceTransformer(str(path), device="cpu") for path in (out, folder / "model"))
    assert hf_linattn.is_patched(model) and model.max_seq_length == 16
    card = (out / "README.md").read_text()
    shown = answer("convert", folder / "model", tmp_path / "shown", *options)
    assert f"hf-linattn eval {tmp_path / 'shown'} test.jsonl --original {folder / 'model'}" in shown
    longer = "--max_positions 16 --block_size 16"
    assert f"--mechanism linear {longer} --train_file train.jsonl" in shown.split("recover: ")[1]
    assert "library_name: sentence-transformers" in card and 'SentenceTransformer("' in card
    found = json.loads(answer("eval", out, folder / "rows.jsonl", "--original", folder / "model", "--json"))
    cut = [text.split()[:16] for text in TEXTS]
    halves = [(" ".join(w[:n]), " ".join(w[n:])) for w in map(str.split, TEXTS) for n in [len(w) // 2]]
    first, second = (torch.from_numpy(model.encode([pair[i] for pair in halves])) for i in (0, 1))
    windows = torch.stack([in_windows(original, " ".join(words)) for words in cut])
    expected = scores(first, second)
    expected["cosine"] = float((torch.from_numpy(model.encode(TEXTS)) * windows).sum(-1).mean())
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    assert (found["num_texts"], found["max_length"], found["document_window"]) == (5, 16, None)


def test_pairs_and_windows(folder):
    options = "--text_pair_column", "title", "--document_window", TABLE, "--document_stride", 4
    found = json.loads(answer("eval", folder / "model", folder / "rows.jsonl", *options, "--json"))
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    titles = torch.from_numpy(model.encode([f"w{5 + i} w{6 + i}" for i in range(5)]))
    first = torch.stack([in_windows(model, text) for text in TEXTS])
    for name, value in scores(first, titles).items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    assert "cosine" not in found and found["document_stride"] == 4 and math.isfinite(found["perplexity"])


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("rows.jsonl", ("--max-length", 9), "max_length=9 is beyond the 8 positions .* extend_positions"),
        ("rows.jsonl", ("--document_window", 9), "document_window=9 is beyond the 8 positions"),
        ("rows.jsonl", ("--document_stride", 2), "document_stride=2: there are no windows"),
        ("rows.jsonl", ("--stride", 2), "stride='2' is an option of perplexity, not of embedding"),
        ("rows.jsonl", ("--metrics", "accuracy"), "metrics='accuracy' is an option of classifiers"),
        ("rows.jsonl", ("--text_column", "txt"), "text_column='txt' is not a column"),
        ("long.jsonl", (), "'w' is too short"),
        ("missing.jsonl", (), "files=.* does not exist; give the path of a file"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(folder, file, options, message):
    said = " ".join(refuse("eval", folder / "model", folder / file, *options).split())
    assert re.search(message, said), said


def test_an_original_of_other_tokens_or_that_is_not_there_is_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "other")
    given = "eval", folder / "model", folder / "rows.jsonl", "--original"
    assert "other' has another tokenizer than model='" in refuse(*given, tmp_path / "other")
    for missing in (tmp_path / "nothing", "nothing"):
        said = " ".join(refuse(*given, missing).split())
        assert f"original='{missing}'" in said and "there is no" in said, said


def test_a_cross_encoder_is_the_classifier_that_its_folder_holds(folder, tmp_path):
    """Its kind is named in the folder; with a pooling of sentence-transformers' own it would make embeddings, too."""
    make_model("bert", "ForSequenceClassification", std=0.4, num_labels=1).save_pretrained(tmp_path / "head")
    make_tokenizer().save_pretrained(tmp_path / "head")
    judge = CrossEncoder(str(tmp_path / "head"), device="cpu", activation_fn=torch.nn.Tanh())
    judge.save_pretrained(str(tmp_path / "model"), create_model_card=False)
    assert (tmp_path / "model" / "modules.json").is_file() and not is_sentence_model("model", str(tmp_path / "model"))
    rows = [{"text": text, "title": f"w{5 + i}", "label": i / 4} for i, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tmp_path / "rows.jsonl", "--text_pair_column", "title", "--json"
    found, plain = (json.loads(answer("eval", tmp_path / name, *options)) for name in ("model", "head"))
    assert found.pop("model") != plain.pop("model") and found == plain and "pearson" in found
    convert = "convert", tmp_path / "model", tmp_path / "out", "--mechanism", "linear"
    announced = json.loads(answer(*convert, "--json", "--dry-run"))["files"]
    answer(*convert)
    assert sorted([*announced, "model.safetensors"]) == sorted(file.name for file in (tmp_path / "out").iterdir())
    converted, pairs = CrossEncoder(str(tmp_path / "out"), device="cpu"), [(TEXTS[4], "w7"), (TEXTS[3], "w6 w8")]
    hf_linattn.patch_model(judge, "linear")
    assert hf_linattn.is_patched(converted)
    assert converted.predict(pairs) == pytest.approx(judge.predict(pairs), abs=1e-6)


@pytest.mark.parametrize("kind", ["SparseEncoder", "ColBERT", "CrossEncoder"])
def test_other_kinds_of_sentence_transformers_are_refused_by_name(folder, tmp_path, kind):
    shutil.copytree(folder / "model", tmp_path / "model")
    said = json.loads((tmp_path / "model" / CONFIG_FILE).read_text())
    (tmp_path / "model" / CONFIG_FILE).write_text(json.dumps(said | {"model_type": kind}))
    with pytest.raises(UnsupportedModelError, match=f"is a {kind} .* modules Transformer, Pooling, Normalize; give"):
        is_sentence_model("model", str(tmp_path / "model"))
    assert f"is a {kind} of sentence-transformers" in " ".join(
        refuse("convert", tmp_path / "model", tmp_path / "out", "--mechanism", "linear").split()
    )
    assert not (tmp_path / "out").exists()


def test_an_encoder_in_a_folder_of_its_own_is_converted_and_fitted(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "old")
    (tmp_path / "old/0_Transformer").mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", TRANSFORMER_FILE):
        (tmp_path / "old" / file).rename(tmp_path / "old/0_Transformer" / file)
    modules = json.loads((tmp_path / "old" / MODULES_FILE).read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "old" / MODULES_FILE).write_text(json.dumps(modules))
    (tmp_path / "book.txt").write_text("w5 w6 w7 w8 w9 " * 40)
    for name in ("model", "old"):
        place = (folder if name == "model" else tmp_path) / name
        fit = "--mechanism", "hedgehog", "--calibrate", tmp_path / "book.txt"
        answer("convert", place, tmp_path / f"{name}-hedgehog", *fit)
    same, other = (load_file(tmp_path / f"{name}-hedgehog/model.safetensors") for name in ("model", "old"))
    assert same.keys() == other.keys() and all(torch.equal(same[key], other[key]) for key in same)
    assert encoder_folder("model", str(tmp_path / "old")) == "0_Transformer"


def test_texts_that_a_chat_template_renders_are_refused(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "chat")
    whole = SentenceTransformer(str(tmp_path / "chat"), device="cpu")
    whole.tokenizer.chat_template = "{% for m in messages %}w5 {{ m.content }}{% endfor %}"
    whole[0].modality_config["message"] = {"method": "forward", "method_output_name": "last_hidden_state"}
    whole.save_pretrained(str(tmp_path / "chat"))
    said = refuse("convert", tmp_path / "chat", tmp_path / "out", "--mechanism", "linear")
    assert "reads texts through the chat template of its tokenizer" in said
