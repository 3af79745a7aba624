"""Golden logs, written after each launcher's format, with figures worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import llama_job
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.logs import FORMATS, LogReader, Parsed, Step, launcher_of, parse_log, read_log, timed

LOGS = Path(__file__).parents[2] / "fixtures/logs"
GB, MIB, GIB = 1e9, 2.0**20, 2.0**30


def read(name: str, launcher: str) -> Parsed:
    return read_log(LOGS / f"{name}.log", launcher)


def whose(name: str) -> str | None:
    with (LOGS / f"{name}.log").open(errors="replace") as lines:
        return launcher_of(lines)


# median and half the distance of the quartiles of the steps after the third; quartiles lie between ordered values as numpy's do
GOLDEN: dict[str, tuple[str, int, float, float, int]] = {
    # 12.85, 12.86, 12.87, 12.88, 12.99: quartiles 12.86 and 12.88
    "megatron-lm": ("megatron-lm", 8, 12.87, 0.01, 5),
    # 7.1783, 7.1995, 7.2447: quartiles 7.1889 and 7.2221
    "megatron-bridge": ("megatron-bridge", 6, 7.1995, 0.0166, 3),
    # of steps 3 to 6 (the first is 0), 1.498, 1.5, 1.512, 1.6: quartiles 1.4995 and 1.534
    "nemo": ("nemo", 7, 1.506, 0.01725, 4),
    # 3.13, 3.14, 3.15
    "nemo-bar": ("nemo", 6, 3.14, 0.005, 3),
    # steps 3 to 6: 5.4, 5.402, 5.41, 5.669: quartiles 5.4015 and 5.47475
    "maxtext": ("maxtext", 7, 5.406, 0.036625, 4),
    # 0.975 ("975" ms), 8.74, 8.79, 8.81 ("8.81K" ms): quartiles 6.79875 and 8.795
    "nanotron": ("nanotron", 7, 8.765, 0.998125, 4),
    # the first of each pair: 13.3647, 13.3728, 13.39: quartiles 13.36875 and 13.3814
    "primus": ("primus", 6, 13.3728, 0.006325, 3),
    # 0.40, 0.40, 0.41, 0.44: quartiles 0.40 and 0.4175
    "workload": ("workload", 7, 0.405, 0.00875, 4),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_step_times(name: str) -> None:
    launcher, steps, step_s, spread_s, used = GOLDEN[name]
    assert whose(name) == launcher
    parsed = read(name, launcher)
    assert (parsed.launcher, len(parsed.steps), parsed.error, parsed.oom, parsed.infrastructure) == (launcher, steps, "", False, False)
    timing = timed(parsed, llama_job(), warmup=3)
    assert timing is not None
    assert timing.step_s == pytest.approx(step_s, rel=1e-9)
    assert timing.spread_s == pytest.approx(spread_s, rel=1e-6)
    assert timing.steps == used


def test_a_rate_of_each_device_is_converted_by_the_job() -> None:
    """torchtitan: record 10 holds steps 2 to 10 and so the warm-up; 64 sequences of 8192 on 64 GPUs at 4098 tokens/s each."""
    assert whose("torchtitan") == "torchtitan"
    parsed = read("torchtitan", "torchtitan")
    assert [(step.number, step.tokens_per_s) for step in parsed.steps] == [
        (1, 1024),
        (10, 4000),
        (20, 4096),
        (30, 4100),
        (40, 4112),
        (50, 4096),
    ]
    job = llama_job(global_batch=64)
    timing = timed(parsed, job)
    assert timing is not None
    assert timing.steps == 4
    assert timing.step_s == pytest.approx((64 * 8192 / (64 * 4096) + 64 * 8192 / (64 * 4100)) / 2)  # between the middle two
    half = timed(parsed, job, sequences=32)  # a shorter run of the same rate
    assert half is not None
    assert half.step_s == pytest.approx(timing.step_s / 2)


def test_a_rate_of_the_whole_job_is_converted_by_its_batch() -> None:
    """DeepSpeed: 64 sequences at 32, 31.25 and 32 sequences a second."""
    assert whose("deepspeed") == "deepspeed"
    timing = timed(read("deepspeed", "deepspeed"), llama_job(global_batch=64))
    assert timing is not None
    assert (timing.step_s, timing.steps) == (2.0, 3)
    assert timing.spread_s == pytest.approx((64 / 31.25 - 2) / 4)


PIPELINE = (
    "steps: 10 loss: 0.0585 iter time (s): 0.186 samples/sec: 53.694\nsteps: 20 loss: 0.0485 iter time (s): 0.180 samples/sec: 55.5\n"
)
BOTH = (
    "[2024-03-07 15:27:02,646] [INFO] [timer.py:260:stop] epoch=0/micro_step=19/global_step=19, RunningAvgSamplesPerSec=58.7, "
    "CurrSamplesPerSec=61.3, MemAllocated=6.01GB, MaxMemAllocated=19.52GB\n"
    " iteration      19/  317892 | consumed samples:       152832 | elapsed time per iteration (ms): 14287.5 | lm loss: 5.9E+00 |\n"
)


def test_a_timer_that_counts_by_itself_makes_no_launches() -> None:
    """Megatron-DeepSpeed from a checkpoint: DeepSpeed's timer counts from 1, the iterations go on from 200."""
    lines = [part.replace("=19", f"={n}").replace("      19/", f"{n + 199:8d}/") for n in range(1, 9) for part in BOTH.splitlines()]
    parsed = parse_log(lines, "deepspeed")
    assert [(step.number, step.launch) for step in parsed.steps] == [(n, 0) for n in range(200, 208)]
    timing = timed(parsed, llama_job())
    assert timing is not None
    assert (timing.step_s, timing.steps) == (14.2875, 5)


