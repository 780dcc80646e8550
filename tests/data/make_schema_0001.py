"""Makes `schema_0001.sql`: a small study as it was stored with schema 0001.

It was run once, with the code of that time. Later schemas must still open what it made, so it is
not run again: a new schema gets a fixture of its own.

    PYTHONPATH=tests python tests/data/make_schema_0001.py
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

from study_helpers import make_profile, make_setup, make_space, simulated

from autotune.search.study import run_search
from autotune.store.repository import Store


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = make_profile(folder, measure={"min_requests": 3, "warmup_requests": 1})
        setup = make_setup(
            folder,
            profile=profile,
            engine=simulated(k3="insufficient_memory"),
            space=make_space({"num_speculative_tokens": [0, 3, 5]}),
            num_repeats=2,
        )
        # Nothing about the machine that this was made on belongs into the repository.
        environment = {**setup.environment, "platform": "Linux", "python": "3.11"}
        setup = replace(setup, environment=environment)
        store = Store(setup.settings.storage, create=True)
        run_search(setup, store)
        store.close()
        with contextlib.closing(sqlite3.connect(setup.settings.storage)) as connection:
            text = "\n".join(connection.iterdump()) + "\n"
    assert name not in text
    (Path(__file__).parent / "schema_0001.sql").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
