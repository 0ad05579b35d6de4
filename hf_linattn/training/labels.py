"""Labels of a data set as the numbers of a model's classes, and what is said where they cannot be these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from datasets import ClassLabel, Dataset
from torch import Tensor

from hf_linattn.errors import DataError, did_you_mean


def numbers_of(config: Any) -> dict[str, int]:
    """Return the number of each class by its name; a config that was given `id2label` alone has no `label2id`."""
    return config.label2id or {name: number for number, name in (config.id2label or {}).items()}


def names_of(texts: Dataset) -> list[str]:
    """Return the names that a data set has for the numbers of its classes; none, where it has none."""
    column = texts.features["label"]
    feature = getattr(column, "feature", column)  # of a list of labels, or of the label
    return feature.names if isinstance(feature, ClassLabel) else []


def as_known(names: Sequence[str], known: Mapping[str, int]) -> list[str]:
    """Return the names of a data set, in the case that the model has them in; none, where the model knows none."""
    written = {name.casefold(): name for name in known} | {name: name for name in known}
    found = [written.get(name, written.get(name.casefold(), name)) for name in names]
    return found if {*found} & {*known} else []


def by_name(texts: Dataset, known: Mapping[str, int]) -> Sequence[Any]:
    """Return the labels of texts; as names, where the data set has names for its numbers and the model knows any.

    A data set may number its classes otherwise than the model does, and write their names in another case.
    """
    labels, names = texts["label"][:], as_known(names_of(texts), known)
    if not names:
        return labels

    def name(label: int | None) -> int | str | None:
        return names[label] if label is not None and label >= 0 else label

    single = isinstance(texts.features["label"], ClassLabel)
    return [name(label) for label in labels] if single else [row and [*map(name, row)] for row in labels]


def check_names(splits: Mapping[str, Dataset], known: Mapping[str, int]) -> None:
    """Raise `DataError` where a number means one class in a split and another in the next."""
    named = {split: names for split, texts in splits.items() if (names := names_of(texts))}
    for (one, first), (other, names) in combinations(named.items(), 2):
        differ = any(a != b for a, b in zip(first, names, strict=False))
        if differ and not (as_known(first, known) and as_known(names, known)):
            raise DataError(
                f"label: the numbers of the {one} split mean {', '.join(first)}, those of the {other} split"
                f" {', '.join(names)}, and the model has none of these names; number all splits alike with"
                " cast_column, or give the model a label2id with the names"
            )


def class_numbers(labels: Sequence[int | str], known: Mapping[str, int], count: int) -> list[int]:
    """Return labels as class numbers; `DataError` for one that the model does not have.

    >>> class_numbers(["good", "bad", 1], {"bad": 0, "good": 1}, 2)
    [1, 0, 1]
    """
    for label in {*labels}:
        named = None if isinstance(label, str) or label is None else known.get(str(int(label)))
        if named is not None and named != label:
            raise DataError(
                f"label {label!r} may be class {label!r} or the class with this name, number {named}; give names as"
                " strings, as rows of .jsonl can, or the model other names"
            )
    numbers = [known.get(label) if isinstance(label, str) else label for label in labels]
    for label, number in zip(labels, numbers, strict=True):
        if number is None or not 0 <= number < count:
            hint = did_you_mean(str(label), known)
            raise DataError(
                f"label {label!r} is none of the model's {count} classes{hint}; relabel the data, or leave rows"
                " without a class out"
            )
    return [*map(int, numbers)]  # type: ignore[arg-type]  # of booleans, too


def check_several(split: str, labels: Tensor, remedy: str) -> None:
    """Raise `DataError` where all texts have the same label: there is nothing to learn, and nothing to measure."""
    if len(labels) > 1 and bool((labels == labels[0]).all()):
        raise DataError(f"label: all {len(labels)} texts of the {split} split have {labels[0].tolist()}; {remedy}")
