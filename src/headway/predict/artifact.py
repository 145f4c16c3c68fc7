"""The artifact: one file that holds a trained predictor, what it was trained on and how good it was.

Layout: the magic line, the SHA-256 of the rest, and a zlib-compressed msgpack body. Nothing in it is code. Whatever is
wrong with it (foreign, cut off, altered, of another version, of other features, giving other numbers than when it was
trained) is an :class:`~headway.errors.ArtifactError` when it is loaded, so that no request ever meets it. Takes and
gives bytes; files are other rooms' business.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ArtifactError
from headway.predict.features import FEATURE_NAMES, FEATURES_VERSION

MAGIC = b"headway-predictor\n"
FORMAT_VERSION = 1
_DIGEST_BYTES = 32
#: An artifact unpacks to no more than this; a damaged or hostile file must not fill the memory.
_MAX_BODY_BYTES = 1 << 30
_DTYPES = ("float64", "float32", "int64", "int32")

#: What may speak for quality or length, from the simplest to the richest.
Kind = Literal["constant", "task_label", "knn", "learned"]


class Array(Struct, frozen=True, array_like=True):
    """A numpy array on the wire: little-endian, C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[np.generic], dtype: str) -> Array:
        """``values`` as ``dtype``, one of float64, float32, int64, int32."""
        array = np.ascontiguousarray(values, np.dtype(dtype).newbyteorder("<"))
        return cls(dtype, array.shape, array.tobytes())

    def numpy(self) -> NDArray[np.float64]:
        """The values as float64.

        Raises:
            ArtifactError: an unknown dtype, or bytes that do not fill the shape.
        """
        return self._values().astype(np.float64)

    def integers(self) -> NDArray[np.int64]:
        """The values of an array of integers. Raises as :meth:`numpy`."""
        return self._values().astype(np.int64)

    def _values(self) -> NDArray[np.generic]:
        if self.dtype not in _DTYPES or any(size < 0 for size in self.shape):
            raise ArtifactError(f"an array of type {self.dtype!r} and shape {self.shape} cannot be read")
        try:
            return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)
        except ValueError as error:
            raise ArtifactError(f"an array does not fill its shape {self.shape}") from error


class TrainedModel(Struct, frozen=True, kw_only=True):
    """A model of the training data. Means are over its rows; None where nothing was known.

    ``log_parameters`` is the natural logarithm of the number of parameters, prices are USD per million tokens.
    """

    name: str
    num_rows: int
    log_parameters: float | None = None
    context_tokens: int | None = None
    input_per_1m_usd: float | None = None
    output_per_1m_usd: float | None = None
    mean_quality: float | None = None
    mean_output_tokens: float | None = None


class LinearModel(Struct, frozen=True, kw_only=True):
    """Ridge regressions on hashed words and dense features: ``weights`` (B + F, T), ``intercept`` (T,).

    A prompt's input is the ``idf`` (B,) of its buckets, scaled to length 1, then its dense features less
    ``dense_mean`` (F,) times ``dense_scale`` (F,), within ±``dense_limit``. T is 2M + L: quality of each model, log1p
    of its output tokens, then one score per task label, whose probabilities are ``softmax(temperature · scores)``.
    """

    idf: Array
    dense_mean: Array
    dense_scale: Array
    dense_limit: float
    weights: Array
    intercept: Array
    temperature: float


class Components(Struct, frozen=True):
    """Principal components of the signed hashed words: ``mean`` (H,), ``axes`` (K, H)."""

    mean: Array
    axes: Array


class QualityTrees(Struct, frozen=True, kw_only=True):
    """Trees for quality less its linear base, and their calibration.

    ``trees`` is LightGBM's text. Raw outputs are drawn towards each model's ``level`` (M,) by ``slope``, then mapped
    through ``knots`` (2, n), linear in between: raw (first row, rising) to quality.
    """

    trees: bytes
    level: Array
    slope: float
    knots: Array


class LengthTrees(Struct, frozen=True):
    """Trees for the log1p of output tokens less their linear base: mean, and two quantiles.

    ``mean_scale`` (M,) makes exp of the mean head unbiased for each model; ``p50_shift`` and ``p90_shift`` (M,) are
    added to the quantile heads, in log1p tokens, so that each covers what it says.
    """

    mean: bytes
    p50: bytes
    p90: bytes
    mean_scale: Array
    p50_shift: Array
    p90_shift: Array


class LabelTable(Struct, frozen=True, kw_only=True):
    """Means per task label and model, all (L, M); lengths in log1p tokens, in tokens, and two of their quantiles."""

    labels: tuple[str, ...]
    quality: Array
    log_tokens: Array
    output_tokens: Array
    p50_tokens: Array
    p90_tokens: Array


