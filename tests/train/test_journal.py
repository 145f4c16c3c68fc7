"""The journal: what is acknowledged is in the file, torn lines are cut, and there is one writer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.errors import ConfigError, HeadwayError
from headway.train.journal import Journal


async def test_lines_of_many_tasks_are_whole_and_all_there(tmp_path: Path) -> None:
    """Tasks that append at once share writes, and no line is lost or mixed with another."""
    path = tmp_path / "j"
    lines = [b"%d-%s\n" % (number, b"x" * (number % 50)) for number in range(300)]
    async with Journal(path) as journal:
        await asyncio.gather(*(journal.append(line) for line in lines))
        assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)
    async with Journal(path) as journal:
        await journal.append(b"later\n")
    assert path.read_bytes().endswith(b"later\n")
    assert journal.num_cut_bytes == 0


@pytest.mark.parametrize(("whole", "torn"), [(b"", b'{"a"'), (b'{"a":1}\n', b'{"b"'), (b"x" * 200_000 + b"\n", b"y")])
async def test_a_torn_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    """What a crash left behind the last line feed never counted, and the next line begins clean."""
    path = tmp_path / "j"
    path.write_bytes(whole + torn)
    async with Journal(path) as journal:
        assert journal.num_cut_bytes == len(torn)
        await journal.append(b"next\n")
    assert path.read_bytes() == whole + b"next\n"


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Two runs on one file would pay for everything twice."""
    async with Journal(tmp_path / "j"):
        with pytest.raises(HeadwayError, match="another run"):
            Journal(tmp_path / "j")
    async with Journal(tmp_path / "j"):
        pass


async def test_a_cancelled_run_still_writes_what_it_was_given(tmp_path: Path) -> None:
    """Whoever is cancelled while a paid answer is on its way to the disk does not take it along."""
    async with Journal(tmp_path / "j") as journal:
        task = asyncio.create_task(journal.append(b"paid\n"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (tmp_path / "j").read_bytes() == b"paid\n"


def test_places_that_cannot_be_appended_to_are_refused(tmp_path: Path) -> None:
    """A compressed file and a missing directory are named."""
    with pytest.raises(ConfigError, match="compressed"):
        Journal(tmp_path / "rows.jsonl.gz")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "no" / "rows.jsonl")


async def test_a_full_disk_ends_the_run() -> None:
    """A row that cannot be stored must not count as stored."""
    async with Journal(Path("/dev/full")) as journal:
        with pytest.raises(HeadwayError, match="cannot be written"):
            await journal.append(b"row\n")
