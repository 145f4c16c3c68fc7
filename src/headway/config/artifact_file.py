"""Reading trained artifacts: what is wrong with one is said with the name of its file.

The artifact itself is decoded and served from bytes (``headway.predict``), which know no file. It refuses to catch
errors that are not the artifact's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.errors import ArtifactError
from headway.predict.artifact import Artifact, decode_artifact


@contextmanager
def errors_of_artifact(path: Path) -> Iterator[None]:
    """What is raised inside, of reading, decoding or serving the artifact at ``path``, names that file.

    Raises:
        ArtifactError: in the place of ``OSError`` and ``ArtifactError``.
    """
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    except ArtifactError as error:
        raise ArtifactError(str(error), path=str(path)) from error


def read_artifact(path: Path) -> Artifact:
    """The artifact in a file.

    Raises:
        ArtifactError: it cannot be read, or is none; names the file.
    """
    with errors_of_artifact(path):
        return decode_artifact(path.read_bytes())
