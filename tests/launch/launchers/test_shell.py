"""Launch scripts read without running them."""

from __future__ import annotations

import subprocess
import time

import pytest

from tuner.errors import SpecError
from tuner.launch.launchers.texts.launch_line import launches
from tuner.launch.launchers.texts.shell import Script, read_script


def texts(script: Script) -> list[list[str]]:
    return [[word.text for word in words] for words in script.commands]


def one(text: str) -> list[str]:
    """Return the words of the last command."""
    return texts(read_script(text, "run.sh"))[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=8\nrun $A ${A} \"$A\" '$A'", ["run", "8", "8", "8", "$A"]),
        ("run ${A:-8} ${A-9} ${A:+x}end", ["run", "8", "9", "end"]),
        ("A=\nrun ${A:-8} ${A:+x}y", ["run", "8", "y"]),
        ("A=4\nB=${A:-8}\nrun $B ${A:+set}", ["run", "4", "set"]),
        ("run ${A:-${B:-3}}", ["run", "3"]),
        ("A=3 B=5\nrun $((A*B)) $(( (A + B) / 3 )) $((-7 / 2)) $((17 % 5))", ["run", "15", "2", "-3", "2"]),
        ("A='x y'\nrun $A \"$A\"", ["run", "x", "y", "x y"]),
        ("A='--one 1 \\\n --two 2'\nrun $A", ["run", "--one", "1", "\\", "--two", "2"]),
        ('A="--one 1 \\\n --two 2"\nrun $A', ["run", "--one", "1", "--two", "2"]),
        ("A=(--one 1  # why\n  --two 'a b'\n)\nA+=(3)\nrun \"${A[@]}\"", ["run", "--one", "1", "--two", "a b", "3"]),
        ("A=(1 2 3)\nrun ${A[1]} ${A[0]} $A \"${A[*]}\"", ["run", "2", "1", "1", "1 2 3"]),
        ("A=('--split 1' x)\nrun ${A[@]}", ["run", "--split", "1", "x"]),
        ("A=x\nA+=y\nexport B=$A\nrun $B", ["run", "xy"]),
        ("run one \\\n  two # three\n", ["run", "one", "two"]),
        ("run a >out.log 2>&1 b 2> err </dev/null c", ["run", "a", "b", "c"]),
        ("cat <<EOF\nA=9 ' unclosed\nEOF\nrun $A", ["run", "$A"]),
        ("cat <<-'EOF' | wc\n\tA=9\n\tEOF\nrun a", ["run", "a"]),
        ("A=1 run --x=$A\"b\"", ["run", "--x=1b"]),
        ("run a\\ b 'it'\"'\"'s' \"\"", ["run", "a b", "it's", ""]),
        ("EMPTY=\nrun $EMPTY \"$EMPTY\" x", ["run", "", "x"]),
        ("run a#b", ["run", "a#b"]),
    ],
)  # fmt: skip
def test_words_expand_as_a_shell_expands_them(text: str, words: list[str]) -> None:
    assert one(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=2\nif [ $A -gt 1 ]; then B=yes; else B=no; fi\nrun $B", ["run", "yes"]),
        ("A=1\nif [[ $A > 1 || $A -eq 1 ]]; then B=yes; fi\nrun ${B:-unset}", ["run", "$B"]),
        ('A=x\nif [[ "$A" == "y" ]] || [[ "$A" == "x" ]]; then B=1; else B=2; fi\nrun $B', ["run", "1"]),
        ('A=x\nif [[ "$A" == "y" ]] && [[ "$A" == "x" ]]; then B=1; else B=2; fi\nrun $B', ["run", "2"]),
        ('[ -z "$A" ] && A=7\nrun $A', ["run", "7"]),
        ("[ -n \"$A\" ] || A=7\nrun $A", ["run", "7"]),
        ("A=4\nif (( A * 2 == 8 )); then B=8; fi\nrun $B", ["run", "8"]),
        ("A=8b\ncase $A in 70b) L=80;; 8b|7b) L=32;; *) L=0;; esac\nrun $L", ["run", "32"]),
        ("A=9b\ncase $A in\n  70b)\n    L=80\n    ;;\n  *)\n    L=0\n    ;;\nesac\nrun $L", ["run", "0"]),
        ("for T in 8; do run $T; done", ["run", "8"]),
        ("if true; then A=1; elif true; then A=2; else A=3; fi\nrun $A", ["run", "1"]),
        ("if false; then A=1; elif true; then A=2; else A=3; fi\nrun $A", ["run", "2"]),
        ("if make; then A=1; elif true; then A=2; fi\nrun $A", ["run", "$A"]),
        ("A=1\nif [[ $A > 0 ]]; then B=1; fi\nrun $B", ["run", "$B"]),
        ("A=1\nif [[ $A -eq 2 && -f x ]]; then B=1; fi\nrun $B", ["run", "$B"]),
        ("go() {\n  run $1 $X\n}\nX=1\ngo", ["go"]),
    ],
)  # fmt: skip
def test_conditions_that_the_script_settles_are_followed(text: str, words: list[str]) -> None:
    assert one(text) == words


