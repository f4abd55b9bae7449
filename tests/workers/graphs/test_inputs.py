"""Dummy batches in the static buffers: their shapes, and that they write no KV."""

from __future__ import annotations

import torch

from workers.batch import BatchBuffers
from workers.graphs.inputs import StaticInputs


def buffers() -> BatchBuffers:
    """Buffers in which an earlier step left values everywhere."""
    left = BatchBuffers(
        max_num_tokens=32, max_num_reqs=8, max_model_len=12, block_size=4, num_blocks=8, device=torch.device("cpu")
    )
    for static in (left.input_ids, left.positions, left.slot_mapping, left.block_table, left.seq_lens):
        static.tensor.fill_(77)
    left.query_start_loc.tensor.fill_(77)
    return left


def test_tokens_are_views() -> None:
    static = buffers()
    input_ids, positions = StaticInputs(static).tokens(5)
    static.input_ids.tensor[4], static.positions.tensor[4] = 1, 2
    assert (input_ids[4], positions[4]) == (1, 2)
    assert input_ids.shape == positions.shape == (5,)


def test_a_dummy_prompt_has_at_most_max_model_len_tokens() -> None:
    for size, length in ((5, 5), (20, 12)):
        metadata = StaticInputs(buffers()).dummy_prompt(size)
        assert (metadata.num_tokens, metadata.num_reqs) == (length, 1)
        assert (metadata.max_query_len, metadata.max_seq_len) == (length, length)
        assert metadata.slot_mapping.tolist() == [-1] * size
        assert metadata.block_table.tolist() == [[0, 0, 0]]
        assert metadata.seq_lens.tolist() == [length]
        assert metadata.query_start_loc.tolist() == [0, length]


def test_a_dummy_decode_spans_the_buffers() -> None:
    static = buffers()
    metadata = StaticInputs(static).dummy_decode(4)
    assert (metadata.num_tokens, metadata.num_reqs, metadata.max_query_len, metadata.max_seq_len) == (4, 4, 1, 12)
    assert metadata.slot_mapping.tolist() == [-1] * 4
    assert metadata.seq_lens.tolist() == [0] * 4
    assert metadata.query_start_loc.tolist() == [0] * 5
    assert metadata.block_table.shape == (4, 3)
    for view, whole in (
        (metadata.slot_mapping, static.slot_mapping), (metadata.block_table, static.block_table),
        (metadata.seq_lens, static.seq_lens), (metadata.query_start_loc, static.query_start_loc),
    ):  # fmt: skip
        assert view.data_ptr() == whole.tensor.data_ptr()
