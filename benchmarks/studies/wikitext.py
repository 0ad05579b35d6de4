"""WikiText's files: one line per paragraph, articles behind each other; here one JSON line per article.

    python -m benchmarks.studies.wikitext wikitext-2/ data/wikitext-2   # train.jsonl, validation.jsonl, test.jsonl

The folder is that of the archive of WikiText-2 (Merity et al. 2016, arXiv 1609.07843). Recipes read what comes out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hf_linattn.atomic_io import write_text
from hf_linattn.errors import DataError

FILES = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}


def read_articles(file: Path) -> list[list[str]]:
    """Return the lines of each article; a line ` = Title = ` begins one, ` = = Section = = ` does not.

    Raises:
        DataError: there is no such file.
    """
    if not file.is_file():
        raise DataError(f"{str(file)!r} does not exist; give the folder with {', '.join(FILES.values())}")
    articles: list[list[str]] = []
    for line in filter(None, map(str.strip, file.read_text(encoding="utf-8").splitlines())):
        if is_heading(line) and not line.startswith("= = "):
            articles.append([])
        if articles:
            articles[-1].append(line)
    return articles


def is_heading(line: str) -> bool:
    """Whether a line is the title of an article or of a section."""
    return line.startswith("= ") and line.endswith(" =")


def main(
    wikitext: Annotated[Path, typer.Argument(help="folder with the three files of WikiText-2")],
    output: Annotated[Path, typer.Argument(help="folder for the three JSON files")],
) -> None:
    """Write the articles of every split as JSON lines with the field `text`."""
    output.mkdir(parents=True, exist_ok=True)
    for split, name in FILES.items():
        texts = ("\n".join(article) + "\n" for article in read_articles(wikitext / name))
        write_text(output / f"{split}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    typer.run(main)
