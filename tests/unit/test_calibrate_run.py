"""From a simulated engine under load to a profile: held-out errors, the gate, the file, and what it is good for."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway import EngineRequest, EngineState, replay
from headway.calibrate.figures import calibration_figures
from headway.calibrate.profile_file import render_profile, rounded, write_profile
from headway.calibrate.read_log import read_step_log
from headway.calibrate.result import Calibrated, calibrate_log
from headway.calibrate.simulated_run import StepList, calibration_load, run_load
from headway.calibrate.step_table import StepTable, feature_matrix, predict_s
from headway.cli import main as command
from headway.cli.validate import validate
from headway.engines.simulated import step_log_header
from headway.engines.step_log import StepLogWriter, batch_features
from headway.errors import ConfigError, DatasetError
from headway.profiles import PROFILE_DIRECTORY, Profile, TruthProfile, load_profile, load_truth
from headway.types import Calibration, StepTime

NAME = "h100-qwen3-8b"
TRUTH = load_truth(NAME)
RATE_PER_S = load_profile(NAME).calibration.service_rate_per_s


def simulated_log(path: Path, truth: TruthProfile = TRUTH, *, num_queries: int = 600, seed: int = 1) -> Path:
    writer = StepLogWriter(path, step_log_header(truth))
    run_load(truth, calibration_load(num_queries, RATE_PER_S, seed), seed=seed, step_sink=writer)
    writer.close()
    return path


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_log(tmp_path_factory.mktemp("log") / "steps.jsonl")


@pytest.fixture(scope="module")
def result(log_path: Path) -> Calibrated:
    return calibrate_log(log_path, name="mine")


def run(*arguments: object) -> int:
    """``headway calibrate`` as the command line calls it; its exit code."""
    with pytest.raises(SystemExit) as caught:
        command.main(["calibrate", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_simulated_engine_is_calibrated_to_its_noise(result: Calibrated) -> None:
    """At 3 % noise every form predicts held-out steps to 5 %, and the clock without noise to 1 %."""
    steps = result.log.steps
    held_out = steps.select(slice(len(steps) - result.chosen.held_out.num_steps, None))
    still_s = predict_s(TRUTH.step_time, held_out) + sum(TRUTH.host_gap_s) / 2
    assert {fit.step_time.form for fit in result.fits} == {"linear", "knee", "six_term"}
    for fit in result.fits:
        assert fit.mape <= 0.05
        assert np.abs(predict_s(fit.step_time, held_out) / still_s - 1).mean() < 0.01
    assert result.chosen.step_time.form == "six_term"
    assert result.warnings == []


def test_a_fit_holds_on_another_run(result: Calibrated) -> None:
    """What one run taught predicts the steps of a run with other queries and other noise."""
    sink = StepList()
    run_load(TRUTH, calibration_load(200, RATE_PER_S, 9), seed=9, step_sink=sink)
    other = sink.table()
    fitted = result.chosen.step_time
    assert np.abs(predict_s(fitted, other) / other.time_s - 1).mean() <= 0.05


def test_the_figures_are_those_of_the_log(result: Calibrated) -> None:
    """θ, T_dec and μ can be counted again from the log, and θ is the published one of this clock."""
    steps, figures = result.log.steps, result.figures
    prefills = steps.column("prefill_tokens") > 0
    theta = steps.column("prefill_tokens").sum() / steps.time_s[prefills].sum()
    assert figures.calibration.prefill_tokens_per_s == pytest.approx(theta)
    assert figures.calibration.prefill_tokens_per_s == pytest.approx(32_954, rel=0.05)
    assert figures.calibration.decode_step_s == pytest.approx(steps.time_s[~prefills].mean())
    assert steps.outputs is not None
    assert steps.finished is not None
    assert figures.mean_output_tokens == pytest.approx(steps.outputs.sum() / 600)
    assert steps.finished.sum() == 600
    assert figures.calibration.service_rate_per_s == pytest.approx(
        figures.peak_output_tokens_per_s / figures.mean_output_tokens
    )


def test_the_written_profile_is_an_estimators(
    log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file loads as any shipped profile, names engine, hardware, data and error, and predicts as fitted."""
    target = tmp_path / "mine.yaml"
    assert run(log_path, "--output", target, "--form", "linear", "--json") == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    profile = load_profile(target)
    assert profile.name == "mine"
    assert profile.limits == TRUTH.limits
    assert (profile.engine_version, profile.model) == (TRUTH.engine_version, TRUTH.model)
    assert profile.hardware == f"simulated {TRUTH.hardware} (truth profile {NAME})"
    digest = hashlib.sha256(log_path.read_bytes()).hexdigest()
    assert digest in profile.source
    assert report["log"]["sha256"] == digest
    assert f"of {report['log']['num_steps']} steps in 'steps.jsonl'" in profile.source
    (fit,) = report["fits"]
    assert f"{fit['held_out']['mape']:.2%}" in profile.source
    assert profile.step_time.form == report["chosen"] == "linear"
    assert profile.step_time.named() == pytest.approx(fit["coefficients"], rel=1e-6)
    assert profile.calibration.service_rate_per_s == pytest.approx(
        report["calibration"]["service_rate_per_s"], rel=1e-6
    )
    assert (report["accepted"], report["profile"]) == (True, str(target))


