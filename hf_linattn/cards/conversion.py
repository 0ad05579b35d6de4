"""The card of a model that was converted and not recovered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from huggingface_hub import ModelCard, ModelCardData

from .. import __version__
from ..markdown import markdown_table
from ..plan import KEPT, PatchConfig, names_in_layer
from ..registry import MECHANISMS
from .base import Base
from .loading import PIPELINE_TAGS, WRITTEN, library_of, loading_lines, packages_of
from .wording import Measured, layers_in_words, measured_sentence

UNTRAINED = "**UNTRAINED.**"
USE = """\
Measure it on text of your own before use (`hf-linattn eval`), and recover it where that shows a loss
(`hf-linattn distill`)."""
INTENDED = """\
Long inputs and long generations, for which the cache or the time of softmax attention is too much. On short inputs
softmax attention is as fast. What the original must not be used for, this model must not be used for either."""
LIMITS = """\
It runs in transformers with hf_linattn installed. vLLM, TGI, llama.cpp and ONNX run attention of their own and cannot
load it. Layers that do not keep softmax may lose what stands far back in the input. Perplexity alone does not show it.
Recall tests do (`hf-linattn eval --suite recall`). Biases and errors of the original are still there."""


@dataclass(frozen=True)
class Calibrated:
    """What `calibrate` was given and did: tokens, names of the files, layers fitted and how many fits were taken."""

    tokens: int
    files: Sequence[str]
    layers: int
    taken: int
    seconds: float


@dataclass(frozen=True)
class Conversion:
    """A model whose attention was replaced.

    Attributes:
        base: what was converted. loader: the Auto class that loads it. patches: path of a part -> its patch.
        untrained: whether it is known that nothing was trained.
        measured: beside the original. calibrated: None where nothing was fitted. command: that made it.
        adapter_of: the base of what is an adapter; None: it is a whole model.
    """

    base: Base
    loader: str
    patches: Mapping[str, PatchConfig]
    untrained: bool = True
    measured: Measured = field(default_factory=Measured)
    calibrated: Calibrated | None = None
    command: str | None = None
    adapter_of: str | None = None


def conversion_card(conversion: Conversion, name: str) -> ModelCard:
    """Return the card: metadata for the Hub, what it is, how to load it, what serves which layers, limits, sources.

    Args:
        name: under which the model is loaded in the example.
    """
    base, mechanisms = conversion.base, mechanism_names(conversion.patches)
    data = ModelCardData(
        base_model=base.hub_id,
        library_name=library_of(conversion.loader) if conversion.adapter_of is None else "peft",
        pipeline_tag=PIPELINE_TAGS.get(conversion.loader),
        tags=["hf_linattn", *mechanisms, "subquadratic-attention", *(["untrained"] if conversion.untrained else [])],
        model_name=title(base, mechanisms),
        **base.metadata,
    )
    command = [] if conversion.command is None else [f"```sh\n{conversion.command}\n```"]
    sections = [
        f"# {data.model_name}",
        " ".join(_first_sentences(conversion)),
        "## Load",
        loading_lines(conversion.loader, name, conversion.adapter_of, packages_of(mechanisms)),
        "## Attention",
        attention_table(conversion.patches),
        "## Training",
        _training(conversion),
        *command,
        *uses_and_limits(base),
        "## Sources",
        sources(mechanisms),
        WRITTEN,
    ]
    return card_of(data, sections)


def card_of(data: ModelCardData, sections: Sequence[str]) -> ModelCard:
    """Return a card of metadata and sections; what is not known is left out of the metadata."""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def title(base: Base, mechanisms: Sequence[str]) -> str:
    """Return what the model is called."""
    return f"{base.title} with {' and '.join(mechanisms) or KEPT} attention"


def attention_table(patches: Mapping[str, PatchConfig]) -> str:
    """Return which attention serves which layers, in Markdown."""
    rows = [[f"`{what}`", where] for what, where in layers_in_words(patches)]
    return markdown_table(["attention", "layers"], rows, "ll")


def uses_and_limits(base: Base) -> list[str]:
    """Return the sections on intended use, limits and licence."""
    named = base.metadata.get("license_name") or base.metadata.get("license")
    licence = f"That of the original: {named}." if named else "That of the original, whose card names none here."
    return ["## Intended use", INTENDED, "## Limits", LIMITS, "## Licence", licence]


def sources(mechanisms: Sequence[str]) -> str:
    """Return the papers of the mechanisms that name one."""
    papers = {name: MECHANISMS.get(name).citation for name in mechanisms}
    return "\n".join(f"- `{name}`: {paper}" for name, paper in papers.items() if paper)


def mechanism_names(patches: Mapping[str, PatchConfig]) -> list[str]:
    """Return the mechanisms that do not keep softmax, those that serve single heads among them."""
    return sorted({name for config in patches.values() for name in _names(config)} - {KEPT})


def _names(config: PatchConfig) -> Iterator[str]:
    for layer in config.layers.values():
        yield from names_in_layer(layer)
    if config.cross is not None:
        yield from _names(config.cross)


def _first_sentences(conversion: Conversion) -> list[str]:
    patches, mechanisms = conversion.patches, " and ".join(mechanism_names(conversion.patches)) or KEPT
    converted = sum(config.count for config in patches.values())
    layers = sum(config.num_layers + (config.cross.num_layers if config.cross else 0) for config in patches.values())
    share = f"in {converted} of {layers} attention layers"
    what = f"{conversion.base.title} with {mechanisms} in place of softmax attention {share}."
    quality = "Its quality and its speed were not measured."
    said = [sentence for sentence in (measured_sentence(conversion.measured),) if sentence]
    return [*([UNTRAINED] if conversion.untrained else []), what, quality, *said]


def _training(conversion: Conversion) -> str:
    fitted, made = conversion.calibrated, f"Converted with hf_linattn {__version__}."
    if not conversion.untrained:
        return f"How it was trained is not recorded here. {made}"
    if fitted is None:
        return f"None. The weights are the original's, and the new attention is as it begins. {made}\n\n{USE}"
    tokens, taken = f"{fitted.tokens:,} tokens of {', '.join(fitted.files)}", f"{fitted.taken} of {fitted.layers}"
    return (
        "None of the original's weights. `calibrate` fitted what is new in the attention to softmax attention, on"
        f" {tokens}. In {taken} layers the fit was better on rows held out, and was taken. {made}\n\n{USE}"
    )
