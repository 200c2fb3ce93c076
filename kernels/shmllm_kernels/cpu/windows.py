"""Where the keys that a token attends to begin."""

from __future__ import annotations

from shmllm_kernels.cpu.language import compiled


@compiled
def first_visible(position, window):
    """Returns the first position that the token at ``position`` attends to; ``window`` is the
    result of `windows.window_number`."""
    if window < 0:
        return position // -window * -window
    return max(position - window + 1, 0) if window > 0 else 0
