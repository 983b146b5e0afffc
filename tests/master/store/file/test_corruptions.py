"""Forty corruptions of the database, its log and what lies beside it: refused, named or repaired, and none silent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.master.store.database import Database, Transaction, make_cluster_id
from dstrial.master.store.file import marks, page_checksums, wal

PAGE = 4096
Outcome: TypeAlias = Literal["refused", "named", "repaired"]
Change: TypeAlias = "Callable[[States, Path], None]"


@dataclasses.dataclass(frozen=True)
class States:
    """What a master leaves, each in a directory of its own.

    Attributes:
        clean: by one that has ended.
        killed: by one that was killed while its log held commits; they are confirmed.
        older: by the same master some commits before, killed.
        older_clean: the database of ``older`` in one file.
        foreign: by another cluster's.
        confirmed: directory -> all that it had confirmed, as SQL.
    """

    clean: Path
    killed: Path
    older: Path
    older_clean: Path
    foreign: Path
    confirmed: dict[Path, str]


def add(tx: Transaction, start: int, count: int) -> None:
    """Store experiments with a trial, reports and lines of logs each, so that tables have more than one page."""
    tx.must_last()
    tx.execute("INSERT OR IGNORE INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
    for number in range(start, start + count):
        tx.execute(
            "INSERT INTO experiments (id, job_id, state, config, original_config, name, owner_id, searcher_type, "
            "searcher_metric, smaller_is_better, slots_per_trial, queue_position, start_us) "
            "VALUES (?, ?, 'COMPLETED', ?, 'name: x', 'x', 1, 'single', 'loss', 1, 1, ?, 1)",
            (number, f"job-{number}", json.dumps({"hyperparameters": {"lr": number / 7}}), float(number)),
        )
        tx.execute("INSERT INTO model_definitions VALUES (?, ?)", (number, bytes(range(256)) * 40))
        tx.execute(
            "INSERT INTO trials (id, experiment_id, request_id, state, hparams, seed, task_id, start_us) "
            "VALUES (?, ?, ?, 'COMPLETED', '{}', 1, ?, 1)",
            (number, number, f"request-{number}", f"{number}.r"),
        )
        for steps in range(40):
            tx.execute(
                "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (?, 1, 'training', ?, 1, ?)",
                (number, steps, json.dumps({"loss": 1 / (steps + number), "accuracy": steps / 40})),
            )
            tx.execute(
                "INSERT INTO logs (task_id, trial_id, time_us, source, log) VALUES (?, ?, 1, 'task', ?)",
                (f"{number}.r", number, f"batch {steps} of trial {number}\n"),
            )


def files(directory: Path) -> list[Path]:
    return [directory / name for name in ("master.db", "master.db-wal", "master.db-marks", "master.db-pages")]


def stored(directory: Path) -> dict[str, bytes]:
    """Return what the files of a state hold; an empty log, which a reader leaves, is none."""
    found = {path.name: path.read_bytes() for path in files(directory) if path.exists()}
    return {name: data for name, data in found.items() if data or not name.endswith("-wal")}


def copy_state(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in files(source):
        if path.exists():
            shutil.copy(path, target)
    return target


def content(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return "\n".join(connection.iterdump())


def kill_with_a_log(database: Database, directory: Path, number: int) -> None:
    """Copy what SIGKILL would leave now, with commits in the log, of which the last need not be on the disk."""
    while True:
        database.write(functools.partial(add, start=number, count=2))
        database.write(lambda tx: tx.execute("UPDATE users SET modified_us = modified_us + 1"))
        number += 2
        found = marks.read(marks.path_of(database.path))
        assert found is not None
        if found.num_frames >= 20 and found.num_synced < found.num_frames:
            copy_state(database.path.parent, directory)
            return


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> States:
    root = tmp_path_factory.mktemp("states")
    (root / "work").mkdir()
    with contextlib.closing(Database(root / "work" / "master.db")) as database:
        database.write(make_cluster_id)
        database.write(lambda tx: add(tx, 1, 6))
    with contextlib.closing(Database(root / "work" / "master.db")) as database:
        kill_with_a_log(database, root / "older", 101)
        kill_with_a_log(database, root / "killed", 201)
    copy_state(root / "work", root / "clean")
    copy_state(root / "older", root / "older_clean")
    Database(root / "older_clean" / "master.db").close()
    (root / "foreign").mkdir()
    with contextlib.closing(Database(root / "foreign" / "master.db")) as database:
        database.write(make_cluster_id)
        database.write(lambda tx: add(tx, 1, 10))
    confirmed = {}
    for name in ("clean", "killed"):
        looked_at = copy_state(root / name, root / f"{name}_looked_at")
        confirmed[root / name] = content(looked_at / "master.db")
    return States(
        root / "clean", root / "killed", root / "older", root / "older_clean", root / "foreign", confirmed
    )


def flip(name: str, offset: int) -> Change:
    """Flip a bit of the byte at an offset, from the end if it is negative."""

    def change(_states: States, directory: Path) -> None:
        path = directory / name
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return change


def flip_text(needle: bytes) -> Change:
    """Flip a bit in a stored text."""

    def change(_states: States, directory: Path) -> None:
        path = directory / "master.db"
        data = bytearray(path.read_bytes())
        place = data.rindex(needle)
        data[place + len(needle) // 2] ^= 1
        path.write_bytes(data)

    return change


def in_page_of(name: str, change_page: Callable[[bytearray], None], kind: str = "leaf") -> Change:
    """Change a page of a table or index."""

    def change(_states: States, directory: Path) -> None:
        path = directory / "master.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
            (number,) = connection.execute(
                "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ? ORDER BY pageno DESC", (name, kind)
            ).fetchone()
        data = bytearray(path.read_bytes())
        page = data[(number - 1) * PAGE : number * PAGE]
        change_page(page)
        data[(number - 1) * PAGE : number * PAGE] = page
        path.write_bytes(data)

    return change


def flip_at(offset: int) -> Callable[[bytearray], None]:
    def change_page(page: bytearray) -> None:
        page[offset] ^= 0x10

    return change_page


def zero(page: bytearray) -> None:
    page[:] = bytes(PAGE)


def swap_pages(_states: States, directory: Path) -> None:
    path = directory / "master.db"
    data = path.read_bytes()
    first, last = data[PAGE : 2 * PAGE], data[-PAGE:]
    assert first != last
    path.write_bytes(data[:PAGE] + last + data[2 * PAGE : -PAGE] + first)


def cut(name: str, part: float) -> Change:
    def change(_states: States, directory: Path) -> None:
        path = directory / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * part)])

    return change


def cut_last_page(_states: States, directory: Path) -> None:
    path = directory / "master.db"
    path.write_bytes(path.read_bytes()[:-PAGE])


def append(name: str) -> Change:
    def change(_states: States, directory: Path) -> None:
        with (directory / name).open("ab") as file:
            file.write(random.Random(1).randbytes(2 * PAGE))

    return change


def garbage(name: str) -> Change:
    def change(_states: States, directory: Path) -> None:
        (directory / name).write_bytes(random.Random(2).randbytes(20000))

    return change


def delete(name: str) -> Change:
    def change(_states: States, directory: Path) -> None:
        (directory / name).unlink()

    return change


def take(name: str, from_state: str) -> Change:
    """Put a file of another state in the place of this one's."""

    def change(states: States, directory: Path) -> None:
        shutil.copy(getattr(states, from_state) / name, directory / name)

    return change


