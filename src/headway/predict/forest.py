"""Boosted trees asked about one prompt on every model of a pool at once: what the models share is looked at once.

LightGBM goes through every tree for every row, and a pool's rows differ in a few columns only. Here each split is a
mask of the leaves that it leaves open; a tree's leaf is the first that all its splits leave open (as in QuickScorer,
SIGIR 2015). Splits on the prompt are compared once, those on a model's own scores once per model, those on what a model
is never again. :meth:`Forest.of` holds it to LightGBM's own library and gives way to that where it cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headway.errors import ArtifactError
from headway.predict.trees import Trees

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Masks = NDArray[np.uint16]

_MAX_LEAVES = 16
_OPEN = np.uint16(0xFFFF)
_CATEGORICAL, _DEFAULT_LEFT, _MISSING_ZERO, _MISSING_NAN = 1, 2, 1, 2
#: The number of each mask's lowest bit.
_FIRST = np.zeros(1 << _MAX_LEAVES, np.uint8)
for _bit in reversed(range(_MAX_LEAVES)):
    _FIRST[1 << _bit :: 2 << _bit] = _bit
_TRIALS, _TOLERANCE = 24, 1e-9
_NUDGES = np.array([0.0, 1e-9, 0.1, -1e-9, -0.1, np.nan, 0.0])


class _Split(Struct):
    """An inner node: ``closes`` is what is left open where the value goes right; ``missing_left`` is where NaN goes."""

    tree: int
    feature: int
    threshold: float
    closes: int
    missing_left: bool
    categories: frozenset[int] | None


class _Splits:
    """Splits as columns: what they compare, with what, and what they leave open."""

    def __init__(self, splits: Sequence[_Split], shape: tuple[int, ...] = ()) -> None:
        """``shape`` is that of what is asked but for its columns: () for one row, (S,) for S of them."""
        self.feature: Ints = np.array([one.feature for one in splits], np.intp)
        self.threshold: Floats = np.array([one.threshold for one in splits], np.float64)
        self.closes: Masks = np.array([one.closes for one in splits], np.uint16)
        self.missing_left = np.array([one.missing_left for one in splits], np.bool_)

        size = (*shape, len(splits))
        self._values, self._left = np.empty(size), np.empty(size, np.bool_)
        #: What :meth:`ask` found, (..., N); every question overwrites it.
        self.left_open: Masks = np.empty(size, np.uint16)

    def ask(self, row: Floats) -> None:
        """Puts what stays open for the values of ``row`` (..., F) into ``left_open``."""
        values, left = self._values, self._left
        row.take(self.feature, axis=-1, out=values, mode="clip")
        np.less_equal(values, self.threshold, out=left)
        if np.isnan(row).any():
            left |= np.isnan(values) & self.missing_left
        np.multiply(left, _OPEN, out=self.left_open)
        np.bitwise_or(self.left_open, self.closes, out=self.left_open)


class Forest:
    """The trees of several heads, for rows that differ in ``own`` and ``fixed`` columns only; the fixed ones never
    change."""

    def __init__(self, texts: Sequence[bytes], rows: Floats, own: Sequence[int], fixed: Sequence[int]) -> None:
        """Raises ``ValueError`` where trees are of a kind that masks cannot hold."""
        splits: list[_Split] = []
        leaves: list[list[float]] = []
        head: list[int] = []
        for number, text in enumerate(texts):
            for block in text.decode().split("\nTree=")[1:]:
                _read_tree(block, len(leaves), splits, leaves)
                head.append(number)
            if b"\naverage_output" in text:
                raise ValueError("trees that are averaged")
        num = len(leaves)
        # Trees with most splits on own columns first, so that each slot of those is a stretch.
        num_own = np.bincount([one.tree for one in splits if one.feature in own], minlength=num)
        order = np.argsort(-num_own, kind="stable")
        place = np.argsort(order)
        splits = [_at(one, int(place[one.tree])) for one in splits]
        leaves = [leaves[tree] for tree in order]
        self._rows, self._own = rows, list(own)
        #: Which head a tree belongs to, (T, heads): 1 where it does.
        self._head: Floats = np.eye(len(texts))[np.array(head)[order]]
        self._offset = np.cumsum([0, *(len(values) for values in leaves[:-1])]).astype(np.intp)
        self._leaves: Floats = np.array([value for values in leaves for value in values], np.float64)
        of_fixed = [one for one in splits if one.feature in fixed]
        self._fixed: Masks = np.full((len(rows), num), _OPEN, np.uint16)
        for one in of_fixed:
            for row in range(len(rows)):
                if not _goes_left(one, float(rows[row, one.feature])):
                    self._fixed[row, one.tree] &= np.uint16(one.closes)
        if any(one.categories is not None for one in splits if one.feature not in fixed):
            raise ValueError("a category that changes with the prompt")
        self._shared = _Shared([one for one in splits if one.feature not in fixed and one.feature not in own], num)
        column = {feature: at for at, feature in enumerate(own)}
        self._left_open: Masks = np.empty_like(self._fixed)
        mine = [_at(one, one.tree, column[one.feature]) for one in splits if one.feature in own]
        self._mine = _Own(mine, self._left_open)

    @classmethod
    def of(cls, texts: Sequence[bytes], rows: Floats, own: Sequence[int], fixed: Sequence[int]) -> Asked:
        """A call that gives each head's values of ``rows`` as they then stand, (heads, S).

        By masks where those say what LightGBM says of random rows, else by LightGBM.

        Raises:
            ArtifactError: LightGBM is missing or does not accept the trees, or they are on other columns.
        """
        trees = [Trees(text) for text in texts]
        for one in trees:
            if one.num_features != rows.shape[1]:
                found = f"{one.num_features} columns, and its features have {rows.shape[1]}"
                raise ArtifactError(f"holds trees on {found}")
        asked = [one.prepare(rows) for one in trees]

        def by_lightgbm() -> Floats:
            return np.array([ask() for ask in asked])

        try:
            forest = cls(texts, rows, own, fixed)
        except (ValueError, KeyError, IndexError):
            return by_lightgbm
        return forest.ask if forest._agrees(by_lightgbm) else by_lightgbm

    def ask(self) -> Floats:
        """Each head's value of each row, (heads, S)."""
        rows = self._rows
        np.bitwise_and(self._fixed, self._shared.left_open(rows[0]), out=self._left_open)
        self._mine.close(rows.take(self._own, axis=1))
        values = self._leaves.take(_FIRST.take(self._left_open) + self._offset)
        said: Floats = (values @ self._head).T
        return said

    def _agrees(self, by_lightgbm: Callable[[], Floats]) -> bool:
        """Whether both say the same of rows about the trees' own thresholds, some of them missing; the rows stay."""
        rows, before = self._rows, self._rows.copy()
        thresholds: dict[int, list[float]] = {}
        for splits, names in ((self._shared.splits, None), (self._mine.splits, self._own)):
            for feature, threshold in zip(splits.feature.tolist(), splits.threshold.tolist(), strict=True):
                thresholds.setdefault(feature if names is None else names[feature], []).append(threshold)
        agrees = True
        for trial in range(_TRIALS):
            for feature, known in thresholds.items():
                # Every mixture will do, so long as it comes again.
                at = trial * 104_729 + feature * 31 + np.arange(len(rows) if feature in self._own else 1) * 7_919
                rows[:, feature] = np.array(known)[at % len(known)] + _NUDGES[at % len(_NUDGES)]
            agrees = agrees and np.allclose(self.ask(), by_lightgbm(), rtol=_TOLERANCE, atol=_TOLERANCE)
        rows[:] = before
        return agrees