def test_what_a_script_does_not_say_is_told_with_its_line() -> None:
    script = read_script('#!/bin/bash\nTP=$1\nrun $TP $NODES $(hostname) ${A##*/}\nif [ "$2" = x ]; then\n  PP=2\nfi\nrun $PP\n', "run.sh")
    assert {(entry.name, entry.line) for entry in script.unresolved} == {
        ("1", 2),
        ("NODES", 3),
        ("(hostname)", 3),
        ("A", 3),
        ("2", 4),
        ("PP", 5),
    }
    assert script.commands[0][1].missing == ("1",) and script.commands[0][1].text == "$1"
    assert script.commands[1][1].missing == ("PP",)
    why = {entry.name: entry.why for entry in script.unresolved}
    assert why["1"] == "is an argument of the script" and "condition" in why["PP"]


def test_a_value_under_an_unknown_condition_replaces_none_that_is_known() -> None:
    script = read_script('TP=4\nif [ "$1" = big ]; then TP=8; fi\nrun $TP\n', "run.sh")
    assert texts(script)[-1] == ["run", "4"]
    assert [entry.line for entry in script.unresolved if entry.name == "TP"] == [2]


def test_lines_of_words_are_those_where_they_were_written() -> None:
    script = read_script('A=(\n  --one 1\n  --two $B\n)\n\nrun "${A[@]}" \\\n  last\n', "run.sh")
    assert [(word.text, word.line) for word in script.commands[0]] == [
        ("run", 6), ("--one", 2), ("1", 2), ("--two", 3), ("$B", 3), ("last", 7),
    ]  # fmt: skip


HEADER = "#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH -N 4\n#SBATCH --gres=gpu:h100:8,tmpfs:1\n#SBATCH --ntasks-per-node=1\n"


def test_headers_of_slurm_say_nodes_and_accelerators() -> None:
    script = read_script(HEADER + "run $SLURM_NNODES $((SLURM_NNODES * 8)) $SLURM_GPUS_ON_NODE\n", "run.sh")
    assert (script.nodes, script.gpus_per_node) == (4, 8)
    assert texts(script)[-1] == ["run", "4", "32", "8"]
    assert read_script("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=a100:4\n", "run.sh").gpus_per_node == 4
    assert read_script("#SBATCH --nodes=2-4\n", "run.sh").nodes is None


