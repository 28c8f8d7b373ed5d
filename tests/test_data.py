"""The elastic loader: the same samples, in the same order, with the same bits, whatever the layout does."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import pickle
import random
import time
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_parcae.data import AbsentBatch, ElasticLoader, ReadPosition


class Augmented(Dataset):
    """Serves (index, noise) with noise from all three generators, none of them seeded by the dataset."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(1).double() + random.random() + np.random.rand()


class AugmentedInBatches(Augmented):
    def __getitems__(self, indices):
        noise = torch.rand(len(indices)).double()  # one call for all: the seeds must not be per sample
        return [(torch.tensor(index), noise[n : n + 1]) for n, index in enumerate(indices)]


class Stream(IterableDataset):
    def __init__(self, size, real_size=None):
        self.size, self.real_size = size, size if real_size is None else real_size

    def __len__(self):
        return self.size

    def __iter__(self):
        for index in range(self.real_size):
            yield torch.tensor(index), torch.rand(1).double() + random.random() + np.random.rand()


class Instances:
    """Several instances in one process, each with its own loader as in a real job."""

    def __init__(self, make, count, *, seed=5, micro_batch_size=2, **options):
        self.layout = (1, 0)  # D, version
        self.loaders = [
            ElasticLoader(
                make(),
                seed=seed,
                micro_batch_size=micro_batch_size,
                position=lambda number=number: self.position(number),
                **options,
            )
            for number in range(count)
        ]

    def position(self, number):
        num_pipelines, version = self.layout
        return ReadPosition(version, num_pipelines, number) if number < num_pipelines else None

    def set_pipelines(self, num_pipelines):
        if num_pipelines != self.layout[0]:
            self.layout = (num_pipelines, self.layout[1] + 1)

    def step(self):
        """Return the global batch as the pipelines read it together; check that they agree on it."""
        parts = [next(loader) for loader in self.loaders]
        plans = {repr(loader.current) for loader in self.loaders}
        assert len(plans) == 1
        for number, part in enumerate(parts):
            expected = self.position(number)
            plan = self.loaders[number].current
            taken = plan.samples(expected.num_pipelines, expected.pipeline) if expected else ()
            assert isinstance(part, AbsentBatch) if not taken else len(part[0]) == len(taken)
        return join(parts)

    def reread(self, num_pipelines):
        """Return the batch handed out last, read again by ``num_pipelines`` pipelines."""
        return join(
            [self.loaders[number].reread(ReadPosition(99, num_pipelines, number)) for number in range(num_pipelines)]
        )

    def epochs(self, plan, count=2, rereads=0):
        """Return every global batch; ``plan`` gives the number of pipelines by batch of each epoch."""
        batches = []
        for epoch in range(count):
            for loader in self.loaders:
                loader.set_epoch(epoch)
                iter(loader)
            for batch in range(len(self.loaders[0])):
                self.set_pipelines(plan.get(batch, self.layout[0]))
                batches.append(self.step())
                if rereads:
                    assert self.reread(1 + batch % rereads) == batches[-1]
        for loader in self.loaders:
            loader.close()
        return batches


def join(parts):
    present = [part for part in parts if not isinstance(part, AbsentBatch)]
    return [torch.cat([part[entry] for part in present]).flatten().tolist() for entry in (0, 1)]


def weighted():
    return WeightedRandomSampler(torch.tensor([1.0, 9.0] * 22 + [1.0]), 45, replacement=True)


def seeded_generator(seed):
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "shuffle": lambda: DataLoader(Augmented(45), batch_size=8, shuffle=True),
    "sequential": lambda: DataLoader(Augmented(45), batch_size=8),
    "drop_last": lambda: DataLoader(Augmented(45), batch_size=8, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(Augmented(45), batch_size=8, sampler=weighted()),
    "batch_sampler": lambda: DataLoader(Augmented(45), batch_sampler=BatchSampler(RandomSampler(range(45)), 7, False)),
    "generator": lambda: DataLoader(Augmented(45), batch_size=8, shuffle=True, generator=seeded_generator(3)),
    "ragged_tail": lambda: DataLoader(Augmented(45), batch_size=22, shuffle=True),  # 1 sample for up to 4 pipelines
    "getitems": lambda: DataLoader(AugmentedInBatches(45), batch_size=8, shuffle=True),
    "stream": lambda: DataLoader(Stream(45), batch_size=8),
    "stream_drop_last": lambda: DataLoader(Stream(45), batch_size=8, drop_last=True),
}
CHANGES = {0: 2, 1: 3, 3: 1, 4: 2, 5: 4}
SETTLED = {0: 1}


