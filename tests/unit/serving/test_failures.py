"""What is made of a server's log. The texts are vLLM's and torch's own, in the shape of its logs."""

from __future__ import annotations

import pytest

from autotune.serving.failures import FailureKind, TrialFailed, TrialFailure, classify_log

STARTUP = """\
(APIServer pid=4823) INFO 11-30 19:32:27 [api_utils.py:286] non-default args: {'port': 8123, 'max_num_seqs': 32}
(APIServer pid=4823) WARNING 11-30 19:32:27 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(APIServer pid=4823) INFO 11-30 19:32:27 [model.py:733] Resolved architecture: LlamaForCausalLM
Triton is installed, but doesn't include CPU backend. Disabling Triton.
(EngineCore pid=4918) INFO 11-30 19:32:36 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', speculative_config=None
"""  # noqa: E501  # as vLLM writes it

HEALTHY = """\
(APIServer pid=4823) INFO 11-30 19:32:55 [launcher.py:195] Route: /v1/completions, Methods: POST
INFO:     Application startup complete.
INFO:     127.0.0.1:42782 - "GET /health HTTP/1.1" 200 OK
"""

CORE = "(EngineCore pid=4918) "
CORE_ERROR = "(EngineCore pid=4918) ERROR 11-30 19:32:40 [core.py:1510] "
API = "(APIServer pid=4823) "
API_ERROR = "(APIServer pid=4823) ERROR 11-30 19:33:10 [async_llm.py:906] "

FRAMES = """\
Traceback (most recent call last):
  File "/venv/vllm/v1/engine/core.py", line 1490, in run_engine_core
    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/vllm/v1/engine/core.py", line 120, in __init__
    self._initialize_kv_caches(vllm_config)
"""


def prefixed(prefix: str, text: str) -> str:
    """Put the prefix before every line, as vLLM's logging does with a message of many lines."""
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def failed_launch(exception: str, frames: str = FRAMES) -> str:
    """Write the log of a launch whose engine ended in `exception`, with the wrappers after it."""
    trace = f"{frames}{exception}\n"
    wrapper = (
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': 1}"
    )
    return (
        STARTUP
        + prefixed(CORE_ERROR, f"EngineCore failed to start.\n{trace}")
        + prefixed(CORE, f"Process EngineCore:\n{trace}")
        + prefixed(API, FRAMES + wrapper)
    )


def failed_under_load(exception: str, frames: str = FRAMES) -> str:
    """Write the log of a healthy server whose engine died, with the wrappers after it."""
    dead = (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
        "See stack trace (above) for the root cause."
    )
    return (
        STARTUP
        + HEALTHY
        + prefixed(CORE_ERROR, f"EngineCore encountered a fatal error.\n{frames}{exception}\n")
        + prefixed(API_ERROR, f"AsyncLLM output_handler failed.\n{FRAMES}{dead}")
        + 'INFO:     127.0.0.1:42790 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
    )


OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.20 GiB is free."
)