def test_a_pool_is_estimated_with_the_written_profile(log_path: Path, tmp_path: Path) -> None:
    """``headway validate`` takes the profile by its path, and a replay with it meets the true clock to 3 %."""
    target = tmp_path / "mine.yaml"
    assert run(log_path, "--output", target, "--form", "six_term") == 0
    config = tmp_path / "pool.yaml"
    config.write_text(f"""
models: [{{name: m, price: {{input_per_1m: 0.1, output_per_1m: 0.2}}}}]
instances:
  - {{id: a, model: m, api_base: "http://127.0.0.1:1/v1", engine: vllm-0.32, profile: "{target}",
     snapshots: {{shared_memory: headway-test}}}}
""")
    assert validate(config, json=True) == 0
    running = EngineRequest(
        request_id="r", prompt_tokens=2000, computed_tokens=2000, output_tokens=1, target_output_tokens=300
    )
    state = EngineState(limits=TRUTH.limits, running=[running], waiting=[])
    newcomer = EngineRequest(request_id="n", prompt_tokens=5000, target_output_tokens=10)
    truth_s = replay(state, newcomer, TRUTH.step_time).ttft_s
    assert replay(state, newcomer, load_profile(target).step_time).ttft_s == pytest.approx(truth_s, rel=0.03)


