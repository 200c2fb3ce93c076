"""How long sounds are divided."""

from __future__ import annotations

import numpy as np
import pytest

from shmllm.frontend.transcription.windows import divide

RATE, MOST = 1000, 30


def noise(seconds: float) -> np.ndarray:
    drawn = np.random.default_rng(1).normal(0, 0.3, int(seconds * RATE))
    return drawn.astype(np.float32)


@pytest.mark.parametrize("seconds", [0.001, 1, 29.999, 30])
def test_a_short_sound_is_one_window(seconds: float) -> None:
    samples = noise(seconds)
    ((start, window),) = divide(samples, RATE, MOST)
    assert start == 0
    assert window is not None
    assert np.array_equal(window, samples)


@pytest.mark.parametrize("seconds", [30.001, 61, 200])
def test_windows_are_the_sound(seconds: float) -> None:
    samples = noise(seconds)
    windows = divide(samples, RATE, MOST)
    assert np.array_equal(np.concatenate([window.samples for window in windows]), samples)
    assert all(0 < len(window.samples) <= MOST * RATE for window in windows)
    assert all(len(window.samples) >= (MOST - 5) * RATE for window in windows[:-1])
    starts = np.cumsum([0, *(len(window.samples) for window in windows[:-1])]) / RATE
    assert np.allclose([window.start for window in windows], starts)


def test_the_cut_is_in_the_pause() -> None:
    samples = noise(50)
    samples[27_400:27_700] *= 0.01
    first, _ = divide(samples, RATE, MOST)
    assert 27_400 <= len(first.samples) <= 27_700


def test_silence_gives_windows_as_long_as_possible() -> None:
    first, second = divide(np.zeros(40 * RATE, np.float32), RATE, MOST)
    assert len(first.samples) > 29.5 * RATE
    assert len(second.samples) > 10 * RATE


def test_the_last_window_is_no_sound_that_a_model_finds_too_short() -> None:
    first, last = divide(np.zeros(30 * RATE + 1, np.float32), RATE, MOST)
    assert len(first.samples) + len(last.samples) == 30 * RATE + 1
    assert len(last.samples) > RATE // 10
