"""Training rows that need what stands far back: plain text, passages that come again, records, generated recall.

    python -m benchmarks.studies.recall_text SmolLM2-135M-Instruct/ train.jsonl books.jsonl.gz web.jsonl.gz

A row has 2,046 tokens, so that with those around a text it fills a row of 2,048. Of the four kinds

- `plain` is a stretch of one text, or of several;
- `repeated` has a passage, another text, and the passage again, in three of five rows with its sentences reordered;
- `records` are names with values (UUIDs, numbers, words), some text, and the same records in another order;
- `recall` is a prompt of `hf-linattn eval --suite recall` with its answer, none that a test has, and plain text.

A recipe that trains on all tokens of such rows teaches the exact heads of a plan to carry what windows lose. Tests of
recall are then no longer of a kind that was never trained.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_linattn.atomic_io import write_text
from hf_linattn.training.recall_rows import recall_prompts

SHARES = {"plain": 0.45, "repeated": 0.28, "records": 0.13, "recall": 0.14}
FORMS = ("{k}: {v}", "The code of {k} is {v}.", "{k} = {v}", "Item {k} has the number {v}.", '"{k}": "{v}",')
BREAK = "\n\n"


class Writer:
    """Rows of `length` tokens from texts, one after the other from one random generator.

    Args:
        files: texts of each file. weights: how often a text is of each file.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, files: list[list[str]], weights: list[float], length: int, seed: int
    ):
        self.tokenizer, self.files, self.weights, self.length = tokenizer, files, weights, length
        self.random = random.Random(seed)
        for texts in files:
            self.random.shuffle(texts)
        self.words = sorted({*re.findall(r"\b[a-z]{4,9}\b", " ".join(files[0][:3])[:2_000_000])})

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that mark its ends."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def rows(self, count: int, prompts_seed: int) -> list[dict[str, str]]:
        """Return about `count` rows of all kinds, shuffled; prompts_seed: of the prompts of recall."""
        haystack, asked = self.files[0][:20], int(count * SHARES["recall"])
        room = self.length - 4  # some tokens are left for what stands behind
        prompts = iter(recall_prompts(self.tokenizer, room, asked, haystack, prompts_seed))

        def recall() -> list[int]:
            prompt = next(prompts)
            return [*prompt.prompt_ids, *prompt.answer_ids, *self.ids(BREAK), *self.plain(self.length)]

        makers: dict[str, Callable[[], list[int]]] = {
            "plain": lambda: self.plain(self.length + 8), "repeated": self.repeated, "records": self.records,
            "recall": recall,
        }  # fmt: skip
        found = []
        for kind, share in SHARES.items():
            made = 0
            while made < int(share * count):
                ids = makers[kind]()
                text = self.exact(ids)
                if text is None and kind == "recall":  # of these there are no others
                    text = self.tokenizer.decode(ids[: self.length])
                if text is not None:
                    found.append({"text": text, "kind": kind})
                    made += 1
        self.random.shuffle(found)
        return found

    def exact(self, ids: list[int]) -> str | None:
        """Return the text of `length` tokens, or None where reading what is written does not come to that."""
        text = self.tokenizer.decode(ids[: self.length])
        again = self.ids(text)
        for _ in range(4):
            if len(again) == self.length:
                return text
            text = self.tokenizer.decode(again[: self.length])
            again = self.ids(text)
        return None

    def pick(self) -> list[str]:
        """Return the texts of one file."""
        return self.random.choices(self.files, self.weights)[0]

    def plain(self, count: int, of: list[str] | None = None) -> list[int]:
        """Return `count` tokens from the texts of a file; from within long ones, begun at a sentence."""
        texts, found = self.pick() if of is None else of, list[int]()
        while len(found) < count:
            text = self.random.choice(texts)
            start = self.random.randrange(max(1, len(text) - 5 * count)) if len(text) > 6 * count else 0
            start = text.find(". ", start) + 2 if start else 0
            found += self.ids(text[start : start + 8 * count]) + self.ids(BREAK)
        return found[:count]

    def filled(self, text: str) -> list[int]:
        """Return the tokens of a text, and plain ones behind it up to a row."""
        ids = self.ids(text)
        return ids + self.plain(self.length) if len(ids) < self.length else ids

    def repeated(self) -> list[int]:
        """Return a passage, other text, and the passage again, or its sentences in another order."""
        passage = self.tokenizer.decode(self.plain(of=self.pick(), count=self.random.randrange(620, 960)))
        between = self.tokenizer.decode(self.plain(of=self.pick(), count=self.random.randrange(0, 250)))
        again = passage
        if self.random.random() >= 0.4:
            sentences = [x for x in re.split(r"(?<=[.!?])\s+|\n+", passage) if len(x) > 20]
            self.random.shuffle(sentences)
            again = "\n".join(sentences)
        return self.filled(BREAK.join((passage, between, again)))

    def value(self) -> str:
        """Return what a record holds."""
        kind = self.random.random()
        if kind < 0.5:
            return str(uuid.UUID(int=self.random.getrandbits(128), version=4))
        if kind < 0.7:
            return f"{self.random.getrandbits(48):x}"
        if kind < 0.85:
            return str(self.random.randrange(10**5, 10**8))
        return " ".join(self.random.sample(self.words, 3))

    def name(self) -> str:
        """Return the name of a record: one or two words."""
        return "-".join(self.random.sample(self.words, self.random.choice((1, 2))))

    def records(self) -> list[int]:
        """Return records, other text, and the records again in another order, at times in another form."""
        form = self.random.choice(FORMS)
        again = form if self.random.random() < 0.6 else self.random.choice(FORMS[:4])
        count, lines = self.random.randrange(26, 44), list[str]()
        pairs = [(self.name(), self.value()) for _ in range(count)]
        between = self.random.random() < 0.6
        for name, value in pairs:
            if between and self.random.random() < 0.5:
                other = self.plain(of=self.pick(), count=self.random.randrange(15, 60))
                lines.append(self.tokenizer.decode(other).replace("\n", " "))
            lines.append(form.format(k=name, v=value))
        gap = self.tokenizer.decode(self.plain(of=self.pick(), count=self.random.randrange(100, 400)))
        asked = pairs[:]
        self.random.shuffle(asked)
        answers = "\n".join(again.format(k=name, v=value) for name, value in asked)
        return self.filled(BREAK.join(("\n".join(lines), gap, answers)))


