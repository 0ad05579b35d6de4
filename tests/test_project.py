"""The project's own rules: sizes, documents that stay true, versions that agree."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from doctest import DocTestParser
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints, is_typeddict

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import hf_linattn
from benchmarks import render, result_files
from benchmarks.result_files import HEADS_FILE, RESULTS, USABLE_FILE, ZERO_SHOT_FILE
from docs import generate
from hf_linattn import errors, evaluation, patch_model, unpatch_model
from hf_linattn.hub import HfLinattnConfig
from hf_linattn.recipe_files import recipe_names
from hf_linattn.testing import checks_of
from hf_linattn.training.data import load_text_splits
from tests.models import make_model
from tests.mutants import MUTANTS
from tests.readme_commands import NAME

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("hf_linattn", "recipes", "benchmarks", "docs", "examples", "tests")
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
PAGES = [
    path
    for folder in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md", "recipes/*.md")
    for path in ROOT.glob(folder)
]
TEXT = [*CODE, *PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci" / "run"]
# in the order of a reader
PAGES_THAT_RUN = ("README.md", "docs/choose.md", "docs/memory.md", "docs/speed.md", "docs/gpu.md")
REFERENCE = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.M)
OF_A_READER = {"model", "original", "tokenizer", "texts", "documents"}  # what examples of the reference take as given
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 8
LONGER = {"hf_linattn/ops": 600}  # folders whose files may be: a backend is one file
FEW_PARAMETERS = ("hf_linattn/training",)  # folders whose functions keep to MAX_PARAMETERS


def tokens(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long)


# ways to the messages that docs/errors.md quotes, on a patched and on an untouched model
PATCHED_MISTAKES: dict[str, Callable[[Any], Any]] = {
    "twice": lambda model: patch_model(model, "linear"),
    "attentions": lambda model: model(tokens(4), output_attentions=True),
    "4-D mask": lambda model: model(tokens(4), attention_mask=torch.ones(1, 1, 4, 4)),
    "too long": lambda model: model(tokens(100)),
    "rows": lambda model: model(tokens(4).expand(4, 4), past_key_values=model(tokens(4)).past_key_values),
    "crop": lambda model: model(tokens(4), use_cache=True).past_key_values.crop(2),
}
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "name": lambda model: patch_model(model, "perfomer"),
    "option": lambda model: patch_model(model, "performer", num_feature=3),
    "value": lambda model: patch_model(model, "performer", num_features=0),
    "layer": lambda model: patch_model(model, "performer", layers=[7]),
    "chunks": lambda model: patch_model(make_model("opt"), "performer", chunk_feed_forward=512),
    "not patched": unpatch_model,
    "checkpoint": lambda model: HfLinattnConfig.from_dict({}),
    "data": lambda model: load_text_splits(train_file="missing.txt"),
}

EXAMPLE_INVARIANTS = ["1", "2", "4", "5", "9"]  # 1 and 4 are about order: causal only


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", read(name), flags=re.M | re.S)


@dataclass
class Facts:
    """What the rules say of a file: its lines, its functions, the lines that assert."""

    lines: int
    functions: list[ast.FunctionDef]
    asserts: list[int]


@pytest.fixture(scope="module")
def facts() -> dict[Path, Facts]:
    """Of every file, read once."""
    found = {}
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text))]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        asserts = [node.lineno for node in nodes if isinstance(node, ast.Assert)]
        found[path] = Facts(len(text.splitlines()), functions, asserts)
    return found


def test_files_and_functions_stay_small(facts: dict[Path, Facts]) -> None:
    assert len(facts) > 400
    assert {relative(path): file.lines for path, file in facts.items() if file.lines > most_lines(path)} == {}
    functions = [(relative(path), f) for path, file in facts.items() for f in file.functions]
    assert [(path, f.name) for path, f in functions if f.end_lineno - f.lineno >= MAX_FUNCTION_LINES] == []


def most_lines(path: Path) -> int:
    return max([MAX_LINES, *(most for folder, most in LONGER.items() if path.is_relative_to(ROOT / folder))])


@pytest.mark.parametrize("folder", FEW_PARAMETERS)
def test_functions_take_few_parameters(folder: str, facts: dict[Path, Facts]) -> None:
    functions = [f for path, file in facts.items() if path.is_relative_to(ROOT / folder) for f in file.functions]
    assert functions and [f.name for f in functions if len(parameters(f)) > MAX_PARAMETERS] == []


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters, but for that of the object or class a method belongs to."""
    found = function.args
    nodes = [*found.posonlyargs, *found.args, found.vararg, *found.kwonlyargs, found.kwarg]
    return [node.arg for node in nodes if node is not None and node.arg not in ("self", "cls")]


def test_library_code_raises_and_never_asserts(facts: dict[Path, Facts]) -> None:
    library = {path: file for path, file in facts.items() if path.is_relative_to(ROOT / "hf_linattn")}
    assert library and {relative(path): file.asserts for path, file in library.items() if file.asserts} == {}


