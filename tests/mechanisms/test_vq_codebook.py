"""The codebook of Transformer-VQ: fitted by k-means, calibrated, trained by running means, saved."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import distributed
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hf_linattn import calibrate, get_mechanisms, patch_model
from hf_linattn.ops.slots import vq
from hf_linattn.testing import Case, random_tokens, tiny_model
from hf_linattn.testing.models import positions_of
from tests.helpers import layer_errors, nearest

SMALL = {"num_codes": 5, "block_size": 8}
LENGTH = 61


# -- k-means ----------------------------------------------------------------------------------------------------------


def clusters(mechanism, length: int, seed: int):
    """Return keys [2, 2, length, 8] close around 5 places of each head, and the place of each [2, 2, length]."""
    generator = torch.Generator().manual_seed(seed)
    centres = 10 * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    place = torch.randint(5, (2, 2, length), generator=generator)
    noise = torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64)
    return centres[torch.arange(2)[:, None], place] + 0.1 * noise, place


def prepared(mechanism, *batches):
    for keys, mask in batches:
        mechanism.prepare(keys, keys, keys, mask)
    return mechanism


def test_k_means_finds_the_means_of_all_batches_and_passes_over_pads():
    make = Case("vq", "llama", True, SMALL).make
    batches, members = [], {}
    for seed, length in ((0, 50), (1, 33), (2, 70)):
        keys, place = clusters(make(), length, seed)
        mask = torch.arange(length) >= torch.tensor([[4], [0]])
        keys[0, :, :4] = 1e3
        batches.append((keys, mask))
        for b, h, i in itertools.product(range(2), range(2), range(length)):
            if mask[b, i]:
                members.setdefault((h, int(place[b, h, i])), []).append(keys[b, h, i])
    mechanism = prepared(make(), *batches)
    for (head, _), keys in members.items():
        mean = torch.stack(keys).mean(0)
        code = nearest(mechanism.codebook[head], mean)
        torch.testing.assert_close(mechanism.codebook[head, code], mean)
        assert mechanism.counts[head, code] == pytest.approx(len(keys))
    state = torch.get_rng_state()
    again = prepared(make(), *batches)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(again.codebook, mechanism.codebook) and torch.equal(again.counts, mechanism.counts)


def test_k_means_is_nearer_to_the_keys_than_its_seeds_and_than_points_at_random():
    case = Case("vq", "llama", True, {"num_codes": 16})
    _, key, _ = case.heads(400)

    def distance(codes):
        return torch.cdist(key.transpose(0, 1).flatten(1, 2), codes).amin(-1).square().mean()

    mechanism = prepared(case.make(), (key, None))
    points = key[0, :, :16]
    seeds = vq._seeded(
        key.transpose(0, 1).flatten(1, 2), points, torch.zeros(2, 16), torch.Generator().manual_seed(0)
    )
    assert distance(mechanism.codebook) < 0.85 * min(distance(seeds), distance(points))
    assert float(mechanism.counts.sum()) == 1600 and bool((mechanism.counts > 0).all())


def test_seeds_are_drawn_among_points_that_have_no_code():
    codebook = torch.tensor([[[100.0, 0.0], [0.0, 100.0], [1.0, 1.0]]])
    points = torch.cat([codebook[:, [0, 1] * 50], torch.tensor([[[3.0, 4.0]]])], 1)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        seeded = vq._seeded(points, codebook, torch.tensor([[50.0, 50.0, 0.0]]), generator)
        assert torch.equal(seeded[:, 2], points[:, -1]) and torch.equal(seeded[:, :2], codebook[:, :2])


def test_autocast_does_not_round_k_means():
    case = Case("vq", "llama", True, {"num_codes": 16})
    _, key, _ = case.heads(100, dtype=torch.float32)
    want = prepared(case.make(torch.float32), (key, None)).codebook
    with torch.autocast("cpu", torch.bfloat16):
        got = prepared(case.make(torch.float32), (key, None)).codebook
    assert torch.equal(got, want)


def test_codes_without_keys_stay_and_are_seeded_by_the_next_batch():
    case = Case("vq", "llama", True, SMALL)
    first = case.make().codebook
    few = torch.tensor([[4.0] * 8, [-4.0] * 8], dtype=torch.float64)[[0, 0, 1]].expand(1, 2, 3, 8)
    mechanism = prepared(case.make(), (few, None))
    found = mechanism.counts > 0
    assert mechanism.counts.sort(descending=True).values.tolist() == [[2, 1, 0, 0, 0]] * 2
    assert torch.equal(mechanism.codebook[~found], first[~found])
    prepared(mechanism, (few, torch.zeros(1, 3, dtype=torch.bool)))  # nothing but pads
    assert torch.equal(mechanism.counts > 0, found)
    prepared(mechanism, (clusters(mechanism, 60, 0)[0], None))
    assert bool((mechanism.counts > 0).all()) and float(mechanism.counts.sum()) == 2 * (3 + 2 * 60)


# -- calibrate --------------------------------------------------------------------------------------------------------


def model_with(architecture: str = "llama", dtype: torch.dtype = torch.float64, **options):
    model = tiny_model(architecture, architecture != "bert", dtype)
    return patch_model(model, "vq", **{"num_codes": 16, "block_size": 8, **options})


def batch(seed: int = 0, rows: int = 4, length: int = 120) -> dict[str, torch.Tensor]:
    return {"input_ids": random_tokens(rows, length, seed=seed)}


def buffers(model) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.named_buffers() if "hf_linattn" in name}


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_calibration_fits_codes_and_reports_the_error_before(architecture):
    model = model_with(architecture)
    parameters = [p.clone() for p in model.parameters()]
    unfitted = layer_errors(model, batch(0))
    unseen = layer_errors(model, batch(9))
    result = calibrate(model, [batch(0), batch(1)])
    assert [errors[0] for errors in result.values()] == pytest.approx(unfitted)
    for errors, earlier, later in zip(result.values(), unseen, layer_errors(model, batch(9)), strict=True):
        assert errors[1] < 0.9 * errors[0] and later < 0.9 * earlier
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    again = model_with(architecture)
    calibrate(again, [batch(0), batch(1)])
    assert all(torch.equal(x, buffers(again)[name]) for name, x in buffers(model).items())


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_and_borders_of_packed_rows_have_no_say_in_calibration(side):
    tokens, pads = batch()["input_ids"], torch.zeros(4, 9, dtype=torch.long)
    order = (lambda real, pad: [pad, real]) if side == "left" else (lambda real, pad: [real, pad])
    mask = torch.cat(order(torch.ones_like(tokens), pads), 1)
    padded = {"input_ids": torch.cat(order(tokens, pads), 1), "attention_mask": mask}
    packed = {"input_ids": tokens.view(2, 240), "position_ids": torch.arange(120).repeat(2)[None].expand(2, -1)}
    plain, first_two, others = model_with(), model_with(), (model_with(), model_with())
    want = calibrate(plain, [{"input_ids": tokens}])
    calibrate(first_two, [{"input_ids": tokens[[0, 2, 1]]}])  # the second row is held out, of the packed ones too
    given = (plain, {**padded, "position_ids": positions_of(mask)}), (first_two, packed)
    for other, (same, inputs) in zip(others, given, strict=True):
        for path, errors in calibrate(other, [inputs]).items():
            assert errors == pytest.approx(want[path], rel=1e-6)
        for name, x in buffers(same).items():
            torch.testing.assert_close(buffers(other)[name], x)


def test_a_fitted_codebook_is_saved(tmp_path):
    model = model_with(dtype=torch.float32)
    calibrate(model, [batch()])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert all(torch.equal(x, buffers(loaded)[name]) for name, x in buffers(model).items())
    assert torch.equal(loaded(**batch(1)).logits, model(**batch(1)).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_calibrated_and_trained(dtype):
    model = model_with(dtype=dtype)
    (mechanism, _), earlier = get_mechanisms(model).values(), layer_errors(model, batch(9))
    calibrate(model, [batch(0), batch(1)])
    assert all(a < 0.9 * b for a, b in zip(layer_errors(model, batch(9)), earlier, strict=True))
    mechanism.counts.fill_(torch.finfo(torch.float16).max)  # as after very many tokens
    calibrate(model, [batch(2)])
    for seed in range(3):
        model.train()(**batch(seed), use_cache=False)
    assert all(x.dtype == torch.float32 and bool(x.isfinite().all()) for x in buffers(model).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_half_precision_follow_the_keys_and_are_saved_and_loaded_whole(tmp_path, dtype):
    """Keys that move by little: a hundredth of the way to them is less than a rounding, as is what a count loses."""
    model = model_with(dtype=torch.float32).to(dtype)
    mechanism, _ = get_mechanisms(model).values()
    key = torch.ones(1, 2, 32, 8, dtype=dtype)
    mechanism.prepare(key, key, key, None)
    for _ in range(300):
        mechanism.train()(key.repeat(1, 2, 1, 1), key + 0.25, key)
        mechanism.before_forward()
    moved = mechanism.codebook[mechanism.counts > 0] - 1
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25), rtol=0.1, atol=0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert all(torch.equal(x, buffers(loaded)[name]) for name, x in buffers(model).items())


def test_codes_that_were_saved_in_half_precision_load(tmp_path):
    model = model_with(dtype=torch.float32).bfloat16()
    former = {name: x.bfloat16() for name, x in buffers(model).items()}
    model.save_pretrained(tmp_path, state_dict={**model.state_dict(), **former})
    loaded = buffers(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(x.dtype == torch.float32 and torch.equal(x, former[name].float()) for name, x in loaded.items())


# -- training ---------------------------------------------------------------------------------------------------------


def test_codes_follow_the_keys_of_training_as_running_means():
    """Two forwards by the paper's sums of keys and counts, in a loop; pads and codes without keys left out."""
    mechanism = Case("vq", "llama", True, {"num_codes": 6, "block_size": 8, "ema_decay": 0.9}).make().train()
    with torch.no_grad():
        mechanism.codebook.copy_(Case("vq", "llama", True).heads(6, seed=9)[1][0])
        mechanism.codebook[:, 5] = 50.0
        mechanism.counts.copy_(torch.arange(12.0).view(2, 6))
    counts = mechanism.counts.clone()
    sums = counts[..., None] * mechanism.codebook
    for seed in range(2):
        heads = Case("vq", "llama", True).heads(LENGTH, seed=seed)
        mask = torch.arange(LENGTH) >= torch.tensor([[11], [0]])
        heads[1][0, :, :11] = torch.nan
        codebook = mechanism.codebook.clone()
        mechanism.before_forward()
        if not seed:  # nothing was read yet
            assert torch.equal(mechanism.codebook, codebook) and torch.equal(mechanism.counts, counts)
        codebook = mechanism.codebook.clone()
        mechanism(*heads, mask)
        mechanism(*heads, mask)  # as gradient checkpointing does
        mechanism.eval()
        mechanism(*(3 * x for x in heads))
        mechanism.before_forward()
        assert torch.equal(mechanism.codebook, codebook)
        mechanism.train()
        for h in range(2):
            keys = heads[1][:, h][mask]
            code = torch.tensor([nearest(codebook[h], key) for key in keys])
            for s in range(6):
                counts[h, s] = 0.9 * counts[h, s] + 0.1 * int((code == s).sum())
                sums[h, s] = 0.9 * sums[h, s] + 0.1 * keys[code == s].sum(0)
    mechanism.before_forward()
    torch.testing.assert_close(mechanism.counts, counts)
    torch.testing.assert_close(mechanism.codebook[:, 1:], sums[:, 1:] / counts[:, 1:, None])
    assert bool((mechanism.codebook[:, 5] == 50.0).all())
    # what counted nothing before the first forward is where its keys are
    torch.testing.assert_close(mechanism.codebook[0, 0], sums[0, 0] / counts[0, 0])
    codebook = mechanism.codebook.clone()
    mechanism.before_forward()  # every forward counts once
    assert torch.equal(mechanism.codebook, codebook)


