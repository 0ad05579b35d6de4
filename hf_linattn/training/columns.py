"""Which columns of a file or a data set hold texts and labels, and what is said where they are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from datasets import Dataset

from hf_linattn.errors import DataError, did_you_mean

STRINGS = ("string", "large_string")
CLASSES = (*STRINGS, "int", "uint", "bool")
NUMBERS = ("float", "double", "int", "uint")
LABELS: dict[tuple[str, ...], str] = {  # by the dtypes of labels: what the column holds
    CLASSES: "integers, booleans or strings",
    ("a list",): "lists of labels, as problem_type='multi_label_classification' has them; for one class per text set"
        " 'single_label_classification' in the model's config",
    NUMBERS: "numbers",
}
UNNAMED = "__index_level_"  # what pandas calls the first fields of rows with more of them than the header
SEPARATORS = {";": "semicolons", "\t": "tabs"}


def check_columns(
    place: str, dataset: Dataset, named: Mapping[str, str], conversations: bool, label_kinds: Sequence[str] = CLASSES
) -> None:
    """Raise `DataError` unless rows have the columns that options name, each with what it is to hold.

    Args:
        place: what the rows are called in messages, such as `the train split`.
        named: option -> column. conversations: whether texts are these. label_kinds: what labels may be.
    """
    _check_apart(named)
    _check_there(place, dataset, named, conversations)
    kinds = tuple(label_kinds)
    texts = (("a list",), "conversations, lists of turns") if conversations else (STRINGS, "strings")
    expected = {"text_column": texts, "text_pair_column": (STRINGS, "strings"), "label_column": (kinds, LABELS[kinds])}
    for option, column in named.items():
        _check_kind(place, dataset, (option, column), *expected[option])


def _check_apart(named: Mapping[str, str]) -> None:
    """Raise `DataError` if two options name one column."""
    first: dict[str, str] = {}
    for option, column in named.items():
        if column in first:
            raise DataError(f"{first[column]} and {option} are both {column!r}; name another column in one of them")
        first[column] = option


def _check_there(place: str, dataset: Dataset, named: Mapping[str, str], conversations: bool) -> None:
    """Raise `DataError` unless the rows have all columns that options name; named: option -> column."""
    missing = {option: column for option, column in named.items() if column not in dataset.column_names}
    if not missing:
        return
    given = " and ".join(f"{option}={column!r}" for option, column in missing.items())
    what = "is not a column" if len(missing) == 1 else "are no columns"
    shape = None if conversations else misread(dataset)
    remedy = shape or "give " + " ".join(f"--{option} NAME" for option in missing)
    known = sorted(dataset.column_names)
    hint = f". Known: {', '.join(known)}"
    if len(missing) == 1:
        hint = did_you_mean(next(iter(missing.values())), known)
    raise DataError(f"{given} {what} of {place}; {remedy}{hint}")


def check_header(place: str, dataset: Dataset) -> None:
    """Raise `DataError` where rows of a table have more fields than its header: the first ones are then no column."""
    header = [name for name in dataset.column_names if not name.startswith(UNNAMED)]
    if len(header) < len(dataset.column_names):
        remedy = _separated(header) or "put quotation marks around texts with commas in them"
        raise DataError(f"{place} has rows with more fields than its header, {', '.join(header)}; {remedy}")


def misread(dataset: Dataset) -> str | None:
    """Return what to do with a file whose rows were not found, as its only column or row shows; None: they were."""
    names = dataset.column_names
    if remedy := _separated(names):
        return remedy
    inside = [name for name in names if isinstance(getattr(dataset.features[name], "feature", None), Mapping)]
    if len(dataset) == 1 and inside:
        return f"its rows stand inside {inside[0]!r}; put them at the top of the file, in a list or one a line"
    return None


def _separated(names: Sequence[str]) -> str | None:
    """Return what to do with a table that has no commas between its columns, as the only name shows; else None."""
    found = next((what for mark, what in SEPARATORS.items() if len(names) == 1 and mark in names[0]), None)
    return found and f"its columns are separated by {found}; save the file with commas between them"


def _check_kind(
    place: str, dataset: Dataset, option: tuple[str, str], kinds: tuple[str, ...], wanted: str
) -> None:
    """Raise `DataError` unless a column holds values of these kinds; option: its name and value."""
    name, column = option
    kind = getattr(dataset.features[column], "dtype", "a list")
    if kind.startswith(kinds):
        return
    values = dataset[column][:] if kind.startswith("float") and "int" in kinds else []
    given = [value for value in values if value is not None]
    if values and not given:
        raise DataError(f"{name}={column!r} of {place} has no value in any row; name a column of {wanted}")
    if len(given) < len(values) and all(value.is_integer() for value in given):
        raise DataError(
            f"{name}={column!r} of {place} has no value in {len(values) - len(given)} of {len(values)} rows, so that"
            f" the integers of the others were read as {kind}; leave these rows out, or give them a class"
        )
    raise DataError(f"{name}={column!r} of {place} holds {kind}; name a column of {wanted}")
