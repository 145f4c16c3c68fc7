"""Writes profiles as YAML files for people: the keys of the shipped ones in their order, and where each figure is from.

Numbers have seven digits, in a notation that every YAML reader takes for a number. It refuses to leave half a file:
the text is written beside the path and moved there.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from headway.errors import ConfigError
from headway.profiles import Profile
from headway.types import EngineLimits

_WIDTH: Final = 112
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9 ,./()_+-]*[A-Za-z0-9)]")
_FORM_COMMENTS: Final = {
    "linear": "seconds: constant, per token, per decode context token, per prefill pair, per request",
    "knee": "seconds: as linear, but per token below and above the knee (tokens)",
    "six_term": "seconds: constant, per prefill token, squared chunk, decode, context token, squared context",
}


def render_profile(profile: Profile, *, title: str, notes: Mapping[str, str] | None = None) -> str:
    """The text of a profile's file. ``notes`` holds comments by ``limits`` or the name of a calibration figure."""
    notes = notes or {}
    lines = _wrapped(title, "# ")
    lines += ["kind: estimator", f"name: {_text(profile.name)}", f"model: {_text(profile.model)}"]
    lines += [f"hardware: {_text(profile.hardware)}", f"engine_version: {_text(profile.engine_version)}", "source: >-"]
    lines += _wrapped(profile.source, "  ")
    lines += ["limits:", *_note(notes, "limits"), *_limits(profile.limits)]
    lines += [f"step_time:      # {_FORM_COMMENTS[profile.step_time.form]}", f"  form: {profile.step_time.form}"]
    lines += [f"  {name}: {_number(value)}" for name, value in profile.step_time.named().items()]
    lines += ["calibration:"]
    for name, value in msgspec.structs.asdict(profile.calibration).items():
        lines += [*_note(notes, name), f"  {name}: {_number(value)}"]
    return "\n".join(lines) + "\n"


def write_profile(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, replacing what was there.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ConfigError(f"cannot be written: {error.strerror}", path=str(path), key="--output") from error


def rounded(value: float) -> float:
    """``value`` with the digits that stand in a file, so that what is reported is what is read back."""
    return float(f"{value:.6e}")


def _limits(limits: EngineLimits) -> list[str]:
    """Every limit that is not vLLM's default, and those without one."""
    shown = {
        field.name: getattr(limits, field.name)
        for field in msgspec.structs.fields(EngineLimits)
        if field.required or field.name == "chunked_prefill" or getattr(limits, field.name) != field.default
    }
    return [f"  {name}: {json.dumps(value)}" for name, value in shown.items()]


def _note(notes: Mapping[str, str], name: str) -> list[str]:
    return _wrapped(notes[name], "  # ") if name in notes else []


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of ``text``, broken between words only: folded again by YAML they are the same words."""
    wrapper = textwrap.TextWrapper(
        _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(" ".join(text.split()))


def _text(value: str) -> str:
    """Plain where that can only be read as text, else in quotes: a JSON string is a YAML one."""
    plain = _PLAIN.fullmatch(value) and value.lower() not in ("true", "false", "null", "yes", "no", "on", "off")
    return value if plain else json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    if isinstance(value, int) or value == 0:
        return f"{value:.0f}"
    if 1e-2 <= abs(value) < 1e7:
        return f"{rounded(value):.7g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    mantissa = mantissa.rstrip("0")
    return f"{mantissa}{'0' if mantissa.endswith('.') else ''}e{exponent}"
