"""Launchers' logs: step times, memory, what went wrong.

    parsed = parse_log(lines, "megatron-lm")       # or read_log(path, ...), launcher_of(lines)
    timing = timed(parsed, job, warmup=3)

LogReader does the same for a log that is still being written. All launchers go through one table (formats.py).
"""

from tuner.launch.logs.formats import FORMATS
from tuner.launch.logs.parsed import Parsed, Step
from tuner.launch.logs.reader import LogReader, launcher_of, parse_log, read_log
from tuner.launch.logs.signs import Fault
from tuner.launch.logs.timing import Timing, timed

__all__ = ["FORMATS", "Fault", "LogReader", "Parsed", "Step", "Timing", "launcher_of", "parse_log", "read_log", "timed"]
