"""The memory behind the ids."""

import torch

from rayfin.cache.kv_tensors import HUGE_BYTES, KVLayout, KVTensors, page_bytes


def test_page_bytes() -> None:
    """2 x layers x page_size x kv_heads x head_dim x dtype size, where keys and values agree."""
    layouts = [KVLayout(2, 8, 8)] * 3
    assert page_bytes(layouts, 16, torch.float32) == 2 * 3 * 16 * 2 * 8 * 4
    assert page_bytes(layouts, 16, torch.bfloat16) == 2 * 3 * 16 * 2 * 8 * 2
    assert page_bytes(layouts, 16, torch.float8_e4m3fn) == 2 * 3 * 16 * 2 * 8
    assert page_bytes([KVLayout(2, 8, 12)], 4, torch.float32) == 4 * 2 * (8 + 12) * 4


def test_tensors_are_zero_and_of_the_bytes_promised() -> None:
    layouts = [KVLayout(2, 8, 12), KVLayout(1, 4, 4)]
    cache = KVTensors(layouts, 5, 4, torch.float32, torch.device("cpu"))
    tensors = [*cache.keys, *cache.values]
    assert cache.keys[0].shape == (5, 4, 2, 8) and cache.values[0].shape == (5, 4, 2, 12)
    assert not any(tensor.any() for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == 5 * page_bytes(layouts, 4, torch.float32)


def test_large_tensors_are_zero_and_outlive_their_maker() -> None:
    pages = HUGE_BYTES // (4 * 2 * 8 * 2) + 3
    cache = KVTensors([KVLayout(2, 8, 4)], pages, 4, torch.bfloat16, torch.device("cpu"))
    keys, values = cache.keys[0], cache.values[0]
    assert keys.shape == (pages, 4, 2, 8) and keys.is_contiguous() and keys.nbytes >= HUGE_BYTES
    assert values.shape == (pages, 4, 2, 4) and values.nbytes < HUGE_BYTES
    assert not keys.any()
    del cache
    keys[-1] = 1.0
    assert keys.sum() == 4 * 2 * 8
