"""The mechanisms' pages: each shows the weights that its mechanism implies beside softmax's, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.measure.targets import FASTER
from benchmarks.result_files import PAGES_FILE, RESULTS, read
from docs import mechanism_page, pictures
from hf_linattn import MechanismConfig, is_patched, list_mechanisms, register_mechanism
from hf_linattn.mechanisms import Mechanism
from tests.helpers import make_tokens
from tests.models import make_model

pytestmark = pytest.mark.tools

LENGTH, LAYER, WINDOW = 23, 1, 5
MOST_BYTES = 2_500_000  # of all pictures together


def make_model_and_heads():
    model = make_model("llama", attn_implementation="eager").eval()
    return model, pictures.read_heads(model, make_tokens(1, LENGTH), LAYER)


def drawn(mechanism: str, **options) -> list[pictures.Panel]:
    model, heads = make_model_and_heads()
    batches = [{"input_ids": make_tokens(1, LENGTH)}]  # the text that is shown: what is fitted to it comes nearer
    shown = list(pictures.panels(model, heads, LAYER, mechanism, options, batches))
    assert not is_patched(model)
    return shown


@torch.no_grad()
def softmax_weights() -> torch.Tensor:
    """What transformers itself says the layer's weights are."""
    model, _ = make_model_and_heads()
    return model(make_tokens(1, LENGTH), output_attentions=True).attentions[LAYER][0].double()


def test_the_panels_are_softmax_and_what_the_mechanism_makes_of_it():
    softmax, local = drawn("local", window_size=WINDOW)
    torch.testing.assert_close(softmax.weights, softmax_weights(), atol=1e-6, rtol=1e-4)
    near = softmax_weights() * torch.ones(LENGTH, LENGTH).triu(1 - WINDOW)
    torch.testing.assert_close(local.weights, near / near.sum(-1, keepdim=True), atol=1e-6, rtol=1e-4)
    assert [panel.title for panel in (softmax, local)] == ["softmax", "local, zero-shot"]


def test_what_calibrate_can_fit_is_drawn_before_and_after():
    softmax, before, after = drawn("hedgehog")
    assert (before.title, after.title) == ("hedgehog, zero-shot", "hedgehog, calibrated")
    values = make_model_and_heads()[1].value.repeat_interleave(2, 1)[0]
    errors = [((panel.weights - softmax.weights) @ values).square().sum() for panel in (before, after)]
    assert errors[1] < 0.5 * errors[0]


def test_the_distance_is_the_share_of_weight_that_lies_elsewhere():
    one, other = torch.eye(4), torch.eye(4)[[1, 0, 2, 3]]
    assert pictures.distance(one, one) == 0
    assert pictures.distance(one, other) == pytest.approx(0.5)


def test_a_figure_shows_the_weights_of_each_head_on_one_scale(tmp_path: Path):
    shown, heads = drawn("local", window_size=WINDOW), (0, 3)
    figure = pictures.draw(shown, heads)
    *panels, bar = figure.axes
    assert len(panels) == len(shown) * len(heads)
    expected = [panel.weights[head].numpy() for head in heads for panel in shown]
    for axes, weights in zip(panels, expected, strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array().filled(0), weights)
        np.testing.assert_array_equal(image.get_array().mask, weights == 0)
        assert (image.norm.vmin, image.norm.vmax) == (-1, 1)
    assert [axes.get_title() for axes in panels] == ["softmax", "local, zero-shot", "", ""]
    far = pictures.distance(shown[1].weights[3], shown[0].weights[3])
    assert [text.get_text() for text in panels[-1].texts] == [f"{far:.2f} from softmax"]
    assert bar.get_ylim() == (0, 1)  # nothing is negative
    path = pictures.save(figure, tmp_path / "local.png", "what it shows")
    saved = Image.open(path)
    assert saved.info["Description"] == "what it shows"
    pixels = np.asarray(saved.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 10
    first = path.read_bytes()
    assert pictures.save(pictures.draw(shown, heads), path, "what it shows").read_bytes() == first


def test_every_mechanism_has_its_pictures_or_the_reason():
    files = {path.name for path in pictures.FOLDER.glob("*.png")}
    shown: set[str] = set()
    for name in list_mechanisms():
        page = mechanism_page.page(name)
        for file, options in pictures.settings(name).items():
            assert (f"]({file})" in page) != ("No picture: " in page)
            if f"]({file})" in page:
                shown.add(file)
                image = Image.open(pictures.FOLDER / file)
                assert image.info["Description"] == pictures.caption(name, options), "run `make pictures`"
    assert files == shown, "run `make pictures`, and delete what no page shows"
    assert sum((pictures.FOLDER / file).stat().st_size for file in files) < MOST_BYTES


def test_there_are_pages_of_mechanisms_alone():
    assert {path.stem for path in pictures.FOLDER.glob("*.md")} == set(list_mechanisms())


def test_a_page_without_a_matrix_says_why():
    class Config(MechanismConfig):
        pass

    @register_mechanism("opaque")
    class Opaque(Mechanism):
        """What *it* does, as in arXiv 2009.14794: `a_b`, a_b."""

        config_class = Config

    page = mechanism_page.page("opaque")
    assert "No picture: mechanism 'opaque' has no attention matrix to show." in page
    assert ".png" not in page
    link = "[arXiv 2009.14794](https://arxiv.org/abs/2009.14794)"
    assert f"What \\*it\\* does, as in {link}: `a_b`, a\\_b." in page
    assert "| `seed` | `0` |" in page


def test_a_page_has_the_rows_of_its_mechanism_alone():
    page = mechanism_page.page("hybrid")
    assert "| GPT-2 | `hybrid` | `window_size=32` |" in page  # calibration
    assert "| llama | hybrid | `hybrid`" in page and "`recipes/models/llama.yaml --row lolcats`" in page  # the board
    assert "`learned_exp` `decay='learned'`" not in page and "| `local` |" not in page


def test_a_page_has_the_speed_on_one_processor_that_was_timed_in_full():
    document = read(RESULTS / PAGES_FILE)
    assert set(document["options"]) == set(FASTER) and not document["failures"]
    for name in list_mechanisms():
        assert mechanism_page.page(name).count("### [Times faster than softmax]") == (name in FASTER)
