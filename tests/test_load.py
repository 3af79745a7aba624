"""Hostile and careless files: every one is refused with a message, none with a traceback."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import presets
from tuner.cluster import Cluster, Gpu
from tuner.errors import SpecError
from tuner.load import MAX_BYTES, load_file, load_foreign_json, load_spec, load_yaml, parse_json, parse_yaml, read_text
from tuner.model import Model

MODEL: dict[str, Any] = {
    "name": "m", "layers": 2, "hidden": 8, "ffn_hidden": 32, "heads": 2, "kv_heads": 2, "head_dim": 4, "vocab": 10
}  # fmt: skip


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_yaml(path)
    return str(caught.value)


def write(folder: Path, content: str | bytes, name: str = "file.yaml") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_values() -> None:
    text = "a: 1\nb: 1.5\nc: 1e3\nd: yes\ne: null\nf: '80'\ng: 80 GB\nh: [1, {x: off}]\ni: 007\nj: 1_536\nk: 2024-01-01\nl:\nm: 0x10\n"
    assert parse_yaml(text, "f") == {
        "a": 1, "b": 1.5, "c": 1000.0, "d": True, "e": None, "f": "80", "g": "80 GB", "h": [1, {"x": False}],
        "i": "007", "j": 1536, "k": "2024-01-01", "l": None, "m": "0x10",
    }  # fmt: skip


def test_aliases_and_merge_keys_are_values() -> None:
    assert parse_yaml("base: &b {x: 1, y: 2}\nother:\n  <<: *b\n  y: 3\n", "f")["other"] == {"x": 1, "y": 3}
    assert parse_yaml("a: &a [1]\nb: [*a, *a]\n", "f")["b"] == [[1], [1]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2\n", "f:2: a: stands twice"),
        ("x:\n  y: .nan\n", "f:2: x.y = .nan: must be a finite number"),
        ("a: 1e999\n", "must be a finite number"),
        ("a: -.inf\n", "must be a finite number"),
        ("a: !!python/object/apply:os.system [ls]\n", "tags are not allowed"),
        ("a: !custom 3\n", "tags are not allowed"),
        ("a: &x [*x]\n", "alias *x has no anchor before it"),
        ("a: *nothing\n", "alias *nothing has no anchor before it"),
        ("? [1, 2]\n: 3\n", "a key must be plain text"),
        ("a: 1\n---\nb: 2\n", "one YAML document"),
        ("a: [1\nb: }", "is not YAML"),
        ("<<: 3\n", "must name a mapping"),
        ("# only a comment\n", "is empty"),
        ("[" * 5000, "nest"),
        ("a: " + "{b: " * 60 + "1" + "}" * 60, "nested deeper than 50"),
        ("- " * 500 + "1", "nested deeper than 50"),
    ],
)
def test_bad_yaml(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, "f")
    assert says in str(caught.value)


def test_all_problems_of_a_file_are_listed() -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml("a: 1\na: 2\nb: .nan\nb: 3\n", "f")
    assert len(caught.value.problems) == 3


def test_alias_bombs_are_refused_fast() -> None:
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 40))
    start = time.perf_counter()
    with pytest.raises(SpecError, match="once its aliases are expanded"):
        parse_yaml("l0: &l0 [1, 2, 3]\n" + levels, "bomb.yaml")
    with pytest.raises(SpecError, match="aliases are expanded"):
        parse_yaml("x: &x {a: 1, b: 2}\ny: [" + ",".join(["*x"] * 100_000) + "]", "bomb.yaml")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', "a: stands twice"),
        ('{"a": NaN}', "must be finite"),
        ('{"a": [1e999]}', "must be finite"),
        ('{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ("[" * 100_000, "nested deeper than 50"),
        ("[" * 60 + "]" * 60, "nested deeper than 50"),
        ('{"a": }', "f:1: is not JSON"),
        ("{'a': 1}", "is not JSON"),
    ],
)
def test_bad_json(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_json(text, "f")
    assert says in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "is empty" in refusal(write(tmp_path, ""))
    assert "is empty" in refusal(write(tmp_path, " \n\t\n"))
    assert "not UTF-8" in refusal(write(tmp_path, b"a: \xff\xfe\n"))
    assert "binary" in refusal(write(tmp_path, b"a: \x00\n"))
    assert "is a folder" in refusal(tmp_path)
    write(tmp_path, "a: 1", "models.yaml")
    assert "no such file (did you mean models.yaml?)" in refusal(tmp_path / "model.yaml")
    assert "no such file" in refusal(tmp_path / "no" / "such.yaml")
    assert "cannot be read" in refusal(tmp_path / ("n" * 5000))
    assert "cannot be read" in refusal(tmp_path / "a\0b")
    assert "device" in refusal(Path("/dev/null"))
    assert "device" in refusal(Path("/dev/zero"))
    assert load_yaml(write(tmp_path, b"\xef\xbb\xbfa: 1")) == {"a": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1")
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(2**30)
    start = time.perf_counter()
    assert f"has {2**30} bytes; at most {MAX_BYTES} are read" in refusal(path)
    assert time.perf_counter() - start < 0.2


def test_a_pipe_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for content, limit in ((b"a: 1", 100), (b"x" * 200, 100)):
        child = os.fork()
        if child == 0:
            try:
                with path.open("wb") as file:
                    file.write(content)
            finally:
                os._exit(0)
        if len(content) <= limit:
            assert read_text(path, limit) == "a: 1"
        else:
            with pytest.raises(SpecError, match="at most 100 bytes"):
                read_text(path, limit)
        os.waitpid(child, 0)


def test_infinity_of_another_program_is_read(tmp_path: Path) -> None:
    assert load_foreign_json(write(tmp_path, '{"a": Infinity}', "a.json")) == {"a": float("inf")}


def test_every_problem_of_a_spec_with_path_value_rule_and_nearest_name() -> None:
    data = MODEL | {"layrs": 3, "hidden": "x", "kv_heads": -1, "gated_mlp": 3, "moe": {"expert": 3, "top_k": 2.5}, "norm": "rmss"}
    with pytest.raises(SpecError) as caught:
        load_spec(Model, data, "m.yaml")
    lines = str(caught.value).splitlines()
    assert "m.yaml: layrs: unknown key (did you mean layers?)" in lines
    assert "m.yaml: hidden = 'x': must be a whole number" in lines
    assert "m.yaml: kv_heads = -1: must be greater than or equal to 1" in lines
    assert "m.yaml: gated_mlp = 3: must be true or false" in lines
    assert "m.yaml: moe.expert: unknown key (did you mean experts?)" in lines
    assert "m.yaml: moe.experts: is missing" in lines
    assert "m.yaml: moe.top_k = 2.5: must be a whole number" in lines
    assert any(line.startswith("m.yaml: norm = 'rmss': must be 'rms' or 'layer' (did you mean rms?)") for line in lines)


def test_rules_between_fields() -> None:
    with pytest.raises(SpecError, match="heads = 2 must be a multiple of kv_heads = 3"):
        load_spec(Model, MODEL | {"kv_heads": 3}, "m.yaml")


def test_quantities_of_a_file_need_units_and_those_of_results_do_not() -> None:
    figure = {"value": 5e12, "source": "s"}
    gpu = {
        "name": "g", "vendor": "v", "peak": {"bf16": figure}, "memory": {"value": "1 GB", "source": "s"},
        "hbm": {"value": "1 TB/s", "source": ""}
    }  # fmt: skip
    with pytest.raises(SpecError) as caught:
        load_spec(Gpu, gpu, "g.yaml")
    assert "g.yaml: peak.bf16.value = 5000000000000.0: must be FLOP/s with a unit, like 989 TFLOP/s" in str(caught.value)
    assert "g.yaml: hbm.source = '': " in str(caught.value)  # a figure without a source is refused
    gpu["hbm"] = {"value": "1 TB/s", "source": "s"}
    read = load_spec(Gpu, gpu, "g.json", units=False)
    assert load_spec(Gpu, json.loads(read.model_dump_json()), "again.json", units=False) == read


@pytest.mark.parametrize("data", [None, 3, "text", [], [1, 2]])
def test_what_is_no_mapping(data: object) -> None:
    with pytest.raises(SpecError, match=r"must be a mapping with the keys of a Model .*known: name, layers"):
        load_spec(Model, data, "m.yaml")


def test_what_yaml_refuses_is_reported_with_what_the_spec_does(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: x\nlayerz: 4\nhidden: -5\nffn_hidden: .nan\nheads: 8\nvocab: 100\nvocab: 200\n")
    with pytest.raises(SpecError) as caught:
        presets.model(str(path))
    said = str(caught.value)
    for words in (
        "ffn_hidden = .nan: must be a finite number",
        "vocab: stands twice",
        "layerz: unknown key",
        "layers: is missing",
        "hidden = -5",
    ):
        assert words in said
    assert said.count("ffn_hidden") == 1


def test_a_file_becomes_a_spec(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(f"{key}: {value}" for key, value in MODEL.items()))
    assert load_file(Model, path) == Model(**MODEL)


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(10**40), 10**40), st.floats(), st.text(max_size=8), st.sampled_from(["80 GB", "s", 1, 8])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
names = st.one_of(st.sampled_from(sorted({*Model.model_fields, *Cluster.model_fields, *Gpu.model_fields})), st.text(max_size=4))


@settings(deadline=None)
@given(st.sampled_from([Model, Cluster, Gpu]), st.dictionaries(names, values, max_size=12))
def test_any_mapping_is_a_spec_or_refused(kind: type[Any], data: dict[str, Any]) -> None:
    try:
        load_spec(kind, data, "f")
    except SpecError as error:
        assert all(problem.where == "f" and problem.rule for problem in error.problems)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=80), st.text(alphabet="ab:- \n&*[]{}!|>\"'#%@`,?<0.e1~", max_size=60)))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text, "f")
        except SpecError as error:
            assert str(error)