AT_LAUNCH = {
    "no memory for the cache": (
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "cache too short": (
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.00 GiB "
        "KV cache is needed, which is larger than the available KV cache memory (9.51 GiB). Based on "
        "the available memory, the estimated maximum model length is 77904.",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "cache too short on a CPU": (
        "RuntimeError: Available memory on node 0 (3.1/7.8 GiB) on kv cache allocation is less than "
        "requested memory for kv (4.0 GiB).",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "GPU in use": (
        "ValueError: Free memory on device cuda:0 (12.3/79.11 GiB) on startup is less than desired "
        "GPU memory utilization (0.92, 72.78 GiB). Decrease GPU memory utilization or reduce GPU "
        "memory used by other processes.",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "CPU memory in use": (
        "ValueError: Available memory on node 0 (3.1/7.8 GiB) on startup is less than desired CPU "
        "memory utilization (0.92, 7.2 GiB). On the CPU backend, the `--gpu-memory-utilization` flag "
        "controls the fraction of CPU memory reserved (despite its name).",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "out of memory": (OUT_OF_MEMORY, FailureKind.INSUFFICIENT_MEMORY),
    "sampler out of memory": (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. "
        "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        FailureKind.INSUFFICIENT_MEMORY,
    ),
    "no FP8 kernel on a CPU": (
        "RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 "
        "argument(s). Declaration: _C::static_scaled_fp8_quant() -> ()",
        FailureKind.INVALID_CONFIG,
    ),
    "GPU too old": (
        "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum "
        "capability: 75. Current capability: 70.",
        FailureKind.INVALID_CONFIG,
    ),
    "type without kernel": (
        "ValueError: torch.float32 is not supported for quantization method fp8. Supported dtypes: "
        "[torch.bfloat16, torch.half]",
        FailureKind.INVALID_CONFIG,
    ),
    "mask_hidden missing": (
        "ValueError: mask_hidden not found in weights but model is configured for parallel drafting. "
        "Please provide mask_hidden in the weights.",
        FailureKind.INVALID_CONFIG,
    ),
    "mask token missing": (
        "ValueError: For parallel drafting, the draft model config must have "
        "`dflash_config.mask_token_id`, `mask_token_id`, `dspark_noise_token_id`, `pard_token`, or "
        "`ptd_token_id` specified in its config.json.",
        FailureKind.INVALID_CONFIG,
    ),
    "no graph size": (
        "ValueError: No valid cudagraph sizes after rounding to multiple of 8 (num_speculative_tokens "
        "+ 1) please adjust num_speculative_tokens (7) or max_cudagraph_capture_size (4) or "
        "cudagraph_capture_sizes ([1, 2, 4])",
        FailureKind.INVALID_CONFIG,
    ),
    "budget too small": (
        "ValueError: VllmConfig does not have enough slots to schedule a token and support the "
        "speculative decoding settings. Got max_num_batched_tokens=4 and scheduled_token_delta=7.",
        FailureKind.INVALID_CONFIG,
    ),
    "M-RoPE": (
        "NotImplementedError: Parallel drafting does not support M-RoPE yet",
        FailureKind.INVALID_CONFIG,
    ),
    "unpadded batch": (
        "NotImplementedError: Parallel drafting only supports padded drafter batch. Please unset "
        "disable_padded_drafter_batch in the speculative_config.",
        FailureKind.INVALID_CONFIG,
    ),
    "drafter in two cache groups": (
        "AssertionError: All drafting layers should belong to the same kv cache group",
        FailureKind.LAUNCH_ERROR,
    ),
    "compile cache of another K": (
        "AssertionError: expected size 7==9, stride 1==1 at dim=0",
        FailureKind.LAUNCH_ERROR,
    ),
    "no weights": (
        "RuntimeError: Cannot find any model weights with `/models/empty`",
        FailureKind.LAUNCH_ERROR,
    ),
    "port in use": (
        "OSError: [Errno 98] Address already in use",
        FailureKind.LAUNCH_ERROR,
    ),
    "unknown": (
        "KeyError: 'layers.0.mlp.down_proj.weight'",
        FailureKind.LAUNCH_ERROR,
    ),
}


@pytest.mark.parametrize("case", AT_LAUNCH)
def test_failed_launches(case: str) -> None:
    exception, kind = AT_LAUNCH[case]
    assert classify_log(failed_launch(exception), is_under_load=False) == (kind, exception)


UNDER_LOAD = {
    "out of memory": (OUT_OF_MEMORY, FailureKind.OUT_OF_MEMORY_UNDER_LOAD),
    "illegal memory access": (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        FailureKind.DIED_UNDER_LOAD,
    ),
    "schedule of K with a parallel drafter": (
        "RuntimeError: shape '[-1, 3]' is invalid for input of size 28",
        FailureKind.DIED_UNDER_LOAD,
    ),
    "synthetic acceptance on a CPU": (
        "AssertionError: Synthetic acceptance not supported with CPU sampling",
        FailureKind.DIED_UNDER_LOAD,
    ),
    "unknown": (
        "vllm.some.module.StrangeError: nobody has seen this before",
        FailureKind.DIED_UNDER_LOAD,
    ),
}


@pytest.mark.parametrize("case", UNDER_LOAD)
def test_deaths_under_load(case: str) -> None:
    exception, kind = UNDER_LOAD[case]
    assert classify_log(failed_under_load(exception), is_under_load=True) == (kind, exception)


# --- finding the root cause ---


def test_a_bare_assert_is_told_with_its_statement() -> None:
    frames = f"""{FRAMES}\
  File "/venv/vllm/v1/sample/rejection_sampler.py", line 157, in forward
    assert metadata.max_spec_len <= MAX_SPEC_LEN
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
    kind, cause = classify_log(failed_under_load("AssertionError", frames), is_under_load=True)
    assert kind is FailureKind.DIED_UNDER_LOAD
    assert cause == "AssertionError at `assert metadata.max_spec_len <= MAX_SPEC_LEN`"


def test_pydantics_explanation_is_told_with_its_headline() -> None:
    exception = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, num_speculative_tokens was provided but without speculative model. \
[type=value_error, input_value=ArgsKwargs((), {...}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
    kind, cause = classify_log(STARTUP + prefixed(API, FRAMES + exception), is_under_load=False)
    assert kind is FailureKind.INVALID_CONFIG
    assert cause.startswith("pydantic_core._pydantic_core.ValidationError: 1 validation error for")
    assert "was provided but without speculative model" in cause


@pytest.mark.parametrize("config", ["SpeculativeConfig", "VllmConfig", "ModelConfig"])
def test_a_refused_config_is_never_worth_a_retry(config: str) -> None:
    exception = f"pydantic_core._pydantic_core.ValidationError: 2 validation errors for {config}"
    kind, _ = classify_log(prefixed(API, FRAMES + exception), is_under_load=False)
    assert kind is FailureKind.INVALID_CONFIG
    assert not kind.is_worth_a_retry


@pytest.mark.parametrize(
    "line",
    [
        "api_server.py: error: unrecognized arguments: --no-such-flag",
        "api_server.py: error: argument --max-num-seqs: invalid int value: 'many'",
        "vllm serve: error: unrecognized arguments: --no-such-flag",
    ],
)
def test_a_refused_command_line(line: str) -> None:
    log = f"usage: api_server.py [-h] [--headless]\n                     [--model MODEL]\n{line}\n"
    assert classify_log(log, is_under_load=False) == (FailureKind.INVALID_CONFIG, line)


def test_the_first_exception_is_the_cause_of_those_that_follow() -> None:
    first = OUT_OF_MEMORY
    second = (
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 8 dummy requests."
    )
    chain = (
        f"{FRAMES}{first}\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{FRAMES}{second}\n"
    )
    log = STARTUP + prefixed(CORE_ERROR, f"EngineCore failed to start.\n{chain}")
    assert classify_log(log, is_under_load=False) == (FailureKind.INSUFFICIENT_MEMORY, first)


def test_a_workers_exception_goes_before_what_the_engine_says_of_it() -> None:
    cause = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    worker = "(Worker_TP0 pid=5009) ERROR 11-30 19:32:40 [multiproc_executor.py:1063] "
    wrapper = (
        "RuntimeError: Worker failed with error 'CUDA error: an illegal memory access was "
        "encountered', please check the stack trace above for the root cause"
    )
    log = (
        STARTUP
        + HEALTHY
        + prefixed(worker, f"WorkerProc hit an exception.\n{FRAMES}{cause}")
        + prefixed(CORE_ERROR, f"EngineCore encountered a fatal error.\n{FRAMES}{wrapper}")
    )
    assert classify_log(log, is_under_load=True) == (FailureKind.DIED_UNDER_LOAD, cause)


def test_a_wrapper_that_was_written_first_is_still_no_cause() -> None:
    # Several processes write to one log; the one that only reports may be the quicker one.
    wrapper = (
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': 1}"
    )
    cause = "ValueError: No available memory for the cache blocks."
    log = STARTUP + prefixed(API, FRAMES + wrapper) + prefixed(CORE_ERROR, FRAMES + cause)
    assert classify_log(log, is_under_load=False) == (FailureKind.INSUFFICIENT_MEMORY, cause)


def test_a_worker_that_fails_to_start() -> None:
    cause = OUT_OF_MEMORY
    worker = "(Worker_TP1 pid=5010) ERROR 11-30 19:32:40 [multiproc_executor.py:953] "
    wrapper = (
        "Exception: WorkerProc initialization failed due to an exception in a background process. "
        "See stack trace for root cause."
    )
    log = (
        STARTUP
        + prefixed(worker, f"WorkerProc failed to start.\n{FRAMES}{cause}")
        + prefixed(CORE_ERROR, f"EngineCore failed to start.\n{FRAMES}{wrapper}")
    )
    assert classify_log(log, is_under_load=False) == (FailureKind.INSUFFICIENT_MEMORY, cause)


def test_with_wrappers_alone_the_one_that_tells_something_is_shown() -> None:
    # A worker killed by the system's out-of-memory killer writes nothing itself.
    line = "Engine core proc EngineCore died unexpectedly, shutting down client."
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    log = STARTUP + HEALTHY + prefixed(API_ERROR, f"{line}\n{FRAMES}{dead}")
    kind, cause = classify_log(log, is_under_load=True)
    assert kind is FailureKind.DIED_UNDER_LOAD
    assert "EngineCore encountered an issue" in cause


def test_a_quoted_error_names_the_kind_where_the_trace_is_missing() -> None:
    wrapper = (
        "RuntimeError: Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB', "
        "please check the stack trace above for the root cause"
    )
    log = STARTUP + prefixed(CORE_ERROR, FRAMES + wrapper)
    assert classify_log(log, is_under_load=True) == (
        FailureKind.OUT_OF_MEMORY_UNDER_LOAD,
        wrapper,
    )


def test_without_any_exception_the_last_words_are_told() -> None:
    log = f"{STARTUP}{CORE}Killed\n\n"
    assert classify_log(log, is_under_load=False) == (FailureKind.LAUNCH_ERROR, "Killed")
    assert classify_log(log, is_under_load=True) == (FailureKind.DIED_UNDER_LOAD, "Killed")


def test_an_empty_log_says_so() -> None:
    kind, cause = classify_log("", is_under_load=False)
    assert kind is FailureKind.LAUNCH_ERROR
    assert cause == "the server wrote nothing to its log"


def test_a_warning_that_names_an_error_is_no_cause() -> None:
    # STARTUP's second line quotes an OSError; the cause is what came last.
    exception = "KeyError: 'model.embed_tokens.weight'"
    assert classify_log(failed_launch(exception), is_under_load=False)[1] == exception


def test_a_huge_line_is_cut() -> None:
    _, cause = classify_log("x" * 100_000, is_under_load=False)
    assert len(cause) <= 500


# --- the failure as a value ---


@pytest.mark.parametrize(
    ("kind", "is_worth_a_retry"),
    [
        (FailureKind.INVALID_CONFIG, False),
        (FailureKind.INSUFFICIENT_MEMORY, False),
        (FailureKind.LAUNCH_ERROR, False),
        (FailureKind.LAUNCH_TIMEOUT, True),
        (FailureKind.DIED_UNDER_LOAD, False),
        (FailureKind.OUT_OF_MEMORY_UNDER_LOAD, False),
        (FailureKind.REQUEST_ERRORS, False),
        (FailureKind.UNSTABLE, True),
        (FailureKind.CLIENT_OVERLOADED, True),
        (FailureKind.SPECULATION_INACTIVE, False),
        (FailureKind.DEGENERATE_OUTPUT, False),
        (FailureKind.CANCELLED, True),
    ],
)
def test_kinds_worth_a_retry(kind: FailureKind, is_worth_a_retry: bool) -> None:
    assert kind.is_worth_a_retry is is_worth_a_retry


def test_every_kind_is_in_the_table_above() -> None:
    marks = test_kinds_worth_a_retry.pytestmark  # type: ignore[attr-defined]  # set by pytest
    assert {kind for kind, _ in marks[0].args[1]} == set(FailureKind)


def test_a_failure_as_text() -> None:
    failure = TrialFailure(FailureKind.LAUNCH_TIMEOUT, "not healthy after 900 s", "/logs/t1.log")
    assert str(failure) == "launch_timeout: not healthy after 900 s (log: /logs/t1.log)"
    assert str(TrialFailed(failure)) == str(failure)
    assert TrialFailed(failure).failure is failure
    assert str(TrialFailure(FailureKind.UNSTABLE, "spread")) == "unstable: spread"
