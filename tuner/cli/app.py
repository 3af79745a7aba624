"""The application: its verbs, in the order of the help page."""

from __future__ import annotations

import typer

from tuner.cli import calibrate, check, doctor, estimate, explain, export, failures, presets, profile, replay, search, validate
from tuner.cli.help import Group, Verb
from tuner.cli.streams import failure, prepare, say, silence_stdout

HELP = """\
Finds the best parallelism configuration for training a large language model.

\b
Examples:
  tuner search -m llama3-70b -c h100x64 -s 8192 -b 512
  tuner estimate -m gpt3-175b -c a100x1024 -s 2048 -b 1536 -p tp=8,pp=8
  tuner presets models

Results go to stdout, progress and words to stderr. Exit codes: 0 ok, 1 nothing feasible, 2 bad input, 3 illegal or does not fit,
4 the machine or the program failed, 5 the budget ended first.
"""

app = typer.Typer(
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        import tuner

        typer.echo(f"tuner {tuner.__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version and exit.")) -> None:
    del version


for verb in (search, profile, estimate, explain, check, export, failures, presets, validate, replay, calibrate, doctor):
    app.command(cls=Verb, name=verb.__name__.rpartition(".")[2], help=verb.HELP, short_help=verb.SHORT)(verb.VERB)


def run() -> int:
    """Run the command line and return its exit code."""
    prepare()
    try:
        app(prog_name="tuner")
    except BrokenPipeError:
        silence_stdout()
        return 141
    except OSError as error:
        silence_stdout()
        say(failure(error))
        return 4
    return 0
