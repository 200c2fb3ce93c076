"""The top_k and top_p filters.

Sorting the logits of a whole vocabulary takes longer than computing them, and a nucleus rarely has
many entries. So only the best NUM_CANDIDATES entries of a row are sorted, and the whole row only
where these are too few to decide which entries stay.
"""

from __future__ import annotations

import torch

NUM_CANDIDATES = 256
"""Independent of the batch, so that a row's ties are cut in the same way in every batch."""


def keep_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Set the entries outside of each row's top-k, then those outside of its nucleus, to -inf.
    All entries that tie with the last one of the top-k stay; of the entries that tie with the last
    one of the nucleus, the first ones stay.

    Args:
        logits: (N, V) float32.
        top_k: (N,) int64; 0 keeps all entries.
        top_p: (N,) float32 in (0, 1]; 1 keeps all entries.

    Returns:
        (N, V) float32.
    """
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    best = logits.topk(num_candidates, dim=1).values
    decided = (top_k <= num_candidates) | (top_k >= logits.shape[1])
    kth = best.gather(1, (top_k.clamp(1, num_candidates) - 1)[:, None])
    kth = torch.where((top_k > 0) & (top_k <= num_candidates), kth[:, 0], -torch.inf)
    kept = logits.masked_fill(logits < kth[:, None], -torch.inf)
    if (top_p < 1).any():
        kept, is_inside = _keep_nucleus(
            kept, best.masked_fill(best < kth[:, None], -torch.inf), top_p
        )
        decided &= is_inside
    if not decided.all():
        rest = (~decided).nonzero()[:, 0]
        kept[rest] = _keep_by_sorting(logits[rest], top_k[rest], top_p[rest])
    return kept


def _keep_nucleus(
    logits: torch.Tensor, best: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply top_p to rows whose nucleus is among their best entries.

    Args:
        logits: (N, V), after top_k.
        best: (N, C), the largest logits of each row, in descending order.
        top_p: (N,) float32.

    Returns:
        The logits, and for each row whether `best` contains its nucleus.
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