#: A prepared question to several heads.
Asked = Callable[[], Floats]


class _Shared:
    """Splits in slots of one per tree; a tree that has fewer is filled up with what closes nothing."""

    def __init__(self, splits: Sequence[_Split], num_trees: int) -> None:
        by_tree: list[list[_Split]] = [[] for _ in range(num_trees)]
        for one in splits:
            by_tree[one.tree].append(one)
        num = max(map(len, by_tree))
        nothing = _Split(0, 0, 0.0, int(_OPEN), True, None)
        self.splits = _Splits([of[slot] if slot < len(of) else nothing for slot in range(num) for of in by_tree])
        self._shape = (num, num_trees)

    def left_open(self, row: Floats) -> Masks:
        """What all splits of each tree leave open, (T,)."""
        self.splits.ask(row)
        masks: Masks = np.bitwise_and.reduce(self.splits.left_open.reshape(self._shape), axis=0)
        return masks


class _Own:
    """Splits in slots of one per tree, of the first trees only: trees are sorted by how many they have."""

    def __init__(self, splits: Sequence[_Split], left_open: Masks) -> None:
        """``left_open`` (S, T) is where leaves are closed."""
        slots: list[list[_Split]] = []
        used: dict[int, int] = {}
        for one in sorted(splits, key=lambda split: split.tree):
            slot = used.get(one.tree, 0)
            used[one.tree] = slot + 1
            slots += [[]] if slot == len(slots) else []
            slots[slot].append(one)
        self.splits = _Splits([one for slot in slots for one in slot], left_open.shape[:1])
        ends = np.cumsum([len(slot) for slot in slots]).tolist()
        found = self.splits.left_open
        self._parts = [
            (left_open[:, : len(slot)], found[:, end - len(slot) : end]) for end, slot in zip(ends, slots, strict=True)
        ]

    def close(self, rows: Floats) -> None:
        """Closes what the values of ``rows`` (S, F) close."""
        self.splits.ask(rows)
        for leaves, masks in self._parts:
            np.bitwise_and(leaves, masks, out=leaves)


