"""Files of lines that stay within their bounds, whatever comes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.gateway.rotated_file import RotatedFile


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(1, 4))
def test_the_newest_lines_are_kept_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_files: int
) -> None:
    """However lines fall, no file is larger than allowed, there are no more files than allowed, and what is there is
    the unbroken end of what was written."""
    path = tmp_path_factory.mktemp("rotated") / "log.jsonl"
    lines = [b"%03d" % number + b"x" * size + b"\n" for number, size in enumerate(sizes)]
    file = RotatedFile(path, max_bytes=64, num_files=num_files)
    assert [file.append(line) for line in lines] == [True] * len(lines)
    file.close()
    files = sorted(path.parent.iterdir(), key=lambda one: -int(one.suffix[1:]) if one.suffix[1:].isdigit() else 0)
    assert len(files) <= num_files
    assert all(one.stat().st_size <= 64 for one in files)
    kept = b"".join(one.read_bytes() for one in files)
    assert b"".join(lines).endswith(kept)
    assert kept or not lines


def test_a_file_is_continued_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """After a restart it goes on behind the last whole line; a torn one is cut; others cannot read what users wrote."""
    path = tmp_path / "rows"
    RotatedFile(path, max_bytes=100, num_files=2).close()
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"one\ntor")
    file = RotatedFile(path, max_bytes=100, num_files=2)
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"


def test_what_cannot_be_written_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Serving goes on without the file; the log has one line, not one per row."""
    path = tmp_path / "d" / "rows"
    path.parent.mkdir()
    file = RotatedFile(path, max_bytes=10, num_files=2)
    with caplog.at_level(logging.ERROR, logger="headway"):
        assert not file.append(b"longer than a whole file\n")
        assert not file.append(b"longer than a whole file\nand two lines of it\n")
    assert file.num_lost_lines == 3
    assert [record.message for record in caplog.records] == ["file_not_written"]
    assert file.append(b"short\n")
    file.close()
    with pytest.raises(ConfigError, match="cannot be appended to"):
        RotatedFile(path / "below" / "a-file", max_bytes=10, num_files=1)