def move_together(processes, patch) -> None:
    """Move the codes of mechanisms that stand for processes, first for what each sends; evaluation sends nothing."""
    sent: list[torch.Tensor] = []
    patch.setattr(distributed, "is_initialized", lambda: True)
    patch.setattr(distributed, "get_world_size", lambda: len(processes))
    patch.setattr(distributed, "all_reduce", lambda x: sent.append(x.clone()))
    for mechanism in processes:
        copy.deepcopy(mechanism).eval().before_forward()
        copy.deepcopy(mechanism).before_forward()
    assert len(sent) == len(processes)
    patch.setattr(distributed, "all_reduce", lambda x: x.copy_(sum(sent)))
    for mechanism in processes:
        mechanism.before_forward()


def test_processes_that_train_together_have_the_codes_of_one_that_has_all_their_keys(monkeypatch):
    """With unequal numbers of keys."""
    case = Case("vq", "llama", True, {"num_codes": 6, "block_size": 8, "ema_decay": 0.9})
    first, second = case.heads(LENGTH), [x[:, :, :20] for x in case.heads(LENGTH, seed=1)]
    both = [torch.cat([a, F.pad(b, (0, 0, 0, LENGTH - 20))]) for a, b in zip(first, second, strict=True)]
    mask = torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH, 20, 20])[:, None]
    whole, *processes = (case.make().train() for _ in range(3))
    for _ in range(2):
        for mechanism, heads in zip(processes, (first, second), strict=True):
            mechanism(*heads)
        whole(*both, mask)
        whole.before_forward()
        with monkeypatch.context() as patch:
            move_together(processes, patch)
        for mechanism in processes:
            torch.testing.assert_close(mechanism.codebook, whole.codebook)
            torch.testing.assert_close(mechanism.counts, whole.counts)