def test_a_bad_fit_makes_no_profile(log_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the gate the exit code is 1, the report says so, and no file appears or changes."""
    target = tmp_path / "mine.yaml"
    assert run(log_path, "--output", target, "--max-error", "0.01", "--form", "linear", "--json") == 1
    report = msgspec.json.decode(capsys.readouterr().out)
    assert (report["accepted"], report["profile"]) == (False, None)
    target.write_text("kept")
    assert run(log_path, "--output", target, "--max-error", "0.01", "--form", "linear") == 1
    assert "--max-error allows 1.00%" in capsys.readouterr().err
    assert target.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_clock_that_no_form_describes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With noise of 40 % the default gate holds."""
    truth = msgspec.structs.replace(TRUTH, step_noise=0.4)
    path = simulated_log(tmp_path / "steps.jsonl", truth, num_queries=60)
    assert run(path, "--output", tmp_path / "mine.yaml") == 1
    assert "no profile written" in capsys.readouterr().err


def test_the_table_names_the_chosen_form(
    log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --json a table shows every form, and the profile goes where the log's name says."""
    monkeypatch.chdir(tmp_path)
    assert run(log_path) == 0
    out = capsys.readouterr().out
    assert "six_term *" in out
    assert "written to steps.yaml" in out
    assert load_profile(tmp_path / "steps.yaml").name == "steps"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-error", "0"], "--max-error: must be finite and above 0"),
        (["--max-error", "nan"], "--max-error: must be finite and above 0"),
        (["--mean-output-tokens", "-1"], "--mean-output-tokens: must be finite and above 0"),
        (["--form", "cubic"], "--form"),
        (["--name", "a\x07b"], "--name: must be printable"),
    ],
)
def test_wrong_options_are_usage_errors(
    log_path: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and the option's name, before anything is read."""
    assert run(log_path, "--output", tmp_path / "mine.yaml", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out


def test_the_log_is_not_overwritten(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile in place of the log it is made from is a slip."""
    assert run(log_path, "--output", log_path) == 2
    assert "is the step log itself" in capsys.readouterr().err


def test_a_profile_without_a_place_is_an_error(log_path: Path, tmp_path: Path) -> None:
    """A directory that is not there is named with the option."""
    with pytest.raises(ConfigError, match="--output: cannot be written"):
        write_profile(tmp_path / "absent" / "mine.yaml", "")
    assert run(log_path, "--output", tmp_path / "absent" / "mine.yaml", "--form", "linear") == 2
    (tmp_path / "mine.yaml").mkdir()
    with pytest.raises(ConfigError, match="--output: cannot be written"):
        write_profile(tmp_path / "mine.yaml", "")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def steps_of(*batches: tuple[float, float, list[tuple[int, int, bool]]]) -> StepTable:
    """Steps of (start, time, chunks)."""
    return StepTable(
        np.array([start for start, _, _ in batches]),
        np.array([time for _, time, _ in batches]),
        feature_matrix(batch_features(chunks) for _, _, chunks in batches),
    )


DECODE, PREFILL = [(1, 100, True)], [(100, 0, False)]


def test_peak_throughput_is_the_best_thirty_seconds() -> None:
    """Bursts count over 30 s of engine time, idle time included, and the share spent in steps is told."""
    slow = [(float(second), 0.5, DECODE) for second in range(100)]
    quick = [(100 + 0.25 * number, 0.25, DECODE * 2) for number in range(120)]
    figures = calibration_figures(steps_of((0.0, 0.5, PREFILL), *slow[1:], *quick), 10.0)
    assert figures.peak_output_tokens_per_s == pytest.approx(8.0)
    assert figures.peak_busy_share == pytest.approx(1.0)
    assert figures.calibration.service_rate_per_s == pytest.approx(0.8)
    assert figures.outputs_source == "decodes, first tokens left out"
    idle = calibration_figures(steps_of((0.0, 0.5, PREFILL), *slow[1:]), 10.0)
    assert idle.peak_busy_share == pytest.approx(0.5, abs=0.02)


def test_a_log_without_lengths_needs_them_given(tmp_path: Path) -> None:
    """Without outputs and ends in the log the mean output length is asked for by the option's name."""
    steps = steps_of(*[(float(n), 0.5, DECODE if n else PREFILL) for n in range(200)])
    with pytest.raises(ConfigError, match="--mean-output-tokens: is needed"):
        calibration_figures(steps)
    assert calibration_figures(steps, 200.0).mean_output_source == "as given"


@pytest.mark.parametrize(
    ("chunks", "message"), [(DECODE, "no step with a prefill chunk"), (PREFILL, "of decodes alone")]
)
def test_a_log_of_one_kind_gives_no_figures(
    tmp_path: Path, chunks: list[tuple[int, int, bool]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log that never shows prefill, or never decodes, is refused by its path."""
    lines = [msgspec.json.encode({"start_s": float(n), "time_s": 0.5, "chunks": chunks}).decode() for n in range(200)]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join([msgspec.json.encode(step_log_header(TRUTH)).decode(), *lines]))
    assert run(path, "--mean-output-tokens", "10") == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_an_idle_engine_and_a_missing_kind_are_warned_of(tmp_path: Path) -> None:
    """What a log cannot teach is said: an unsaturated engine, a kind of step that nothing tests, empty steps."""
    lines = [{"start_s": 0.0, "time_s": 0.5, "chunks": PREFILL}, {"start_s": 0.6, "time_s": 0.1, "chunks": []}]
    lines += [{"start_s": float(n), "time_s": 0.5, "chunks": DECODE} for n in range(1, 200)]
    path = tmp_path / "steps.jsonl"
    text = [msgspec.json.encode(line).decode() for line in [step_log_header(TRUTH), *lines]]
    path.write_text("\n".join(text))
    warnings = calibrate_log(path, name="mine", mean_output_tokens=10.0).warnings
    assert warnings == [
        "no held-out prefill step: nothing tests the fit there",
        "no held-out mixed step: nothing tests the fit there",
        "the engine was busy only 50% of its best 30 s: service_rate_per_s is a lower bound",
        "1 steps without a request were left out",
    ]


@pytest.mark.parametrize(
    "text", ["plain", "yes", "7e3", "12", "a: b", "# no", "-", "ends: ", "naïve “quotes”", "'q'", "@x"]
)
@pytest.mark.parametrize(
    "step_time",
    [
        StepTime.linear(b0=1.0, b1=0.0, b2=1e-300, b3=123456.789, b_seq=9.9999999e-3),
        StepTime.knee(b0=7e-3, b1_below=1e-5, b1_above=3e-5, knee=300.0, b2=5e-8, b3=1e-9),
        load_truth(NAME).step_time,
    ],
)
def test_what_is_rendered_loads_as_it_was(tmp_path: Path, text: str, step_time: StepTime) -> None:
    """Names that look like other YAML values, and numbers of any size, come back as they were."""
    profile = Profile(
        name=text, model=text, hardware=text, engine_version=text, source=f"{text} and vllm-0.32.0 " * 20,
        limits=msgspec.structs.replace(TRUTH.limits, watermark=0.01, policy="priority", max_num_seqs=3),
        step_time=StepTime(step_time.form, tuple(rounded(value) for value in step_time.coefficients)),
        calibration=Calibration(prefill_tokens_per_s=1e7, decode_step_s=1e-9, service_rate_per_s=1.0, concurrency=3),
    )  # fmt: skip
    path = tmp_path / "mine.yaml"
    write_profile(path, render_profile(profile, title="A title.", notes={"limits": "A note.", "concurrency": "k"}))
    loaded = load_profile(path)
    assert msgspec.structs.replace(loaded, source="") == msgspec.structs.replace(profile, source="")
    assert loaded.source == " ".join(profile.source.split())


def test_the_form_of_the_file_is_that_of_the_shipped_ones() -> None:
    """A shipped profile, rendered again, loads equal."""
    shipped = load_profile(NAME)
    path = PROFILE_DIRECTORY / f"{NAME}.yaml"
    keys = [
        line for line in render_profile(shipped, title="x").splitlines() if line and not line.startswith((" ", "#"))
    ]
    theirs = [line for line in path.read_text().splitlines() if line and not line.startswith((" ", "#"))]
    assert [key.split(":")[0] for key in keys] == [key.split(":")[0] for key in theirs]


def test_the_same_run_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """A simulated log is the same for one seed and another for the next."""
    texts = [
        simulated_log(tmp_path / f"{number}.jsonl", num_queries=20, seed=seed).read_bytes()
        for number, seed in enumerate([5, 5, 6])
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_damaged_log_says_where(log_path: Path, tmp_path: Path) -> None:
    """A log cut off inside a line is refused with the number of that line."""
    text = log_path.read_text().splitlines()
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join([*text[:200], text[200][:40]]))
    with pytest.raises(DatasetError) as caught:
        read_step_log(path)
    assert caught.value.line == 201
