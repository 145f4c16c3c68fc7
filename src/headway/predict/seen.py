"""Which prompts an artifact was trained on, by the hashes it carries: nothing measured on those says anything.

Prompts are equal here when their letters and digits are, whatever case, marks or spaces. It refuses to guess at prompts
that are merely alike.
"""

from __future__ import annotations

import hashlib
import re

from headway.predict.artifact import Artifact

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Its runs of letters and digits, in lower case."""
    return _WORD.findall(text.lower())


def prompt_hash(text: str) -> int:
    """The 63-bit hash under which training keeps a prompt."""
    words = " ".join(words_of(text))
    digest = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seen_prompts(artifact: Artifact) -> frozenset[int]:
    """The hashes of the prompts that ``artifact`` was trained on.

    Raises:
        ArtifactError: they cannot be read.
    """
    return frozenset(artifact.data.prompt_hashes.integers().tolist())
