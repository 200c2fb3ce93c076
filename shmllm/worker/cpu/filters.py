"""top_k and top_p: which entries of a row stay.

Sorting a row of a whole vocabulary takes longer than the model does for it, and a nucleus
rarely has many entries. So only the best few are sorted, and the whole row where they do
not decide.
"""

from __future__ import annotations

import torch

NUM_CANDIDATES = 256
"""The same for every batch, so that equal logits are cut in the same way beside others."""


def keep_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Set to -inf what lies outside each row's top-k, then outside its nucleus. Entries equal
    to the last one of the top-k stay; of such in the nucleus the first ones do.

    Args:
        logits: (N, V) float32.
        top_k: (N,) int64, 0 keeps all.
        top_p: (N,) float32 in (0, 1].
    """
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    best = logits.topk(num_candidates, dim=1).values
    decided = (top_k <= num_candidates) | (top_k >= logits.shape[1])
    kth = best.gather(1, (top_k.clamp(1, num_candidates) - 1)[:, None])
    kth = torch.where((top_k > 0) & (top_k <= num_candidates), kth[:, 0], -torch.inf)
    short = logits.masked_fill(logits < kth[:, None], -torch.inf)
    if (top_p < 1).any():
        short, is_inside = _keep_nucleus(
            short, best.masked_fill(best < kth[:, None], -torch.inf), top_p
        )
        decided &= is_inside
    if not decided.all():
        rest = (~decided).nonzero()[:, 0]
        short[rest] = _keep_by_sorting(logits[rest], top_k[rest], top_p[rest])
    return short


def _keep_nucleus(
    logits: torch.Tensor, best: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and for each row whether `best` holds its nucleus.

    Args:
        logits: (N, V), what the top-k left.
        best: (N, C), the largest of them, in order.
    """
    total = logits.logsumexp(dim=1, keepdim=True)
    probabilities = (best - total).exp()
    before = probabilities.cumsum(dim=1) - probabilities
    inside = (before < top_p[:, None]) & (best > -torch.inf)
    inside[:, 0] = True
    count = inside.sum(dim=1)
    last = best.gather(1, (count - 1)[:, None])
    above, equal = logits > last, logits == last
    kept = above | (equal & (equal.cumsum(dim=1) <= (count - above.sum(dim=1))[:, None]))
    all_stay = (top_p >= 1)[:, None]
    is_held = (count < best.shape[1]) | (best.shape[1] == logits.shape[1]) | all_stay[:, 0]
    return logits.masked_fill(~(kept | all_stay), -torch.inf), is_held


def _keep_by_sorting(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    sorted_logits, order = logits.sort(dim=1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth = sorted_logits.gather(1, (k - 1)[:, None])
    sorted_logits.masked_fill_(sorted_logits < kth, -torch.inf)
    probabilities = sorted_logits.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    sorted_logits.masked_fill_(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, sorted_logits)
