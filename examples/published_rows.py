"""Evaluation rows of a published set, parted into prompts to train on and prompts to hold out.

    HEADWAY_DATA=DIRECTORY python examples/published_rows.py alpaca-eval FOLDER MODEL...

writes FOLDER/train.jsonl and FOLDER/held_out.jsonl with the answers of these models (by default of all). One prompt in
two is held out, by its hash, so that equal prompts fall on one side; each set's traps are left out as `headway evaluate
--published` leaves them out. The directory that HEADWAY_DATA names holds `evals/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headway.predict.seen import prompt_hash
from headway.train.dataset import write_rows
from headway.train.published import PUBLISHED, data_directory

name, folder, *models = sys.argv[1:]
rows = [row for row in PUBLISHED[name].rows(data_directory()) if not models or row.model in models]
for part, held_out in (("train", False), ("held_out", True)):
    path = Path(folder) / f"{part}.jsonl"
    num = write_rows(path, (row for row in rows if (prompt_hash(row.text) % 2 == 1) == held_out))
    print(f"{path}: {num:,} rows")
