"""Draw the weights that every mechanism implies beside softmax's, on queries and keys of a bundled model.

    python -m docs.pictures                                        # docs/mechanisms/*.png

One layer of the bundled Llama reads the start of a text that it was not trained on. Its queries and keys are those of
the original model: left is softmax, then each mechanism as `patch_model` makes it, then after `calibrate` where that
fits anything, on the tokens of `benchmarks.studies.calibration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.result_files import ROOT
from benchmarks.studies.calibration import training_batches
from benchmarks.studies.zero_shot import MODELS, patched
from benchmarks.studies.zero_shot import OPTIONS as MEASURED_OPTIONS
from benchmarks.tables.markdown import options_text
from benchmarks.tables.quality import MODEL_NAMES
from hf_linattn import calibrate, get_mechanisms, list_mechanisms
from hf_linattn.atomic_io import write_whole
from hf_linattn.calibration import what_is_fitted
from hf_linattn.errors import UnsupportedModeError
from hf_linattn.report.plots import INK, ORIGINAL, PATCHED
from hf_linattn.training.corpus import standard_library_corpus
from hf_linattn.training.task import load_model

FOLDER = Path(__file__).parent / "mechanisms"
MODEL, DOCUMENT, LENGTH = "llama", "operator", 160
LAYER, HEADS = 2, (0, 2)  # one head of each key/value head: the first looks far back, the second mostly near

# Mechanisms whose defaults would look like another's; all others are drawn as they were measured
OWN_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "by_head": [{"plan": {"streaming": {"heads": [0], "window_size": 32}}}],
    "cosformer": [{"max_length": LENGTH}],
    "hybrid": [*MEASURED_OPTIONS["hybrid"], {"window_size": 16, "num_hard_keys": 16, "recall_error": "absolute"}],
    "synthesizer": [{"initial_mix": 0.5}],
}
OPTIONS = {**MEASURED_OPTIONS, **OWN_OPTIONS}

CELL, DPI = 3, 150  # pixels per weight, pixels per inch
TICKS = 40  # tokens from one tick to the next
LEFT, RIGHT, BOTTOM, TOP, GAP = 100, 120, 80, 50, 24  # pixels around and between the panels
SHADES = 33  # of the scale of weights in a file, odd: the middle one is zero
WEAKEST = 1e-3  # weights below it fade into white
NOTHING = "#EAEAEA"  # weights that are zero
WEIGHTS = LinearSegmentedColormap.from_list(
    "weights", ["#3A1400", PATCHED, "#F5B57A", "white", "#9FD0EE", ORIGINAL, "#001830"]
).with_extremes(bad=NOTHING)


class Heads(NamedTuple):
    """What a layer is asked: query [1, H, N, D], key and value [1, Hkv, N, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Panel(NamedTuple):
    """What one column shows: a title, and the weights of all heads [H, N, N]."""

    title: str
    weights: Tensor


def read_text(path: str) -> Tensor:
    """Return the first `LENGTH` tokens of the held-out document [1, N]."""
    (text,) = (row["text"] for row in standard_library_corpus()["test"] if row["module"] == DOCUMENT)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / path)
    return tokenizer(text, return_tensors="pt", truncation=True, max_length=LENGTH)["input_ids"]


def read_heads(model: PreTrainedModel, input_ids: Tensor, layer: int) -> Heads:
    """Return queries, keys and values of a layer of the original model."""
    seen: list[Heads] = []
    with patched(model, "softmax", {}), torch.no_grad():
        mechanism = list(get_mechanisms(model).values())[layer]
        mechanism.register_forward_pre_hook(lambda _, heads: seen.append(Heads(*(x.double() for x in heads[:3]))))
        model(input_ids=input_ids, use_cache=False)
    return seen[0]


def panels(
    model: PreTrainedModel, heads: Heads, layer: int, mechanism: str, options: Mapping[str, Any],
    batches: Sequence[Mapping[str, Tensor]],
) -> Iterator[Panel]:
    """Yield softmax, the mechanism zero-shot and, where it has something to fit, calibrated on the batches.

    UnsupportedModeError if it has no attention matrix. The model is left as it was.
    """
    with patched(model, "softmax", {}):
        yield Panel("softmax", implied(model, heads, layer))
    with patched(model, mechanism, {**options, "layers": [layer]}):  # layers do not wait for each other in calibrate
        yield Panel(f"{mechanism}, zero-shot", implied(model, heads, layer))
        if what_is_fitted(get_mechanisms(model)):
            calibrate(model, batches)
            yield Panel(f"{mechanism}, calibrated", implied(model, heads, layer))


@torch.no_grad()
def implied(model: PreTrainedModel, heads: Heads, layer: int) -> Tensor:
    """Return the weights [H, N, N] that a patched layer's mechanism gives these queries and keys."""
    mechanism = list(get_mechanisms(model).values())[layer]
    return mechanism.attention_matrix(heads.query, heads.key, value=heads.value)[0]


def distance(weights: Tensor, others: Tensor) -> float:
    """Return the share of its weight that a query puts elsewhere, mean over queries: sum_j |w_ij - w'_ij| / 2."""
    return float((weights - others).abs().sum(-1).mean() / 2)