def test_deepspeed_prints_in_three_ways() -> None:
    parsed = parse_log(PIPELINE.splitlines(keepends=True), "deepspeed")
    assert [(s.number, s.seconds, s.loss) for s in parsed.steps] == [(10, 0.186, 0.0585), (20, 0.18, 0.0485)]
    assert launcher_of(PIPELINE.splitlines()) == "deepspeed"
    both = parse_log(BOTH.splitlines(keepends=True), "deepspeed")  # Megatron-DeepSpeed: its own line is the better one
    assert both.steps == (Step(number=19, seconds=14.2875, loss=5.9),)
    assert launcher_of(BOTH.splitlines()) == "deepspeed"


@pytest.mark.parametrize(
    ("name", "kind", "peaks"),
    [
        ("megatron-lm", "allocated", {0: 15754 * MIB, 2: 12680 * MIB, 6: 10850.5 * MIB}),  # two reports on one line
        ("megatron-bridge", "allocated", {0: 194.41 * GB}),
        ("torchtitan", "reserved", {0: 52.6 * GIB, 1: 52.6 * GIB}),  # not the 60 of validation
        ("maxtext", "device", {-1: 13.6 * GIB}),
        ("deepspeed", "allocated", {-1: 19.5 * GIB}),
        ("nanotron", "allocated", {-1: 30929 * MIB}),
        ("primus", "device", {-1: 153.81 * GIB, 1: 163.5 * GIB}),
        ("workload", "device", {0: 500e6, 1: 501e6, 2: 502e6, 3: 503e6}),
        ("nemo", "allocated", {-1: 115792977920}),
        ("nemo-bar", "device", {}),
    ],
)
def test_memory_by_rank(name: str, kind: str, peaks: dict[int, float]) -> None:
    parsed = read(name, name.removesuffix("-bar"))
    assert parsed.memory_kind == kind
    assert parsed.memory_bytes == pytest.approx(peaks)


def test_the_workload_says_what_its_accelerator_allocated_where_it_has_one() -> None:
    line = 'tuner-rank {"rank": 1, "max_allocated_bytes": 7000, "max_reserved_bytes": 9000, "host_peak_bytes": 5000, "compute_s": 0.25}'
    parsed = parse_log([line], "workload")
    assert (parsed.memory_kind, parsed.memory_bytes, parsed.compute_s) == ("allocated", {1: 7000}, {1: 0.25})
    assert read("workload", "workload").versions == {"torch": "2.13.0", "tuner": "0.1.0"}


