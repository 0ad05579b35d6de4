"""Embedding models of sentence-transformers through the recipe: converted, taught by the original, and reloaded."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer

import hf_linattn
from hf_linattn.errors import CheckpointError, DataError, OptionError, UnsupportedModelError
from hf_linattn.evaluation.document_windows import windows_for
from hf_linattn.evaluation.embeddings import Texts
from hf_linattn.report import Report
from hf_linattn.sentence_models import SentenceModel
from hf_linattn.training import pipeline
from hf_linattn.training.arguments import DISTILLATION, DataArguments, parse_arguments
from hf_linattn.training.base_task import TextEncoder
from hf_linattn.training.classification import PaddingCollator
from hf_linattn.training.data import TrainingData
from hf_linattn.training.embeddings import Embeddings, check_weights, weights_of
from hf_linattn.training.finetuning import stage_arguments, validation_loss
from hf_linattn.training.loading import load_task
from hf_linattn.training.losses.embeddings import EmbeddingDistillation, EmbeddingWeights
from hf_linattn.training.preparation import prepare
from hf_linattn.training.stages.recovery import RecoveredTraining
from hf_linattn.training.trainers import RecoveryTrainer
from tests.helpers import make_tokenizer
from tests.models import make_model
from tests.recipes.test_finetune import command, recorded
from tests.sentence_models import save_sentence_model
from tests.training.test_finetuning import REQUIRED, make_training

TABLE, LONG = 8, 16  # positions of the original, and of the converted model
OPTIONS = {
    "mechanism": "hedgehog", "mechanism_options": None, "block_size": LONG, "max_positions": LONG,
    "max_train_tokens": 2048, "transfer_tokens": 256, "learning_rates": "3e-3", "lr_search_tokens": None,
    "speed_lengths": "12",
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("embeddings")
    files = {"model_name_or_path": save_sentence_model(folder, max_position_embeddings=TABLE)}
    generator = torch.Generator().manual_seed(0)
    for split, count in {"train": 48, "validation": 8, "test": 14}.items():
        lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
        texts = [" ".join(f"w{int(i)}" for i in torch.randint(5, 60, (n,), generator=generator)) for n in lengths]
        files[f"{split}_file"] = str(folder / f"{split}.jsonl")
        lines = [json.dumps({"text": text, "title": text[: len(text) // 2]}) + "\n" for text in texts]
        Path(files[f"{split}_file"]).write_text("".join(lines))
    return files


def texts_of(material) -> list[str]:
    return [json.loads(line)["text"] for line in Path(material["test_file"]).read_text().splitlines()]


def distill(material, out, **changes) -> Report:
    return pipeline.main(command(material, out, **OPTIONS | changes), DISTILLATION, "distill.py")


def in_windows(model: SentenceTransformer, text: str) -> torch.Tensor:
    """Return the mean of the embeddings of windows, half of one apart, by their tokens."""
    words, total, start, seen = text.split()[:LONG], torch.zeros(32), 0, 0
    while not seen or seen < len(words):
        window = words[start : start + TABLE]
        total += len(window) * torch.from_numpy(model.encode(" ".join(window)))
        start, seen = start + TABLE // 2, start + TABLE
    return total / total.norm()


def scores(queries: torch.Tensor, answers: torch.Tensor) -> dict[str, float]:
    found, loss = {1: 0, 10: 0}, 0.0
    for i, query in enumerate(queries):
        near = [float(query @ answer) for answer in answers]
        rank = sum(x >= near[i] for x in near) - 1
        loss += math.log(sum(math.exp(20 * x) for x in near)) - 20 * near[i]
        found = {k: count + (rank < k) for k, count in found.items()}
    count = len(queries)
    return {"recall_at_1": found[1] / count, "recall_at_10": found[10] / count, "perplexity": math.exp(loss / count)}


def test_an_embedding_model_learns_to_read_long_documents_from_its_own_windows(material, tmp_path, capsys):
    out = tmp_path / "out"
    report = distill(material, out)
    assert Report.load(out) == report
    texts, original = texts_of(material), SentenceTransformer(material["model_name_or_path"], device="cpu")
    halves = [[" ".join(w[:n]), " ".join(w[n:])] for w in map(str.split, texts) for n in [len(w) // 2]]
    windows = torch.stack([in_windows(original, text) for text in texts])
    loaded = SentenceTransformer(str(out), device="cpu")
    assert hf_linattn.is_patched(loaded) and loaded.max_seq_length == LONG == loaded.tokenizer.model_max_length
    rows = {row.metric: row for row in report.metrics}
    control = SentenceTransformer(str(out / "control"), device="cpu")
    for name, model in {"recovered": loaded, "control": control}.items():
        first, second = (torch.from_numpy(model.encode([pair[i] for pair in halves])) for i in (0, 1))
        expected = scores(first, second)
        expected["cosine"] = float((torch.from_numpy(model.encode(texts)) * windows).sum(-1).mean())
        for metric, value in expected.items():
            kept = report.perplexity if metric == "perplexity" else rows[metric]
            assert getattr(kept, name) == pytest.approx(value, abs=2e-4), (name, metric)
    assert [*rows] == ["recall_at_1", "recall_at_10", "cosine"]
    assert rows["cosine"].recovered > rows["cosine"].converted + 0.01
    cut, pooled = report.readings
    assert pooled.metrics["cosine"] == pytest.approx(1, abs=1e-5) and pooled.stride == TABLE // 2
    first = torch.from_numpy(original.encode(texts))
    assert cut.metrics["cosine"] == pytest.approx(float((first * windows).sum(-1).mean()), abs=1e-4)
    assert [stage.name for stage in report.stages] == ["converted", "transfer", "recovered"]
    assert recorded(out, "recovered_training")["eval_loss"] == pytest.approx(report.stages[-1].validation_loss, 1e-4)
    assert len(report.samples) == 3 and report.samples[0].truth == halves[0][1]
    assert {sample.recovered for sample in report.samples} <= {second for _, second in halves}
    page, card = (out / "report.md").read_text(), (out / "README.md").read_text()
    assert "## Retrieval" in page and "embeddings averaged by tokens" in page and "validation loss" in page
    assert 'model = SentenceTransformer("' in card and "pipeline_tag: sentence-similarity" in card
    assert "cosine" in capsys.readouterr().out


def test_a_pad_token_that_the_encoder_has_no_embedding_for_is_not_read(tmp_path):
    name = save_sentence_model(tmp_path, max_position_embeddings=TABLE)
    (encoder, task), texts = load_task(name), ["w7 w9 w11", "w8 w30 w31 w32 w33", "w40 w41"]
    tokenizer, found = task.modules.tokenizer, []
    rows = Dataset.from_dict({"text": texts})
    for _ in range(2):
        parts = DatasetDict({"train": rows, "validation": rows})
        data = task.rows(parts, TextEncoder(tokenizer, DataArguments(block_size=TABLE)), encoder, 64)
        batch = data.collator([*data.validation])
        windows = windows_for(tokenizer, 3)
        with torch.no_grad():
            found.append([
                task.modules.embed_texts(encoder, texts, max_length=TABLE), task.modules.embed(encoder, batch),
                task.modules.embed(encoder, batch, windows),
            ])  # fmt: skip
        tokenizer.add_special_tokens({"pad_token": "[OTHER PAD]"})
    assert tokenizer.pad_token_id >= encoder.config.vocab_size
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("read_in_windows", [False, True])
def test_the_loss_is_what_its_formula_says(tmp_path, pooling, read_in_windows):
    name = save_sentence_model(tmp_path, pooling, normalize=False, max_position_embeddings=TABLE)
    (encoder, task), texts = load_task(name), ["w7 w9 w11", "w8 w30 w31 w32 w33", "w40 w41"]
    student, original = load_task(name)[0], SentenceTransformer(name, device="cpu")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    windows = hf_linattn.evaluation.document_windows.DocumentWindows(3, 2) if read_in_windows else None
    weights = EmbeddingWeights(0.0 if read_in_windows else 2.0, 3.0, 5.0)
    encoded = task.modules.encode(texts, TABLE)
    rows = Dataset.from_dict({**encoded, "labels": [0] * len(texts)})
    batch = PaddingCollator(0)([*rows])
    loss = float(EmbeddingDistillation(student, encoder, task.modules, weights, windows).eval()(**batch)["loss"])
    with task.modules.holding(student) as whole:
        got = torch.from_numpy(whole.encode(texts)).double()
    want = torch.from_numpy(original.encode(texts)).double()
    if read_in_windows:
        parts = [[text.split()[i : i + 3] for i in range(0, max(1, len(text.split()) - 1), 2)] for text in texts]
        want = torch.stack([
            sum(len(part) * torch.from_numpy(original.encode(" ".join(part))).double() for part in each)
            for each in parts
        ])  # fmt: skip
    got, want = (x / x.norm(dim=-1, keepdim=True) for x in (got, want))
    expected = 3.0 * float((1 - (got * want).sum(-1)).mean())
    others = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected += 5.0 * sum(float(got[i] @ got[j] - want[i] @ want[j]) ** 2 for i, j in others) / len(others)
    if not read_in_windows:
        errors = []
        for text in texts:
            ids = {"input_ids": torch.tensor([make_tokenizer()(text)["input_ids"]]), "output_hidden_states": True}
            with torch.no_grad():
                pairs = zip(student.eval()(**ids).hidden_states[1:], encoder(**ids).hidden_states[1:], strict=True)
            errors += [((a - b).square().sum(-1) / b.square().sum(-1)).mean() for a, b in pairs]
        expected += 2.0 * float(torch.stack(errors).mean())  # of texts, which count alike, however long
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_validation_loss_is_that_of_groups_of_8_however_many_texts_are_read_at_a_time(tmp_path):
    name = save_sentence_model(tmp_path)
    (encoder, task), student = load_task(name), load_task(name)[0]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    texts = [" ".join(f"w{5 + i * j % 40}" for j in range(3 + i % 7)) for i in range(19)]
    rows = Dataset.from_dict({**task.modules.encode(texts, LONG), "labels": [0] * 19}).with_format("torch")
    data, weights = TrainingData(rows, rows, evaluation_collator=PaddingCollator(0)), EmbeddingWeights(1.0, 1.0, 5.0)
    whole = EmbeddingDistillation(student, encoder, task.modules, weights).eval()
    batches = [PaddingCollator(0)([*rows.select(range(i, min(i + 8, 19)))]) for i in (0, 8, 16)]
    expected = sum(float(whole(**batch)["loss"]) * len(batch["labels"]) for batch in batches) / 19
    read: list[int] = []
    student.register_forward_pre_hook(lambda _, args, given: read.append(len(given["input_ids"])), with_kwargs=True)
    for size, most in ((1, 1), (3, 3), (12, 8), (16, 16)):
        loss = EmbeddingDistillation(student, encoder, task.modules, weights, at_once=size)
        training = make_training(tmp_path / "out", per_device_eval_batch_size=size)
        trainer = RecoveryTrainer(loss, stage_arguments(loss, training, tmp_path / "out"), data)
        found = validation_loss(loss, data, size), trainer.evaluate()["eval_loss"]
        assert found == pytest.approx((expected, expected), rel=1e-5), size
        assert max(read) == most
        read.clear()


def test_tokens_are_those_of_sentence_transformers_with_its_prompt(tmp_path):
    name = save_sentence_model(tmp_path)
    config = Path(name) / "config_sentence_transformers.json"
    config.write_text(json.dumps({"prompts": {"query": "w9 w10 "}, "default_prompt_name": "query"}))
    modules, whole = SentenceModel(name), SentenceTransformer(name, device="cpu")
    encoder, texts = modules.take_encoder(), ["w7", "w11 w12 w13"]
    found = modules.embed_texts(encoder, texts, max_length=64, batch_size=2)
    torch.testing.assert_close(found, torch.from_numpy(whole.encode(texts)), rtol=1e-5, atol=1e-6)
    assert modules.encode(texts, 4)["input_ids"] == [[9, 10, 7], [9, 10, 11, 12]]
    pooling = Path(name) / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    with pytest.raises(UnsupportedModelError, match=r"leaves the prompt 'w9 w10 ' out of its pooling"):
        SentenceModel(name)


def test_pairs_have_the_prompts_of_queries_and_of_documents(tmp_path):
    name = save_sentence_model(tmp_path)
    config = Path(name) / "config_sentence_transformers.json"
    config.write_text(json.dumps({"prompts": {"query": "w9 w10 ", "document": "w20 "}, "default_prompt_name": None}))
    modules, whole = SentenceModel(name), SentenceTransformer(name, device="cpu")
    rows = Dataset.from_dict({"text": ["w7", "w8 w11"], "text_pair": ["w30 w31", "w33"]})
    texts, encoder = Texts.of(rows), modules.take_encoder()
    queries, answers = whole.encode_query(texts.queries), whole.encode_document(texts.answers)
    expected = np.concatenate([queries, answers]), queries, answers
    parts = texts.whole, texts.queries, texts.answers
    for part, prompts, want in zip(parts, texts.prompts(modules), expected, strict=True):
        found = modules.embed_texts(encoder, part, prompts=prompts, max_length=64)
        torch.testing.assert_close(found, torch.from_numpy(want), rtol=1e-5, atol=1e-6)
    splits = DatasetDict(train=rows, validation=rows)
    made = Embeddings(modules).rows(splits, TextEncoder(modules.tokenizer, DataArguments(block_size=16)), encoder, 99)
    assert [row["input_ids"].tolist() for row in made.validation][:2] == [[9, 10, 7], [20, 30, 31]]
    halves = Texts.of(rows.select_columns("text"))
    assert halves.prompts(modules) == ([""] * 2,) * 3


def test_embeddings_whose_lengths_count_are_refused(tmp_path):
    name = save_sentence_model(tmp_path, normalize=False)
    config = Path(name) / "config_sentence_transformers.json"
    config.write_text(json.dumps({"similarity_fn_name": "dot"}))
    with pytest.raises(UnsupportedModelError, match=r"similarity_fn_name='dot', in which their lengths count"):
        SentenceModel(name)


def test_embeddings_are_cut_to_what_the_folder_says(tmp_path):
    name = save_sentence_model(tmp_path)
    config = Path(name) / "config_sentence_transformers.json"
    config.write_text(json.dumps({"truncate_dim": 5}))
    modules, whole = SentenceModel(name), SentenceTransformer(name, device="cpu")
    texts = ["w7", "w11 w12 w13"]
    found = modules.embed_texts(modules.take_encoder(), texts, max_length=64)
    want = torch.from_numpy(whole.encode(texts, normalize_embeddings=True))
    assert found.shape == (2, 5)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_the_usual_similarity_weight_is_0_where_texts_come_one_at_a_time(caplog):
    def weights(*flags: str) -> EmbeddingWeights:
        arguments = parse_arguments([*REQUIRED, "--use_cpu", "true", "--block_size", "16", *flags], DISTILLATION)
        check_weights(arguments)
        return weights_of(arguments)

    assert weights() == (0, 1, 1) and not caplog.records
    longer = ("--long_block_size", "128", "--long_tokens", "1024", "--per_device_train_batch_size", "8")
    for alone in (("--per_device_train_batch_size", "1"), longer):
        caplog.clear()
        assert weights(*alone) == (0, 1, 0) and "similarity_weight: 0 is taken" in caplog.text
        caplog.clear()
        assert weights(*alone, "--similarity_weight", "0") == (0, 1, 0) and not caplog.records


def test_pairs_are_rows_of_their_own(material, tmp_path):
    flags = command(material, tmp_path, text_pair_column="title", lora_rank=2, **OPTIONS)
    run = prepare(parse_arguments(flags, DISTILLATION))
    assert (len(run.data.train), len(run.data.validation)) == (2 * 48, 2 * 8)
    ids = [row["input_ids"].tolist() for row in run.data.validation]
    texts = [json.loads(line) for line in Path(material["validation_file"]).read_text().splitlines()]
    expected = [text.split()[:LONG] for row in texts for text in (row["text"], row["title"])]
    assert ids[0] == [int(word[1:]) for word in expected[0]] and len(ids[1]) == len(expected[1])
    assert run.windows.length == TABLE and RecoveredTraining().teacher(run) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_positions": None}, OptionError, r"block_size=16 is beyond the 8 positions .* extend_positions"),
        ({"max_positions": 4}, OptionError, "max_positions must be above 8"),
        ({"hidden_weight": 1.0}, OptionError, "hidden_weight=1.0: the original reads windows of 8 tokens"),
        ({"document_window": 9}, OptionError, "document_window must be at most the 8 positions"),
        ({"kl_weight": 1.0}, OptionError, "kl_weight=1.0: an embedding model predicts nothing"),
        ({"ce_weight": 0.5}, OptionError, "ce_weight=0.5: there are no predictions"),
        ({"metrics": "accuracy"}, OptionError, "metrics=.*: it is of classifiers"),
        ({"layers": "auto"}, OptionError, "layers='auto': layers are chosen by what is predicted"),
        ({"cosine_weight": 0, "similarity_weight": 0}, OptionError, "nothing teaches"),
        ({"similarity_weight": -1}, OptionError, "similarity_weight must be at least 0"),
        ({"similarity_weight": 5, "per_device_train_batch_size": 1}, OptionError, "5.0: a batch of one .* least 2, "),
        ({"cosine_weight": 0, "per_device_train_batch_size": 1}, OptionError, "None: a batch of one text has no "),
        ({"similarity_weight": 5, "long_block_size": 256, "long_tokens": 1024}, OptionError, "of at least 32, or sim"),
        ({"text_column": "txt"}, DataError, "text_column='txt' is not a column of the train .*; did you mean text"),
        ({"text_pair_column": "headline"}, DataError, "text_pair_column='headline' is not a column"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(material, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        distill(material, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["w7 w8"], "1 text to look for another in"), (["w7 w8", "w"], "'w' is too short to have a first half")],
)
def test_texts_that_measure_nothing_are_refused(material, tmp_path, texts, message):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(DataError, match=message):
        distill(material, tmp_path / "out", test_file=str(tmp_path / "few.jsonl"))
    assert not (tmp_path / "out").exists()


def test_other_models_and_modules_are_refused_by_name(material, tmp_path, monkeypatch):
    make_model("bert", "Model").save_pretrained(tmp_path / "bare")
    make_tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match=r"is no SentenceTransformer with a modules\.json"):
        SentenceModel(str(tmp_path / "bare"))
    with pytest.raises(UnsupportedModelError, match=r"embeddings \(a folder with modules\.json\)"):
        distill(material, tmp_path / "out", model_name_or_path=str(tmp_path / "bare"))
    make_model("bert").save_pretrained(tmp_path / "bare")
    changes = {"block_size": 8, "max_positions": None, "cosine_weight": 1.0}
    with pytest.raises(OptionError, match=r"cosine_weight=1\.0: it is of embedding models"):
        distill(material, tmp_path / "out", model_name_or_path=str(tmp_path / "bare"), **changes)
    name = save_sentence_model(tmp_path)
    listed = json.loads((Path(name) / "modules.json").read_text())
    (Path(name) / "modules.json").write_text(json.dumps(listed[:1]))
    with pytest.raises(UnsupportedModelError, match="has the modules Transformer; what is converted is"):
        SentenceModel(name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == "sentence_transformers" else find(x))
    with pytest.raises(UnsupportedModelError, match=r"pip install 'hf_linattn\[embeddings\]'"):
        SentenceModel(material["model_name_or_path"])