@pytest.mark.parametrize("kind", LOADERS)
def test_pipelines_together_read_what_one_reads_at_every_step(kind):
    make = LOADERS[kind]
    want = Instances(make, 1).epochs(SETTLED)
    assert Instances(make, 4).epochs(CHANGES, rereads=4) == want
    per_epoch = len(want) // 2
    assert len(want) == 2 * len(make())
    if kind not in ("weighted", "drop_last", "stream_drop_last"):
        for epoch in range(2):
            used = [index for batch in want[epoch * per_epoch :][:per_epoch] for index in batch[0]]
            assert sorted(used) == list(range(45))
    first, second = want[:per_epoch], want[per_epoch:]
    assert [noise for _, noise in first] != [noise for _, noise in second]
    if kind not in ("sequential", "stream", "stream_drop_last"):
        assert [indices for indices, _ in first] != [indices for indices, _ in second]


def test_workers_read_the_same_bits_and_leave_nothing_behind():
    settings = {"batch_size": 8, "shuffle": True}
    want = Instances(lambda: DataLoader(Augmented(24), **settings), 1).epochs(SETTLED, count=1)
    workers = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True, "timeout": 30}
    instances = Instances(lambda: DataLoader(Augmented(24), **settings, **workers), 2)
    assert instances.epochs({0: 2, 1: 1, 2: 2}, count=1, rereads=2) == want
    assert multiprocessing.active_children() == []


def test_spawned_workers_read_the_same_bits():
    settings = {"batch_size": 4, "shuffle": True}
    want = Instances(lambda: DataLoader(Augmented(4), **settings), 1).epochs(SETTLED, count=1)
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert Instances(lambda: DataLoader(Augmented(4), **settings, **spawned), 1).epochs(SETTLED, count=1) == want
    assert multiprocessing.active_children() == []


def test_a_repeated_sample_is_augmented_anew():
    loader = DataLoader(Augmented(2), batch_size=8, sampler=WeightedRandomSampler([1.0, 1.0], 8, replacement=True))
    ((_, noise),) = Instances(lambda: loader, 1).epochs(SETTLED, count=1)
    assert len(set(noise)) == 8


def test_the_processes_own_generators_are_left_alone():
    def draw():
        return torch.rand(1).item(), random.random(), np.random.rand()

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    want = draw()
    for kind in ("shuffle", "stream", "weighted"):
        seed()
        Instances(LOADERS[kind], 1).epochs(SETTLED, rereads=1)
        assert draw() == want
    generator = seeded_generator(3)
    Instances(lambda: DataLoader(Augmented(8), batch_size=4, shuffle=True, generator=generator), 1).epochs(SETTLED)
    assert torch.equal(generator.get_state(), seeded_generator(3).get_state())


def test_the_order_depends_on_the_seed_and_on_the_users_generator():
    def order(seed, generator_seed):
        make = lambda: DataLoader(  # noqa: E731
            Augmented(20), batch_size=20, shuffle=True, generator=seeded_generator(generator_seed)
        )
        return Instances(make, 1, seed=seed).loaders[0].order.digest

    digests = {order(*seeds) for seeds in [(1, 1), (1, 2), (2, 1)]}
    assert len(digests) == 3
    assert order(1, 1) in digests


def test_micro_batch_size_by_default_cuts_into_at_most_eight():
    instances = Instances(LOADERS["ragged_tail"], 1, micro_batch_size=None)
    instances.step()
    assert [len(micro) for micro in instances.loaders[0].current.microbatches] == [3] * 7 + [1]
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1"):
        Instances(LOADERS["shuffle"], 1, micro_batch_size=0)


