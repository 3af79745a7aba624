"""The worked spaces in configs/spaces are read, and the command in each one's comment finds plans that fit."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.jobs import calibration_of
from tuner import presets
from tuner.load import load_spec, load_yaml
from tuner.request import JOB_KEYS, read_job, read_request
from tuner.search.exhaustive import sweep
from tuner.search.space import SpaceSpec, build_space


@pytest.mark.parametrize("name", presets.names("spaces"))
def test_a_worked_space_answers_its_own_question(name: str) -> None:
    path = presets.find("spaces", name)
    (command,) = re.findall(r"^# tuner search (.*)$", path.read_text(), flags=re.M)
    words = shlex.split(command)
    options = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    assert options.pop("space") == name
    spellings = {"seq": "seq_len", "global-batch": "global_batch"}
    job = read_job(read_request({spellings.get(key, key): value for key, value in options.items()}, keys=JOB_KEYS))
    spec = load_spec(SpaceSpec, load_yaml(path), str(path))
    space = build_space(job, spec, str(path))
    result = sweep(job, space, calibration_of(job, "auto"), top_k=1)
    assert result.fit > 0
    for knob, values in spec.axes.items():
        axis = next(a for a in space.axes if knob in a.knobs)
        assert len({row[axis.knobs.index(knob)] for row in axis.words}) == len(values), f"{knob}: a value is never legal"