@pytest.mark.parametrize(
    ("text", "by", "program", "size", "rest"),
    [
        ("torchrun --nproc-per-node 8 --nnodes=2 train.py --a 1", "torchrun", "train.py", (2, 8), ["--a", "1"]),
        ("torchrun --nproc_per_node=8 --standalone train.py", "torchrun", "train.py", (1, 8), []),
        (HEADER + "torchrun --standalone --nproc_per_node=8 train.py --a", "torchrun", "train.py", (1, 8), ["--a"]),
        ("torchrun --nproc_per_node=8 train.py", "torchrun", "train.py", (1, 8), []),
        ("torchrun --nnodes 1:4 --nproc_per_node gpu -m pkg.train --b", "torchrun", "pkg.train", (None, None), ["--b"]),
        ("python -u -m torch.distributed.run --nnodes 3 --nproc_per_node 4 train.py", "torchrun", "train.py", (3, 4), []),
        ("python3.11 -m torch.distributed.launch --use_env --nproc_per_node=2 t.py", "torchrun", "t.py", (1, 2), []),
        (HEADER + "srun python -u train.py --a", "python", "train.py", (4, 1), ["--a"]),
        (HEADER + 'srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 t.py --x \\$SLURM_NODEID"', "torchrun", "t.py", (4, 8),
         ["--x", "$SLURM_NODEID"]),
        ("accelerate launch --num_machines 2 --num_processes 16 --use_fsdp t.py --c", "accelerate", "t.py", (2, None), ["--c"]),
        ("deepspeed --num_gpus 8 --num_nodes 2 t.py --deepspeed x.json", "deepspeed", "t.py", (2, 8), ["--deepspeed", "x.json"]),
        ("nsys profile -o x numactl -m 0 torchrun --nproc_per_node=1 t.py", "torchrun", "t.py", (1, 1), []),
        ("CMD='torchrun --nproc_per_node=4 t.py'\n$CMD --d", "torchrun", "t.py", (1, 4), ["--d"]),
        ("exec torchrun --nproc_per_node=4 t.py", "torchrun", "t.py", (1, 4), []),
        ("if [ -f x ]; then torchrun --nproc_per_node=4 t.py; fi", "torchrun", "t.py", (1, 4), []),
    ],
)  # fmt: skip
def test_launching_lines(text: str, by: str, program: str, size: tuple[int | None, int | None], rest: list[str]) -> None:
    (launch,) = launches(read_script(text, "run.sh"))
    assert (launch.by, launch.program, (launch.nodes, launch.per_node)) == (by, program, size)
    assert [word.text for word in launch.arguments] == rest


def test_processes_are_nodes_times_those_of_each() -> None:
    (launch,) = launches(read_script("accelerate launch --num_processes 16 t.py", "run.sh"))
    assert launch.processes == 16
    (launch,) = launches(read_script("torchrun --nnodes 2 --nproc_per_node 8 t.py", "run.sh"))
    assert launch.processes == 16


def test_a_line_in_a_branch_that_does_not_run_launches_nothing() -> None:
    assert not launches(read_script("if false; then torchrun t.py; fi", "run.sh"))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('run "open\n', 1), ("a\nrun 'open\n", 2), ("A=(1 2\n", 1), ("cat <<EOF\nx\n", 2), ("run ${A", 1), ("run $((1", 1), ("run `x\n", 1),
        ("A=(1 | 2)\n", 1), ("x" * 200_000, 1),
    ],
)  # fmt: skip
def test_text_that_cannot_be_taken_apart_is_an_error_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SpecError) as wrong:
        read_script(text, "run.sh")
    assert f"run.sh:{line}" in str(wrong.value)


DOUBLED = "A=xxxxxxxxxx\n" + 'A="$A$A"\n' * 60 + "run $A\n"


@pytest.mark.parametrize(
    "text",
    [
        DOUBLED,
        "A=(x)\n" + "A+=(${A[@]} ${A[@]})\n" * 60,
        "run " + "${A:-" * 5000 + "}" * 5000,
        "run " + "$(" * 20_000 + ")" * 20_000,
        "run $((" + "(" * 20_000 + ")" * 20_000 + "))",
        "run $((9**9**9**9)) $((1<<99999999))",
        "if " * 20_000 + "true\n",
        "bash -c '" + "bash -c " * 1000 + "'",
        "\x00\x01\x02" * 1000,
        "(" * 50_000,
        "case x in " * 5000,
        'run "' + "\\" * 99_990 + '"',
        "A=" + "9" * 5000 + "\nrun $((A*A))",
    ],
    ids=range(13),
)
def test_hostile_scripts_end_soon(text: str) -> None:
    start = time.monotonic()
    try:
        launches(read_script(text, "run.sh"))
    except SpecError as wrong:
        assert len(str(wrong)) < 1000
    assert time.monotonic() - start < 5


