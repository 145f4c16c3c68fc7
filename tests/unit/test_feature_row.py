"""Features kept in place of a prompt: the same numbers again, and nothing of another make."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import DatasetError
from headway.predict.feature_row import FeatureRow
from headway.predict.features import FEATURES_VERSION, NUM_FEATURES, prompt_features
from headway.predict.prompt import prompt_of_text
from headway.train.dataset import EvaluationRow, decode_row, encode_row


@given(st.text(max_size=300), st.none() | st.integers(1, 9000))
def test_a_file_gives_back_every_bit(text: str, max_tokens: int | None) -> None:
    """Through JSON and back, a row's features are those that were computed, missing values included."""
    features = prompt_features(prompt_of_text(text, max_tokens=max_tokens))
    row = EvaluationRow(prompt_id="p", model="m", features=FeatureRow.of(features, "00ff"), output_tokens=3)
    read = decode_row(encode_row(row)).features
    assert read is not None
    for name in ("dense", "hashed", "buckets"):
        ours, theirs = getattr(features, name), getattr(read.features(), name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": FEATURES_VERSION + 1}, "of version"),
        ({"dense": [0.0]}, "dense features"),
        ({"hashed": [[512, 1.0]]}, "< 512|<= 511"),
        ({"buckets": [-1]}, ">= 0"),
        ({"words": ["secret"]}, "unknown field"),
    ],
)
def test_features_of_another_make_are_refused(change: dict[str, object], words: str) -> None:
    """A version this build does not compute, or counts and places it does not have, are named at their line."""
    fields = {"version": FEATURES_VERSION, "prompt_sha256": "x", "dense": [0.0] * NUM_FEATURES, "hashed": [],
              "buckets": []}  # fmt: skip
    line = msgspec.json.encode({"prompt_id": "p", "model": "m", "features": fields | change})
    with pytest.raises(DatasetError, match=words):
        decode_row(line, path="f.jsonl", number=3)


def test_a_row_has_one_kind_of_prompt() -> None:
    """Text, messages or features: a row with two of them would not say which to believe."""
    with pytest.raises(DatasetError, match="one of"):
        decode_row(b'{"prompt_id": "p", "model": "m"}')
    with pytest.raises(DatasetError, match="one of"):
        decode_row(b'{"prompt_id": "p", "model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}')
