"""English text that every Python carries: the documentation of its own standard library.

Language-model recipes need text, and this one needs no network: the docstrings of the standard library's modules,
one document per module in the manner of ``help(module)``, and the language reference's topics behind ``help("if")``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset, DatasetDict

SPLITS = {"train": 0.90, "validation": 0.05, "test": 0.05}
TOPICS_PACKAGE = "pydoc_data"
_SPLIT_SEED = 9  # packages differ in size by three orders of magnitude; this one gives even, varied held-out splits
_TEST_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def standard_library_corpus(include_source: bool = False) -> DatasetDict:
    """Return the standard library's documentation as ``DatasetDict(train, validation, test)``.

    Columns: ``text`` (one whole document) and ``module`` (its dotted name; for a topic, ``pydoc_data.topics:<name>``).
    A module's document lists its classes, functions and methods, each as a signature line and its docstring. The
    sources are read with ``ast``; no module is imported.

    The split is by top-level package (see :func:`split_of`), so that a package's submodules stay on one side. All
    topics train: they quote each other at length, and a held-out topic would not be unseen text.

    Args:
        include_source: add, for every module, its source code as one more document of the same split.

    The text depends on the Python version (and on modules its distributor left out), not on installed packages.

    >>> corpus = standard_library_corpus()
    >>> sorted(corpus)
    ['test', 'train', 'validation']
    >>> corpus["train"].column_names
    ['text', 'module']
    """
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for name, documentation, source in _documents():
        texts = [documentation] + [source] * include_source
        rows[split_of(name)].extend({"text": text, "module": name} for text in texts if text.strip())
    rows["train"].extend(
        {"text": text.strip() + "\n", "module": f"{TOPICS_PACKAGE}.topics:{name}"}
        for name, text in sorted(topics.items())
    )
    return DatasetDict({split: Dataset.from_list(documents) for split, documents in rows.items()})


@functools.cache  # five seconds of parsing
def _documents() -> list[tuple[str, str, str]]:
    """Return name, documentation and source of every module."""
    sources = [(name, path.read_text(encoding="utf-8")) for name, path in _module_files()]
    return [(name, module_documentation(name, source), source) for name, source in sources]


def split_of(module: str) -> str:
    """Return the split of a module: a stable hash of its top-level package, compared with the shares in ``SPLITS``.

    An accelerator's pure-Python twin (``_pydecimal``, ``_pyio``, ``_strptime``) goes where its public name goes.

    >>> split_of("json.decoder") == split_of("json")
    True
    """
    package = module.partition(".")[0].removeprefix("_py").lstrip("_")
    digest = hashlib.sha256(f"{_SPLIT_SEED}:{package}".encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    for split, share in SPLITS.items():
        if position < share:
            return split
        position -= share
    return split


def module_documentation(name: str, source: str) -> str:
    """Return the docstrings of a module's source as one text, or ``""`` where it documents nothing.

    >>> print(module_documentation("shapes", 'def area(r):\\n    "Area of a disc of radius r."'))
    Help on module shapes:
    <BLANKLINE>
    area(r)
        Area of a disc of radius r.
    <BLANKLINE>
    """
    tree = ast.parse(source)
    blocks = list(_documented(tree.body, ""))
    docstring = ast.get_docstring(tree)
    if docstring:
        blocks.insert(0, docstring)
    return "\n\n".join([f"Help on module {name}:", *blocks]) + "\n" if blocks else ""


def _documented(body: list[ast.stmt], indent: str) -> Iterator[str]:
    """Yield signature and docstring of every documented class and function, methods indented below their class."""
    for node in body:
        if not isinstance(node, _DEFINITIONS):
            continue
        docstring = ast.get_docstring(node)
        inner = list(_documented(node.body, indent + "    ")) if isinstance(node, ast.ClassDef) else []
        if docstring:
            lines = [_signature(node), *("    " + line if line.strip() else "" for line in docstring.splitlines())]
            yield "\n".join((indent + line).rstrip() for line in lines)
        elif inner:
            yield indent + _signature(node)
        yield from inner


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """``class Name(bases)`` or ``name(arguments)``."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _module_files() -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, source file) of every standard-library module but the tests, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for package in sorted(sys.stdlib_module_names - {"test", TOPICS_PACKAGE}):
        single = root / f"{package}.py"
        files = [single] if single.is_file() else sorted((root / package).rglob("*.py"))
        for path in files:
            parts = path.relative_to(root).with_suffix("").parts
            if not _TEST_FOLDERS.intersection(parts):
                yield ".".join(parts).removesuffix(".__init__"), path