class Neighbours(Struct, frozen=True, kw_only=True):
    """Training prompts for nearest neighbours: ``points`` (P, K) on principal components, and what each model made of
    them, (P, M), NaN where it was not asked."""

    k: int
    points: Array
    quality: Array
    output_tokens: Array


class Overall(Struct, frozen=True, kw_only=True):
    """Means per model, and two quantiles of its lengths, all (M,)."""

    quality: Array
    output_tokens: Array
    p50_tokens: Array
    p90_tokens: Array


class RemainingLengths(Struct, frozen=True):
    """Answers of the training data by bin of prompt tokens, for requests that outlive their prediction.

    ``edges_tokens`` are upper bounds, the last bin is open; ``lengths`` has one more row, each at most 256 quantiles.
    """

    edges_tokens: tuple[int, ...]
    lengths: tuple[tuple[float, ...], ...]


class TrainingData(Struct, frozen=True, kw_only=True):
    """What an artifact was trained on. ``prompt_hashes`` are 64-bit hashes of the normalised prompts, sorted."""

    sources: tuple[str, ...]
    sha256: str
    num_rows: int
    num_prompts: int
    num_duplicate_prompts: int
    prompt_hashes: Array


class CardFigures(Struct, frozen=True, kw_only=True):
    """Cross-validated figures within model, as far as serving and the lab need them. None where not measured.

    ``quality_r2_within_task`` and ``length_log_r2_within_task`` are what is explained beyond each model's mean on each
    task label. ``routing_gain`` is realised quality at matched cost less that of the task label, with its interval.
    """

    quality_r2: float | None = None
    quality_r2_within_task: float | None = None
    length_log_r2: float | None = None
    length_log_r2_within_task: float | None = None
    routing_gain: float | None = None
    routing_gain_low: float | None = None
    routing_gain_high: float | None = None


class SelfTest(Struct, frozen=True):
    """A prompt and what the artifact must say of it: (M,) each. Guards against other libraries and other features."""

    text: str
    quality: Array
    output_tokens: Array
    p90_tokens: Array


class Artifact(Struct, frozen=True, kw_only=True):
    """A trained predictor. ``serves_quality`` and ``serves_length`` name what is to speak; ``why`` says why.

    ``generation`` rises by one with each update. A head is None where the data held nothing to train it on.
    """

    format_version: int = FORMAT_VERSION
    features_version: int = FEATURES_VERSION
    feature_names: tuple[str, ...] = FEATURE_NAMES
    made_by: str
    generation: int = 1
    models: tuple[TrainedModel, ...]
    data: TrainingData
    figures: CardFigures
    serves_quality: Kind
    serves_length: Kind
    why: str
    linear: LinearModel
    components: Components
    quality: QualityTrees | None
    length: LengthTrees | None
    labels: LabelTable
    neighbours: Neighbours
    overall: Overall
    remaining: RemainingLengths
    self_tests: tuple[SelfTest, ...] = ()
    settings: dict[str, float | int | str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Artifact)


class _Versions(Struct):
    """What can be read of an artifact of any version."""

    format_version: int
    features_version: int


def encode_artifact(artifact: Artifact) -> bytes:
    """The file's content. Equal artifacts give equal bytes."""
    body = zlib.compress(_encoder.encode(artifact), 6)
    return MAGIC + hashlib.sha256(body).digest() + body


def decode_artifact(content: bytes) -> Artifact:
    """The artifact in a file's content; its trees are not loaded yet (``LearnedPredictor`` does that, and tests them).

    Raises:
        ArtifactError: no artifact, damaged, or of a version that this build does not read.
    """
    if not content.startswith(MAGIC):
        raise ArtifactError("is no predictor artifact of headway train")
    digest, body = content[len(MAGIC) :][:_DIGEST_BYTES], content[len(MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != digest:
        raise ArtifactError("is damaged: its checksum does not hold")
    unpacker = zlib.decompressobj()
    try:
        packed = unpacker.decompress(body, _MAX_BODY_BYTES)
        versions = msgspec.msgpack.decode(packed, type=_Versions)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ArtifactError(f"cannot be read: {error}") from error
    for what, found, ours in (
        ("format", versions.format_version, FORMAT_VERSION),
        ("features", versions.features_version, FEATURES_VERSION),
    ):
        if found != ours:
            raise ArtifactError(f"is of {what} version {found}, and this build reads {ours}: train it again")
    try:
        artifact = _decoder.decode(packed)
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"cannot be read: {error}") from error
    if artifact.feature_names != FEATURE_NAMES:
        raise ArtifactError("was trained on other features than this build computes: train it again")
    _check_names(artifact.models)
    return artifact


def _check_names(models: Sequence[TrainedModel]) -> None:
    names = [model.name for model in models]
    if not names or len(set(names)) != len(names):
        raise ArtifactError("must name each of its models once, and at least one")