def fresh_schema(_states: States, directory: Path) -> None:
    with contextlib.closing(Database(directory / "new.db")) as database:
        database.write(make_cluster_id)
    (directory / "new.db").replace(directory / "master.db")
    for end in ("-marks", "-pages"):
        (directory / f"new.db{end}").unlink()


def flip_frame(part: float, offset: int) -> Change:
    """Flip a bit in a frame of the log, at an offset from the frame's page."""

    def change(_states: States, directory: Path) -> None:
        path = directory / "master.db-wal"
        data = bytearray(path.read_bytes())
        found = marks.read(directory / "master.db-marks")
        assert found is not None
        frame_idx = min(int(found.num_frames * part), found.num_frames - 1)
        data[wal.frame_offset(frame_idx, PAGE) + offset] ^= 0x10
        path.write_bytes(data)

    return change


def after_power_loss(num_left: Callable[[marks.Marks], int]) -> Change:
    """Have the machine start again, with some frames of the log on its disk."""

    def change(_states: States, directory: Path) -> None:
        found = marks.read(directory / "master.db-marks")
        assert found is not None
        marks.write(directory / "master.db-marks", dataclasses.replace(found, boot_id="an earlier one"))
        path = directory / "master.db-wal"
        path.write_bytes(path.read_bytes()[: wal.frame_offset(num_left(found), PAGE) - 24])

    return change