def _read_tree(block: str, number: int, splits: list[_Split], leaves: list[list[float]]) -> None:
    """Adds one tree of LightGBM's text: its splits, and its leaves from left to right."""
    fields: Mapping[str, str] = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    if int(fields["num_leaves"]) > _MAX_LEAVES or fields.get("is_linear", "0") != "0":
        raise ValueError("too many leaves, or linear ones")
    values = [float(value) for value in fields["leaf_value"].split()]
    if len(values) == 1:
        leaves.append(values)
        return
    names = ("split_feature", "decision_type", "left_child", "right_child")
    feature, decision, left, right = ([int(value) for value in fields[name].split()] for name in names)
    threshold = [float(value) for value in fields["threshold"].split()]
    order: list[int] = []

    def walk(node: int) -> int:
        """The mask of the leaves below ``node``; leaves are numbered as they are met."""
        if node < 0:
            order.append(~node)
            return 1 << (len(order) - 1)
        lefts, rights = walk(left[node]), walk(right[node])
        missing, kind = (decision[node] >> 2) & 3, decision[node] & _CATEGORICAL
        if missing == _MISSING_ZERO and not kind:
            raise ValueError("zeros that count as missing")
        goes_left = bool(decision[node] & _DEFAULT_LEFT) if missing == _MISSING_NAN else threshold[node] >= 0.0
        categories = _categories(fields, int(threshold[node])) if kind else None
        closes = 0xFFFF & ~lefts
        splits.append(_Split(number, feature[node], threshold[node], closes, goes_left, categories))
        return lefts | rights

    walk(0)
    leaves.append([values[leaf] for leaf in order])


def _categories(fields: Mapping[str, str], index: int) -> frozenset[int]:
    """The categories that go left."""
    bounds = [int(value) for value in fields["cat_boundaries"].split()]
    words = [int(value) for value in fields["cat_threshold"].split()][bounds[index] : bounds[index + 1]]
    return frozenset(32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1)


def _goes_left(split: _Split, value: float) -> bool:
    if split.categories is not None:
        return not np.isnan(value) and int(value) in split.categories
    return split.missing_left if np.isnan(value) else value <= split.threshold


def _at(split: _Split, tree: int, feature: int | None = None) -> _Split:
    column = split.feature if feature is None else feature
    return _Split(tree, column, split.threshold, split.closes, split.missing_left, split.categories)
