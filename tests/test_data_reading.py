"""Cutting collated batches, and starting workers."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parcae.data_reading import WorkerInit, cut_batch, tensor_versions

Pair = namedtuple("Pair", ["x", "y"])


def test_a_collated_batch_is_cut_along_its_samples():
    x, y = torch.arange(8).reshape(4, 2), torch.arange(4)
    batch = {
        "pair": Pair(x, [y, np.arange(4)]),
        "names": ["a", "b", "c", "d"],
        "ragged": [torch.ones(n) for n in (1, 2, 3, 5)],
        "boxes": [{"box": torch.ones(n, 4)} for n in (1, 2, 3, 5)],
        "scale": torch.tensor(3.0),
        "kind": "train",
        "both": (x, y),
    }
    part = cut_batch(batch, range(1, 3), 4)
    assert isinstance(part["pair"], Pair)
    assert part["pair"].x.tolist() == [[2, 3], [4, 5]]
    assert [entry.tolist() for entry in part["pair"].y] == [[1, 2], [1, 2]]
    assert part["names"] == ["b", "c"]
    assert [len(entry) for entry in part["ragged"]] == [2, 3]
    assert [len(entry["box"]) for entry in part["boxes"]] == [2, 3]
    assert (part["scale"].item(), part["kind"]) == (3.0, "train")
    assert [entry.tolist() for entry in part["both"]] == [[[2, 3], [4, 5]], [1, 2]]
    assert len(batch["names"]) == 4


def test_other_mappings_keep_their_kind():
    part = cut_batch(UserDict(ids=torch.arange(3)), range(2, 3), 3)
    assert isinstance(part, UserDict)
    assert part["ids"].tolist() == [2]


def test_a_list_of_columns_is_no_list_of_samples_though_it_has_their_number():
    columns = cut_batch([torch.arange(2), torch.arange(2, 4)], range(1, 2), 2)
    assert [column.tolist() for column in columns] == [[1], [3]]


def test_a_tensor_of_another_length_is_refused_by_its_path():
    with pytest.raises(MisconfigurationException, match=r"batch\['a'\]\[1\]: dimension 0 is 5, .* 4 samples"):
        cut_batch({"a": (torch.ones(4), torch.ones(5))}, range(2), 4)


def test_a_change_of_a_slice_shows_in_the_whole():
    batch = {"a": [torch.ones(4)], "b": "text"}
    before = tensor_versions(batch)
    cut_batch(batch, range(2), 4)["a"][0].zero_()
    assert tensor_versions(batch) != before


def test_lightnings_worker_seeding_is_made_independent_of_the_rank():
    seen = []

    def seeding(worker_id, rank):
        seen.append((worker_id, rank))

    WorkerInit(functools.partial(seeding, rank=3))(1)
    WorkerInit(None)(0)
    assert seen == [(1, 0)]