def fold_by_another(_states: States, directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "master.db")) as connection:
        connection.execute("SELECT COUNT(*) FROM users").fetchone()


CASES: dict[str, tuple[Literal["clean", "killed"], Change, Outcome]] = {
    # The database.
    "its magic": ("clean", flip("master.db", 3), "refused"),
    "its page size": ("clean", flip("master.db", 16), "refused"),
    "its format's version": ("clean", flip("master.db", 18), "refused"),
    "its reserved bytes": ("clean", flip("master.db", 20), "refused"),
    "its count of pages": ("clean", flip("master.db", 31), "refused"),
    "its list of free pages": ("clean", flip("master.db", 35), "refused"),
    "its schema's cookie": ("clean", flip("master.db", 43), "refused"),
    "its schema's version": ("clean", flip("master.db", 63), "refused"),
    "the text of its schema": ("clean", flip_text(b"CREATE TABLE storages"), "refused"),
    "a page's kind": ("clean", in_page_of("metrics", flip_at(0)), "refused"),
    "a page's count of cells": ("clean", in_page_of("metrics", flip_at(4)), "refused"),
    "a page's pointers": ("clean", in_page_of("experiments", flip_at(8)), "refused"),
    "a child of an inner page": ("clean", in_page_of("logs", flip_at(-1), "internal"), "refused"),
    "a key of an index": ("clean", in_page_of("metrics_by_trial", flip_at(-3)), "refused"),
    "a value of a report": ("clean", flip_text(b'{"loss": 0.1'), "refused"),
    "a value of a config": ("clean", flip_text(b'{"hyperparameters": {"lr": '), "refused"),
    "a line of a log": ("clean", flip_text(b"batch 17 of trial 2"), "refused"),
    "a model definition": ("clean", in_page_of("model_definitions", flip_at(900), "overflow"), "refused"),
    "a page of zeros": ("clean", in_page_of("trials", zero), "refused"),
    "two pages exchanged": ("clean", swap_pages, "refused"),
    "an empty file": ("clean", cut("master.db", 0), "refused"),
    "half a file": ("clean", cut("master.db", 0.5), "refused"),
    "a last page less": ("clean", cut_last_page, "refused"),
    "no file": ("clean", delete("master.db"), "refused"),
    "something else": ("clean", garbage("master.db"), "refused"),
    "a database without rows": ("clean", fresh_schema, "refused"),
    "an older database": ("clean", take("master.db", "older_clean"), "refused"),
    "another cluster's database": ("clean", take("master.db", "foreign"), "refused"),
    "a flipped value after a kill": ("killed", flip_text(b"batch 17 of trial 2"), "refused"),
    "pages after the last": ("clean", append("master.db"), "refused"),
    # The log.
    "no log": ("killed", delete("master.db-wal"), "refused"),
    "an empty log": ("killed", cut("master.db-wal", 0), "refused"),
    "half a log": ("killed", cut("master.db-wal", 0.5), "refused"),
    "the log's magic": ("killed", flip("master.db-wal", 3), "refused"),
    "the log's salt": ("killed", flip("master.db-wal", 17), "refused"),
    "a page in the log": ("killed", flip_frame(0.5, 2000), "refused"),
    "the last page in the log": ("killed", flip_frame(1, 100), "refused"),
    "a page's number in the log": ("killed", flip_frame(0.3, -21), "refused"),
    "the end of a transaction in the log": ("killed", flip_frame(1, -17), "refused"),
    "an older log": ("killed", take("master.db-wal", "older"), "refused"),
    "a log after all was folded in": ("clean", take("master.db-wal", "killed"), "refused"),
    "another thing than a log": ("killed", garbage("master.db-wal"), "refused"),
    "something after the log": ("killed", append("master.db-wal"), "repaired"),
    "a log that another program has folded in": ("killed", fold_by_another, "named"),
    "power lost, the log as it was": ("killed", after_power_loss(lambda found: found.num_frames), "repaired"),
    "power lost, what was confirmed as lasting lost": (
        "killed",
        after_power_loss(lambda found: found.num_synced - 1),
        "refused",
    ),
    # What lies beside them.
    "flipped marks": ("killed", flip("master.db-marks", 30), "named"),
    "no marks": ("killed", delete("master.db-marks"), "named"),
    "empty marks": ("killed", cut("master.db-marks", 0), "named"),
    "older marks": ("killed", take("master.db-marks", "older"), "repaired"),
    "a flipped checksum": ("clean", flip("master.db-pages", -6), "named"),
    "the checksums' head": ("clean", flip("master.db-pages", 3), "named"),
    "no checksums": ("clean", delete("master.db-pages"), "named"),
    "half the checksums": ("clean", cut("master.db-pages", 0.5), "named"),
    "older checksums": ("clean", take("master.db-pages", "older"), "refused"),
    "SQLite's index of the log": ("killed", garbage("master.db-shm"), "repaired"),
}


