"""The first sentence of a card, what the Hub is told, and what push puts into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from typer.testing import CliRunner

from hf_linattn import patch_model
from hf_linattn.cards import WRITTEN, Measured, measured_sentence, read_base
from hf_linattn.cli import app
from hf_linattn.cli.push import named_files
from hf_linattn.errors import OptionError
from hf_linattn.evaluation import MemoryRow
from hf_linattn.report import Accuracies, model_card, save_card
from hf_linattn.report.tables import sections
from tests.models import make_model
from tests.report.test_tables import report

__all__ = ["report"]


def first_sentences(card: ModelCard) -> str:
    """What stands between the title and the first section."""
    return card.text.split("\n\n## ")[0].strip().split("\n\n")[1]


def test_a_classifiers_card_begins_with_its_accuracy(report):
    memory = (MemoryRow(512, 1, 2), MemoryRow(256, 1, 2))
    found = replace(report, accuracy=Accuracies(0.80, 0.90, 0.5, 0.89), memory=memory)
    card = model_card(found)
    said = first_sentences(card)
    # 0.89 / 0.90, and 2000 / 1000 tokens per second at the longest length
    assert said.startswith("Keeps 98.9 % of the accuracy (89.0 % against 90.0 % with softmax attention), reads 2.0 ")
    assert "times faster at 512 tokens" in said and "perplexity" not in said and "decoding state" not in said
    assert [result.metric_type for result in card.data.eval_results] == ["accuracy", "perplexity"]
    text = "\n\n".join(sections(found))
    assert text.index("accuracy") < text.index("test perplexity") and "## Accuracy and perplexity" in text


def test_a_language_models_card_has_perplexity_speed_and_state(report):
    card = model_card(replace(report, dataset_name="me/texts"), "me/model")
    said = first_sentences(card)
    assert "Has 1.250 times the perplexity (10.00 against 8.00 with softmax attention)" in said
    assert "has a decoding state of 10 B instead of 40 B at 512 tokens" in said
    assert "2,000,000 tokens of bundled, with the original as its teacher" in said
    assert card.data.datasets == ["me/texts"] and "# gpt2 with performer attention" in card.text
    header = str(card).split("---")[1]
    assert ModelCardData(**yaml.safe_load(header)).to_dict() == yaml.safe_load(header), "the Hub's client takes it"


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        (Measured(), ""),
        (Measured(speed=(0.5, 128)), "Reads 2.0 times slower at 128 tokens."),
        (Measured(state=(999, 1_000_000, 7)), "Has a decoding state of 999 B instead of 1.0 MB at 7 tokens."),
    ],
)
def test_what_was_not_measured_is_not_said(measured, sentence):
    assert measured_sentence(measured) == sentence


def test_push_puts_its_name_into_the_card_and_leaves_what_a_person_added(report, tmp_path):
    card = save_card(report, tmp_path)
    assert f'from_pretrained("{tmp_path.name}")' in card.read_text(), "no path of one machine"
    card.write_text(card.read_text().replace("## Limits", "## Mine\n\nI added this.\n\n## Limits"))
    (text,) = named_files(tmp_path, "me/model").values()
    assert 'from_pretrained("me/model")' in text and "I added this." in text and tmp_path.name not in text
    card.write_text('A card of my own: AutoModel.from_pretrained("mine")')
    assert named_files(tmp_path, "me/model") == {}


def test_push_writes_a_card_where_there_is_none_that_claims_nothing(tmp_path):
    patch_model(make_model("bert"), {"linear": 0}).save_pretrained(tmp_path / "model")
    card = ModelCard(named_files(tmp_path / "model", "me/model")["README.md"])
    said = first_sentences(card)
    assert said.startswith("bert with linear in place of softmax attention in 1 of 2 attention layers.")
    assert "UNTRAINED" not in card.text and "untrained" not in card.data.tags
    assert "not measured" in said and "How it was trained is not recorded here." in card.text
    assert card.data.base_model is None and card.data.pipeline_tag == "fill-mask"
    assert "AutoModelForMaskedLM" in card.text


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """Converted models, with a card and without one."""
    folder = tmp_path_factory.mktemp("places")
    model = patch_model(make_model("bert"), "linear")
    for name in ("carded", "plain"):
        model.save_pretrained(folder / name)
    (folder / "carded" / "README.md").write_text(f'AutoModel.from_pretrained("carded") {WRITTEN}')
    return folder


@pytest.mark.parametrize(
    ("folder", "repository", "message"),
    [
        ("carded", "no name!", "OptionError: repository='no name!' is no name on the Hub; give user/name"),
        ("plain", "../plain", "OptionError: repository='../plain' is no name on the Hub; give user/name"),
        ("carded", "me/model", "repository='me/model': the Hub refused the upload"),  # there is no connection
        ("plain", "me/model", "repository='me/model': the Hub refused the upload"),
        ("me/carded", "carded", "folder='me/carded': there is no such folder; the folder comes first, then the name"),
        ("me/model", "me/carded", "folder='me/model': there is no such folder; give the folder of a converted model"),
    ],
)
def test_a_push_that_fails_changes_nothing(places, monkeypatch, folder, repository, message):
    monkeypatch.chdir(places)
    before = {file: file.read_bytes() for file in places.rglob("*") if file.is_file()}
    result = CliRunner().invoke(app, ["push", folder, repository])
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output
    assert {file: file.read_bytes() for file in places.rglob("*") if file.is_file()} == before


def test_the_base_is_named_by_its_name_on_the_hub_alone(tmp_path):
    assert read_base("me/absent-model").hub_id == "me/absent-model" and read_base("me/absent-model").metadata == {}
    assert read_base(str(tmp_path)).hub_id is None and read_base(str(tmp_path)).title == tmp_path.name
    assert {read_base(name).hub_id for name in ("./gone", "../gone", "/models/gone", "runs/--gone")} == {None}
    with pytest.raises(OptionError, match="base_model must be a name on the Hub"):
        read_base(str(tmp_path), "no such/na/me")
