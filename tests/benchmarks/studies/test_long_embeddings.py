"""The study of embeddings of articles, at a tiny size: paragraphs look for the article that they are from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.studies import long_embeddings
from benchmarks.studies.long_embeddings import READINGS, Sizes, Study, left_out
from benchmarks.studies.wikitext import FILES
from benchmarks.tables.quality import long_embeddings_table
from tests.sentence_models import save_sentence_model

LONG = " ".join(["w7"] * long_embeddings.LEAST_WORDS)


def article(number: int, paragraphs: int) -> list[str]:
    return [f"= A{number} =", "w5 short", *(f"{LONG} w{number} w{20 + i}" for i in range(paragraphs))]


def test_every_fourth_paragraph_is_left_out_of_its_article_and_short_articles_are_none() -> None:
    asked, numbers, rest = left_out([article(0, 9), article(1, 7), article(2, 8)])
    assert asked == [f"{LONG} w{n} w{20 + i}" for n in (0, 2) for i in (3, 7)] and numbers == [0, 0, 1, 1]
    assert [text.splitlines()[0] for text in rest] == ["= A0 =", "= A2 ="]
    assert all(text.count(LONG) == kept and "short" in text for text, kept in zip(rest, (7, 6), strict=True))


def test_a_paragraph_is_right_where_its_own_article_is_the_nearest(tmp_path: Path) -> None:
    (tmp_path / FILES["test"]).write_text("\n".join(line for n in range(2) for line in article(n, 8)))
    study = Study("", tmp_path, tmp_path, tmp_path / "out.json", Sizes(), 0)
    near = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]])  # of the paragraphs, two of each article

    class Modules:
        @staticmethod
        def embed_texts(encoder: None, texts: list[str], **reading: object) -> torch.Tensor:
            return near if len(texts) == 4 else torch.eye(2)

    found = study.score(Modules(), None, 16, None)
    assert found == {"length": 16, "articles": 2, "right": "1010"}


@pytest.mark.tools
def test_articles_are_read_in_windows_and_by_a_conversion_that_is_taught(tmp_path: Path) -> None:
    model = save_sentence_model(tmp_path / "model")
    for split, file in FILES.items():
        lines = [" ".join(f"w{5 + (i * j + len(split)) % 80}" for j in range(30)) for i in range(1, 9)]
        (tmp_path / file).write_text("\n".join(f"= A{n} =\n" + "\n".join(lines[n:] + lines) for n in range(4)))
    output = tmp_path / "out" / "long_embeddings.json"
    study = Study(model, tmp_path, tmp_path / "work", output, Sizes(window=24, length=128, batch_size=2), 1024)
    study.run({})
    first = json.loads(output.read_text())["rows"]
    study.run({"hedgehog": replace(READINGS["hedgehog"], calibrated=256)})
    document = json.loads(output.read_text())
    rows = {row["row"]: row for row in document["rows"]}
    assert document["rows"][:2] == first and list(rows) == ["cut", "windows", "hedgehog"]
    assert [row["length"] for row in rows.values()] == [24, 128, 128] and rows["hedgehog"]["trained"] > 0
    assert all(len(row["right"]) == len(first[0]["right"]) > 4 for row in rows.values())
    table = long_embeddings_table(document).splitlines()
    share = rows["hedgehog"]["right"].count("1") / len(rows["hedgehog"]["right"])
    assert len(table) == 7 and f" {share:.3f} (" in table[-1] and "hedgehog" in table[-1]


def test_a_row_is_compared_with_windows_paragraph_by_paragraph() -> None:
    said = {"length": 2048, "articles": 3}
    rows = [
        {"row": "windows", **said, "right": "1100"},
        {"row": "linear", "mechanism": "linear", "options": {}, "trained": 4000, **said, "right": "1110"},
    ]
    *_, windows, linear = long_embeddings_table({"model": "mini", "rows": rows}).splitlines()
    assert windows.startswith("| windows | 2,048 | 0 | 0.500 (") and windows.endswith("|  |")
    assert linear.startswith("| `linear` | 2,048 | 4,000 | 0.750 (") and "| +0.250 (" in linear
