"""Boosted trees served by LightGBM's own library, straight through its C interface.

The Python package of LightGBM takes over a second to import and tens of microseconds to ask; its shared library alone
loads in milliseconds and answers one row in a few. It is looked up where the package (extra ``learned``) is installed
and loaded only when an artifact holds trees. This file refuses to train.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headway.errors import ArtifactError

_FLOAT64, _ROW_MAJOR, _NORMAL = 1, 1, 0
_PARAMETERS = b"num_threads=1"
#: Up to this many rows are asked one by one through the prepared single-row call, more in one batch.
_MAX_SINGLE_ROWS = 4


class Trees:
    """One trained model of LightGBM, from the text that LightGBM saves.

    Raises:
        ArtifactError: LightGBM is not installed, cannot be loaded, or does not accept the text.
    """

    def __init__(self, text: bytes) -> None:
        self._library = _library()
        self._handle, self._single = ctypes.c_void_p(), ctypes.c_void_p()
        iterations, features = ctypes.c_int(), ctypes.c_int()
        self._call("BoosterLoadModelFromString", text, ctypes.byref(iterations), ctypes.byref(self._handle))
        self._call("BoosterGetNumFeature", self._handle, ctypes.byref(features))
        self.num_features, self.num_iterations = features.value, iterations.value
        self._call(
            "BoosterPredictForMatSingleRowFastInit",
            *(self._handle, _NORMAL, 0, -1, _FLOAT64, features, _PARAMETERS, ctypes.byref(self._single)),
        )
        self._predict_single = self._library.LGBM_BoosterPredictForMatSingleRowFast
        self._predict_single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._length = ctypes.c_int64()
        self._length_at = ctypes.addressof(self._length)

    def predict(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """One value per row of ``rows``, float64 of shape (n, ``num_features``); NaN is a missing value."""
        return self.prepare(np.ascontiguousarray(rows, np.float64))()

    def prepare(self, rows: NDArray[np.float64]) -> Callable[[], NDArray[np.float64]]:
        """A call that gives one value per row of this very array as it then stands, in an array that it reuses.

        Raises:
            ValueError: ``rows`` is not C-ordered float64, or has other columns than the trees.
        """
        if rows.dtype != np.float64 or not rows.flags.c_contiguous or rows.shape[1] != self.num_features:
            raise ValueError(f"rows are {rows.dtype} of shape {rows.shape}, the trees take {self.num_features} columns")
        out = np.empty(len(rows))
        predict = self._one_by_one if len(rows) <= _MAX_SINGLE_ROWS else self._in_one_batch
        return predict(rows, out)

    def _one_by_one(self, rows: NDArray[np.float64], out: NDArray[np.float64]) -> Callable[[], NDArray[np.float64]]:
        predict, single, length_at = self._predict_single, self._single, self._length_at
        stride = 8 * self.num_features
        places = [(rows.ctypes.data + stride * row, out.ctypes.data + 8 * row) for row in range(len(rows))]

        def ask(trees: Trees = self, asked: NDArray[np.float64] = rows) -> NDArray[np.float64]:
            # Trees and rows are arguments so that they live as long as this call does: it only knows addresses.
            for source, target in places:
                predict(single, source, length_at, target)
            return out

        return ask

    def _in_one_batch(self, rows: NDArray[np.float64], out: NDArray[np.float64]) -> Callable[[], NDArray[np.float64]]:
        source, target = rows.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p)
        shape = (*map(ctypes.c_int32, rows.shape), _ROW_MAJOR)
        length = ctypes.byref(self._length)

        def ask() -> NDArray[np.float64]:
            whole = (_NORMAL, 0, -1, _PARAMETERS, length)
            self._call("BoosterPredictForMat", self._handle, source, _FLOAT64, *shape, *whole, target)
            return out

        return ask

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, f"LGBM_{name}")(*arguments) != 0:
            reason = ctypes.string_at(self._library.LGBM_GetLastError()).decode("utf-8", "replace")
            raise ArtifactError(f"LightGBM refused {name}: {reason.strip()}")

    def __del__(self) -> None:
        library = getattr(self, "_library", None)
        if library is not None:
            if self._single.value:
                library.LGBM_FastConfigFree(self._single)
            if self._handle.value:
                library.LGBM_BoosterFree(self._handle)


@cache
def _library() -> ctypes.CDLL:
    """LightGBM's shared library, loaded without its Python package.

    Raises:
        ArtifactError: it is not installed, or cannot be loaded.
    """
    found = importlib.util.find_spec("lightgbm")
    if found is None or not found.submodule_search_locations:
        raise ArtifactError("holds boosted trees, and LightGBM is not installed: pip install 'headway[learned]'")
    folder = found.submodule_search_locations[0]
    name = {"win32": "lib_lightgbm.dll", "darwin": "lib_lightgbm.dylib"}.get(sys.platform, "lib_lightgbm.so")
    problems = []
    for path in (f"{folder}/lib/{name}", f"{folder}/{name}", f"{folder}/bin/{name}"):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            problems.append(str(error))
            continue
        library.LGBM_GetLastError.restype = ctypes.c_void_p
        return library
    raise ArtifactError(f"holds boosted trees, and LightGBM's library cannot be loaded: {problems[0]}")
