"""How many positions a text may have: what the tables that serve its tokens hold, and no other."""

from __future__ import annotations

import pytest
import torch
from transformers import Glm4vConfig, Glm4vModel

from hf_linattn import UnsupportedModeError, patch_model
from hf_linattn.evaluation import position_limit
from hf_linattn.positions.tables import known_positions, position_tables
from hf_linattn.support.tiny import POSITIONS, tiny_model

TABLES = {  # kind -> ends of the paths of the tables that count, and how many positions these and the config have
    "llava": ((), POSITIONS),  # its tower's 17 places of patches are no places of tokens
    "idefics": ((), POSITIONS),  # a tower that is no transformers model
    "git": (("git.embeddings.position_embeddings",), POSITIONS),
    "clip": (("text_model.embeddings.position_embedding",), POSITIONS),
    "vilt": (("embeddings.text_embeddings.position_embeddings",), POSITIONS),  # patches and tokens in one module
    "roberta": (("roberta.embeddings.position_embeddings",), POSITIONS - 1),  # the first one is that of pads
    "bart": (("model.encoder.embed_positions", "model.decoder.embed_positions"), POSITIONS),
}


@pytest.mark.parametrize("kind", TABLES)
def test_places_of_patches_are_no_positions_of_tokens(kind):
    model, (tables, positions) = tiny_model(kind), TABLES[kind]
    assert tuple(position_tables(model, of_parts=True)) == tables
    assert known_positions(model) == positions
    assert position_limit(model) == (positions if tables else None)


def test_patches_may_be_made_one_module_further_up():
    config = Glm4vConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1})
    with torch.device("meta"):  # nothing smaller can be made of it
        model = Glm4vModel(config)
    assert isinstance(model.visual.embeddings.position_embedding, torch.nn.Embedding)
    assert not position_tables(model, of_parts=True)


def test_pads_take_no_positions_of_a_model_that_counts_none():
    model = tiny_model("roberta").eval()
    pad = model.config.pad_token_id
    ids = torch.cat([torch.full((2, POSITIONS - 1), 5), torch.full((2, 9), pad)], 1)
    assert torch.isfinite(patch_model(model, "linear")(input_ids=ids, attention_mask=(ids != pad).long()).logits).all()
    with pytest.raises(UnsupportedModeError, match=f"reaches position {POSITIONS}, but"):
        model(input_ids=ids.fill_(5)[:, :POSITIONS])


def test_a_text_beside_a_picture_may_be_longer_than_the_picture_has_patches():
    model = patch_model(tiny_model("idefics").eval(), "linear")
    inputs = {"input_ids": torch.ones(1, 40, dtype=torch.long), "attention_mask": torch.ones(1, 40)}
    size = model.config.vision_config.image_size
    pictures = {"pixel_values": torch.zeros(1, 1, 3, size, size), "image_attention_mask": torch.ones(1, 40, 1)}
    assert torch.isfinite(model(**inputs, **pictures).last_hidden_state).all()
