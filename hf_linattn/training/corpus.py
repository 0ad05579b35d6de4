"""English text that every Python carries: the documentation of its own standard library.

Language-model recipes need text, and this one needs no network: the docstrings of the standard library's modules,
one document per module in the manner of `help(module)`, and the language reference's topics behind `help("if")`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from datasets import Dataset, DatasetDict, NamedSplit

from hf_linattn.errors import DataError

SPLITS = {"train": 0.90, "validation": 0.05, "test": 0.05}
TOPICS_PACKAGE = "pydoc_data"
# what the library needs to train and to draw, or what these need: installed wherever a recipe runs
DOCUMENTED_PACKAGES = (
    "accelerate", "datasets", "huggingface_hub", "matplotlib", "networkx", "numpy", "pandas", "peft", "sympy", "torch",
)  # fmt: skip
_SPLIT_SEED = 9  # packages differ in size by three orders of magnitude; this one gives even, varied held-out splits
_TEST_FOLDERS = {"test", "tests", "testing", "_vendor", "idle_test", "site-packages", "__pycache__"}
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def standard_library_corpus(include_source: bool = False) -> DatasetDict:
    """Return the standard library's documentation as `DatasetDict(train, validation, test)`.

    Columns: `text` (one whole document) and `module` (its dotted name; for a topic, `pydoc_data.topics:<name>`).
    A module's document lists its classes, functions and methods, each as a signature line and its docstring. The
    sources are read with `ast`; no module is imported.

    The split is by top-level package (see `split_of`), so that a package's submodules stay on one side. All
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
    return DatasetDict({split: Dataset.from_list(rows[split], split=NamedSplit(split)) for split in SPLITS})


def installed_documentation(packages: Sequence[str] = DOCUMENTED_PACKAGES) -> Dataset:
    """Return the documentation of installed packages, one document per module, as the standard library's is written.

    Columns: `text` and `module`. Tests and vendored copies of other packages are left out. The text depends on the
    versions installed. The packages of the default hold 25 million characters; reading them takes about a minute.

    Raises:
        DataError: a package is not installed, or is no package of Python files with documentation.

    >>> installed_documentation(["hf_linattn"]).column_names
    ['text', 'module']
    """
    rows: list[dict[str, str]] = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        roots = [Path(place) for place in (spec and spec.submodule_search_locations) or []]
        files = [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]
        found = [(_dotted(root.parent, path), path) for root, path in files if not _is_test(path.relative_to(root))]
        texts = [(name, module_documentation(name, path.read_text(encoding="utf-8"))) for name, path in found]
        documented = [{"text": text, "module": name} for name, text in texts if text]
        if not documented:
            raise DataError(f"packages: {package!r} is not installed or documents nothing; install it or leave it out")
        rows += documented
    return Dataset.from_list(rows)


@functools.cache  # five seconds of parsing
def _documents() -> list[tuple[str, str, str]]:
    """Return name, documentation and source of every module."""
    sources = [(name, path.read_text(encoding="utf-8")) for name, path in _module_files()]
    return [(name, module_documentation(name, source), source) for name, source in sources]


def split_of(module: str) -> str:
    """Return the split of a module: a stable hash of its top-level package, compared with the shares in `SPLITS`.

    An accelerator's pure-Python twin (`_pydecimal`, `_pyio`, `_strptime`) goes where its public name goes.

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
    """Return the docstrings of a module's source as one text, or `""` where it documents nothing.

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
    """`class Name(bases)` or `name(arguments)`."""
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
            if not _is_test(path.relative_to(root)):
                yield _dotted(root, path), path


def _is_test(path: Path) -> bool:
    """Whether a file below its root is a test, or a copy of somebody else's."""
    return bool(_TEST_FOLDERS.intersection(path.with_suffix("").parts))


def _dotted(root: Path, path: Path) -> str:
    """Return the name by which a file below the root is imported."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
