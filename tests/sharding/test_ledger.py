"""The account of samples."""

from __future__ import annotations

import pytest

from lightning_parcae.sharding.ledger import CommitRecord, Ledger, ReadRecord


def _write(path, *records, tail=""):
    path.write_text("".join(record.to_json() + "\n" for record in records) + tail)
    return path


def _commits(batches, epoch=0, first_step=0):
    return [CommitRecord(first_step + n, epoch, n, tuple(batch)) for n, batch in enumerate(batches)]


@pytest.mark.parametrize(
    "record", [CommitRecord(3, 1, 2, (5, "a", 7)), CommitRecord(0, 0, 0, ()), ReadRecord(4, 1), ReadRecord("x")]
)
def test_records_survive_json(record):
    line = record.to_json()
    assert "\n" not in line
    assert type(record).from_json(line) == record


def test_an_index_of_another_type_is_named_by_its_repr():
    record = CommitRecord(0, 0, 0, ((True, 3), 4))
    assert record.indices == ("(True, 3)", 4)
    assert CommitRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "3",
        "[]",
        '{"record":"commit","step":1}',
        '{"record":"commit","step":"1","epoch":0,"batch":0,"indices":[]}',
        '{"record":"read","index":1,"epoch":"0"}',
        '{"record":"other"}',
    ],
)
def test_what_is_no_record_is_refused(line):
    with pytest.raises(ValueError, match=r"record|must be"):
        Ledger().add(line)


def test_records_of_several_instances_for_the_same_steps_count_once(tmp_path):
    steps = _commits([[3, 1], [0, 2]])
    ledger = Ledger.from_files([_write(tmp_path / "a", *steps), _write(tmp_path / "b", *steps[1:])])
    (report,) = ledger.report(4)
    assert report.is_exact
    assert (report.num_committed, report.duplicated, report.lost, report.left) == (4, {}, {}, {})
    assert str(report) == "epoch 0: 4 of 4 samples committed, 0 duplicated, 0 lost, 0 left"


@pytest.mark.parametrize("other", [CommitRecord(1, 0, 1, (9, 8)), CommitRecord(1, 0, 2, (0, 2))])
def test_conflicting_records_for_one_step_are_an_error_that_names_the_file(tmp_path, other):
    files = [_write(tmp_path / "a", *_commits([[3, 1], [0, 2]])), _write(tmp_path / "b", other)]
    with pytest.raises(ValueError, match=r"b, line 1: step 1 was committed with different samples"):
        Ledger.from_files(files)


def test_accumulation_gives_a_step_several_batches(tmp_path):
    records = [CommitRecord(batch // 2, 0, batch, (batch,)) for batch in range(5)]
    ledger = Ledger.from_files([_write(tmp_path / "a", *records)], batches_per_step=2)
    assert ledger.report(5)[0].is_exact
    with pytest.raises(ValueError, match="step 0 was committed"):
        Ledger.from_files([tmp_path / "a"])


def test_duplicated_lost_and_left_samples_are_told_apart():
    ledger = Ledger()
    for record in [*_commits([[0, 1], [2, 3]]), *_commits([[3, 1], [1, 0]], epoch=1, first_step=2)]:
        ledger.add(record)
    first, second = ledger.report(6)
    assert (first.lost, first.left, first.duplicated) == ({4: 1, 5: 1}, {}, {})
    assert (second.lost, second.left, second.duplicated) == ({}, {2: 1, 4: 1, 5: 1}, {1: 1})
    assert not first.is_exact
    assert ledger.report(6, finished=True)[1].lost == {2: 1, 4: 1, 5: 1}


def test_a_gap_in_the_batches_is_a_loss_even_while_the_epoch_runs():
    ledger = Ledger()
    for record in _commits([[0], [1], [2]])[::2]:
        ledger.add(record)
    (report,) = ledger.report(4)
    assert (report.gaps, report.lost, report.left) == ((1,), {1: 1, 3: 1}, {})


def test_the_expected_samples_may_be_dropped_or_repeated():
    ledger = Ledger()
    for record in _commits([[0, 1], [2, 2]]):
        ledger.add(record)
    assert ledger.report([0, 1, 2, 2], finished=True)[0].is_exact  # weighted, with replacement
    assert ledger.report(3, finished=True)[0].duplicated == {2: 1}


def test_reads_are_shown_beside_and_change_nothing(tmp_path):
    reads = [ReadRecord(index, 0) for index in (0, 1, 1, 2)] + [ReadRecord(7)]
    ledger = Ledger.from_files([_write(tmp_path / "a", *reads, *_commits([[0, 1]]))])
    (report,) = ledger.report(2)
    assert report.is_exact
    assert report.num_reads == 4
    assert ledger.reads[None][7] == 1


def test_the_cut_off_last_line_of_a_killed_writer_is_left_out(tmp_path):
    ledger = Ledger.from_files([_write(tmp_path / "a", *_commits([[0]]), tail='{"record":"com')])
    assert ledger.num_truncated == 1
    assert ledger.report(1)[0].is_exact


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "a"
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"a, line 1: not a record: 'nonsense'"):
        Ledger.from_files([path])
