"""Makes the ``*-kernel`` profiles from a table of step-time coefficients composed of single GPU operations.

``python -m headway.calibrate.kernel_profiles qwen3_iteration_coefficients.csv DIRECTORY`` writes one profile per row,
the same bytes each time. Kernel time is not a whole step: host terms are added, limits are worked out from the GPU's
memory, and the profile says so. It refuses GPUs and models whose size it does not know.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from headway.calibrate.profile_file import render_profile, rounded, write_profile
from headway.calibrate.step_table import FEATURES, StepTable, predict_s
from headway.errors import DatasetError, HeadwayError
from headway.profiles import Profile
from headway.types import Calibration, EngineLimits, StepTime

#: Host time on top of the kernels: per step and per request (BLIS, trained on real vLLM on H100).
_HOST_S: Final = 0.126e-3
_HOST_PER_REQUEST_S: Final = 0.0044e-3

# The memory plan: what an engine may use, and what weights and keys and values leave free of it.
_MEMORY_SHARE: Final = 0.90
_RESERVE_GIB: Final = 4.0
_BLOCK_SIZE: Final = 16
_MAX_MODEL_LEN: Final = 40_960  # max_position_embeddings of every Qwen3 model here
_BYTES_PER_WEIGHT: Final = 2

# The query that θ, T_dec and μ are stated for, and the decode batch of T_dec.
_PROMPT_TOKENS: Final = 1024
_OUTPUT_TOKENS: Final = 256
_DECODE_REQUESTS: Final = 25


class _Gpu(Struct, frozen=True):
    slug: str
    name: str
    memory_mib: int  # as nvidia-smi shows it


class _Model(Struct, frozen=True):
    parameters: float
    num_layers: int
    num_kv_heads: int = 8
    head_size: int = 128


_GPUS: Final = {
    "A100-SXM-80GB": _Gpu("a100", "NVIDIA A100 SXM 80 GB", 81_920),
    "H100-SXM-80GB": _Gpu("h100", "NVIDIA H100 SXM 80 GB", 81_559),
    "H200-SXM": _Gpu("h200", "NVIDIA H200 SXM 141 GB", 143_771),
    "L40S": _Gpu("l40s", "NVIDIA L40S 48 GB", 46_068),
    "B200-SXM": _Gpu("b200", "NVIDIA B200 SXM 180 GB", 183_359),
}
_MODELS: Final = {
    "Qwen3-0.6B": _Model(0.596e9, 28),
    "Qwen3-4B": _Model(4.02e9, 36),
    "Qwen3-8B": _Model(8.19e9, 36),
    "Qwen3-14B": _Model(14.77e9, 40),
    "Qwen3-32B": _Model(32.76e9, 64),
}
#: Served on one GPU or on two: the name says which.
_SEVERAL_SIZES: Final = ("Qwen3-32B",)


class _Row(Struct, frozen=True, kw_only=True):
    """One row of the table; times are milliseconds, errors percent, ``h_*`` the knee form."""

    gpu: str
    model: str
    b0_ms: float
    b1_ms_per_token: float
    b2_ms_per_ctx_token: float
    b3_ms_per_tok2: float
    heldout_mape_pct: float
    knee: float
    h_b0_ms: float
    h_b1_below: float
    h_b1_above: float
    h_b2: float
    h_b3: float
    h_heldout_mape_pct: float


def kernel_profiles(path: Path) -> dict[str, str]:
    """File name → text of every profile that the table at ``path`` gives.

    Raises:
        DatasetError: the table cannot be read, a row is malformed, or its GPU or model is unknown.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"cannot be read: {error}", path=str(path)) from error
    texts = {}
    for number, raw in enumerate(rows, 2):
        try:
            row = msgspec.convert(raw, _Row, strict=False)
            profile = _profile(row)
        except (msgspec.ValidationError, HeadwayError) as error:
            raise DatasetError(str(error), path=str(path), line=number) from error
        title = (
            f"Kernel time of {profile.model} on {profile.hardware}, for estimates before anything was measured. Never "
            "pair it with a truth profile: those are whole-step times of other runs."
        )
        texts[f"{profile.name}.yaml"] = render_profile(profile, title=title, notes=_NOTES)
    return texts


_NOTES: Final = {
    "limits": (
        f"Assumed: {_MEMORY_SHARE:.0%} of the GPU's memory, less the bf16 weights and {_RESERVE_GIB:.0f} GiB for "
        "activations and graphs, holds bf16 keys and values; batch limits are the server's defaults for such a GPU."
    ),
    "prefill_tokens_per_s": f"By the step time: a batch filled with {_PROMPT_TOKENS:,}-token prompts.",
    "decode_step_s": (
        f"By the step time: {_DECODE_REQUESTS} decodes halfway through a query of {_PROMPT_TOKENS:,} prompt and "
        f"{_OUTPUT_TOKENS} output tokens."
    ),
    "service_rate_per_s": (
        "By the step time: as many such queries at once as KV blocks, sequences and token budget allow, each step "
        "decoding all of them and prefilling what replaces those that end."
    ),
    "concurrency": "Not measured: the published k of the limited-processor-sharing estimate.",
    "ttft_ratio_p90": "Not measured: the default.",
}