# -- position ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [1, 5])
@pytest.mark.parametrize("kind", ["shuffle", "stream"])
def test_a_state_continues_in_another_process_in_the_middle_of_an_epoch(kind, taken):
    want = Instances(LOADERS[kind], 1).epochs(SETTLED)
    before = Instances(LOADERS[kind], 2)
    before.set_pipelines(2)
    for loader in before.loaders:
        loader.set_epoch(1)
        iter(loader)
    assert [before.step() for _ in range(taken)] == want[6 : 6 + taken]
    state = json.loads(json.dumps(before.loaders[0].state_dict()))
    after = Instances(LOADERS[kind], 3, seed=999)  # another seed: the epoch keeps the one it began with
    after.set_pipelines(3)
    for loader in after.loaders:
        loader.load_state_dict(state)
        iter(loader)
        loader.set_epoch(1)
        iter(loader)  # Lightning may call it twice
    assert [after.step() for _ in range(6 - taken)] == want[6 + taken :]


def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next():
    want = Instances(LOADERS["shuffle"], 1).epochs(SETTLED)
    before = Instances(LOADERS["shuffle"], 1)
    assert before.epochs(SETTLED, count=1) == want[:6]
    state = before.loaders[0].state_dict()
    assert (state["epoch"], state["batch"]) == (0, 6)
    # as Lightning does: the epoch is announced after iter(), which was called while the trainer was set up
    after = Instances(LOADERS["shuffle"], 1)
    loader = after.loaders[0]
    loader.load_state_dict(state)
    iter(loader)
    loader.set_epoch(1)
    assert [after.step() for _ in range(6)] == want[6:]
    # in a plain loop the first pass is over, the next one is another one
    loader.load_state_dict(state)
    assert list(loader) == []
    assert len(list(loader)) == 6
    assert (loader.epoch, loader.cycle) == (0, 1)


def test_passes_within_an_epoch_differ_in_training_only():
    def orders(is_training):
        loader = Instances(LOADERS["shuffle"], 1, is_training=is_training).loaders[0]
        return [[batch[0].tolist() for batch in loader] for _ in range(2)]

    first, second = orders(is_training=True)
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(45))
    first, second = orders(is_training=False)
    assert first == second


def test_a_state_of_another_loader_is_refused():
    loader = Instances(LOADERS["shuffle"], 1).loaders[0]
    with pytest.raises(MisconfigurationException, match=r"another kind of loader \(\['_snapshot'\]\)"):
        loader.load_state_dict({"_snapshot": {}})
    state = Instances(LOADERS["ragged_tail"], 1).loaders[0].state_dict()
    with pytest.raises(MisconfigurationException, match="batch 1 of 3 within epoch 0, but this loader has 6"):
        loader.load_state_dict(state | {"batch": 1})
    loader.load_state_dict(state | {"epoch": 4, "batch": 3})  # between two epochs nothing is half done
    assert (loader.epoch, loader.batch) == (4, 6)


def test_the_boundary_comes_first_and_may_jump_and_change_the_position():
    want = Instances(LOADERS["shuffle"], 1).epochs(SETTLED)
    seen = []

    def boundary(loader):
        seen.append((loader.epoch, loader.batch))
        if loader.batch == 0 and loader.epoch == 0:
            loader.jump(loader.state_dict() | {"epoch": 1, "batch": 4})
            instances.set_pipelines(2)

    instances = Instances(LOADERS["shuffle"], 2)
    instances.loaders[0]._boundary = instances.loaders[1]._boundary = boundary
    assert instances.step() == want[10]
    assert instances.step() == want[11]
    with pytest.raises(StopIteration):
        next(instances.loaders[0])
    assert seen == [(0, 0)] * 2 + [(1, 5)] * 2  # none at the end of the epoch


