"""Megatron-LM's own parser as a service: reads lines of JSON {"argv", "world", "environment"}, answers {"error": "" or why it refuses}.

Runs in an environment of its own, with the wheel of megatron-core 0.19.2 unpacked on the path. What it takes to run there, without a GPU and
on Python 3.11, is listed here, and all of it:
- typing.override, which came with Python 3.12: a decorator that does nothing at run time;
- torch.cuda's questions about the device are answered as an H100 would;
- rope fusion is switched off once arguments are validated: it is on by default and asks for Transformer Engine.
"Accepted" so means: names are known, and parse_args, validate_args and TransformerConfig raise nothing. Nothing is started.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import typing
import warnings
from types import SimpleNamespace

if not hasattr(typing, "override"):
    typing.override = lambda function: function

import torch  # noqa: E402

torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: 0

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args


def refusal(argv: list[str], world: int, environment: dict[str, str]) -> str:
    """Return why Megatron-LM refuses a command line, "" where it takes it."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS",):
        os.environ.pop(name, None)
    os.environ.update({"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0", **environment})
    sys.argv = ["pretrain_gpt.py", *argv]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = parse_args()
            validate_args(args)
            args.apply_rope_fusion = False
            core_transformer_config_from_args(args)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}" + ("" if str(error) else f" at {_place(error)}")
    return ""


def _place(error: BaseException) -> str:
    import linecache
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno}: {linecache.getline(last.filename, last.lineno or 0).strip()[:120]}"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            why = refusal(asked["argv"], asked["world"], asked.get("environment", {}))
        answers.write(json.dumps({"error": why}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