def test_every_make_command_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        commands = re.findall(r"`make ([a-z -]+)`|^    make ([a-z -]+?)(?:  |$)", text, flags=re.M)
        named = {target for command in commands for target in "".join(command).split()}
        assert named <= targets, page


def test_what_make_measures_it_writes_into_the_pages() -> None:
    targets = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", read("Makefile"), flags=re.M)
    studies = {name: lines for name, lines in targets if re.search(r"benchmarks\.(studies|measure\.peers)", lines)}
    unwritten = {name for name, lines in studies.items() if not lines.endswith("\t$(TABLES)\n")}
    in_no_page, by_themselves = {"recall"}, {"start", "depth", "long-inputs"}
    assert unwritten == in_no_page | by_themselves


def test_every_recipe_in_the_documents_exists() -> None:
    known = {*recipe_names(), "NAME"}
    for page in (*PAGES, *(ROOT / "notebooks").glob("*.ipynb")):
        assert {*re.findall(r"recipe:([\w/-]+)", page.read_text(encoding="utf-8"))} <= known, page


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{relative(page)} -> {target}"


@pytest.mark.parametrize("name", hf_linattn.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(hf_linattn, name))
    assert f"`{name}" in read("docs/index.md")
    home = getattr(hf_linattn, name).__module__  # errors are in the reference as one module
    assert (home if home == errors.__name__ else f"{home}.{name}") in REFERENCE


@pytest.mark.parametrize("name", evaluation.__all__)
def test_names_that_measure_are_in_the_reference(name: str) -> None:
    assert f"{getattr(evaluation, name).__module__}.{name}" in REFERENCE


def sections_of(docstring: str) -> dict[str, str]:
    """Return title -> text of the sections of a docstring, as the site reads them."""
    return dict(re.findall(r"^(\w+):\n((?: {4}.*\n|\n)+)", docstring + "\n", flags=re.M))


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_has_a_line_for_each_parameter_and_error(name: str) -> None:
    """What shares a line with another one is missing on the site, and in what an editor shows."""
    module, _, own = name.rpartition(".")
    found = getattr(importlib.import_module(module), own)
    docstring = inspect.getdoc(found) or ""
    sections = sections_of(docstring)
    described = re.findall(r"^ {4}\*{0,2}(\w+): ", "".join(sections.get(x, "") for x in ("Args", "Attributes")), re.M)
    given = get_type_hints(found) if is_typeddict(found) else signature(found)
    assert [x for x in given if x not in described] == []
    raised = sections.get("Raises", "")
    assert re.findall(r"(\w+Error)[:,]", raised) == re.findall(r"^ {4}(\w+Error): ", raised, re.M)
    assert docstring.count(">>> ") == sections.get("Examples", "").count(">>> ")  # elsewhere it is no code on the site
    assert "Examples" in sections or not inspect.isfunction(found)
    assert unbound("".join(e.source for e in DocTestParser().get_examples(docstring))) <= OF_A_READER