def test_prefetched_batches_are_not_seen(tmp_path):
    class Logged(Augmented):
        def __getitem__(self, index):
            with open(tmp_path / "reads", "a") as log:
                log.write(f"{index}\n")
            return super().__getitem__(index)

    make = lambda: DataLoader(Logged(40), batch_size=4, num_workers=1, prefetch_factor=3)  # noqa: E731
    instances = Instances(make, 2, micro_batch_size=1)
    used = [instances.step() for _ in range(2)]
    deadline = time.monotonic() + 20
    while len((tmp_path / "reads").read_text().split()) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert instances.loaders[0].state_dict()["batch"] == 2
    instances.set_pipelines(2)
    used += [instances.step() for _ in range(8)]
    assert [index for indices, _ in used for index in indices] == list(range(40))
    assert len((tmp_path / "reads").read_text().split()) > 40


def test_a_new_version_with_the_same_part_keeps_the_workers():
    instances = Instances(lambda: DataLoader(Augmented(24), batch_size=4, num_workers=1), 1)
    instances.step()
    (worker,) = multiprocessing.active_children()
    instances.layout = (1, 7)
    instances.step()
    assert multiprocessing.active_children() == [worker]
    instances.loaders[0].close()


@pytest.mark.parametrize("whole_batches", [False, True])
def test_any_sequence_of_layouts_gives_the_same_batches(whole_batches):
    def make():
        sizes = [3, 1, 5, 2, 1, 1, 4, 2, 6, 1, 3, 1]  # often fewer micro-batches than pipelines
        ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        return DataLoader(Augmented(30), batch_sampler=[list(range(*pair)) for pair in pairwise(ends)])

    want = Instances(make, 1, micro_batch_size=1).epochs(SETTLED, count=1)
    for trial in range(15):
        dice = random.Random(trial)
        places = [None] * 4
        loaders = [
            ElasticLoader(
                make(),
                seed=5,
                micro_batch_size=1,
                position=lambda number=number, places=places: places[number],
                whole_batches=whole_batches,
            )
            for number in range(4)
        ]
        layouts = []
        for num_pipelines in (dice.randint(1, 4), dice.randint(2, 4)):
            taken = [ReadPosition(0, num_pipelines, pipeline) for pipeline in range(num_pipelines)]
            layouts.append(dice.sample(taken + [None] * (4 - num_pipelines), 4))
        for batch in want:
            places[:] = dice.choice(layouts)
            parts = {places[number]: next(loader) for number, loader in enumerate(loaders)}
            parts.pop(None, None)
            assert join([parts[place] for place in sorted(parts, key=lambda place: place.pipeline)]) == batch


# -- what stands in for a batch ----------------------------------------------------------------------------


def test_an_absent_batch_says_why():
    instances = Instances(LOADERS["ragged_tail"], 3)
    instances.set_pipelines(2)
    parts = [next(loader) for _ in range(3) for loader in instances.loaders]
    idle, empty = parts[2], parts[-2]
    assert "only the first stage" in repr(idle)
    assert "global batch 2 of epoch 0 has 1 micro-batch(es) for 2 pipelines" in repr(empty)
    with pytest.raises(AttributeError, match=r"no batch to take \.shape from: .*first stage"):
        idle.shape
    with pytest.raises(TypeError, match="no batch to take"):
        idle["image"]
    with pytest.raises(TypeError, match="no batch to take"):
        _, _ = idle
    for copied in (copy.deepcopy(idle), pickle.loads(pickle.dumps(idle))):
        assert copied.reason == idle.reason


def test_an_absent_batch_passes_through_lightnings_transfer():
    from lightning.fabric.utilities import move_data_to_device

    absent = AbsentBatch("no place")
    assert move_data_to_device(absent, torch.device("cpu")) is absent


def test_the_loader_looks_like_the_users():
    user = LOADERS["shuffle"]()
    loader = Instances(lambda: user, 1).loaders[0]
    assert (loader.dataset, loader.batch_size, loader.num_workers) == (user.dataset, 8, 0)
    assert "batch=0 of 6" in repr(loader)
    with pytest.raises(AttributeError):
        loader.no_such_attribute
    with pytest.raises(RuntimeError, match="no batch was handed out yet"):
        loader.current


# -- trouble ----------------------------------------------------------------------------------------------


