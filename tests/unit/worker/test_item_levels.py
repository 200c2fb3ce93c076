"""What items add behind the first layers, beside their embeddings."""

from __future__ import annotations

import torch

from shmllm.worker.items import spread_levels


def test_images_have_levels_and_sounds_and_text_have_none() -> None:
    levels = torch.full((2, 7, 3), torch.nan)
    image, sound = torch.arange(18.0).view(2, 9), torch.ones(1, 3)
    spread_levels(levels, [(slice(1, 3), image), (slice(4, 5), sound)], 6)
    assert levels[0, 1:3].tolist() == [[3, 4, 5], [12, 13, 14]]
    assert levels[1, 1:3].tolist() == [[6, 7, 8], [15, 16, 17]]
    assert not levels[:, [0, 3, 4, 5]].any()
    assert levels[:, 6].isnan().all()
