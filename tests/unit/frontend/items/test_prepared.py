"""The cache of prepared items."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shmllm.errors import RequestError
from shmllm.frontend.items.prepared import PreparedItem, PreparedItems


def prepared(num_bytes: int) -> PreparedItem:
    return PreparedItem(np.zeros((1, 1, num_bytes, 1), np.uint8), (1, 1, 1), 1)


def test_the_least_recently_used_items_give_way() -> None:
    cache = PreparedItems(100)
    kept = {name: cache.get(name, lambda: prepared(40)) for name in (b"a", b"b")}
    assert cache.get(b"a", lambda: prepared(1)) is kept[b"a"]
    cache.get(b"c", lambda: prepared(50))
    assert (len(cache), cache.num_bytes) == (2, 90)
    assert cache.get(b"a", lambda: prepared(1)) is kept[b"a"]
    assert cache.get(b"b", lambda: prepared(10)) is not kept[b"b"]
    cache.check_integrity()
    cache.get(b"too large", lambda: prepared(101))
    assert len(cache) == 3
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)
    cache.check_integrity()


def test_the_bytes_of_all_parts_count() -> None:
    cache = PreparedItems(100)
    item = PreparedItem.of_parts([prepared(30), prepared(40)], (2, 1, 1))
    assert (item.nbytes, item.num_tokens, len(item.parts)) == (70, 2, 2)
    cache.get(b"a", lambda: item)
    assert cache.num_bytes == 70
    cache.get(b"b", lambda: prepared(40))
    assert cache.num_bytes == 40
    cache.check_integrity()


def test_an_item_that_two_prepare_at_once_is_kept_once() -> None:
    cache = PreparedItems(100)
    cache.get(b"a", lambda: cache.get(b"a", lambda: prepared(40)))
    assert (len(cache), cache.num_bytes) == (1, 40)
    cache.check_integrity()


def test_an_error_leaves_the_cache_as_it_was() -> None:
    cache = PreparedItems(100)

    def fail() -> PreparedItem:
        raise RequestError("no")

    with pytest.raises(RequestError):
        cache.get(b"a", fail)
    assert len(cache) == 0
    cache.check_integrity()


def test_threads_share_the_cache() -> None:
    cache = PreparedItems(300)
    wrong: list[int] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for size in random.integers(1, 60, 2000).tolist():
            item = cache.get(bytes([size]), lambda size=size: prepared(size))
            if item.data.nbytes != size:
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert wrong == []
    assert cache.num_hits + cache.num_misses == 8000
    cache.check_integrity()
