"""The slot cache: what attention layers read is what each row wrote."""

from __future__ import annotations

import torch

from hosted_tinker.sampling.kv_cache import SlotCache

CPU = torch.device("cpu")
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def make_prompt(value: float, length: int) -> Layers:
    """Two layers of two heads; keys hold `value`, values its negative."""
    keys = torch.full((1, 2, length, 3), value)
    return [(keys, -keys), (10 * keys, -10 * keys)]


def step(cache: SlotCache, values: list[float]) -> list[torch.Tensor]:
    """Writes one position of every row; returns what both layers read of head 0 as [B, T]."""
    cache.begin_step(CPU)
    keys = torch.tensor(values)[:, None, None, None].expand(-1, 2, 1, 3)
    read = [
        cache.update(scale * keys, -scale * keys, layer)[0] for layer, scale in ((0, 1), (1, 10))
    ]
    cache.end_step()
    return [keys[:, 0, :, 0] for keys in read]


def rows_of(read: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [row[:length].tolist() for row, length in zip(read, lengths, strict=True)]


def test_rows_of_unequal_length_write_where_each_ends() -> None:
    cache = SlotCache(max_rows=4, max_length=16)
    cache.add_rows(make_prompt(1.0, 3), 1)
    cache.add_rows(make_prompt(2.0, 1), 2)
    first, second = step(cache, [7.0, 8.0, 9.0])
    assert rows_of(first, [4, 2, 2]) == [[1, 1, 1, 7], [2, 8], [2, 9]]
    assert rows_of(second, [4, 2, 2]) == [[10, 10, 10, 70], [20, 80], [20, 90]]
    assert first.shape == (3, 4)


def test_positions_and_mask_of_a_step() -> None:
    cache = SlotCache(max_rows=4, max_length=16)
    cache.add_rows(make_prompt(1.0, 2), 1)
    cache.add_rows(make_prompt(2.0, 1), 1)
    positions, mask = cache.begin_step(CPU)
    assert positions.tolist() == [[2], [1]]
    assert mask.tolist() == [[[[True, True, True]]], [[[True, True, False]]]]


def test_the_last_row_takes_the_place_of_one_that_ends() -> None:
    cache = SlotCache(max_rows=4, max_length=16)
    for value in (1.0, 2.0, 3.0):
        cache.add_rows(make_prompt(value, int(value)), 1)
    cache.remove_row(0)
    assert cache.lengths == [3, 2]
    assert rows_of(step(cache, [8.0, 9.0])[0], [4, 3]) == [[3, 3, 3, 8], [2, 2, 9]]


def test_buffers_double_keep_their_rows_and_go_with_the_last() -> None:
    cache = SlotCache(max_rows=3, max_length=700)
    cache.add_rows(make_prompt(1.0, 255), 1)
    assert cache.allocated_shape == (1, 256)
    cache.add_rows(make_prompt(2.0, 300), 1)
    assert cache.allocated_shape == (2, 512)
    cache.add_rows(make_prompt(3.0, 600), 1)
    assert cache.allocated_shape == (3, 700)
    read = step(cache, [7.0, 8.0, 9.0])[0]
    assert rows_of(read, [256, 301, 601]) == [
        [1.0] * 255 + [7.0],
        [2.0] * 300 + [8.0],
        [3.0] * 600 + [9.0],
    ]
    for _ in range(3):
        cache.remove_row(0)
    assert cache.allocated_shape == (0, 0)