def test_what_was_trained_before_calibration_does_not_count_after_it():
    model = model_with()
    model.train()(**batch(0), use_cache=False)
    calibrate(model, [batch(1)])
    want = buffers(model)
    model(**batch(2), use_cache=False)
    mechanisms = get_mechanisms(model)
    for path, mechanism in mechanisms.items():
        assert torch.equal(mechanism.codebook, want[f"{path}.hf_linattn.codebook"])
        assert torch.equal(mechanism.counts, want[f"{path}.hf_linattn.counts"])


def test_with_a_decay_of_one_codes_stay():
    model = model_with(ema_decay=1.0).train()
    before = buffers(model)
    for seed in range(2):
        model(**batch(seed), use_cache=False)
    assert all(torch.equal(x, before[name]) for name, x in buffers(model).items())


def train(model, seeds, checkpointing: bool = False) -> list[torch.Tensor]:
    """Return the losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for seed in seeds:
        loss = model.train()(**batch(seed), labels=batch(seed)["input_ids"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_checkpointed_training_and_a_resumed_run_have_the_same_codes(tmp_path):
    model, checkpointed = model_with(dtype=torch.float32), model_with(dtype=torch.float32)
    start, losses = buffers(model), train(model, range(4))
    assert torch.equal(torch.stack(train(checkpointed, range(4), checkpointing=True)), torch.stack(losses))
    broken = model_with(dtype=torch.float32)
    train(broken, range(2))
    broken.save_pretrained(tmp_path)
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(resumed.eval()(**batch(7)).logits, broken.eval()(**batch(7)).logits)
    assert torch.equal(torch.stack(train(resumed, range(2, 4))), torch.stack(losses[2:]))
    for name, x in buffers(model).items():
        assert torch.equal(x, buffers(checkpointed)[name]) and torch.equal(x, buffers(resumed)[name])
        assert not torch.equal(x, start[name])


def test_decoding_in_training_mode_is_no_training():
    model = model_with().train()
    mechanism, _ = get_mechanisms(model).values()
    out = model(**batch(), use_cache=True)
    seen = mechanism.last_counts.clone()
    model(batch(1)["input_ids"][:, :1], past_key_values=out.past_key_values, use_cache=True)
    assert float(seen.sum()) == 2 * 4 * 120 and torch.equal(mechanism.last_counts, seen)
