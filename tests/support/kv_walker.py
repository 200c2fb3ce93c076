"""An engine of the random walk over shared prefix caches, without a model.

It joins a folder and does random things, until its parent kills it. It reports how much it
has done, and how often it has looked at borrowed blocks; or "wrong", if a borrowed block does not
have the data of its key, or anything else is not as it has to be.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from typing import Any

from support.shared_regions import FileMemory, Member, key_of, layout_of

from shmllm.shared_kv import own_region
from shmllm.shared_kv.folder import make_folder
from shmllm.shared_kv.joining import join
from shmllm.shared_kv.region import Region
from shmllm.shared_kv.store import Store

KEY = "feedfeedfeedfeed"
ACTIONS_OF_A_REPORT = 10
NUM_KEYS = 40
SAVED_AT_ONCE = 6
HELD_AT_MOST = 10
SLOW_SHARE = 0.05
"""How often a fence, or the read of a pin, takes long: between two steps of the protocol."""


class Walker:
    """Does one random thing after the other with a tier."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: list[tuple[int, int, bytes]] = []
        self._member = self._join()
        self.num_verified = 0

    def _join(self) -> Member:
        folder = make_folder(KEY)
        return Member(join(folder, layout_of(16, 8)))

    def step(self) -> None:
        """One action."""
        actions = [self._save] * 6 + [self._borrow] * 8 + [self._give_back] * 4 + [self._refresh]
        rare = [self._clear, self._leave, self._remove, self._close]
        self._rng.choice(rare if self._rng.random() < 0.02 else actions)()
        self._verify()
        if self._member.problems:
            raise AssertionError(self._member.problems)

    def _key(self) -> tuple[int, bytes]:
        section = int(self._rng.random() < 0.3)
        return section, key_of(min(self._rng.randrange(NUM_KEYS), self._rng.randrange(NUM_KEYS)))

    def _save(self) -> None:
        wanted = [self._key() for _ in range(self._rng.randint(1, SAVED_AT_ONCE))]
        ids = self._member.tier.reserve(wanted)
        self._verify()
        for (section, key), block_id in zip(wanted, ids, strict=True):
            if block_id is not None:
                self._member.memory.write(section, block_id, key)
                self._member.tier.publish(section, block_id)

    def _borrow(self) -> None:
        section, key = self._key()
        is_held = any(each[2] == key and each[0] == section for each in self._held)
        if len(self._held) < HELD_AT_MOST and not is_held:
            block_id = self._member.tier.borrow(section, key)
            if block_id is not None:
                self._held.append((section, block_id, key))

    def _give_back(self) -> None:
        if self._held:
            section, block_id, _ = self._held.pop(self._rng.randrange(len(self._held)))
            self._member.tier.give_back(section, block_id)

    def _refresh(self) -> None:
        self._member.tier.refresh()

    def _clear(self) -> None:
        self._member.tier.clear()

    def _leave(self) -> None:
        self._end(self._member.tier.leave)

    def _remove(self) -> None:
        self._end(self._member.tier.remove)

    def _close(self) -> None:
        self._held.clear()
        self._end(self._member.tier.close)

    def _end(self, how: Any) -> None:
        """Leave, read what is lent for a while, and join again."""
        how()
        while self._held:
            self._verify()
            self._give_back()
        if self._member.memory.num_mapped:
            raise AssertionError("regions stay mapped")
        self._member = self._join()

    def _verify(self) -> None:
        memory: FileMemory = self._member.memory
        for section, block_id, key in self._held:
            self.num_verified += 1
            if not memory.has(section, block_id, key):
                raise AssertionError(
                    f"section {section}, block {block_id} has other data; the region of this "
                    f"engine has its name: {self._member.region.path.exists()}"
                )


def slow_down(rng: random.Random) -> None:
    """Let some of the moments between two steps of the protocol last long."""
    fence = vars(own_region)["fence"]

    def wait(share: float) -> None:
        if rng.random() < share:
            time.sleep(rng.uniform(0, 0.01))

    def slow_fence() -> None:
        wait(SLOW_SHARE)
        fence()
        wait(SLOW_SHARE)

    def before(of: Any, name: str, share: float) -> None:
        """Wait before a method now and then."""
        method = getattr(of, name)

        def slow(self: Any, *arguments: Any) -> Any:
            wait(share)
            return method(self, *arguments)

        setattr(of, name, slow)

    vars(own_region)["fence"] = slow_fence
    before(Region, "pins", SLOW_SHARE / 10)
    before(Region, "has_key", SLOW_SHARE)  # after a look at the generation, before the pin
    before(own_region.OwnRegion, "invalidate", SLOW_SHARE)  # after a look at the pins
    before(Store, "settle", 2 * SLOW_SHARE)  # while blocks are invalid


def walk(seed: int, output: int) -> None:
    """Walk until somebody kills this process, or something is wrong.

    Args:
        seed: decides what it does.
        output: a pipe for the reports.
    """
    rng = random.Random(seed)
    slow_down(rng)
    try:
        walker = Walker(rng)
        while True:
            for _ in range(ACTIONS_OF_A_REPORT):
                walker.step()
            os.write(output, b"%d %d\n" % (ACTIONS_OF_A_REPORT, walker.num_verified))
            walker.num_verified = 0
    except Exception:
        os.write(output, b"wrong: " + traceback.format_exc().encode())
