"""No file of the library imports itself through others."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_linattn"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Graph = Mapping[str, set[str]]


def find_modules(root: Path) -> dict[str, Path]:
    """Return the name of each module in the package below `root` -> its file."""
    files = (root / PACKAGE).rglob("*.py")
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported(tree: ast.AST, package: str, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each name that a file of `package` imports, dotted, and whether that happens inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", inside) for alias in node.names)
        else:
            yield from imported(node, package, inside or isinstance(node, FUNCTIONS))


def import_graph(root: Path, with_functions: bool) -> Graph:
    """Return module -> the modules of the package that it imports: at its top level, or inside functions, too."""
    modules = find_modules(root)
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [x for x, inside in imported(tree, package) if with_functions or not inside]
        found = {x if x in modules else x.rpartition(".")[0] for x in names}  # a module, or a name in one
        graph[name] = found & set(modules) - {name}
    return graph


def find_circles(graph: Graph) -> list[list[str]]:
    """Return a circle of each module that is in one: itself, what it imports, ..., itself, by the shortest way."""
    return [circle for start in graph if (circle := shortest_circle(graph, start))]


def shortest_circle(graph: Graph, start: str) -> list[str] | None:
    ways, seen = [[start]], {start}
    for way in ways:  # which grows
        for name in sorted(graph[way[-1]]):
            if name == start:
                return [*way, start]
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return None


def show(circles: list[list[str]]) -> str:
    return "\n".join(" -> ".join(circle) for circle in circles)


def test_no_module_imports_itself_through_others() -> None:
    circles = find_circles(import_graph(ROOT, with_functions=False))
    assert not circles, f"circles of imports:\n{show(circles)}"


def test_imports_inside_functions_close_no_circle_either() -> None:
    circles = find_circles(import_graph(ROOT, with_functions=True))
    assert not circles, f"circles through an import inside a function:\n{show(circles)}"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("from .b import x", False),
        ("from . import b", False),
        ("from hf_linattn.inner.b import x", False),
        ("import hf_linattn.inner.b", False),
        ("if True:\n    from ..inner import b", False),
        ("class A:\n    from .b import x", False),
        ("def f():\n    from .b import x", True),
        ("class A:\n    def f(self):\n        if self:\n            from ..inner.b import x", True),
    ],
)
def test_circles_are_found_however_they_are_written(text: str, inside: bool, tmp_path: Path) -> None:
    inner = tmp_path / PACKAGE / "inner"
    inner.mkdir(parents=True)
    files = {"__init__": "", "a": text, "b": "from .c import y", "c": "from .a import z"}
    for name, content in files.items():
        (inner / f"{name}.py").write_text(content, encoding="utf-8")
    circle = [f"{PACKAGE}.inner.{name}" for name in ("a", "b", "c", "a")]
    assert (circle in find_circles(import_graph(tmp_path, with_functions=True))) is True
    assert (circle in find_circles(import_graph(tmp_path, with_functions=False))) is not inside
