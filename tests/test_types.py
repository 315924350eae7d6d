"""Samples as columns: what goes in comes out, rows are found again, spans are masks."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.samples import make_sample

from rlgen.rollout.samples import Ragged, Samples
from rlgen.types import Sample, Span, ids_of, logp_of


def rows() -> list[Sample]:
    """A plain row, a conversation of two turns by two weight versions, one without a sampled token, and one with a failure."""
    turns = (Span(0, 2, 3), Span(4, 5, 4))
    return [
        make_sample(completion="", rewards={"a": 1.0, "b": None}, reward=1.0),
        make_sample(
            group_id=2**40,
            sample_index=3,
            prompt_ids=(1,),
            completion_ids=(5, 6, 7, 8, 9),
            sampler_logp=(-1.0, -2.0, np.nan, np.nan, -3.0),
            spans=turns,
            finish_reason="length",
            seed=2**61,
            completion="",
            rewards={"a": 0.25, "b": -2.0},
            reward=-1.75,
            cached_tokens=128,
        ),
        make_sample(spans=(), completion="", rewards={"a": None, "b": None}),
        make_sample(completion="", rewards={"a": None, "b": 3.0}, reward_errors={"a": "timeout: no answer within 30 s"}),
    ]


def same(one: Sample, other: Sample) -> bool:
    """Equal; a log-prob of NaN equals NaN."""
    logp = [np.nan_to_num(sample.sampler_logp, nan=7.0) for sample in (one, other)]
    return replace(one, sampler_logp=logp[0]) == replace(other, sampler_logp=logp[1])


def test_rows_come_out_as_they_went_in_and_are_views() -> None:
    columns = Samples.of(rows())
    assert columns.labels == ("a", "b") and len(columns) == 4
    assert all(same(columns[place], row) for place, row in enumerate(rows()))
    assert (columns.completion_ids.values.dtype, columns.sampler_logp.values.dtype) == (np.int32, np.float32)
    columns.completion_ids.values[0] = 77
    assert columns[0].completion_ids[0] == 77


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [3, 1], [2], [1, 0, 3], []])
def test_rows_are_taken_in_the_order_that_is_asked(places: list[int]) -> None:
    taken = Samples.of(rows()).take(places)
    assert len(taken) == len(places) and all(same(taken[at], rows()[place]) for at, place in enumerate(places))


def test_joined_rows_are_those_of_the_parts() -> None:
    whole = Samples.of(rows())
    joined = Samples.join([whole.take([0, 1]), whole.take([]), whole.take([2, 3])])
    assert all(same(joined[place], row) for place, row in enumerate(rows()))
    assert joined.spans == whole.spans


def test_masks_counts_and_versions_follow_from_spans() -> None:
    columns = Samples.of(rows())
    assert columns.loss_mask[1].tolist() == columns[1].loss_mask.tolist() == [True, True, False, False, True]
    assert [row.loss_mask.tolist() for row in columns] == [mask.tolist() for mask in columns.loss_mask]
    assert columns.sampled_tokens.tolist() == [3, 3, 0, 3]
    assert columns.weight_version.tolist() == [0, 3, -1, 0]
    assert columns.lengths.tolist() == [5, 6, 5, 5]


def test_spans_that_touch_are_counted_once_each() -> None:
    row = make_sample(spans=(Span(0, 1, 0), Span(1, 3, 1)))
    assert Samples.of([row]).loss_mask[0].tolist() == [True, True, True] and row.weight_version == 0


def test_records_with_other_arrays_differ() -> None:
    assert make_sample() == make_sample() and make_sample() != make_sample(completion_ids=(7, 8, 9))
    assert Ragged.of([ids_of([1]), ids_of([])], np.int32) == Ragged(ids_of([1]), np.array([0, 1, 1]))
    assert logp_of([0.1]).dtype == np.float32
