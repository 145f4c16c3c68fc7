"""Runs on Ray: the same results as in processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.lab.runs import run
from headway.lab.scenario import parse_scenario

SCENARIO = """\
name: on ray
num_queries: 60
seeds: [0, 1]
rates_per_s: [6]
policies: [bear, shortest_queue]
"""


def test_a_local_ray_gives_the_same_bytes(tmp_path: Path) -> None:
    """Units played on a Ray started here leave the records that this process alone would leave."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra 'ray')")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        on_ray = run(parse_scenario(SCENARIO), tmp_path / "ray", backend="ray")
    finally:
        ray.shutdown()
    here = run(parse_scenario(SCENARIO), tmp_path / "here", jobs=1)
    assert on_ray == here
    assert here.num_played > 0
    kept = [sorted((tmp_path / name / "results.jsonl").read_bytes().splitlines()) for name in ("ray", "here")]
    assert kept[0] == kept[1]
