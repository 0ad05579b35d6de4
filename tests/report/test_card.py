"""The model card: metadata that huggingface_hub reads back, and everything a reader needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from hf_linattn.mechanisms import MECHANISMS
from hf_linattn.report import Accuracies, model_card, save_card
from hf_linattn.report.card import EVAL_RESULTS_FILE, how_trained
from hf_linattn.report.schema import EMBEDDING
from hf_linattn.report.tables import to_markdown, training_rows
from hf_linattn.report.teaching import TEACHING
from tests.report.test_tables import report

__all__ = ["report"]


def test_the_card_on_disk_is_read_back_by_the_hubs_own_client(report, tmp_path):
    report = replace(report, base_model="openai-community/gpt2", mechanism="hedgehog+softmax")
    path = save_card(report, tmp_path, "me/gpt2-hedgehog")
    card = ModelCard.load(path)
    assert path.name == "README.md" and card.data.base_model == "openai-community/gpt2"
    assert card.data.tags == ["hf_linattn", "hedgehog", "subquadratic-attention"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    (result,) = card.data.eval_results
    assert not (tmp_path / EVAL_RESULTS_FILE).exists(), "its data is no data set of the Hub"
    assert (result.metric_type, result.dataset_split) == ("perplexity", "test")
    assert result.metric_value == pytest.approx(report.perplexity.recovered)
    for part in (
        MECHANISMS.get("hedgehog").citation, 'from_pretrained("me/gpt2-hedgehog")', "import hf_linattn",
        report.provenance.command, f"{report.perplexity.control:,.2f}", "perplexity.png",
    ):  # fmt: skip
        assert part in card.text, part


def test_the_scores_on_a_data_set_of_the_hub_are_collected_by_its_name(report, tmp_path):
    report = replace(report, dataset_name="Salesforce/wikitext", dataset_config_name="wikitext-2-raw-v1")
    result = ModelCard.load(save_card(report, tmp_path)).data.eval_results[0]
    assert (result.dataset_type, result.dataset_config) == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    (entry,) = parse_eval_result_entries(yaml.safe_load((tmp_path / EVAL_RESULTS_FILE).read_text()))
    assert (entry.dataset_id, entry.task_id) == ("Salesforce/wikitext", "perplexity")
    assert entry.value == pytest.approx(report.perplexity.recovered) and "wikitext-2-raw-v1, test" in entry.notes
    report = replace(report, evaluation=replace(report.evaluation, held_out=True))
    result = ModelCard.load(save_card(report, tmp_path)).data.eval_results[0]
    assert (result.dataset_split, result.metric_name) == ("train", "held-out perplexity")
    assert not (tmp_path / EVAL_RESULTS_FILE).exists() and "held out of its training split" in to_markdown(report)


@pytest.mark.parametrize("name", [None, ""])
def test_texts_of_files_are_no_data_set_of_the_hub(report, tmp_path, name):
    """An empty name takes back that of a recipe."""
    card = ModelCard.load(save_card(replace(report, dataset_name=name), tmp_path))
    assert card.data.datasets is None and not (tmp_path / EVAL_RESULTS_FILE).exists()


@pytest.mark.parametrize("name", [None, *TEACHING, EMBEDDING])
def test_a_teacher_is_named_where_the_original_taught_alone(report, name):
    own, said = {"lora_rank": 8, "window_dropout": 0.5}, {} if name in (None, EMBEDDING) else {name: 2, "top_k": 4}
    how = replace(report.evaluation, problem=EMBEDDING if name == EMBEDDING else None)
    given = replace(report, training=replace(report.training, teaching=own | said), evaluation=how)
    rows = dict(training_rows(given))
    sentence, shown = how_trained(given), rows["how the original taught it"]
    assert sentence.endswith("without a teacher." if name is None else "with the original as its teacher.")
    expected = {None: "not at all", EMBEDDING: "by its embeddings"}
    assert shown == expected.get(name, f"{name}=2, top_k=4")
    assert rows["other options of the training"] == "lora_rank=8, window_dropout=0.5"


def test_a_folder_is_no_base_model_and_a_classifier_has_its_accuracy(report, tmp_path):
    folder = replace(report, base_model=str(tmp_path), accuracy=Accuracies(0.9, 0.91, 0.5, 0.89))
    card = model_card(folder)
    assert card.data.base_model is None and card.data.pipeline_tag == "text-classification"
    assert {result.metric_type: result.metric_value for result in card.data.eval_results}["accuracy"] == 0.89
    assert "AutoModelForSequenceClassification" in card.text
    masked = replace(report, evaluation=replace(report.evaluation, stride=None))
    assert model_card(masked).data.pipeline_tag == "fill-mask"
