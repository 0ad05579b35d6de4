"""How a card says that its model is loaded, and under which name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from typing import Any

from ..registry import MECHANISM_PACKAGE
from ..saved_config import auto_classes, class_names, own_name

# Auto class that loads a model -> what the Hub calls its work; the first that fits is named
PIPELINE_TAGS: dict[str, str] = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "text-generation",  # of BART, which fills masks, too
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForImageClassification": "image-classification",
    "AutoModel": "feature-extraction",
    "SentenceTransformer": "sentence-similarity",
}
SENTENCES = "SentenceTransformer"  # loads by its constructor, from a library of its own
LINES = """\
```python
import hf_linattn  # pip install hf_linattn{packages}
from {library} import {loader}

model = {call}("{name}")
```

The import teaches transformers the model type. A program that cannot import it, such as lm_eval, passes
`trust_remote_code=True` instead; hf_linattn has to be installed then, too. Without either the model does not load: its
attention is not softmax."""
ADAPTER_LINES = """\
```python
from hf_linattn.training import load_adapter  # pip install "hf_linattn[train]"{packages}
from transformers import {loader}

base = "{base}"
model = load_adapter({loader}.from_pretrained(base), "{name}")
```

This folder holds no weights of the base: the plan of its attention, the parameters of the new mechanisms, and LoRA
weights. `load_adapter` patches the base first; `.merge_and_unload()` makes one model of both. PEFT alone refuses the
folder, as under softmax attention these adapters would be wrong; after `import hf_linattn.training.adapter_files` it
loads it, too."""
# push puts the name of the repository into cards that have this line, and leaves all others alone
WRITTEN = "<!-- written by hf_linattn -->"
LOADED = re.compile(
    r'((?<=\.from_pretrained\(")|(?<=SentenceTransformer\(")|(?<=\.from_pretrained\(base\), "))[^"]*(?="\))'
)


def loader_of(config: Any) -> str:
    """Return the Auto class by which a model is loaded, from its config, marked or not.

    >>> from transformers import BertConfig
    >>> loader_of(BertConfig(architectures=["BertForMaskedLM"]))
    'AutoModelForMaskedLM'
    """
    name = (class_names(config) or [""])[0]
    found = {auto.__name__ for auto, model_class in auto_classes(type(config)) if own_name(model_class) == name}
    return next((loader for loader in PIPELINE_TAGS if loader in found), min(found, default="AutoModel"))


def packages_of(mechanisms: Collection[str]) -> list[str]:
    """Return the packages beside this library that mechanisms come from, as their entry points say."""
    points = entry_points(group=MECHANISM_PACKAGE)
    return sorted({point.dist.name for point in points if point.name in mechanisms and point.dist is not None})


def loading_lines(loader: str, name: str, adapter_of: str | None = None, packages: Sequence[str] = ()) -> str:
    """Return the lines that load a model, in Markdown.

    Args:
        adapter_of: the base of what is an adapter; None: it is a whole model.
        packages: have to be installed, too.
    """
    also = "".join(f" {package}" for package in packages)
    if adapter_of is not None:
        return ADAPTER_LINES.format(loader=loader, name=name, base=adapter_of, packages=also)
    call = loader if loader == SENTENCES else f"{loader}.from_pretrained"
    module = library_of(loader).replace("-", "_")
    return LINES.format(library=module, loader=loader, call=call, name=name, packages=also)


def library_of(loader: str) -> str:
    """Return the Hub's name of the library that loads a model by this class.

    >>> library_of("SentenceTransformer"), library_of("AutoModel")
    ('sentence-transformers', 'transformers')
    """
    return "sentence-transformers" if loader == SENTENCES else "transformers"


def with_name(card: str, name: str) -> str:
    """Return a card with another name in the lines that load its model; a card that a person wrote stays as it is.

    >>> print(with_name(f'AutoModel.from_pretrained("runs/mine") {WRITTEN}', "me/mine"))
    AutoModel.from_pretrained("me/mine") <!-- written by hf_linattn -->
    """
    return LOADED.sub(lambda _: name, card) if WRITTEN in card else card
