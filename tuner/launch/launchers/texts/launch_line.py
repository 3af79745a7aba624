"""Lines that launch a training program: torchrun, srun, python -m torch.distributed.run, accelerate launch, deepspeed, python."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tuner.launch.launchers.texts.shell import read_script
from tuner.launch.launchers.texts.shell_names import Word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tuner.launch.launchers.texts.shell import Script

_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python[\d.]{0,6}")
_SHELLS = ("bash", "sh")
_DEEPEST = 3
# Options of launchers that take no value, by their name without dashes.
_SWITCHES = frozenset(
    (
        *("standalone", "no_python", "run_path", "module", "m", "use_env", "multi_gpu", "use_deepspeed", "use_fsdp", "cpu", "tpu", "u"),
        *("same_network", "quiet", "q", "debug", "use_megatron_lm", "no_local_rank", "no_ssh", "force_multi", "bind_cores_to_rank"),
        "use_parallelism_config",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A line that launches a program. by: torchrun, accelerate, deepspeed or python; options: of the launcher, by name with underscores;
    nodes, per_node: processes' nodes and processes of each, None unless told.
    """

    by: str
    program: str
    arguments: tuple[Word, ...]
    options: Mapping[str, Word]
    line: int
    nodes: int | None = None
    per_node: int | None = None

    @property
    def processes(self) -> int | None:
        """Processes in all."""
        total = _number(self.options.get("num_processes")) if self.by == "accelerate" else None
        return total or (self.nodes * self.per_node if self.nodes and self.per_node else None)


def launches(script: Script, depth: int = 0) -> tuple[Launch, ...]:
    """Return the launching lines of a script in order; #SBATCH headers say nodes and processes where the line does not."""
    return tuple(found for words in script.commands for found in _launch(script, words, depth))


def _launch(script: Script, words: Sequence[Word], depth: int) -> Iterator[Launch]:
    for i, word in enumerate(words):
        name = PurePosixPath(word.text[:300]).name
        following = words[i + 1 :]
        if name == "torchrun":
            yield _line(script, "torchrun", word.line, following, srun=words[:i])
        elif name == "deepspeed":
            yield _line(script, "deepspeed", word.line, following, srun=words[:i])
        elif name == "accelerate" and following and following[0].text == "launch":
            yield _line(script, "accelerate", word.line, following[1:], srun=words[:i])
        elif _PYTHON.fullmatch(name):
            yield from _python(script, word.line, following, words[:i])
        elif name in _SHELLS and depth < _DEEPEST and (text := _inline(following)) is not None:
            inner = read_script(text.text, f"{script.where}:{text.line}")
            placed = [tuple(_at(w, text.line) for w in command) for command in inner.commands]
            for command in placed:
                yield from _launch(script, (*words[:i], *command), depth + 1)
        else:
            continue
        return


def _at(word: Word, line: int) -> Word:
    return Word(text=word.text, line=line + word.line - 1, missing=word.missing)


def _inline(words: Sequence[Word]) -> Word | None:
    """Return the text behind -c of a shell."""
    for i, word in enumerate(words[:4]):
        if re.fullmatch(r"-[a-z]{0,3}c", word.text) and i + 1 < len(words):
            return words[i + 1]
    return None


def _python(script: Script, line: int, words: Sequence[Word], srun: Sequence[Word]) -> Iterator[Launch]:
    for i, word in enumerate(words):
        if word.text == "-m" and i + 1 < len(words):
            if words[i + 1].text in _MODULES:
                yield _line(script, "torchrun", line, words[i + 2 :], srun=srun)
            else:
                yield _line(script, "python", line, words[i:], srun=srun)
            return
        if not word.text.startswith("-"):
            if word.text.endswith(".py"):
                yield _line(script, "python", line, words[i:], srun=srun)
            return


def _line(script: Script, by: str, line: int, words: Sequence[Word], srun: Sequence[Word]) -> Launch:
    options: dict[str, Word] = {}
    program, rest = "", len(words)
    i = 0
    while i < len(words):
        text = words[i].text
        if not text.startswith("-") or text == "-":
            program, rest = text, i + 1
            break
        name, equals, value = text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "module") and i + 1 < len(words):
            program, rest = words[i + 1].text, i + 2
            break
        if equals or name == "standalone":
            options[name] = _valued(words[i], value)
        elif name not in _SWITCHES and i + 1 < len(words) and not words[i + 1].text.endswith(".py"):
            options[name] = words[i + 1]
            i += 1
        i += 1
    around = _options_of_srun(srun)
    return Launch(
        by=by,
        program=program,
        arguments=tuple(words[rest:]),
        options=options,
        line=line,
        nodes=_nodes(script, by, options, around),
        per_node=_per_node(script, by, options, around),
    )


def _valued(word: Word, value: str) -> Word:
    return Word(text=value, line=word.line, missing=word.missing)


def _options_of_srun(words: Sequence[Word]) -> dict[str, Word]:
    found: dict[str, Word] = {}
    for i, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        name = {"-N": "--nodes", "-n": "--ntasks"}.get(name, name)
        if name in ("--nodes", "--ntasks", "--ntasks-per-node", "--gpus-per-node"):
            found[name] = _valued(word, value) if equals else (words[i + 1] if i + 1 < len(words) else word)
    return found


def _nodes(script: Script, by: str, options: Mapping[str, Word], around: Mapping[str, Word]) -> int | None:
    if by == "torchrun" and "standalone" in options:
        return 1
    named = {"torchrun": "nnodes", "accelerate": "num_machines", "deepspeed": "num_nodes"}.get(by, "")
    told = options.get(named)
    if told is not None and not told.missing:
        return _number(told)
    if told is None and by in ("torchrun", "accelerate") and not around and script.nodes is None:
        return 1
    return _number(around.get("--nodes")) or script.nodes


def _per_node(script: Script, by: str, options: Mapping[str, Word], around: Mapping[str, Word]) -> int | None:
    named = {"torchrun": "nproc_per_node", "deepspeed": "num_gpus"}.get(by, "")
    told = options.get(named)
    if told is not None:
        return _number(told) or script.gpus_per_node
    if by == "python":
        return _number(around.get("--ntasks-per-node")) or _number(script.headers.get("--ntasks-per-node"))
    return 1 if by == "torchrun" else None


def _number(word: Word | None) -> int | None:
    return int(word.text) if word and re.fullmatch(r"\d{1,6}", word.text) and int(word.text) else None


def flags_of(words: Sequence[Word]) -> Iterator[tuple[Word, list[Word]]]:
    """Yield each flag of a command line with the words behind it (--flag=value is taken apart)."""
    flag: Word | None = None
    values: list[Word] = []
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            if flag is not None:
                yield flag, values
            name, equals, value = word.text.partition("=")
            flag = Word(text=name, line=word.line, missing=word.missing if not equals else ())
            values = [Word(text=value, line=word.line, missing=word.missing)] if equals else []
        elif flag is not None:
            values.append(word)
    if flag is not None:
        yield flag, values
