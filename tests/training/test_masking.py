"""Masks of packed rows: what is chosen, what it depends on, and that an interruption changes none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader

from hf_linattn import patch_model
from hf_linattn.errors import DataError
from hf_linattn.training.data import IGNORED_LABEL, tokenize_and_pack
from hf_linattn.training.masking import PackedMaskingCollator
from hf_linattn.training.trainers import RecoveryTrainer
from tests.models import make_model
from tests.training.test_data import (
    BLOCK_SIZE,
    SPECIAL,
    VOCABULARY,
    causal_tokenizer,
    documents,
    make_tokenizer,
    masked_tokenizer,
)
from tests.training.test_finetuning import make_data, make_training

__all__ = ["causal_tokenizer", "documents", "masked_tokenizer"]


def test_masking_keeps_restarts_and_labels_only_what_it_chose(documents, masked_tokenizer):
    rows = [row for row in tokenize_and_pack(documents, masked_tokenizer, BLOCK_SIZE)]
    torch.manual_seed(0)
    batch = PackedMaskingCollator(masked_tokenizer, mlm_probability=0.5)(rows)
    original = torch.stack([row["input_ids"] for row in rows])
    chosen = batch["labels"] != IGNORED_LABEL
    special = torch.isin(original, torch.arange(len(SPECIAL)))
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert torch.equal(batch["position_ids"], torch.stack([row["position_ids"] for row in rows]))
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not (chosen & special).any()
    assert chosen[~special].float().mean().item() == pytest.approx(0.5, abs=0.15)
    assert (batch["input_ids"] == VOCABULARY["[MASK]"])[chosen].float().mean().item() == pytest.approx(0.8, abs=0.15)


def test_seeded_masks_depend_on_the_row_alone(documents, masked_tokenizer):
    rows = [row for row in tokenize_and_pack(documents, masked_tokenizer, BLOCK_SIZE)]
    before = torch.get_rng_state()
    collator = PackedMaskingCollator(masked_tokenizer, seed=3)
    together, alone = collator(rows), [collator([row]) for row in reversed(rows)]
    for name in together:
        assert torch.equal(together[name], torch.cat([batch[name] for batch in reversed(alone)]))
    assert torch.equal(torch.get_rng_state(), before)
    other = PackedMaskingCollator(masked_tokenizer, seed=4)(rows)
    assert not torch.equal(other["labels"], together["labels"])


def test_each_epoch_has_masks_of_its_own_in_the_workers_of_a_loader_too(documents, masked_tokenizer):
    rows = tokenize_and_pack(documents, masked_tokenizer, BLOCK_SIZE)
    collator = PackedMaskingCollator(masked_tokenizer, mlm_probability=0.5)
    loader = DataLoader(rows, len(rows), collate_fn=collator, num_workers=1, persistent_workers=True)
    read = []
    for epoch in (0, 1, 0):
        collator.begin_epoch(7, epoch)
        read.append(next(iter(loader))["labels"])
        assert torch.equal(read[-1], collator([*rows])["labels"])
    assert torch.equal(read[0], read[2]) and not torch.equal(read[0], read[1])


def test_no_token_is_drawn_that_the_model_lacks(documents):
    larger = make_tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", pad_token="[PAD]")
    known = len(larger)
    rows = [row for row in tokenize_and_pack(documents, larger, BLOCK_SIZE)] * 4
    larger.add_tokens([f"<extra{i}>" for i in range(1000)])
    batch = PackedMaskingCollator(larger, mlm_probability=1.0, vocab_size=known)(rows)
    assert int(batch["input_ids"].max()) < known and bool((batch["labels"] != -100).any())
    with pytest.raises(DataError, match=f"has the number {VOCABULARY['[MASK]']}, beyond the 2 tokens of the model"):
        PackedMaskingCollator(larger, vocab_size=2)


def test_a_tokenizer_without_a_mask_token_cannot_mask(causal_tokenizer):
    with pytest.raises(DataError, match="mask_token=None"):
        PackedMaskingCollator(causal_tokenizer)


@pytest.mark.parametrize("stopped", [3, 8])
def test_a_masked_model_that_goes_on_from_a_checkpoint_ends_as_an_unbroken_one(tmp_path, stopped):
    """In its first epoch and in its second one."""
    data = make_data(make_model("bert"))
    options = {"save_strategy": "steps", "save_steps": stopped, "max_steps": 14, "eval_strategy": "no"}
    options |= {"save_total_limit": 9, "load_best_model_at_end": False, "learning_rate": 1e-3, "seed": 3}
    before = patch_model(make_model("bert"), "linear")
    whole, resumed = copy.deepcopy(before), copy.deepcopy(before)
    RecoveryTrainer(whole, make_training(tmp_path, **options), data).train()
    rows = [*data.train]
    assert 14 > 2 * len(rows) / 4 > 8 > len(rows) / 4 > 3
    drawn = data.collator(rows)["labels"]
    for epoch, same in ((0, False), (2, True)):
        data.collator.begin_epoch(3, epoch)
        assert torch.equal(data.collator(rows)["labels"], drawn) is same, "the third epoch was the last"
    checkpoint = str(tmp_path / f"checkpoint-{stopped}")
    RecoveryTrainer(resumed, make_training(tmp_path, **options), data).train(resume_from_checkpoint=checkpoint)
    want = whole.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in resumed.state_dict().items())
