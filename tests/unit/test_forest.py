"""Trees asked by masks of leaves say what LightGBM says, whatever the splits are on; what masks cannot hold it says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.errors import ArtifactError
from headway.predict.forest import Forest
from headway.predict.trees import Trees

lightgbm = pytest.importorskip("lightgbm", reason="needs the extra 'learned'")

WIDTH, OWN, FIXED = 12, (7, 8), (9, 10, 11)  # the last columns: a category, and two sizes that may be unknown
MODELS = 5


def training_rows(num: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num, WIDTH))
    rows[:, 9] = rng.integers(0, MODELS, num)
    rows[:, 4] = rng.integers(0, 2, num)
    rows[rng.random(num) < 0.3, 3] = np.nan
    rows[rng.random(num) < 0.3, 11] = np.nan
    return rows


def trees(seed: int, *, num_leaves: int = 12, num_trees: int = 25, **more: object) -> bytes:
    rows = training_rows(1500, seed)
    known = np.nan_to_num(rows)
    targets = np.sin(known[:, :8].sum(axis=1) * known[:, 8]) + known[:, 9] % 3 + known[:, 3] * known[:, 11]
    parameters = {"objective": "huber", "num_leaves": num_leaves, "min_data_in_leaf": 5, "verbosity": -1, "seed": seed,
                  "num_threads": 1, "max_cat_to_onehot": 2, **more}  # fmt: skip
    data = lightgbm.Dataset(rows, targets, categorical_feature=[9])
    text: str = lightgbm.train(parameters, data, num_trees).model_to_string()
    return text.encode()


def pool_rows() -> NDArray[np.float64]:
    rows = np.zeros((MODELS, WIDTH))
    rows[:, 9] = range(MODELS)
    rows[:, 10] = np.linspace(-1, 1, MODELS)
    rows[:, 11] = [0.3, np.nan, -0.4, np.nan, 1.0]
    return rows


def put(rows: NDArray[np.float64], rng: np.random.Generator) -> None:
    """A prompt and its scores; something of it is missing now and then."""
    rows[:, :7] = rng.standard_normal(7)
    rows[:, 4] = rng.integers(0, 2)
    rows[:, OWN] = rng.standard_normal((len(rows), len(OWN)))
    if rng.random() < 0.4:
        rows[:, rng.integers(0, 7)] = np.nan
    if rng.random() < 0.2:
        rows[rng.integers(0, len(rows)), OWN[0]] = np.nan


def test_masks_say_what_lightgbm_says() -> None:
    """On splits of every kind: of the prompt, of a model's own scores, on a category, with values missing anywhere."""
    texts, rows, rng = [trees(1), trees(2, num_trees=7), trees(3, num_leaves=16)], pool_rows(), np.random.default_rng(0)
    by_masks = Forest(texts, rows, OWN, FIXED).ask
    by_lightgbm = [Trees(text).prepare(rows) for text in texts]
    for _ in range(300):
        put(rows, rng)
        said = by_masks()
        assert said.shape == (3, MODELS)
        np.testing.assert_allclose(said, np.array([ask() for ask in by_lightgbm]), rtol=1e-12, atol=1e-12)


def test_masks_are_used_where_they_can_be() -> None:
    """What serves is the forest, and asking it at load left the rows as they were."""
    rows = pool_rows()
    before = rows.copy()
    asked = Forest.of([trees(1)], rows, OWN, FIXED)
    assert isinstance(getattr(asked, "__self__", None), Forest)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize(
    "text",
    [
        trees(4, num_leaves=40, num_trees=3),
        trees(5, zero_as_missing=True, num_trees=5),
        trees(6, boosting="rf", bagging_fraction=0.5, bagging_freq=1, num_trees=5),
    ],
    ids=["many leaves", "zeros as missing", "averaged"],
)
def test_what_masks_cannot_hold_lightgbm_says(text: bytes) -> None:
    """More leaves than a mask has bits, zeros that count as missing, trees that are averaged."""
    rows, rng = pool_rows(), np.random.default_rng(1)
    with pytest.raises(ValueError, match=r"leaves|zeros|averaged"):
        Forest([text], rows, OWN, FIXED)
    asked, by_lightgbm = Forest.of([text], rows, OWN, FIXED), Trees(text).prepare(rows)
    for _ in range(20):
        put(rows, rng)
        assert asked()[0].tolist() == by_lightgbm().tolist()


def test_a_category_of_the_prompt_is_left_to_lightgbm() -> None:
    """Only what a model is may be a category."""
    with pytest.raises(ValueError, match="category"):
        Forest([trees(1)], pool_rows(), (*OWN, 9), (10, 11))


def test_trees_without_a_split() -> None:
    """A head that found nothing to split on says one value."""
    text = trees(7, num_trees=2, min_gain_to_split=1e9)
    rows = pool_rows()
    said = Forest.of([text, trees(1, num_trees=2)], rows, OWN, FIXED)()
    assert len(set(said[0].tolist())) == 1
    np.testing.assert_allclose(said[0], Trees(text).predict(rows), rtol=1e-12)


def test_trees_on_other_columns_are_refused() -> None:
    """By their number, when they are loaded."""
    with pytest.raises(ArtifactError, match="12 columns, and its features have 9"):
        Forest.of([trees(1, num_trees=1)], np.zeros((2, 9)), (), ())