def test_there_are_at_least_forty() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("case", CASES)
def test_a_corruption_is_refused_named_or_repaired(case: str, states: States, tmp_path: Path) -> None:
    state, change, expected = CASES[case]
    source: Path = getattr(states, state)
    directory = copy_state(source, tmp_path / "state")
    before = stored(directory)
    change(states, directory)
    changed = stored(directory)
    assert changed != before or case.startswith("SQLite"), "the corruption changes nothing"
    path = directory / "master.db"

    if expected == "refused":
        with pytest.raises(MasterError, match=r"master\.db.*expected.*dstrial restore"):
            Database(path)
        assert stored(directory) == changed, "what is refused is left as it is"
        return
    with contextlib.closing(Database(path)) as database:
        notes = database.notes
    assert bool(notes) == (expected == "named"), notes
    assert content(path) == states.confirmed[source]
    Database(path).close()
    assert page_checksums.read(page_checksums.path_of(path)) == page_checksums.of_file(path)


def test_what_power_takes_is_named_and_only_what_need_not_last(states: States, tmp_path: Path) -> None:
    directory = copy_state(states.killed, tmp_path / "state")
    after_power_loss(lambda found: found.num_synced)(states, directory)

    with contextlib.closing(Database(directory / "master.db")) as database:
        (note,) = database.notes
    assert "experiments, checkpoints and registrations are not" in note
    lost = set(states.confirmed[states.killed].splitlines()) - set(
        content(directory / "master.db").splitlines()
    )
    assert all("users" in line for line in lost), lost
    assert lost


def test_what_is_whole_is_taken_without_a_word(states: States, tmp_path: Path) -> None:
    for name in ("clean", "killed"):
        source: Path = getattr(states, name)
        directory = copy_state(source, tmp_path / name)
        for _ in range(2):
            with contextlib.closing(Database(directory / "master.db")) as database:
                assert database.notes == ()
        assert content(directory / "master.db") == states.confirmed[source]


def test_a_database_of_an_older_release_is_taken_and_watched_from_then_on(
    states: States, tmp_path: Path
) -> None:
    shutil.copy(states.clean / "master.db", tmp_path)
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        assert database.notes == ()

    flip_text(b"batch 17 of trial 2")(states, tmp_path)

    with pytest.raises(DatabaseDamagedError, match=r"page \d+ \(logs\) differs"):
        Database(tmp_path / "master.db")


def test_a_page_that_is_damaged_while_it_serves_is_told_of(states: States, tmp_path: Path) -> None:
    directory = copy_state(states.clean, tmp_path / "state")
    with contextlib.closing(Database(directory / "master.db")) as database:
        in_page_of("logs", flip_at(0))(states, directory)

        with (
            pytest.raises(DatabaseDamagedError, match=r"is damaged.*dstrial restore"),
            database.read() as connection,
        ):
            connection.execute("SELECT SUM(LENGTH(log)) FROM logs").fetchone()
        with pytest.raises(DatabaseDamagedError):
            database.write(lambda tx: tx.execute("DELETE FROM logs"))

        assert "is damaged" in database.describe_damage()
        with database.read() as connection:
            assert connection.execute("SELECT COUNT(*) FROM users").fetchone()[0] == 1


def test_a_value_that_is_flipped_while_it_serves_is_found_by_looking(states: States, tmp_path: Path) -> None:
    directory = copy_state(states.clean, tmp_path / "state")
    with contextlib.closing(Database(directory / "master.db")) as database:
        database.write(lambda tx: add(tx, 50, 1))
        assert database.scrub() == []
        assert database.describe_damage() == ""

        flip_text(b"batch 17 of trial 3\n")(states, directory)

        (page,) = database.scrub()
        assert f"page {page} is not what was written" in database.describe_damage()
