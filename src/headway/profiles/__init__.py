"""Profiles: what is known of an engine on a piece of hardware, one YAML file each, shipped beside this file.

``NAME.yaml`` is an estimator's profile: limits, a fitted step time and calibration figures. ``truth/NAME.yaml`` is the
clock of a simulated engine, and nothing that estimates may read it: an estimator that sees the truth proves nothing.
So each loader refuses the other kind, by the ``kind`` that every file states. Unknown, doubled and missing keys are
errors with their path; a profile says which engine version, hardware and source its figures come from.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

import msgspec
import yaml
from msgspec import Struct

from headway.errors import EngineInputError, ProfileError
from headway.types import Calibration, EngineLimits, StepTime

PROFILE_DIRECTORY: Final = Path(__file__).parent
TRUTH_DIRECTORY: Final = PROFILE_DIRECTORY / "truth"

_T = TypeVar("_T", bound=Struct)


class Profile(Struct, frozen=True, kw_only=True):
    """What an estimator may know of an instance before any traffic. ``source`` says where the figures come from."""

    name: str
    model: str
    hardware: str
    engine_version: str
    source: str
    limits: EngineLimits
    step_time: StepTime
    calibration: Calibration


class TruthProfile(Struct, frozen=True, kw_only=True):
    """The clock of a simulated engine, which no estimator may read.

    A step takes ``step_time`` × exp(``step_noise`` · z), z standard normal; with ``stall_probability`` a stall of
    exponential length with mean ``stall_mean_s`` comes on top, and always a host gap uniform in ``host_gap_s``.
    """

    name: str
    model: str
    hardware: str
    engine_version: str
    source: str
    limits: EngineLimits
    step_time: StepTime
    step_noise: float
    stall_probability: float
    stall_mean_s: float
    host_gap_s: tuple[float, float]


class _Linear(Struct, tag_field="form", tag="linear"):
    b0: float
    b1: float
    b2: float
    b3: float
    b_seq: float = 0.0


class _Knee(Struct, tag_field="form", tag="knee"):
    b0: float
    b1_below: float
    b1_above: float
    knee: float
    b2: float
    b3: float
    b_seq: float = 0.0


class _SixTerm(Struct, tag_field="form", tag="six_term"):
    b0: float
    bp: float
    bpp: float
    bd: float
    bs: float
    bss: float


_STEP_TIME_FORMS: Final[dict[object, type[Struct]]] = {"linear": _Linear, "knee": _Knee, "six_term": _SixTerm}


class _ProfileFile(Struct, kw_only=True):
    kind: Literal["estimator"]
    name: str
    model: str
    hardware: str
    engine_version: str
    source: str
    limits: EngineLimits
    step_time: _Linear | _Knee | _SixTerm
    calibration: Calibration


class _TruthFile(Struct, kw_only=True):
    kind: Literal["truth"]
    name: str
    model: str
    hardware: str
    engine_version: str
    source: str
    limits: EngineLimits
    step_time: _Linear | _Knee | _SixTerm
    step_noise: float
    stall_probability: float
    stall_mean_s: float
    host_gap_s: tuple[float, float]


def profile_names() -> list[str]:
    """The names of the shipped estimator profiles."""
    return sorted(path.stem for path in PROFILE_DIRECTORY.glob("*.yaml"))


def truth_names() -> list[str]:
    """The names of the shipped truth profiles."""
    return sorted(path.stem for path in TRUTH_DIRECTORY.glob("*.yaml"))


def load_profile(name_or_path: str | Path) -> Profile:
    """An estimator profile by shipped name, or from a path (anything with ``/`` or ending in ``.yaml``).

    Raises:
        ProfileError: unknown, malformed, or a truth profile.
    """
    path = _locate(name_or_path, PROFILE_DIRECTORY, profile_names())
    raw = _read(path)
    if raw.get("kind") == "truth":
        raise ProfileError(
            "is a truth profile, which only simulated engines may read: an estimator that knows the truth proves "
            f"nothing{_hint(path.stem, profile_names())}",
            path=str(path),
            key="kind",
        )
    file = _convert(raw, _ProfileFile, path)
    for key in ("prefill_tokens_per_s", "decode_step_s", "service_rate_per_s", "concurrency", "ttft_ratio_p90"):
        _require(getattr(file.calibration, key), path, f"calibration.{key}", exclusive=True)
    values = {key: getattr(file, key) for key in Profile.__struct_fields__}
    return Profile(**(values | {"step_time": _step_time(file.step_time, path)}))


def load_truth(name_or_path: str | Path) -> TruthProfile:
    """The truth profile of a simulated engine, by shipped name or from a path.

    Raises:
        ProfileError: unknown, malformed, or an estimator's profile; also when one request of ``max_model_len``
            would not fit the blocks, with which no engine starts.
    """
    path = _locate(name_or_path, TRUTH_DIRECTORY, truth_names())
    raw = _read(path)
    if raw.get("kind") == "estimator":
        raise ProfileError("is an estimator's profile; a simulated engine needs a truth profile", path=str(path))
    file = _convert(raw, _TruthFile, path)
    _require(file.step_noise, path, "step_noise", maximum=1.0)
    _require(file.stall_probability, path, "stall_probability", maximum=1.0)
    _require(file.stall_mean_s, path, "stall_mean_s")
    low, high = file.host_gap_s
    _require(low, path, "host_gap_s[0]", maximum=high)
    _require(high, path, "host_gap_s[1]")
    limits = file.limits
    if (limits.num_blocks - 1) * limits.block_size < limits.max_model_len:
        raise ProfileError(
            f"{limits.num_blocks} blocks of {limits.block_size} tokens, one of them the null block, hold no request of "
            f"max_model_len ({limits.max_model_len})",
            path=str(path),
            key="limits.num_blocks",
        )
    values = {key: getattr(file, key) for key in TruthProfile.__struct_fields__}
    return TruthProfile(**(values | {"step_time": _step_time(file.step_time, path)}))


def _locate(name_or_path: str | Path, directory: Path, names: list[str]) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    if text not in names:
        hint = _hint(text, names) or f"; there are {', '.join(names)}"
        raise ProfileError(f"no profile is called {text!r}{hint}", key="profile")
    return directory / f"{text}.yaml"


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (``1e-3``), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return cast("dict[object, object]", super().construct_mapping(node, deep))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read(path: Path) -> Mapping[str, object]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot be read: {error}", path=str(path), key="profile") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ProfileError(
            str(error.problem),
            path=str(path),
            line=mark.line + 1 if mark else None,
            column=mark.column + 1 if mark else None,
        ) from error
    except yaml.YAMLError as error:
        raise ProfileError(f"is no YAML: {error}", path=str(path)) from error
    if not isinstance(raw, dict):
        raise ProfileError("must be a mapping of keys to values", path=str(path))
    return raw


def _convert(raw: Mapping[str, object], form: type[_T], path: Path) -> _T:
    _refuse_unknown_keys(raw, form, path, "")
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ProfileError(message, path=str(path), key=where.rstrip("`").lstrip(".")) from error


def _refuse_unknown_keys(raw: Mapping[str, object], form: type[Struct], path: Path, prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(form)}
    known = [*fields, *([form.__struct_config__.tag_field] if form.__struct_config__.tag_field else [])]
    for key, value in raw.items():
        if key not in known:
            raise ProfileError(f"unknown key{_hint(str(key), known)}", path=str(path), key=f"{prefix}{key}")
        inner = fields.get(key)
        if key == "step_time" and isinstance(value, dict):
            inner = _STEP_TIME_FORMS.get(value.get("form"))
        if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, dict):
            _refuse_unknown_keys(value, inner, path, f"{prefix}{key}.")


def _step_time(raw: _Linear | _Knee | _SixTerm, path: Path) -> StepTime:
    values = msgspec.structs.asdict(raw)
    try:
        if isinstance(raw, _Linear):
            return StepTime.linear(**values)
        return StepTime.knee(**values) if isinstance(raw, _Knee) else StepTime.six_term(**values)
    except EngineInputError as error:
        raise ProfileError(str(error), path=str(path), key="step_time") from error


def _require(value: float, path: Path, key: str, *, exclusive: bool = False, maximum: float = math.inf) -> None:
    good = math.isfinite(value) and (value > 0 if exclusive else value >= 0) and value <= maximum
    if not good:
        above = "above 0" if exclusive else "at least 0"
        below = f" and at most {maximum:g}" if maximum != math.inf else ""
        raise ProfileError(f"must be finite, {above}{below}, not {value!r}", path=str(path), key=key)
