import pytest

from tuner.errors import InfrastructureError, NothingFeasible, PlanError, Problem, SpecError, TunerError, nearest, one_problem, printable


def test_the_tree_and_its_exit_codes() -> None:
    codes = {SpecError: 2, PlanError: 2, NothingFeasible: 1, InfrastructureError: 4}
    for kind, code in codes.items():
        assert issubclass(kind, TunerError)
        assert kind.exit_code == code


def test_a_problem_says_file_path_value_rule_and_hint() -> None:
    problem = Problem(where="job.yaml", path="model.layers", value="0", rule="must be at least 1", hint="did you mean 10?")
    assert str(problem) == "job.yaml: model.layers = 0: must be at least 1 (did you mean 10?)"
    assert str(Problem(where="job.yaml", path="", value="", rule="is empty")) == "job.yaml: is empty"


def test_all_problems_are_in_the_message() -> None:
    problems = [Problem(where="f", path=str(i), value="", rule="is wrong") for i in range(3)]
    assert str(SpecError(problems)).splitlines() == [f"f: {i}: is wrong" for i in range(3)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("layrs", "did you mean layers?"), ("LAYERS", "did you mean layers?"), ("zzz", "known: hidden, layers")],
)
def test_nearest_name(name: str, hint: str) -> None:
    assert nearest(name, ["layers", "hidden"]) == hint


def test_many_known_names_are_cut_and_none_say_nothing() -> None:
    assert nearest("zzz", [f"n{i:02}" for i in range(30)]).endswith("n11, ...")
    assert nearest("zzz", []) == ""


def test_a_long_value_is_cut() -> None:
    assert len(one_problem("f", "p", "x" * 500, "is long").problems[0].value) <= 80


def test_equal_problems_are_listed_once() -> None:
    problem = Problem(where="--fix", path="", value="'x'", rule="must be like tp=8,pp=2")
    assert SpecError([problem, problem]).problems == (problem,)


def test_no_value_is_no_value() -> None:
    assert str(one_problem("plan", "", None, "is missing")) == "plan: is missing"
    assert str(one_problem("seq_len", "", "", "must be a whole number")) == "seq_len = '': must be a whole number"


def test_text_that_steers_a_terminal_is_spelled_out() -> None:
    assert printable("a\x1b[31m\x9b\r\n\u202e\ud800é😀") == "a\\x1b[31m\\x9b\\x0d\\x0a\\u202e\\ud800é😀"
