"""Parts become tables: by policy, then by task, whatever is empty, however many rows make a row group."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvsim import tables
from kvsim.errors import BadTrace
from kvsim.replay import parts as module
from kvsim.replay.parts import Parts, finished, merge, read_part, read_table, write_part

TASKS = [(0, 1), (0, 2), (5, 1)]
IDS = ["one", "two", "three"]


def events(task, place, rows):
    """A table whose `promoted` tells where a row comes from."""
    columns = {"policy": IDS[place], "request": task[0], "layer": task[1], "kv_head": 0, "step": np.arange(rows)}
    counts = dict.fromkeys(("demoted", "evicted", "aged_in", "requantised"), 0)
    return tables.table("events", columns | {"promoted": np.full(rows, 100 * place + TASKS.index(task))} | counts)


@pytest.fixture
def parts(tmp_path):
    folder = Parts(tmp_path / "parts", "key")
    folder.root.mkdir()
    for task in reversed(TASKS):  # the order in which tasks are finished does not matter
        write_part(folder, task, [[{"events": events(task, i, n)} if (n := 3 * i) else {} for i in range(3)]])
    return folder


@pytest.mark.parametrize("rows", [1, 4, 7, 1000])
def test_rows_stand_by_policy_then_by_task(parts, tmp_path, monkeypatch, rows):
    monkeypatch.setattr(module, "ROWS", rows)
    merge(parts, tmp_path, TASKS, IDS)
    found = pq.read_table(tmp_path / "events.parquet")
    assert found["promoted"].to_pylist() == [100 + i for i in range(3) for _ in range(3)] + [
        200 + i for i in range(3) for _ in range(6)
    ]
    assert found["policy"].to_pylist() == ["two"] * 9 + ["three"] * 18
    assert found.schema.equals(tables.EVENTS)
    groups = pq.ParquetFile(tmp_path / "events.parquet").num_row_groups
    assert groups == {1: 6, 4: 2 + 3, 7: 1 + 2, 1000: 2}[rows]


def test_all_row_groups_share_one_dictionary_of_policies(parts, tmp_path):
    merge(parts, tmp_path, TASKS, IDS)
    chunks = pq.read_table(tmp_path / "events.parquet")["policy"].chunks
    assert {tuple(c.dictionary.to_pylist()) for c in chunks} == {tuple(IDS)}


def test_only_ledger_and_heads_are_written_without_rows(parts, tmp_path):
    merge(parts, tmp_path, TASKS, IDS)
    assert sorted(p.name for p in tmp_path.glob("*.parquet")) == ["events.parquet", "heads.parquet", "ledger.parquet"]
    assert pq.read_metadata(tmp_path / "ledger.parquet").num_rows == 0


def test_a_part_gives_back_what_was_written(parts):
    assert read_part(parts, TASKS[1])[0] == {}
    assert read_part(parts, TASKS[1])[2]["events"].equals(events(TASKS[1], 2, 6).drop_columns(["policy"]))
    assert read_table(parts, TASKS[1], "ledger") == []


def test_a_part_is_the_same_however_many_policies_are_written_at_once(parts, tmp_path):
    one_by_one = Parts(tmp_path / "others", "key")
    one_by_one.root.mkdir()
    for task in TASKS:
        write_part(one_by_one, task, [[{}], [{"events": events(task, 1, 3)}], [{"events": events(task, 2, 6)}]])
    for a, b in zip(read_part(parts, TASKS[0]), read_part(one_by_one, TASKS[0]), strict=True):
        assert a.keys() == b.keys()
        assert all(a[name].equals(b[name]) for name in a)


def test_a_table_of_a_part_is_one_of_the_run_with_checksums(parts):
    file = parts.folder(TASKS[1]) / "events.parquet"
    table = pq.read_table(file)
    assert table.schema.equals(tables.EVENTS)
    assert table["policy"].to_pylist() == ["two"] * 3 + ["three"] * 6
    whole = file.read_bytes()
    column = pq.read_metadata(file).row_group(0).column(5)
    at = column.dictionary_page_offset + column.total_compressed_size - 1  # the last byte of its last page
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(file, page_checksum_verification=True)


def test_a_part_is_there_whole_or_not_at_all(parts):
    class Broken(dict):
        def get(self, name):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_part(parts, (9, 9), [[{"events": events(TASKS[0], 0, 1)}], [Broken(events=None)]])
    assert finished(parts, [*TASKS, (9, 9)]) == TASKS


def test_a_late_part_does_not_bring_back_what_is_gone(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_part(Parts(tmp_path / "gone" / "parts", "key"), TASKS[0], [[{"events": events(TASKS[0], 0, 1)}]])
    assert not list(tmp_path.iterdir())


def test_without_its_receipt_a_part_is_not_there(parts):
    (parts.folder(TASKS[0]) / "part.json").unlink()
    assert finished(parts, TASKS) == TASKS[1:]


def test_parts_of_other_content_are_others(parts):
    assert finished(Parts(parts.root, "other"), TASKS) == []


def test_a_part_that_two_processes_finish_is_kept_once(parts):
    before = read_part(parts, TASKS[0])[1]["events"]
    write_part(parts, TASKS[0], [[{}, {"events": events(TASKS[0], 1, 1)}, {}]])
    assert read_part(parts, TASKS[0])[1]["events"].equals(before)


@pytest.mark.parametrize("file", ["events.parquet", "part.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_an_altered_part_is_noticed_wherever_it_is(parts, tmp_path, file, harm):
    """Every bit matters: one is flipped in places all over the file."""
    where = parts.folder(TASKS[1]) / file
    whole = where.read_bytes()
    harmed = {"cut": [whole[:-1], whole[: len(whole) // 2]], "empty": [b""], "flip": []}[harm]
    if harm == "flip":
        harmed = [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(0, len(whole), 7)]
    for content in harmed:
        where.write_bytes(content)
        with pytest.raises(BadTrace, match=r"cut short or altered; remove .*request=0,layer=2,key and repeat"):
            merge(parts, tmp_path, TASKS, IDS)
