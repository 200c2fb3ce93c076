"""Launches the lookup of a step's tokens on a GPU."""

from __future__ import annotations

from torch import Tensor

from shmllm.models.layers import TokenEmbedding
from shmllm.worker.gpu.group import NoMeetings
from shmllm.worker.gpu.inputs import GpuInputs
from shmllm.worker.gpu.products import rows_of
from shmllm_kernels.gpu.row_copies import TableShare, embed
from shmllm_kernels.reference.step import LearnedRows


def look_up(
    out: Tensor, embedding: TokenEmbedding, inputs: GpuInputs, meetings: NoMeetings
) -> None:
    """Launch the lookup of a step's tokens, and of what is added to their embeddings.

    Args:
        out: [tokens, width], the result.
        embedding: the tables.
        inputs: the step's inputs.
        meetings: where the ranks of a group meet, of which each has a part of the table.
    """
    num_tokens, step, part, share = len(out), inputs.step, out, None
    if meetings.are_needed:
        part = meetings.part(*out.shape)
        share = TableShare(embedding.first_token, meetings.has_rest)
    learned = []
    if embedding.positions is not None:
        rows = embedding.positions[embedding.first_position :]
        learned.append(LearnedRows(rows, step.positions[:num_tokens]))
    if embedding.token_types is not None:
        learned.append(LearnedRows(embedding.token_types, step.token_types[0, :num_tokens]))
    table, token_ids = rows_of(embedding.table), step.token_ids[:num_tokens]
    of_rest = learned if meetings.has_rest else ()
    embed(part, table, token_ids, inputs.last_tokens, embedding.scale, of_rest, share)
    if meetings.are_needed:
        meetings.sum_parts(out)
    if embedding.added is not None:
        out.add_(embedding.added)
