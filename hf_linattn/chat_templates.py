"""Conversations as a tokenizer's chat template writes them, with the same text every day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase

TODAY = "strftime_now"  # the function of templates, as of Llama 3.2 and SmolLM3, that gives today's date in a format
DAY = date(2024, 7, 26)  # in its place; Llama's template has it where there is no such function
CODES = "aAbBdHIjmMpSyY"  # of a format


def render_chat(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Mapping[str, Any]], asks: bool = True) -> str:
    """Return turns as text; a template that writes today's date writes `DAY`, or a run could not go on tomorrow.

    asks: with the beginning of an answer.
    """
    template = tokenizer.get_chat_template()
    if TODAY in template:
        filters = "".join(f"|replace('%{code}', '{DAY.strftime(f'%{code}')}')" for code in CODES)
        # a macro, as transformers lets no function into a template; its line ends with it, so nothing is written
        macro = f"{{% macro {TODAY}(format) %}}{{{{ format|replace('%-', '%'){filters} }}}}{{% endmacro %}}"
        template = f"{macro}\n{template}"
    options: Any = {"chat_template": template, "add_generation_prompt": asks, "tokenize": False}
    return str(tokenizer.apply_chat_template(turns, **options))
