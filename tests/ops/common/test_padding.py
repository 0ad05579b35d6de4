"""Every real token is in exactly one sequence, in order, and comes back to its place."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_linattn.ops.common.padding import Packed, find_sequences, first_of_block, from_the_left

ROWS, LENGTH = 3, 17


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.booleans(), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH),
    st.lists(st.integers(0, 1), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH),
)
def test_sequences_are_what_a_loop_over_tokens_finds(mask, steps):
    mask = torch.tensor(mask).view(ROWS, LENGTH)
    ids = torch.tensor(steps).view(ROWS, LENGTH).cumsum(1)
    want = []
    for row in range(ROWS):
        found: dict[int, list[int]] = {}
        for column in range(LENGTH):
            if mask[row, column]:
                found.setdefault(int(ids[row, column]), []).append(row * LENGTH + column)
        want += [(row, places, number == len(found) - 1) for number, places in enumerate(found.values())]
    groups = find_sequences(ROWS, LENGTH, mask, ids, mask.device)
    assert groups[0].rows.tolist() == list(range(ROWS))
    got, size = [], 0
    for group in groups:
        size += group.index.numel() if group is not groups[0] else 0
        are_last = torch.isin(torch.arange(len(group.rows)), group.last)
        for index, length, row, last in zip(group.index, group.lengths, group.rows, are_last, strict=True):
            if length:
                got.append((int(row), index[:length].tolist(), bool(last)))
            else:
                assert last  # the row is empty: this is all there is of it
    assert sorted(got) == sorted(want)
    assert size < 2 * ROWS * LENGTH
    assert groups and sum(len(g.last) for g in groups) == ROWS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH))
def test_packed_sequences_are_the_runs_of_equal_ids(steps):
    ids = torch.tensor(steps).view(ROWS, LENGTH).cumsum(1)
    found, places = Packed.of(ids, ROWS), []
    for row in range(ROWS):
        starts = [0, *(i for i in range(1, LENGTH) if ids[row, i] != ids[row, i - 1])]
        places += [(row, at, end - at) for at, end in zip(starts, [*starts[1:], LENGTH], strict=True)]
    assert found.places.tolist() == [list(place) for place in places]
    assert [places[i] for i in found.last] == [place for place in places if place[1] + place[2] == LENGTH]
    assert found.begins.nonzero().tolist() == [[row, start] for row, start, _ in places]
    turned = Packed.of(ids.flip(1), ROWS)
    assert found.backwards().places.tolist() == turned.places.tolist()  # the C keeps states by number and start
    assert [x for x in found.shortened().places.tolist() if x[2]] == Packed.of(ids[:, :-1], ROWS).places.tolist()


def test_taken_and_put_back():
    x = torch.randn(ROWS, 2, LENGTH, 3, dtype=torch.float64)
    mask = torch.rand(ROWS, LENGTH) < 0.7
    ids = (torch.arange(LENGTH) // 5).expand(ROWS, -1)
    back = torch.zeros_like(x)
    for group in find_sequences(ROWS, LENGTH, mask, ids, x.device):
        rows = group.take(x)
        assert not (rows * ~group.present[:, None, :, None]).any()
        back = group.put(rows, back)
    torch.testing.assert_close(back, x * mask[:, None, :, None])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=ROWS * LENGTH, max_size=ROWS * LENGTH))
def test_real_tokens_come_first_in_order_and_nothing_stands_behind(real):
    mask, generator = torch.tensor(real).view(ROWS, LENGTH), torch.Generator().manual_seed(0)
    heads = [torch.randn(ROWS, 2, LENGTH, width, generator=generator) for width in (3, 4)]
    *moved, lengths = from_the_left(*heads, mask)
    for row in range(ROWS):
        count = int(mask[row].sum())
        assert lengths[row] == count
        for x, got in zip(heads, moved, strict=True):
            assert torch.equal(got[row, :, :count], x[row][:, mask[row]]) and not got[row, :, count:].any()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 20), st.integers(1, 6))
def test_the_first_of_a_block_begins_one_in_every_row(read, count, size):
    for rows in (read, read[:1]):
        first, alike = first_of_block(torch.tensor(rows), count, size), len(set(rows)) == 1
        begins = [x for x in range(count) if all((y + x) % size == 0 for y in rows) and x + size <= count]
        assert first in [*begins[:1], count]
        assert first < count or not begins or not alike  # rows of one length begin theirs together
