"""A predictor's file is followed: whole changes are taken, everything else leaves the old predictor in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from headway.errors import ArtifactError, ConfigError
from headway.gateway.predictor_watch import PredictorCollector, PredictorWatch
from headway.predict.base import Predictor
from headway.types import Prediction, Query


class Named:
    """A predictor known by the content it was made of."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def predict(self, query: Query) -> Mapping[str, Prediction]:
        """Nothing."""
        return {}


def load(content: bytes) -> Predictor:
    if content.startswith(b"corrupt"):
        raise ArtifactError("is damaged: its checksum does not hold")
    if content.startswith(b"strange"):
        raise KeyError("trees")
    return Named(content)


class Watched:
    """A watch, its file, and what it put to use. Each write gets a time of its own, as a slower writer's would."""

    def __init__(self, path: Path) -> None:
        self.path, self.used = path, list[bytes]()
        self._writes = 0
        self.write(b"one")
        self.watch = PredictorWatch("live", path, load, wall_clock=lambda: 100.0 + self._writes)
        self.watch.use = lambda predictor: self.used.append(predictor.content)  # type: ignore[attr-defined]

    def write(self, content: bytes) -> None:
        self._writes += 1
        self.path.write_bytes(content)
        os.utime(self.path, ns=(self._writes * 10**9,) * 2)

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.watch.look()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "predictor.hw")


async def test_a_new_file_takes_the_place_of_the_old(watched: Watched) -> None:
    """The present content is in use from the start; each change is taken once."""
    assert watched.watch.predictor.content == b"one"  # type: ignore[attr-defined]
    await watched.look()
    assert watched.used == []
    watched.write(b"two")
    await watched.look(4)
    assert watched.used == [b"two"]
    assert watched.watch.loaded_wall_s == 102.0


async def test_a_file_that_still_changes_is_not_read(watched: Watched) -> None:
    """Between two looks it must stay as it is; half an artifact is never tried."""
    watched.write(b"corrupt, being written")
    await watched.look(1)
    watched.write(b"two")
    await watched.look(1)
    assert watched.used == []
    await watched.look(1)
    assert watched.used == [b"two"]
    assert watched.watch.num_failures == 0


@pytest.mark.parametrize("content", [b"corrupt", b"strange"])
async def test_a_corrupt_file_leaves_the_old_predictor(
    watched: Watched, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says it once, the metric holds until the file is mended, and mending needs no restart."""
    watched.write(content)
    with caplog.at_level(logging.INFO, logger="headway"):
        await watched.look(5)
        assert watched.used == []
        assert watched.watch.predictor.content == b"one"  # type: ignore[attr-defined]
        assert watched.watch.problem is not None
        watched.write(b"two")
        await watched.look()
    assert watched.used == [b"two"]
    assert watched.watch.problem is None
    assert [record.message for record in caplog.records] == ["predictor_not_loaded", "predictor_loaded"]


async def test_a_file_that_is_gone_is_said_once(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A deployment that moves files about must not take the predictor away; when it is back, it is taken if new."""
    watched.path.unlink()
    await watched.look(4)
    assert watched.watch.num_failures == 1
    watched.write(b"one")
    await watched.look()
    assert (watched.used, watched.watch.problem) == ([], None)  # the same content: nothing to swap
    assert len(caplog.records) == 1


async def test_figures_are_there_to_be_scraped(watched: Watched) -> None:
    """When it was loaded, whether its file is broken, and how often that was."""
    watched.write(b"corrupt")
    await watched.look()
    samples = {
        sample.name: sample.value
        for family in PredictorCollector(lambda: [watched.watch]).collect()
        for sample in family.samples
        if sample.labels == {"role": "live"}
    }
    assert samples == {
        "headway_predictor_loaded_timestamp_seconds": 101.0,
        "headway_predictor_broken": 1.0,
        "headway_predictor_load_failures_total": 1.0,
    }


def test_a_start_needs_a_whole_file(tmp_path: Path) -> None:
    """At the start there is no old predictor to fall back on: a missing or corrupt file is an error."""
    with pytest.raises(ConfigError, match="cannot be read"):
        PredictorWatch("live", tmp_path / "none", load)
    (tmp_path / "bad").write_bytes(b"corrupt")
    with pytest.raises(ArtifactError, match="damaged"):
        PredictorWatch("live", tmp_path / "bad", load)
