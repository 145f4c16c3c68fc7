"""The kernel profiles: what they say of themselves, that they follow from their table, and tables that are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway._core import batch_time_s
from headway.calibrate.kernel_profiles import kernel_profiles, main
from headway.errors import DatasetError
from headway.profiles import PROFILE_DIRECTORY, load_profile, load_truth, profile_names, truth_names

NAMES = [name for name in profile_names() if name.endswith("-kernel")]
DATA = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[3] / "shared" / "data")
TABLE = DATA / "timing" / "qwen3_iteration_coefficients.csv"

COLUMNS = (
    "gpu,model,b0_ms,b1_ms_per_token,b2_ms_per_ctx_token,b3_ms_per_tok2,heldout_mape_pct,"
    "knee,h_b0_ms,h_b1_below,h_b1_above,h_b2,h_b3,h_heldout_mape_pct"
)
ROW = "H100-SXM-80GB,Qwen3-8B_tp1,6.67,0.0144,4.6e-05,4.0e-06,3.5,512,6.87,0.0124,0.0195,4.8e-05,1.3e-06,2.1"


def table(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return path


def test_five_gpus_are_covered() -> None:
    """Qwen3 of five sizes on five GPUs, 32B on one and on two of them where it fits."""
    gpus = {name.split("-")[0] for name in NAMES}
    assert gpus == {"a100", "h100", "h200", "l40s", "b200"}
    for gpu in gpus:
        sizes = {name.removeprefix(f"{gpu}-qwen3-").removesuffix("-kernel") for name in NAMES if name.startswith(gpu)}
        assert sizes == {"0.6b", "4b", "8b", "14b", "32b-tp2"} | (set() if gpu == "l40s" else {"32b-tp1"})


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_profile_says_what_it_is(name: str) -> None:
    """Each loads under its name, names its source and host terms, and warns against truth profiles, of which none is
    called like it."""
    profile = load_profile(name)
    text = (PROFILE_DIRECTORY / f"{name}.yaml").read_text()
    assert profile.name == name
    assert "AIConfigurator" in profile.source
    assert "Kernel time alone; added: 0.126 ms per step and 0.0044 ms per request" in profile.source
    assert "pair it with a truth profile" in " ".join(text.split()).replace("# ", "")
    assert name not in truth_names()
    assert profile.step_time.named()["b_seq"] == 4.4e-6
    assert profile.step_time.form in ("linear", "knee")


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_profile_has_limits_that_an_engine_starts_with(name: str) -> None:
    """One request of max_model_len fits the blocks, and batch limits are the server's defaults for the GPU's memory."""
    limits = load_profile(name).limits
    assert (limits.num_blocks - 1) * limits.block_size >= limits.max_model_len
    assert limits.max_model_len > 16_000
    batch = {"l40s": (2048, 256), "b200": (16_384, 1024)}.get(name.split("-", maxsplit=1)[0], (8192, 1024))
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == batch


@pytest.mark.parametrize(("name", "kv_tokens"), [("0.6b", 628_512), ("8b", 382_304), ("32b-tp2", 298_416)])
def test_the_memory_plan_meets_the_capacities_published_for_h100(name: str, kv_tokens: int) -> None:
    """The assumed share and reserve give the KV capacity of three real engines to 2.5 %."""
    limits = load_profile(f"h100-qwen3-{name}-kernel").limits
    assert limits.num_blocks * limits.block_size == pytest.approx(kv_tokens, rel=0.025)


@pytest.mark.parametrize("name", NAMES)
def test_calibration_figures_follow_from_the_step_time_as_the_file_says(name: str) -> None:
    """θ and T_dec can be computed again by the core from the batches that the file names; μ lies below both bounds."""
    profile = load_profile(name)
    limits, calibration = profile.limits, profile.calibration
    num_prompts = limits.max_num_batched_tokens // 1024
    prefill_s = batch_time_s(profile.step_time, [(1024, 0, False)] * num_prompts)
    assert calibration.prefill_tokens_per_s == pytest.approx(num_prompts * 1024 / prefill_s, rel=1e-6)
    assert calibration.decode_step_s == pytest.approx(batch_time_s(profile.step_time, [(1, 1152, True)] * 25), rel=1e-6)
    by_prefill = calibration.prefill_tokens_per_s / 1024
    by_blocks = (limits.num_blocks - 1) * 16 / 1152 / (256 * batch_time_s(profile.step_time, []))
    assert 0 < calibration.service_rate_per_s < min(by_prefill, by_blocks)


@pytest.mark.parametrize(("model", "kernel"), [("0.6b", "0.6b"), ("8b", "8b"), ("32b", "32b-tp2")])
def test_kernel_times_are_not_those_of_the_truth(model: str, kernel: str) -> None:
    """On H100 they differ from the whole-step clock by 4 to 22 % on decodes and up to 20 % on a long prefill."""
    kernels, truth = load_profile(f"h100-qwen3-{kernel}-kernel").step_time, load_truth(f"h100-qwen3-{model}").step_time
    decodes, prefill = [(1, 1000, True)] * 32, [(32_768, 0, False)]
    assert 0.775 < batch_time_s(kernels, decodes) / batch_time_s(truth, decodes) < 0.965
    assert 0.795 < batch_time_s(kernels, prefill) / batch_time_s(truth, prefill) < 1.205


def test_larger_models_and_older_gpus_are_slower() -> None:
    """Decode steps grow with the model on every GPU, and the GPUs rank as they should for 8B."""
    step_s = {name: load_profile(name).calibration.decode_step_s for name in NAMES}
    for gpu in ("a100", "h100", "h200", "l40s", "b200"):
        sizes = [step_s[f"{gpu}-qwen3-{size}-kernel"] for size in ("0.6b", "4b", "8b", "14b")]
        assert sizes == sorted(sizes)
    ranked = sorted(("a100", "h100", "h200", "l40s", "b200"), key=lambda gpu: step_s[f"{gpu}-qwen3-8b-kernel"])
    assert ranked == ["b200", "h200", "h100", "a100", "l40s"]


def test_coefficients_become_seconds_with_host_terms(tmp_path: Path) -> None:
    """A row in milliseconds gives the better form in seconds, the constant with the host's share."""
    (text,) = kernel_profiles(table(tmp_path, ROW)).values()
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_profile(path).step_time.named() == pytest.approx(
        {
            "b0": 6.996e-3,
            "b1_below": 1.24e-5,
            "b1_above": 1.95e-5,
            "knee": 512,
            "b2": 4.8e-8,
            "b3": 1.3e-9,
            "b_seq": 4.4e-6,
        }
    )
    (text,) = kernel_profiles(table(tmp_path, ROW.removesuffix("2.1") + "3.6")).values()
    path.write_text(text)
    assert load_profile(path).step_time.named() == pytest.approx(
        {"b0": 6.796e-3, "b1": 1.44e-5, "b2": 4.6e-8, "b3": 4.0e-9, "b_seq": 4.4e-6}
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ROW.replace("H100-SXM-80GB", "T4"), "'T4' with 'Qwen3-8B_tp1' is neither a known GPU nor a known model"),
        (ROW.replace("_tp1", ""), "is neither a known GPU nor a known model"),
        (ROW.replace("Qwen3-8B", "Llama"), "is neither a known GPU nor a known model"),
        (ROW.replace("6.87", "fast"), "h_b0_ms"),
        (ROW.replace("6.87", "nan"), "b0: must be finite"),
        (ROW.replace("0.0124", "-0.0124"), "b1_below: must be finite and at least 0"),
        ("H100-SXM-80GB,Qwen3-8B_tp1", "b0_ms"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path: Path, bad: str, message: str) -> None:
    """An unknown GPU or model, and a number that is none, are reported with file and line."""
    path = table(tmp_path, ROW, bad)
    with pytest.raises(DatasetError, match=message) as caught:
        kernel_profiles(path)
    assert (caught.value.path, caught.value.line) == (str(path), 3)


def test_the_script_says_how_to_call_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments and absent tables end with code 2 and a word on what is wrong."""
    assert main([]) == 2
    assert main([str(tmp_path / "none.csv"), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "usage: python -m headway.calibrate.kernel_profiles" in error
    assert "none.csv: cannot be read" in error
    assert main([str(table(tmp_path, ROW)), str(tmp_path)]) == 0
    assert load_profile(tmp_path / "h100-qwen3-8b-kernel.yaml").model == "Qwen/Qwen3-8B"


@pytest.mark.skipif(not TABLE.exists(), reason=f"needs {TABLE} (set HEADWAY_DATA)")
def test_the_shipped_profiles_are_those_of_the_table() -> None:
    """The script gives the shipped files, byte for byte, and nothing else."""
    texts = kernel_profiles(TABLE)
    assert sorted(texts) == sorted(f"{name}.yaml" for name in NAMES)
    for name, text in texts.items():
        assert (PROFILE_DIRECTORY / name).read_text() == text
