"""Random walks of engines without a model over shared prefix caches, with kills and stops.

    python -m support.kv_walks SEED ENGINES ROUNDS

A process of its own, because it forks engines: it has one thread, and nothing to import again.
"""

from __future__ import annotations

import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

from support.kv_walker import KEY, walk
from support.shared_regions import Member, layout_of
from support.waiting import PATIENCE_S

from shmllm.shared_kv.folder import (
    DIRECTORY_VARIABLE,
    make_folder,
    places,
    region_path,
    remove_if_empty,
)
from shmllm.shared_kv.joining import join
from shmllm.shared_kv.region_files import remove

MEAN_PAUSE_S = 0.01
LONGEST_STOP_S = 0.02


class Engine(NamedTuple):
    """A process, and the pipe that has its reports."""

    pid: int
    output: TextIO


@dataclass
class Figures:
    """What a walk has done."""

    actions: int = 0
    verified: int = 0
    kills: int = 0
    kills_of_stopped: int = 0
    stops: int = 0
    most_regions: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began_s
        return (
            f"{self.actions:,} actions, {self.verified:,} looks at borrowed blocks, {self.kills} "
            f"kills ({self.kills_of_stopped} of stopped ones), {self.stops} stops, at most "
            f"{self.most_regions} regions, {seconds:.0f} s"
        )


class Walk:
    """Engines in processes of their own.

    Args:
        seed: decides what they do and what is done to them.
        num_engines: how many run at a time.
    """

    def __init__(self, seed: int, num_engines: int) -> None:
        self._rng = random.Random(seed)
        self._num_engines = num_engines
        self._root = Path(tempfile.mkdtemp(prefix="kv-walk-", dir="/dev/shm"))
        os.environ[DIRECTORY_VARIABLE] = str(self._root)
        self._engines: list[Engine] = []
        self._selector = selectors.DefaultSelector()
        self.figures = Figures()

    def run(self, num_rounds: int) -> Figures:
        """Disturb the engines so often; then check that nothing leaks.

        Raises:
            AssertionError: a borrowed block had other data, an engine failed, or something leaked.
        """
        try:
            for _ in range(num_rounds):
                while len(self._engines) < self._num_engines:
                    self._start()
                self._listen(self._rng.expovariate(1 / MEAN_PAUSE_S))
                self._disturb()
        finally:
            self._kill_all()
            try:
                self._check_leaks()
            finally:
                shutil.rmtree(self._root)
        return self.figures

    def _start(self) -> None:
        reading, writing = os.pipe()
        seed = self._rng.getrandbits(32)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                walk(seed, writing)
            finally:
                os._exit(1)
        os.close(writing)
        engine = Engine(pid, os.fdopen(reading))
        self._engines.append(engine)
        self._selector.register(engine.output, selectors.EVENT_READ, engine)

    def _listen(self, limit_s: float) -> None:
        deadline, silent_s = time.monotonic() + limit_s, time.monotonic() + PATIENCE_S
        is_new = True
        while is_new or time.monotonic() < deadline:
            is_new = False
            for key, _ in self._selector.select(max(deadline - time.monotonic(), 0)):
                line = key.data.output.readline()
                if not line[:1].isdigit():
                    raise AssertionError(line + key.data.output.read())
                actions, verified = map(int, line.split())
                self.figures.actions += actions
                self.figures.verified += verified
            assert time.monotonic() < silent_s

    def _disturb(self) -> None:
        folder = make_folder(KEY)
        self.figures.most_regions = max(self.figures.most_regions, len(places(folder)))
        victim = self._rng.choice(self._engines)
        how = self._rng.random()
        if how < 0.75:
            os.kill(victim.pid, signal.SIGSTOP)
            self.figures.stops += 1
            self._listen(self._rng.uniform(0, LONGEST_STOP_S))
            os.kill(victim.pid, signal.SIGCONT)
        if how > 0.75 or how < 0.08:
            if how < 0.08:
                os.kill(victim.pid, signal.SIGSTOP)
                self.figures.kills_of_stopped += 1
            self._kill(victim)
            self.figures.kills += 1

    def _kill(self, engine: Engine) -> None:
        self._engines.remove(engine)
        self._selector.unregister(engine.output)
        os.kill(engine.pid, signal.SIGKILL)
        os.waitpid(engine.pid, 0)
        rest = engine.output.read()
        engine.output.close()
        assert "wrong" not in rest, rest

    def _kill_all(self) -> None:
        for engine in [*self._engines]:
            self._kill(engine)
        self._selector.close()

    def _check_leaks(self) -> None:
        """Each region is adopted, and each of its blocks can be reused; then nothing is left."""
        folder = make_folder(KEY)
        found = places(folder)
        members = [Member(join(folder, layout_of(16, 8))) for _ in found]
        try:
            assert {each.region.place for each in members} == found.keys()
            for number, member in enumerate(members):
                names = [("last", number, n) for n in range(16)]
                assert member.save(*names) == [True] * 16
                assert member.save(*names[:8], section=1) == [True] * 8
                assert member.problems == []
        finally:
            for member in members:
                member.close()
        for place in places(folder):
            assert remove(region_path(folder, place))
        remove_if_empty(folder)
        assert not os.path.exists(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    seed, num_engines, num_rounds = map(int, sys.argv[1:])
    print(Walk(seed, num_engines).run(num_rounds))