def test_what_a_log_states_of_job_and_plan() -> None:
    assert read("megatron-lm", "megatron-lm").stated == {
        "cp": 1, "micro_batch": 1, "pp": 4, "seq_len": 4096, "tp": 4, "gpus": 64, "global_batch": 128,
    }  # fmt: skip
    assert read("torchtitan", "torchtitan").stated == {"pp": 1, "cp": 1, "tp": 2, "ep": 1}
    assert read("maxtext", "maxtext").stated == {"seq_len": 8192, "global_batch": 48}


def test_a_log_of_two_launches_is_that_of_the_last() -> None:
    parsed = read("restart", "megatron-lm")
    assert [(step.number, step.launch, step.seconds) for step in parsed.steps] == [
        (1, 0, 9.0), (2, 0, 2.1), (3, 0, 2.05), (4, 0, 2.0),
        (5, 1, 8.0), (6, 1, 1.02), (7, 1, 1.01), (8, 1, 1.0), (9, 1, 1.004), (10, 1, 1.002), (11, 1, None),
    ]  # fmt: skip
    assert (parsed.oom, parsed.error) == (False, "")  # what ended the first
    assert parsed.bad_losses == (8,)
    timing = timed(parsed, llama_job())
    assert timing is not None
    assert (timing.step_s, timing.steps) == (1.002, 3)  # 5, 6 and 7 are warm-up again; 11 was cut off at "10"


@pytest.mark.parametrize(
    ("name", "launcher", "oom", "infrastructure", "error"),
    [
        ("oom", "torchtitan", True, False, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3"),
        ("oom-jax", "maxtext", True, False, "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying"),
        ("watchdog", "megatron-lm", False, True, "[E1103 07:30:00.426415540 ProcessGroupNCCL.cpp:629] [Rank 7] Watchdog caught"),
        ("node-failure", "workload", False, True, "slurmstepd: error: *** STEP 814509.1 ON node1 CANCELLED AT 2026-11-03T07:30:05 DUE TO"),
        ("host-memory", "megatron-lm", False, False, "out of host memory: slurmstepd: error: Detected 1 oom_kill event"),
        ("refused", "megatron-lm", False, False, "AssertionError: uneven"),
    ],
)
def test_what_went_wrong(name: str, launcher: str, oom: bool, infrastructure: bool, error: str) -> None:
    assert whose(name) == launcher
    parsed = read(name, launcher)
    assert (parsed.oom, parsed.infrastructure) == (oom, infrastructure)
    assert parsed.error.startswith(error)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.35 GiB total capacity)", "oom"),
        ("torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB (GPU 0; 512.00 MiB total capacity)", "oom"),
        ("torch.OutOfMemoryError: CUDA out of mem", "oom"),  # cut off
        ("RuntimeError: CUDA error: out of memory", "oom"),
        ("torch.AcceleratorError: HIP error: out of memory", "oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "oom"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm.", "oom"),
        ("node1:77:99 [3] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'", "oom"),
        ("node1:77:99 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc async 4194304 bytes", "oom"),
        ("Memory cgroup out of memory: Killed process 1234 (python) total-vm:1kB", "host"),
        ("srun: error: node1: task 3: Out Of Memory", "host"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried", "host"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "machine"),
        ("OSError: [Errno 28] No space left on device: '/scratch/ckpt'", "machine"),
        ("slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2026-11-03T07:30:05 DUE TO TIME LIMIT ***", "machine"),
        ("srun: error: Node failure on node7", "machine"),
        ("node1:77:99 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.3 with status=12 error", "peer"),
        ("NCCL error: transport retry counter exceeded", "peer"),
        ("usage: pretrain.py\npretrain.py: error: unrecognized arguments: --tensor", "failed"),
        ("Fatal Python error: Segmentation fault", "failed"),
        ("/opt/venv/bin/python3.11: can't open file '/opt/train.py': [Errno 2] No such file or directory", "failed"),
        ("torchrun: error: argument --nnodes: invalid value", "failed"),
        ("srun: error: node1: task 3: Exited with exit code 1", "summary"),
        # nothing of these is a failure
        ("[W1103 07:20:00 socket.cpp:697] [c10d] The client socket cannot be initialized: Connection refused", None),
        ("UserWarning: to avoid CUDA out of memory, set expandable_segments", None),
        ("    except torch.cuda.OutOfMemoryError:", None),
        ("grpc: RESOURCE_EXHAUSTED: Received message larger than max", None),
        ("loss scale error feedback enabled", None),
    ],
)
def test_signs_of_failure(line: str, kind: str | None) -> None:
    reader = LogReader("megatron-lm")
    reader.feed(f"[rank3]: {line}" if "\n" not in line else line)
    assert (reader.faults.cause and reader.faults.cause.kind) == kind
    assert (reader.failure is not None) == (kind in ("oom", "host", "machine", "failed"))


