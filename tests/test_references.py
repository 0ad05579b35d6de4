"""Files that the code speaks of, and names in backticks, exist: a reader can follow every reference."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_project import CODE, ROOT, relative
from tests.test_words import LIBRARY, C

NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)[`(]")  # `module.name` or `Class.name`
FILE = re.compile(r"(?<![\w./\"'])(?:\w+/)*\w+\.(?:c|h|py)\b(?!\.\w|\[)")
PLACE = re.compile(rf"`?(\w+)`? (?:of|in) `?({FILE.pattern})")  # a name of a file
C_COMMENT = re.compile(r"/\*.*?\*/", re.S)
# what is not the project's: other libraries and their objects, attributes of a model, files of checkpoints
FOREIGN = {"torch", "rich", "evaluate", "config", "model", "query_map", "key_map"}
FOREIGN_FILES = {"transformer.h", "configuration_hf_linattn.py"}
SUFFIXES = {"c", "h", "py", "md", "json", "safetensors"}
ENGLISH = {"as", "names", "pass"}  # before a file, and no name of it


def words(node: ast.AST) -> Iterator[str]:
    """Yield the names that are defined, imported or used inside a node."""
    for part in ast.walk(node):
        match part:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (other or name).split(".")


class Names:
    """The names in each module, package and class of the library, and in each file."""

    def __init__(self) -> None:
        self.of_file: dict[Path, set[str]] = {}
        self.of_owner: dict[str, set[str]] = defaultdict(set)
        classes = set()
        for path in LIBRARY:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            self.of_file[path] = {*words(tree)}
            self.of_owner[path.parent.name if path.stem == "__init__" else path.stem] |= self.of_file[path]
            for inner, outer in zip([path.with_suffix(""), *path.parents], path.parents, strict=False):
                self.of_owner[outer.name].add(inner.name)
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    classes.add(node.name)
                    self.of_owner[node.name] |= {*words(node)}
        for _ in range(4):  # what is inherited, from base to base
            for name in classes:
                inherited = [self.of_owner[base] for base in self.of_owner[name] & classes - {name}]
                self.of_owner[name] |= set().union(*inherited)

    def exists(self, path: Path, dotted: str) -> bool:
        """Whether a file may speak of `owner.name`: an owner of the library has it, or it is a variable's."""
        first, owner, name = dotted.split(".")[0], *dotted.split(".")[-2:]
        if owner in self.of_owner and first not in FOREIGN:
            return name in self.of_owner[owner]
        return first in FOREIGN or (owner in self.of_file[path] and name.islower())


def test_names_in_backticks_exist():
    names = Names()
    found = [
        (relative(path), dotted)
        for path in LIBRARY
        for dotted in NAME.findall(path.read_text(encoding="utf-8"))
        if dotted.split(".")[-1] not in SUFFIXES and not names.exists(path, dotted)
    ]
    assert found == []


def test_files_that_the_code_names_exist():
    files = {f"/{relative(x)}": x.read_text(encoding="utf-8") for x in [*CODE, *C, *ROOT.glob("*.py")]}
    found = []
    for path in [*LIBRARY, *C]:
        text = path.read_text(encoding="utf-8")
        text = " ".join(C_COMMENT.findall(text)) if path in C else text
        texts = {file: [files[x] for x in files if x.endswith(f"/{file}")] for file in FILE.findall(text)}
        found += [(relative(path), file) for file in texts.keys() - FOREIGN_FILES if not texts[file]]
        for name, file in PLACE.findall(text):
            if name not in ENGLISH and not any(re.search(rf"\b{name}\b", inside) for inside in texts[file]):
                found.append((relative(path), f"{name} of {file}"))
    assert found == []
