"""Profiles: the shipped ones hold the published figures, and a wrong file is refused where it is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from four_task_mix import NAMES, four_task_mix
from headway.errors import ProfileError
from headway.profiles import PROFILE_DIRECTORY, TRUTH_DIRECTORY, load_profile, load_truth, profile_names, truth_names
from headway.types import StepTime

KV_TOKENS = {"h100-qwen3-0.6b": 628_512, "h100-qwen3-8b": 382_304, "h100-qwen3-32b": 298_416}


def edited(tmp_path: Path, source: Path, old: str, new: str) -> Path:
    text = source.read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


def test_every_profile_has_a_truth_of_the_same_name_and_limits() -> None:
    """Each shipped profile but the kernel ones can be played against a simulated engine of its limits and version."""
    assert [name for name in profile_names() if not name.endswith("-kernel")] == truth_names() == sorted(NAMES)
    for name in NAMES:
        profile, truth = load_profile(name), load_truth(name)
        assert profile.name == truth.name == name
        assert profile.limits == truth.limits
        assert profile.engine_version == truth.engine_version
        assert profile.limits.num_blocks * profile.limits.block_size == KV_TOKENS[name]


def test_the_8b_profile_holds_the_published_figures() -> None:
    """Fit and truth of the 8B model are the published coefficients, in seconds."""
    assert load_profile("h100-qwen3-8b").step_time == StepTime.linear(
        b0=7.490e-3, b1=2.078e-5, b2=5.037e-8, b3=1.033e-9
    )
    truth = load_truth("h100-qwen3-8b")
    assert truth.step_time == StepTime.six_term(
        b0=7.296e-3, bp=2.0789e-5, bpp=5.1196e-10, bd=2.5632e-5, bs=4.6491e-8, bss=2.6851e-13
    )
    assert (truth.step_noise, truth.stall_probability, truth.stall_mean_s) == (0.03, 2e-4, 0.030)
    assert truth.host_gap_s == (1e-4, 3e-4)


@pytest.mark.parametrize("name", NAMES)
def test_calibration_figures_follow_from_the_fit_as_the_file_says(name: str) -> None:
    """Decode step time and service rate can be computed again from the fit and the stated query mix."""
    profile = load_profile(name)
    _, prompt, answer = four_task_mix(name, 400_000, np.random.default_rng(7))
    b0, b1, b2, b3 = (profile.step_time.named()[key] for key in ("b0", "b1", "b2", "b3"))
    context = prompt + answer / 2
    mean_context = (answer * context).mean() / answer.mean()
    share = np.maximum(context / KV_TOKENS[name], 1 / profile.limits.max_num_seqs)
    work_s = b1 * prompt + b3 * prompt * (prompt + 1) / 2 + answer * (b1 + b2 * context) + b0 * answer * share
    calibration = profile.calibration
    assert calibration.decode_step_s == pytest.approx(b0 + 25 * (b1 + b2 * mean_context), rel=0.01)
    assert calibration.service_rate_per_s == pytest.approx(1 / work_s.mean(), rel=0.01)


def test_an_unknown_profile_names_the_nearest_one() -> None:
    """A misspelt name says which profile was probably meant."""
    with pytest.raises(ProfileError, match="did you mean 'h100-qwen3-8b'"):
        load_profile("h100-qwen-8b")
    with pytest.raises(ProfileError, match=r"there are h100-qwen3-0\.6b, h100-qwen3-32b, h100-qwen3-8b"):
        load_truth("tpu")


def test_an_estimator_may_not_read_a_truth_profile() -> None:
    """A truth profile given to an estimator is refused, and the honest one of the same name is offered."""
    with pytest.raises(ProfileError, match=r"truth profile.*did you mean 'h100-qwen3-8b'") as caught:
        load_profile(TRUTH_DIRECTORY / "h100-qwen3-8b.yaml")
    assert caught.value.key == "kind"


def test_a_simulated_engine_needs_a_truth_profile() -> None:
    """An estimator's profile is no clock for a simulated engine."""
    with pytest.raises(ProfileError, match="needs a truth profile"):
        load_truth(PROFILE_DIRECTORY / "h100-qwen3-8b.yaml")


@pytest.mark.parametrize(
    ("old", "new", "key", "message"),
    [
        ("hardware:", "hardwear:", "hardwear", "did you mean 'hardware'"),
        ("  block_size:", "  blocksize:", "limits.blocksize", "did you mean 'block_size'"),
        ("  b1:", "  bb1:", "step_time.bb1", "unknown key"),
        ("  concurrency: 25", "  concurency: 25", "calibration.concurency", "did you mean 'concurrency'"),
        ("  b0: 7.490e-3", "  b0: .nan", "step_time", "b0: must be finite"),
        ("  b0: 7.490e-3", "  b0: fast", "step_time.b0", "Expected `float`"),
        ("  b0: 7.490e-3\n", "", "step_time", "missing required field `b0`"),
        ("form: linear", "form: cubic", "step_time.form", "Invalid value 'cubic'"),
        ("block_size: 16", "block_size: 0", "limits", "block_size: must be at least 1"),
        ("  prefill_tokens_per_s: 32954", "  prefill_tokens_per_s: 0", "calibration.prefill_tokens_per_s", "above 0"),
        ("kind: estimator", "kind: guess", "kind", "Invalid enum value 'guess'"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(
    tmp_path: Path, old: str, new: str, key: str, message: str
) -> None:
    """Every mistake in a profile is reported with the file, the dotted key and, where one is near, the right key."""
    path = edited(tmp_path, PROFILE_DIRECTORY / "h100-qwen3-8b.yaml", old, new)
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert caught.value.path == str(path)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("step_noise: 0.03", "step_noise: -0.03", "step_noise"),
        ("stall_probability: 2.0e-4", "stall_probability: 2", "stall_probability"),
        ("host_gap_s: [1.0e-4, 3.0e-4]", "host_gap_s: [3.0e-4, 1.0e-4]", "host_gap_s[0]"),
        ("num_blocks: 23894", "num_blocks: 100", "limits.num_blocks"),
    ],
)
def test_a_wrong_truth_is_refused_with_its_path(tmp_path: Path, old: str, new: str, key: str) -> None:
    """A simulated engine does not start on noise, stalls or blocks that no engine could have."""
    path = edited(tmp_path, TRUTH_DIRECTORY / "h100-qwen3-8b.yaml", old, new)
    with pytest.raises(ProfileError) as caught:
        load_truth(path)
    assert caught.value.key == key


def test_a_key_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    """Two values for one key are a mistake, not a choice."""
    path = edited(tmp_path, PROFILE_DIRECTORY / "h100-qwen3-8b.yaml", "kind:", "kind: estimator\nkind:")
    with pytest.raises(ProfileError, match="key 'kind' stands twice") as caught:
        load_profile(path)
    assert caught.value.line == 3


def test_a_number_without_a_point_is_a_number(tmp_path: Path) -> None:
    """``7e-3`` is a number here, though YAML 1.1 reads it as text."""
    path = edited(tmp_path, PROFILE_DIRECTORY / "h100-qwen3-8b.yaml", "b0: 7.490e-3", "b0: 7e-3")
    assert load_profile(path).step_time.named()["b0"] == 0.007


@pytest.mark.parametrize("text", ["[1, 2", "- a list", "", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """Broken YAML, a list, an empty file and binary rubbish all end in a ProfileError with the path."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"mine\.yaml"):
        load_profile(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    """A path that leads nowhere is named."""
    with pytest.raises(ProfileError, match=r"none\.yaml"):
        load_profile(tmp_path / "none.yaml")