def test_a_failure_is_told_with_its_line() -> None:
    """The runner ends a trial at once: on line 10 of this log, long before the last."""
    reader = LogReader("torchtitan")
    seen = []
    for number, line in enumerate((LOGS / "oom.log").read_text().splitlines(keepends=True), start=1):
        reader.write(line.encode())
        if reader.failure and not seen:
            seen.append((number, reader.failure.kind))
    assert seen == [(10, "oom")]


def test_an_exception_is_told_with_its_line_not_with_its_traceback() -> None:
    reader = LogReader("megatron-lm")
    told = []
    for line in (LOGS / "refused.log").read_text().splitlines():
        reader.feed(line)
        told.append(reader.failure is not None)
    assert told.index(True) == 10
    assert reader.failure is not None
    assert (reader.failure.reason, reader.failure.infrastructure) == ("AssertionError: uneven", False)


def test_an_exception_of_any_name_ends_a_traceback() -> None:
    lines = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    f()", "mine.NothingFits: no plan", "INFO: x"]
    assert parse_log(lines, "workload").error == "mine.NothingFits: no plan"
    between = [*lines[:3], "INFO: another rank", "Building model", "KeyError: 'x'"]
    assert parse_log(between, "workload").error == "KeyError: 'x'"


def test_what_python_goes_on_after_is_no_failure_and_what_follows_is() -> None:
    ignored = [
        "Exception ignored in: <function F.__del__ at 0x7f>",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "OSError: [Errno 5]",
    ]
    assert parse_log(ignored, "workload").error == ""
    assert parse_log(["Exception ignored in: <stdout>", "BrokenPipeError: [Errno 32] Broken pipe"], "workload").error == ""
    real = [
        "Traceback (most recent call last):",
        '  File "b.py", line 2, in f',
        "    raise E('Connection reset by peer')",
        "ValueError: no",
    ]
    assert parse_log([*ignored, *real], "workload").error == "ValueError: no"
    assert parse_log([*ignored[:3], *real], "workload").error == "ValueError: no"  # of another rank, without prefix
    frames = LogReader("workload")
    for line in real[:3]:
        frames.feed(line)
    assert frames.faults.cause is None  # what a frame quotes is none


def test_progress_counts_steps_as_they_come() -> None:
    reader = LogReader("workload")
    data = (LOGS / "workload.log").read_bytes()
    counts = []
    for at in range(0, len(data), 50):  # pieces that end within lines
        reader.write(data[at : at + 50])
        counts.append(reader.progress)
    reader.close()
    assert counts == sorted(counts)
    assert (counts[0], reader.progress) == (0, 7)
    assert reader.parsed() == read("workload", "workload")


def test_lines_of_two_ranks_out_of_order_are_no_restart() -> None:
    titan = "step: {n}  loss:  9.0  grad_norm:  1.0  memory:  1.00GiB(1%)  tps: {tps}  tflops: 1.0  mfu: 1%"
    lines = [titan.format(n=n, tps=100 + n) for n in (10, 20, 10, 30, 20, 30, 40, 40)]
    assert {step.launch for step in parse_log(lines, "torchtitan").steps} == {0}
    again = parse_log([*lines, *(titan.format(n=n, tps=900 + n) for n in (10, 20))], "torchtitan")
    assert [(s.number, s.launch, s.tokens_per_s) for s in again.steps] == [(10, 1, 910), (20, 1, 920), (30, 0, 130), (40, 0, 140)]