def read_texts(file: Path, without: list[str]) -> list[str]:
    """Return the texts of JSON lines, packed or not, but for those of some kinds."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [row["text"] for row in rows if row.get("kind") not in without]


def main(
    model: Annotated[str, typer.Argument(help="folder or Hub name of the model that is taught")],
    output: Annotated[Path, typer.Argument(help="the file that is written, JSON lines")],
    files: Annotated[list[Path], typer.Argument(help="texts, JSON lines with `text`; needles lie in the first")],
    weight: Annotated[list[float], typer.Option(help="how often a text is of each file; default: alike")] = [],  # noqa: B006
    without: Annotated[list[str], typer.Option(help="kinds of rows that are left out")] = [],  # noqa: B006
    rows: Annotated[int, typer.Option(help="how many are made, about")] = 520,
    length: Annotated[int, typer.Option(help="tokens of a row")] = 2046,
    seed: Annotated[int, typer.Option(help="of what is drawn, but for prompts of recall")] = 17,
    prompts_seed: Annotated[int, typer.Option(help="of the prompts of recall")] = 5,
) -> None:
    """Write rows that need what stands far back."""
    texts = [read_texts(file, without) for file in files]
    writer = Writer(AutoTokenizer.from_pretrained(model), texts, weight or [1.0] * len(files), length, seed)
    write_text(output, "".join(f"{json.dumps(row)}\n" for row in writer.rows(rows, prompts_seed)))


if __name__ == "__main__":
    typer.run(main)
