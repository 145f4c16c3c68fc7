"""``headway version``: what is installed, for bug reports.

It loads the native core, so that a broken build shows here and not in the first request; a core that cannot be loaded
is an answer, not a crash.
"""

from __future__ import annotations

import json as json_module
import platform
import sys
from typing import Annotated

from cyclopts import Parameter

import headway


def version(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Print the versions of Headway, its native core, Python and the platform.

    Parameters
    ----------
    json
        Print one JSON object instead of text.
    """
    versions: dict[str, str | None] = {
        "headway": headway.__version__,
        "core": None,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    problem = None
    try:
        from headway import _core

        versions["core"] = (_core.__file__ or "").rsplit("/", 1)[-1]
    except ImportError as error:
        problem = str(error)
    if json:
        print(json_module.dumps({**versions, "problem": problem}))
    else:
        for name, value in versions.items():
            print(f"{name:<9}{value or f'cannot be loaded: {problem}'}")
    if problem is not None:
        print("headway: build the native core with `make build`", file=sys.stderr)
    return 0 if problem is None else 1