def _profile(row: _Row) -> Profile:
    gpu = _GPUS.get(row.gpu)
    size, _, parallel = row.model.partition("_tp")
    model = _MODELS.get(size)
    if gpu is None or model is None or not parallel.isdecimal() or int(parallel) < 1:
        raise DatasetError(f"{row.gpu!r} with {row.model!r} is neither a known GPU nor a known model")
    num_gpus = int(parallel)
    limits = _limits(gpu, model, num_gpus)
    step_time, mape_pct = _step_time(row)
    slug = f"{gpu.slug}-{size.lower()}" + (f"-tp{num_gpus}" if size in _SEVERAL_SIZES else "")
    return Profile(
        name=f"{slug}-kernel",
        model=f"Qwen/{size}",
        hardware=f"{num_gpus}x {gpu.name}" + (", tensor parallel" if num_gpus > 1 else ""),
        engine_version="vllm-0.32.0",
        source=(
            f"Least-squares fit of the {step_time.form} form to batches composed of single-operation timings by "
            "AIConfigurator (ai-dynamo/aiconfigurator @ 095f58a, Apache-2.0; other vLLM versions' kernels), held-out "
            f"error {mape_pct:g} %. "
            "Decode agreed with real vLLM on H100 (mean error 2.7 %), prefill was never checked. Kernel time alone; "
            f"added: {_HOST_S * 1e3:g} ms per step and {_HOST_PER_REQUEST_S * 1e3:g} ms per request of host time "
            "(inference-sim/inference-sim @ f90a1e3, Apache-2.0). Token-batch rules: vLLM 0.32.0."
        ),
        limits=limits,
        step_time=step_time,
        calibration=_calibration(step_time, limits),
    )


def _step_time(row: _Row) -> tuple[StepTime, float]:
    """The form with the smaller held-out error, in seconds and with host terms; and that error in percent."""
    knee_is_better = row.h_heldout_mape_pct < row.heldout_mape_pct
    constant, *slopes = (
        (row.h_b0_ms, row.h_b1_below, row.h_b1_above, row.h_b2, row.h_b3)
        if knee_is_better
        else (row.b0_ms, row.b1_ms_per_token, row.b2_ms_per_ctx_token, row.b3_ms_per_tok2)
    )
    b0 = rounded(constant * 1e-3 + _HOST_S)
    b1, *rest = (rounded(slope * 1e-3) for slope in slopes)
    if knee_is_better:
        above, b2, b3 = rest
        step_time = StepTime.knee(
            b0=b0, b1_below=b1, b1_above=above, knee=row.knee, b2=b2, b3=b3, b_seq=_HOST_PER_REQUEST_S
        )
        return step_time, row.h_heldout_mape_pct
    b2, b3 = rest
    return StepTime.linear(b0=b0, b1=b1, b2=b2, b3=b3, b_seq=_HOST_PER_REQUEST_S), row.heldout_mape_pct


def _limits(gpu: _Gpu, model: _Model, num_gpus: int) -> EngineLimits:
    gib = gpu.memory_mib / 1024
    weights = model.parameters * _BYTES_PER_WEIGHT / num_gpus
    free = (gib * _MEMORY_SHARE - _RESERVE_GIB) * 2**30 - weights
    bytes_per_token = 2 * _BYTES_PER_WEIGHT * model.num_layers * model.num_kv_heads * model.head_size / num_gpus
    num_blocks = math.floor(free / (bytes_per_token * _BLOCK_SIZE))
    # vLLM's server defaults by GPU memory, as of 0.32.
    batched, seqs = (2048, 256) if gib < 70 else (8192, 1024) if gib < 160 else (16_384, 1024)
    room = (num_blocks - 1) * _BLOCK_SIZE // 1024 * 1024
    return EngineLimits(
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        max_model_len=min(_MAX_MODEL_LEN, room),
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
    )


def _calibration(step_time: StepTime, limits: EngineLimits) -> Calibration:
    budget, context = limits.max_num_batched_tokens, _PROMPT_TOKENS + _OUTPUT_TOKENS / 2
    num_prompts = budget // _PROMPT_TOKENS
    kv_tokens = (limits.num_blocks - 1) * limits.block_size
    # Queries that end per step are replaced by as many prompts.
    ends_per_resident = 1 / _OUTPUT_TOKENS
    tokens_per_resident = 1 + _PROMPT_TOKENS * ends_per_resident
    residents = min(limits.max_num_seqs, kv_tokens / context, budget / tokens_per_resident)
    return Calibration(
        prefill_tokens_per_s=rounded(num_prompts * _PROMPT_TOKENS / _batch_s(step_time, num_prompts, 0, 0.0)),
        decode_step_s=rounded(_batch_s(step_time, 0, _DECODE_REQUESTS, context)),
        service_rate_per_s=rounded(
            residents * ends_per_resident / _batch_s(step_time, residents * ends_per_resident, residents, context)
        ),
    )


def _batch_s(step_time: StepTime, num_prompts: float, num_decodes: float, context: float) -> float:
    """Seconds of a batch of whole prompts and decodes; both may be fractions, as means over many steps."""
    prompt = _PROMPT_TOKENS
    features = {
        "requests": num_prompts + num_decodes,
        "tokens": num_prompts * prompt + num_decodes,
        "prefill_tokens": num_prompts * prompt,
        "decodes": num_decodes,
        "decode_context": num_decodes * context,
        "context": num_decodes * context,
        "prefill_pairs": num_prompts * prompt * (prompt + 1) / 2,
        "chunk_squares": num_prompts * prompt**2,
        "context_squares": num_decodes * context**2,
    }
    one = np.zeros(1)
    return float(predict_s(step_time, StepTable(one, one, np.array([[features[name] for name in FEATURES]])))[0])


def main(arguments: list[str]) -> int:
    """Write every profile of a table; returns the exit code."""
    if len(arguments) != 2:
        print("usage: python -m headway.calibrate.kernel_profiles TABLE.csv DIRECTORY", file=sys.stderr)
        return 2
    try:
        texts = kernel_profiles(Path(arguments[0]))
        for name, text in texts.items():
            write_profile(Path(arguments[1]) / name, text)
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    print(f"{len(texts)} profiles written to {arguments[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
