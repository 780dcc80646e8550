"""The dashboard shows a study to readers on this machine, and nobody can change anything through it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import AutotuneError, InputError
from autotune.search.build import EngineChoice, build_search
from autotune.search.setup import SearchSettings
from autotune.search.study import run_search
from autotune.store.repository import Store
from autotune.traffic.profile import load_profile

pytest.importorskip("optuna_dashboard", reason="the dashboard is an optional package")

from autotune.report.dashboard import make_dashboard

SPACE = "version: 1\nname: s\nparameters: {num_speculative_tokens: {choices: [0, 1, 4, 8]}}\n"
# Without noise K = 0 takes 6.8 ms per token at this load, and every other K less than 4.5 ms.
TRAFFIC = """\
version: 1
name: guarded
model: owner/target
drafter: owner/head
load: {kind: concurrency, concurrency: 2}
measure: {min_requests: 12}
classes:
  - prompts: {builtin: demo/chat}
    output: {max_tokens: 64}
    slo: {tpot_mean_ms: 5.5}
"""


@dataclass(frozen=True)
class Answer:
    """What the dashboard said."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the database of a simulated study in which some configs break a limit."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "traffic.yaml").write_text(TRAFFIC, encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    settings = SearchSettings(
        storage=str(folder / "autotune.db"), out_dir=folder, max_trials=4, num_repeats=2
    )
    setup = build_search(
        load_profile(folder / "traffic.yaml"),
        str(folder / "space.yaml"),
        EngineChoice("simulated", options={"faults": "K=8:launch_error"}),
        settings,
    )
    store = Store(settings.storage, create=True)
    try:
        run_search(setup, store)
    finally:
        store.close()
    return settings.storage


@pytest.fixture(scope="module")
def port(storage: str) -> Iterator[int]:
    """Serve the dashboard on a free port for as long as the tests of this module run."""
    with make_dashboard(storage, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def ask(port: int) -> Ask:
    """Give a function that sends one request to the dashboard."""

    def send(
        method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())

    return send


@pytest.fixture
def study_id(ask: Ask) -> int:
    (study,) = ask("GET", "/api/studies").data["study_summaries"]
    return int(study["study_id"])


def test_it_listens_on_the_address_it_was_given(storage: str) -> None:
    with make_dashboard(storage, "127.0.0.1", 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.server_port > 0


def test_its_page_is_there(ask: Ask) -> None:
    page = ask("GET", "/dashboard")
    assert page.status == 200
    assert b"<html" in page.body.lower()


def test_it_lists_the_study(ask: Ask) -> None:
    listed = ask("GET", "/api/studies")
    assert listed.status == 200
    (study,) = listed.data["study_summaries"]
    assert study["study_name"] == "guarded"
    assert study["directions"] == ["maximize"]


def test_it_shows_every_trial_with_its_config_and_value(ask: Ask, study_id: int) -> None:
    study = ask("GET", f"/api/studies/{study_id}?after=0").data
    trials = study["trials"]
    assert [trial["state"] for trial in trials] == ["Complete"] * 4
    assert [label_of(trial) for trial in trials[:3]] == ["K=0", "K=8", "K=4"]  # the anchors
    assert len({str(trial["params"]) for trial in trials}) == 4
    assert all(trial["values"] for trial in trials)
    assert study["objective_names"] == ["output_throughput_tps"]


def test_trials_that_break_a_limit_are_infeasible_and_others_are_not(
    ask: Ask, study_id: int
) -> None:
    trials = ask("GET", f"/api/studies/{study_id}?after=0").data["trials"]
    worst = {label_of(trial): max(trial["constraints"]) for trial in trials}

    assert worst.keys() == {"K=0", "K=1", "K=4", "K=8"}
    assert worst["K=0"] > 0, "breaks the limit on tpot_mean_ms"
    assert worst["K=8"] > 0, "its launch failed"
    assert worst["K=4"] <= 0
    # Cut off for being far slower than K = 4: it counts as one that broke something.
    assert worst["K=1"] == 1


def test_optuna_sees_the_same_violations(storage: str, ask: Ask, study_id: int) -> None:
    trials = ask("GET", f"/api/studies/{study_id}?after=0").data["trials"]
    shown = {trial["number"]: max(trial["constraints"]) for trial in trials}
    study = optuna.load_study(study_name="guarded", storage=f"sqlite:///{storage}")
    assert {trial.number: max(trial.constraints.values()) for trial in study.trials} == shown


def label_of(trial: Mapping[str, Any]) -> str:
    labels = [attr["value"] for attr in trial["user_attrs"] if attr["key"] == "label"]
    return str(labels[0]).strip('"')


# --- Nobody can change anything ---

CHANGES = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB")


@pytest.mark.parametrize("method", CHANGES)
def test_only_reading_gets_through(method: str, ask: Ask, study_id: int) -> None:
    refused = ask(method, f"/api/studies/{study_id}")
    assert refused.status == 405
    assert refused.headers["Allow"] == "GET, HEAD"
    assert b"read-only" in refused.body


def test_a_study_cannot_be_deleted(ask: Ask, study_id: int, storage: str) -> None:
    assert ask("DELETE", f"/api/studies/{study_id}").status == 405

    assert [s["study_id"] for s in ask("GET", "/api/studies").data["study_summaries"]] == [
        study_id
    ]
    assert optuna.get_all_study_names(f"sqlite:///{storage}") == ["guarded"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/studies", {"study_name": "mine", "directions": ["minimize"]}),
        ("/api/studies/{id}/rename", {"study_name": "mine"}),
        ("/api/trials/{id}/tell", {"state": "Fail"}),
        ("/api/trials/{id}/user-attrs", {"user_attrs": {"x": 1}}),
        ("/api/studies/{id}/note", {"body": "hello", "version": 1}),
    ],
)
def test_nothing_can_be_written(
    path: str, body: Mapping[str, Any], ask: Ask, study_id: int, storage: str
) -> None:
    before = Path(storage).read_bytes()
    headers = {"Content-Type": "application/json"}
    refused = ask("POST", path.format(id=study_id), json.dumps(body), headers)
    assert refused.status == 405
    assert Path(storage).read_bytes() == before


@pytest.mark.parametrize("name", ["X-HTTP-Method-Override", "X-Method-Override", "X-HTTP-Method"])
def test_a_header_cannot_make_reading_a_change(name: str, ask: Ask, study_id: int) -> None:
    ask("GET", f"/api/studies/{study_id}", headers={name: "DELETE"})
    assert len(ask("GET", "/api/studies").data["study_summaries"]) == 1


# --- And only pages of this machine can read ---

STRANGERS = (
    "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "",
    "[::2]:80",
)  # fmt: skip


@pytest.mark.parametrize("host", STRANGERS)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_page_of_another_name_is_refused(method: str, host: str, ask: Ask) -> None:
    refused = ask(method, "/api/studies", headers={"Host": host})
    assert refused.status == 403
    assert b"guarded" not in refused.body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "[::1]:8080"])
def test_names_of_this_machine_are_welcome(host: str, ask: Ask) -> None:
    assert ask("GET", "/api/studies", headers={"Host": host}).status == 200


def test_no_other_site_may_read_the_answers(ask: Ask) -> None:
    answer = ask("GET", "/api/studies", headers={"Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in answer.headers


# --- What can be wrong with it ---


def test_a_database_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study database is there"):
        make_dashboard(str(tmp_path / "none.db"), "127.0.0.1", 0)


def test_a_port_that_is_taken_is_told(storage: str, port: int) -> None:
    with pytest.raises(AutotuneError, match=f"127.0.0.1:{port} cannot be listened on"):
        make_dashboard(storage, "127.0.0.1", port)


def test_it_says_nothing_about_requests(ask: Ask) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        ask("GET", "/api/studies")
    assert said.getvalue() == ""
