"""Words that the project has given up for those of the field: docs/glossary.md has the ones in use."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_linattn.config import FORMER_OPTIONS
from hf_linattn.registry import FORMER_MECHANISMS
from tests.test_project import CODE, PAGES, ROOT, relative

OPS = ROOT / "hf_linattn" / "ops"
LIBRARY = [path for path in CODE if path.is_relative_to(ROOT / "hf_linattn")]
C = [*(ROOT / "hf_linattn" / "csrc").rglob("*.[ch]")]
# names in Python -> what to write; "" where nothing is needed any more
NAMES = {
    "Objective": "LossModule", "Observer": "Interceptor", "Reader": "ScoreBlocks", "SinkHolder": "",
    "authority": "schedule", "cache_layer": "AttentionCall", "count_call": "record_call", "further": "offset",
    "hold_instead": "", "keeps_state": "call.keep_state", "lend": "export_stages", "lent_control": "shared_control",
    "observed": "intercept_attention", "observer_of": "interceptor_of", "on_device": "to_default_device",
    "quiet": "quiet_logging", "row_of": "row_f32", "told": "what it is: masks, a reason, messages",
    "unobserved": "pass_through", "by_softmax": "run_softmax", "without_sink": "mechanisms_dropping_sinks",
}  # fmt: skip
# names in Python outside hf_linattn/ops
NAMES_OUTSIDE_OPS = {
    "held": "what is held: sizes, keys, a state", "num_sinks": "num_sink_tokens", "take_over": "adopt",
    "FlashConfig": "MixedChunkConfig", "SinksConfig": "StreamingConfig", "FixedConfig": "FixedPatternConfig",
    "RandomConfig": "RandomBlocksConfig",
}  # fmt: skip
NAMES_IN_C = {
    "further": "offset_ptr", "row_of": "row_ptr", "choose": "blend", "larger_of": "vmax", "turn": "transpose",
    "exchange_all": "transpose_block", "make_product": "gemm", "add_earlier": "gemm_tril", "add_later": "gemm_tril_t",
    "make_earlier": "gemm_out_tril", "make_exact": "gemm_f32", "put_left": "pack_a", "put_right": "pack_b",
    "room_for": "packed_floats", "arrange": "workspace_init", "upcoming": "prefetch_queue",
    "look_ahead": "prefetch_push", "fetch_ahead": "prefetch_some", "smaller": "min_i64",
}  # fmt: skip
# in any text
PHRASES = {
    "so many": "a number, or `option`", "in the place of": "in place of", "of use to anyone": "needed",
    "unless told": "by default", "has any use for": "needs", "what it is told": "what it gets",
    "lie there are others now": "are stale",
}  # fmt: skip

RST = re.compile(r"(?<!`)``(?!`)[^`\n]+``|:(?:func|mod|class|meth):`")

# what the length of a sentence is not about: code, comments, headings, tables, and what links lead to
NOT_PROSE = re.compile(r"^```.*?^```|<!--.*?-->|^(?:    |\||#)[^\n]*", re.M | re.S)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
WORD = re.compile(r"(?<![\w\\])(?:[A-Za-z][a-z'-]+|a)(?![\w\\])")  # no symbols of formulas
MOST_WORDS = 30  # of a sentence, or of its part up to a colon or semicolon


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page; a semicolon or colon ends one, too."""
    for unit in re.split(r"\n\s*\n|\n\s*(?=(?:[-*]|\d+\.)\s)", NOT_PROSE.sub("\n\n", page)):
        text = re.sub(r"`[^`]*`", "code", LINK.sub(r"\1", " ".join(unit.split())))
        yield from re.split(r"(?<=[.!?;:])\)?\s+", text)


def names_in(text: str, banned: dict[str, str]) -> set[str]:
    """Return which banned names stand in Python code, not in its comments and strings; most files have none at all."""
    if not banned.keys() & set(re.findall(r"\w+", text)):
        return set()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} & banned.keys()


def test_python_has_no_name_that_was_given_up():
    found = {}
    for path in CODE:
        of_operations = path.is_relative_to(OPS) or path.is_relative_to(ROOT / "tests" / "ops")
        banned = NAMES if of_operations else NAMES | NAMES_OUTSIDE_OPS
        names = names_in(path.read_text(encoding="utf-8"), banned)
        found |= {(relative(path), name): banned[name] for name in names}
    assert found == {}


def test_c_has_no_name_that_was_given_up():
    found = {}
    for path in C:
        names = set(re.findall(r"\b[a-z]\w*\b", path.read_text(encoding="utf-8")))
        found |= {(relative(path), name): NAMES_IN_C[name] for name in names & NAMES_IN_C.keys()}
    assert found == {}


def test_no_text_has_a_phrase_that_was_given_up():
    found = {}
    for path in [*CODE, *PAGES]:
        if path != Path(__file__).resolve():
            text = " ".join(path.read_text(encoding="utf-8").split())
            found |= {(relative(path), phrase): instead for phrase, instead in PHRASES.items() if phrase in text}
    assert found == {}


def test_docstrings_are_in_the_markup_of_the_site():
    """Markdown: roles and double backticks of reStructuredText would be shown as they are."""
    found = {relative(path): RST.findall(path.read_text(encoding="utf-8")) for path in CODE}
    assert {path: roles for path, roles in found.items() if roles} == {}


def test_pages_name_mechanisms_and_options_as_they_are_today():
    former = {*FORMER_MECHANISMS, *FORMER_OPTIONS}
    for path in PAGES:
        if path.name != "CHANGELOG.md" and path.stem != "synthesizer":  # which has a form `random`
            quoted = set(re.findall(r"`(\w+)`", path.read_text(encoding="utf-8")))
            assert quoted & former == set(), path


def test_the_glossary_names_what_there_is():
    library = "".join(path.read_text(encoding="utf-8") for path in [*LIBRARY, *C])
    rows = re.findall(r"^\|[^|]*\|[^|]*\|([^|]*)\|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    for code in re.findall(r"`([^`]+)`", " ".join(rows)):
        if "/" in code:
            assert list((ROOT / "hf_linattn").glob(f"{code}*")), code
        else:
            assert all(re.search(rf"\b{name}\b", library) for name in re.findall(r"\w+", code)), code


def test_no_sentence_is_longer_than_a_reader_keeps_in_mind():
    found = {}
    for path in PAGES:
        if path.name != "CHANGELOG.md":  # a log
            long = [x for x in sentences(path.read_text(encoding="utf-8")) if len(WORD.findall(x)) > MOST_WORDS]
            found |= {relative(path): long} if long else {}
    assert found == {}


@pytest.mark.parametrize(("words", "longer"), [(MOST_WORDS, 0), (MOST_WORDS + 1, 1)])
def test_a_sentence_of_more_words_is_seen(words, longer):
    page = f"# head\n\n- an item\n- [{'word ' * (words - 1)}](far.md) `code of several words`.\n\n    {'code ' * 40}\n"
    assert sum(len(WORD.findall(sentence)) > MOST_WORDS for sentence in sentences(page)) == longer