def test_two_records_on_one_line_and_ranks_in_front() -> None:
    one = "iteration {n}/ 10 | elapsed time per iteration (ms): {t} | lm loss: 1.0E+01 |"
    line = f" 3: [rank7]: {one.format(n=1, t='1,500.5')}[rank7]:  {one.format(n=2, t='900.0')}"
    parsed = parse_log([line], "megatron-lm")
    assert [(step.number, step.seconds) for step in parsed.steps] == [(1, 1.5005), (2, 0.9)]


def test_a_figure_that_was_cut_off_is_none() -> None:
    lines = ["completed step: 7, seconds: 5.402, Tokens/s/device: 8.0\n", "completed step: 8, seconds: 5.4"]
    assert [step.seconds for step in parse_log(lines, "maxtext").steps] == [5.402, None]
    assert [step.seconds for step in parse_log([line.rstrip() for line in lines], "maxtext").steps] == [5.402, 5.4]  # it cannot tell


def test_what_is_not_a_number_is_no_time() -> None:
    for word in ("nan", "inf", "-3", "0", "1e999"):
        step = parse_log([f"completed step: 1, seconds: {word}, loss: {word}"], "maxtext").steps[0]
        assert step.seconds is None
    assert parse_log(["completed step: 1, seconds: 2, loss: nan"], "maxtext").bad_losses == (1,)
    assert parse_log(['tuner-step {"step": 4, "seconds": 0.5, "loss": NaN}'], "workload").bad_losses == (4,)


@pytest.mark.parametrize(
    ("numbers", "launcher", "left"),
    [
        ([1, 2, 3, 4, 5], "megatron-lm", [4, 5]),
        ([10, 20, 30], "megatron-lm", [20, 30]),  # the first holds the warm-up
        ([10], "megatron-lm", []),
        ([0, 1, 2, 3, 4], "nemo", [3, 4]),
        ([0, 10, 20], "nemo", [10, 20]),  # the time of a single step
        ([100, 101, 102, 103, 104], "megatron-lm", [103, 104]),  # from a checkpoint
    ],
)
def test_warm_up(numbers: list[int], launcher: str, left: list[int]) -> None:
    parsed = Parsed(launcher=launcher, steps=tuple(Step(number=n, seconds=float(n + 1)) for n in numbers))
    timing = timed(parsed, llama_job(), warmup=3)
    assert (timing.steps if timing else 0) == len(left)
    assert timing is None or timing.step_s == sum(n + 1 for n in left) / len(left)
    assert timed(parsed, llama_job(), warmup=0) is not None


def test_one_time_has_no_spread() -> None:
    timing = timed(Parsed(steps=(Step(number=1, seconds=2.0),)), llama_job(), warmup=0)
    assert timing is not None
    assert (timing.step_s, timing.spread_s, timing.steps) == (2.0, None, 1)


def test_an_unknown_launcher_is_named() -> None:
    with pytest.raises(SpecError, match=r"launcher = 'megatron': must be one of .*did you mean megatron-lm"):
        parse_log([], "megatron")
    assert launcher_of(["epoch 1 of 3", "all is well"]) is None


def test_each_launcher_but_the_workload_is_a_framework() -> None:
    frameworks: Any = presets.names("frameworks")
    assert set(FORMATS) - {"workload"} <= set(frameworks)


def test_lines_of_the_scheduler_do_not_end_a_traceback() -> None:
    lines = ["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']
    lines += ["srun: error: n1: task 0: Exited with exit code 1", "srun: launch/slurm: _step_signal: Terminating StepId=1.2"]
    parsed = parse_log([*lines, "ValueError: heads (7) by tp (2)"], "workload")
    assert parsed.error == "ValueError: heads (7) by tp (2)"