def draw(shown: Sequence[Panel], heads: Sequence[int]) -> Figure:
    """Draw a row per head and a column per panel, the first of them softmax's, all on one scale of colours."""
    size = CELL * shown[0].weights.shape[-1]
    width = LEFT + len(shown) * (size + GAP) - GAP + RIGHT
    height = TOP + len(heads) * (size + GAP) - GAP + BOTTOM
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)

    def place(left: int, top: int, wide: int, high: int) -> Axes:
        return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))

    norm = SymLogNorm(linthresh=WEAKEST, linscale=0.4, vmin=-1, vmax=1)
    for row, head in enumerate(heads):
        for column, panel in enumerate(shown):
            axes = place(LEFT + column * (size + GAP), TOP + row * (size + GAP), size, size)
            weights = np.ma.masked_equal(panel.weights[head].numpy(), 0)
            image = axes.imshow(weights, cmap=WEIGHTS, norm=norm, interpolation="nearest")
            axes.set(xticks=range(0, size // CELL, TICKS), yticks=range(0, size // CELL, TICKS))
            left, bottom = column == 0, row == len(heads) - 1  # where ticks have their numbers
            axes.tick_params(labelleft=left, labelbottom=bottom)
            axes.set(xlabel="key" * bottom, ylabel=f"head {head}: query" * left, title="" if row else panel.title)
            _style(axes)
            if column:
                text = f"{distance(panel.weights[head], shown[0].weights[head]):.2f} from softmax"
                axes.text(0.97, 0.96, text, transform=axes.transAxes, ha="right", va="top", fontsize=9, color=INK)
    negative = any(bool((panel.weights[list(heads)] < -WEAKEST).any()) for panel in shown)
    bar = figure.colorbar(image, cax=place(width - RIGHT + GAP, TOP, 24, height - TOP - BOTTOM))
    bar.ax.set_ylim(-1 if negative else 0, 1)
    bar.ax.yaxis.set_major_locator(FixedLocator([sign * 10**-power for sign in (-1, 1) for power in range(4)] + [0]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.minorticks_off()
    _style(bar.ax)
    return figure


def _style(axes: Axes) -> None:
    axes.spines[:].set(color=INK, linewidth=0.5)
    axes.tick_params(colors=INK, labelsize=8, width=0.5, length=3)
    axes.title.set(color=INK, fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=INK, fontsize=9)


def palette() -> Image.Image:
    """Return the colours of all files: shades of the weights, and of the text on white and on what has no weight."""
    texts = [LinearSegmentedColormap.from_list("text", [INK, ground]) for ground in ("white", NOTHING)]
    colours = [WEIGHTS(np.linspace(0, 1, SHADES)), *(text(np.linspace(0, 1, 8)) for text in texts)]
    image = Image.new("P", (1, 1))
    image.putpalette((255 * np.concatenate(colours)[:, :3]).round().astype(np.uint8).tobytes())
    return image


def save(figure: Figure, path: Path, caption: str) -> Path:
    """Write a figure with few colours and its caption in it; the same figure always gives the same bytes."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image = image.quantize(palette=palette(), dither=Image.Dither.NONE)
    information = PngInfo()
    information.add_text("Description", caption)
    return write_whole(path, lambda temporary: image.save(temporary, format="png", optimize=True, pnginfo=information))


def settings(mechanism: str) -> dict[str, dict[str, Any]]:
    """Return the name of each picture of a mechanism, and its options."""
    several = OPTIONS.get(mechanism, [{}])
    files = [f"{mechanism}.png", *(f"{mechanism}-{number}.png" for number in range(2, len(several) + 1))]
    return dict(zip(files, several, strict=True))


def caption(mechanism: str, options: Mapping[str, Any]) -> str:
    """Return what a picture shows, in one line."""
    where = f"layer {LAYER}, heads {' and '.join(map(str, HEADS))} of the bundled {MODEL_NAMES[MODEL]}"
    what = f"softmax and {mechanism}" + (f" with {options_text(dict(options))}" if options else "")
    return f"Attention weights of {what}: {where}, first {LENGTH} tokens of the documentation of {DOCUMENT}"


def main(
    mechanism: Annotated[list[str] | None, typer.Option(help="repeatable; by default every one")] = None,
    folder: Annotated[Path, typer.Option(help="where the pictures go")] = FOLDER,
) -> None:
    """Draw the pictures; `python -m docs.generate` makes the pages that show them."""
    path = MODELS[MODEL]
    model, batches = load_model(str(ROOT / path), torch.float32).eval(), training_batches(path)
    heads = read_heads(model, read_text(path), LAYER)
    for name in tqdm(mechanism or list_mechanisms(), desc="pictures"):
        for file, options in settings(name).items():
            try:
                shown = list(panels(model, heads, LAYER, name, options, batches))
            except UnsupportedModeError as error:  # its page says so
                tqdm.write(str(error))
                continue
            save(draw(shown, HEADS), folder / file, caption(name, options))


if __name__ == "__main__":
    typer.run(main)