def unbound(code: str) -> set[str]:
    """Return the names that an example uses and neither imports nor makes, so that one cannot copy it."""
    nodes = [*ast.walk(ast.parse(code))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, ast.alias | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return used - made - set(dir(builtins))


def signature(found: Any) -> list[str]:
    """Return the parameters that a caller gives; a module has none, nor has an error of the library."""
    return [] if found is errors else [*inspect.signature(found).parameters]


def test_every_error_has_its_place_in_the_documents() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    defined = {name for name, kind in classes if kind.__module__ == errors.__name__}
    assert set(re.findall(r"^## (\w+)$", read("docs/errors.md"), flags=re.M)) == defined - {"HfLinattnError"}


def test_the_tests_and_errors_that_the_limits_name_exist() -> None:
    page = read("docs/limits.md")
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", page)
    assert named
    for path, function in named:
        assert re.search(rf"^def {function}\(", read(path), flags=re.M), f"{path}::{function}"
    defined = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    assert set(re.findall(r"`(\w+Error)`", page)) <= defined


@pytest.mark.parametrize("mistake", [*MISTAKES, *PATCHED_MISTAKES])
def test_quoted_messages_are_the_ones_raised(mistake: str) -> None:
    model = make_model("gpt2")
    with pytest.raises(errors.HfLinattnError) as caught:
        if mistake in MISTAKES:
            MISTAKES[mistake](model)
        else:
            PATCHED_MISTAKES[mistake](patch_model(model, "linear"))
    section = read("docs/errors.md").split(f"## {caught.type.__name__}\n")[1].split("\n## ")[0]
    message, known, _ = str(caught.value).partition(" Known: ")  # the page need not list every name there is
    assert f"    {message}{known}" in section


@pytest.mark.parametrize("name", generate.pages())
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert read(f"docs/{name}") == generate.pages()[name](), "run `make docs`"


def test_tables_are_what_the_results_say(tmp_path: Path) -> None:
    results, docs = tmp_path / "benchmarks" / "results", tmp_path / "docs"
    if RESULTS.exists():
        shutil.copytree(RESULTS, results)
    docs.mkdir()
    for name in render.SECTIONS:
        (docs / name).write_text(read(f"docs/{name}"), encoding="utf-8")
    render.write_tables(tmp_path)
    for name in render.SECTIONS:
        assert (docs / name).read_text(encoding="utf-8") == read(f"docs/{name}"), "run `make tables`"


def test_the_example_of_contributing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it registers is forgotten after the test."""
    example = ModuleType("relu_power")
    monkeypatch.setitem(sys.modules, "relu_power", example)
    exec(compile(code_blocks("CONTRIBUTING.md", "python")[0], "CONTRIBUTING.md", "exec"), vars(example))
    checks = [x for x in checks_of("relu_power", ["llama"], power=3) if x.invariant.split()[0] in EXAMPLE_INVARIANTS]
    assert len(checks) == 2 * len(EXAMPLE_INVARIANTS) - 2
    for check in checks:
        check.run()


def test_python_of_the_pages_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their blocks, one after the other, on a bundled model under the name of the README's."""
    namespace: dict[str, object] = {}
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(ROOT / "recipes" / "pretrained" / "llama")
    (tmp_path / "book.txt").write_text(read("docs/how-it-works.md"))
    monkeypatch.chdir(tmp_path)
    for page in PAGES_THAT_RUN:
        for block in code_blocks(page, "python"):
            exec(compile(block, page, "exec"), namespace)


def test_the_readme_fits_a_screen_or_two() -> None:
    assert len(read("README.md").splitlines()) <= 150


def test_numbers_in_sentences_are_those_that_were_measured() -> None:
    rows, usable = (result_files.read(RESULTS / name)["rows"] for name in (ZERO_SHOT_FILE, USABLE_FILE))
    performer = next(row for row in rows if row["mechanism"] == "performer" and not row["options"])["perplexity"]
    llama = result_files.board_reports()["llama-performer"]["perplexity"]
    wikitext = {row["mechanism"]: row["perplexity"] for row in usable if row["options"].get("window_size", 256) == 256}
    heads = result_files.read(RESULTS / HEADS_FILE)["runs"]
    fifth, tenth = heads[0]["whole_model"][0]["bytes"], heads[0]["token"]["share"]
    assert round(fifth["plan"] / fifth["softmax"], 1) == 0.2 and round(tenth, 1) == 0.1
    sentences = {
        f"{performer['llama']:.1f} instead of {llama['original']:.1f} on the small Llama": "README.md",
        f"{llama['recovered']:.1f}, where softmax trained on the same text has {llama['control']:.1f}": "README.md",
        "a fifth of the cache at 2,000 tokens, a tenth at 32,000": "README.md",
        "a fifth at 2,000 tokens, a tenth at 32,000": "docs/choose.md",
        f"{wikitext['streaming'] / wikitext['original']:.2f} times on two rows of WikiText-2": "docs/choose.md",
    }
    assert not [said for said, page in sentences.items() if said not in " ".join(read(page).split())]


def test_tables_of_the_unpacked_model_say_so() -> None:
    """The SmolLM2 of `make smollm2` has 4-bit weights, which are not those of the Hub."""
    section = re.compile(r"<!-- (\S+):begin -->\n(.*?)<!-- \1:end -->", re.DOTALL)
    found = {
        (relative(page), name): text
        for page in PAGES
        for name, text in section.findall(page.read_text(encoding="utf-8"))
        if "SmolLM2" in text
    }
    assert len(found) == 8 and not [place for place, text in found.items() if "4-bit" not in text]


def test_versions_agree() -> None:
    assert f"version: {hf_linattn.__version__}" in read("CITATION.cff")
    assert hf_linattn.__version__ in read("CHANGELOG.md")
    assert Version(hf_linattn.__version__)


def test_tested_versions_satisfy_the_requirements() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    pinned = dict(line.split("==") for line in read("constraints.txt").splitlines() if "==" in line)
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(line)
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pinned[requirement.name]), line


def test_nothing_is_left_open_and_nothing_names_one_machine() -> None:
    banned = ["N" + "/A", "TO" + "DO", "FIX" + "ME", "index" + "-url", "/ho" + "me/", "/ro" + "ot/"]
    texts = {relative(path): path.read_text(encoding="utf-8") for path in TEXT}
    assert [(path, word) for path, text in texts.items() for word in banned if word in text] == []


def test_no_test_is_skipped() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        calls = re.findall(r"pytest\.(?:mark\.)?(skip\w*|xfail|importorskip)\b", path.read_text(encoding="utf-8"))
        assert path == Path(__file__) or not calls, path


def test_the_lines_that_mutants_change_stand_in_their_files():
    lost = [mutant.name for mutant in MUTANTS if mutant.old not in (ROOT / mutant.file).read_text(encoding="utf-8")]
    assert not lost