class Broken(Augmented):
    def __init__(self, size, error):
        super().__init__(size)
        self.error = error

    def __getitem__(self, index):
        if index == 5 and self.error is not None:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_comes_through_and_the_batch_is_not_counted(num_workers):
    dataset = Broken(12, ZeroDivisionError("sample five"))
    instances = Instances(lambda: DataLoader(dataset, batch_size=4, num_workers=num_workers), 1)
    instances.step()
    with pytest.raises(ZeroDivisionError, match="sample five"):
        instances.step()
    dataset.error = None
    assert instances.step()[0] == [4, 5, 6, 7]
    instances.loaders[0].close()


def test_stop_iteration_in_a_dataset_does_not_end_the_epoch_in_silence():
    instances = Instances(lambda: DataLoader(Broken(12, StopIteration()), batch_size=6), 1)
    with pytest.raises(RuntimeError, match="raised StopIteration in global batch 0"):
        instances.step()


def test_a_stream_shorter_than_it_says_is_refused():
    instances = Instances(lambda: DataLoader(Stream(12, 9), batch_size=4), 1)
    with pytest.raises(MisconfigurationException, match="says it has 12 samples, but its stream ended after 9"):
        list(instances.loaders[0])


@pytest.mark.parametrize("mutate", [True, False])
def test_a_stream_batch_that_was_changed_in_place_is_read_again(mutate):
    reads = []

    class Counted(Stream):
        def __iter__(self):
            reads.append(0)
            return super().__iter__()

    loader = Instances(lambda: DataLoader(Counted(12), batch_size=4), 1).loaders[0]
    batch = next(loader)
    want = batch[1].tolist()
    if mutate:
        batch[1].zero_()
    assert loader.reread(ReadPosition(1, 1, 0))[1].tolist() == want
    assert len(reads) == 1 + mutate


def test_a_collate_function_that_draws_is_replayed_and_with_whole_batches_does_not_see_the_layout():
    def mask(samples):
        return torch.stack([index for index, _ in samples]), torch.rand(len(samples)).double()

    def make():
        return DataLoader(Augmented(24), batch_size=8, shuffle=True, collate_fn=mask)

    parts = Instances(make, 2)
    parts.set_pipelines(2)
    batch = parts.step()
    assert parts.reread(2) == batch
    want = Instances(make, 1, whole_batches=True).epochs(SETTLED, count=1)
    assert Instances(make, 3, whole_batches=True).epochs({0: 3, 1: 2}, count=1, rereads=3) == want


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.0 if index < 16 else 0.3)
        return index


def test_closing_waits_for_a_sample_and_not_for_a_batch():
    loader = Instances(lambda: DataLoader(Slow(), batch_size=16, num_workers=1), 1).loaders[0]
    next(loader)
    time.sleep(0.1)  # the worker is in the middle of the next batch, which takes 4.8 s
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2.0
    assert multiprocessing.active_children() == []


class SeesWorker(Dataset):
    prefix = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.prefix + index


def prepare(worker_id):
    get_worker_info().dataset.prefix = 100 * (worker_id + 1)


def test_the_users_worker_init_function_finds_its_dataset():
    make = lambda: DataLoader(SeesWorker(), batch_size=4, num_workers=1, worker_init_fn=prepare)  # noqa: E731
    assert next(Instances(make, 1).loaders[0]).tolist() == [100, 101, 102, 103]
    assert multiprocessing.active_children() == []


def test_many_changes_leave_memory_processes_and_descriptors_flat():
    def resident():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    instances = Instances(lambda: DataLoader(Augmented(4000), batch_size=4, shuffle=True), 1)
    few = Instances(lambda: DataLoader(Augmented(4000), batch_size=4, shuffle=True, num_workers=1), 1)
    for loaders, changes in ((instances, 300), (few, 8)):
        for count in range(2 * changes):
            if count == changes:
                before = resident(), len(os.listdir("/proc/self/fd"))
            loaders.layout = (1 + count % 2, count)
            next(loaders.loaders[0])
        assert resident() - before[0] < 4
        assert len(os.listdir("/proc/self/fd")) <= before[1] + 2
        loaders.loaders[0].close()
    assert multiprocessing.active_children() == []