def test_nothing_of_a_script_is_run(tmp_path: object) -> None:
    script = read_script(
        f"touch {tmp_path}/ran; A=$(touch {tmp_path}/ran)\n`touch {tmp_path}/ran`\nrun $((__import__('os').getpid()))\n", "x.sh"
    )
    assert script.commands
    from pathlib import Path

    assert not (Path(str(tmp_path)) / "ran").exists()


def test_what_is_not_said_takes_only_its_own_word_along() -> None:
    """Of a value in quotes that is split where it stands unquoted: one name of it is not set, or stands for what a command prints."""
    (launch,) = launches(
        read_script(
            'HOST=$(scontrol show hostnames "$LIST" | head -n 1)\nARGS="--tp 4 --load $CKPT --host $HOST:6000 --pp 2"\n'
            "torchrun --nnodes 2 --nproc-per-node 8 train.py $ARGS\n",
            "run.sh",
        )
    )
    assert [word.text for word in launch.arguments if word.missing] == ["$CKPT", launch.arguments[5].text]
    assert [word.text for word in launch.arguments if not word.missing] == ["--tp", "4", "--load", "--host", "--pp", "2"]
    assert launch.arguments[5].text.endswith(":6000")


@pytest.mark.parametrize(
    "text",
    [
        'TP=2; A=1; if ! [ "$A" = 1 ]; then TP=4; fi',
        "TP=2; ! true && TP=4",
        "TP=2; ! false && TP=4",
        "TP=2; if ! [ 1 -gt 2 ]; then TP=4; fi",
        "TP=2; A=a; [[ $A == b && $A == a ]] && TP=4",
        "TP=2\nusage() {\n TP=4\n}",
        "TP=2\nfunction usage {\n TP=4\n}",
        "TP=2\nsetup() {\n TP=4\n}\nsetup",
        "TP=2\nf() { if true; then { TP=4; }; fi; }\n",
        'TP=2; P=ab; [ "$P" = "a*" ] && TP=4',
        'TP=2; P=ab; [[ "$P" == a* ]] && TP=4',
        'TP=2; P=ab; [[ "$P" == "a*" ]] && TP=4',
        "TP=2; TP=4 echo hi",
        "TP=2; (TP=4)",
        "TP=2; (TP=4; echo $TP); { TP=8; }",
        "TP=2; while false; do TP=4; done",
        "TP=2; until true; do TP=4; done",
        "TP=2; for i in 1; do TP=4; done",
        "A=4; unset A; TP=${A:-2}",
        "TP=$((2#100))",
        "Y=5; TP=$((--Y))",
        "TP=2; ((TP*=2))",
        "TP=2; ((TP++))",
        "TP=2; let TP=4",
        "TP=2; read TP <<< 8",
        "TP=2; printf -v TP %d 4",
        'a=(1 2); a[1]=9; TP=${a[1]}',
        "TP=2; if ((TP > 1)); then TP=16; fi",
        "TP=2; if (( (TP+=1) > 2 )); then echo hi; fi",
    ],
)  # fmt: skip
def test_a_value_is_what_bash_makes_of_it_or_is_not_settled(text: str) -> None:
    """Never another value: what a script does in a way that is not followed is told as such."""
    script = read_script(f"{text}\ntorchrun train.py --tp $TP\n", "run.sh")
    (launch,) = launches(script)
    value = launch.arguments[1]
    done = subprocess.run(["bash", "-c", f'{text}\nprintf "=%s" "$TP"'], capture_output=True, text=True, check=True)
    told = {one.name for one in script.unresolved}
    assert value.text == done.stdout.rpartition("=")[2] or value.missing or "TP" in told, (value, done.stdout)
