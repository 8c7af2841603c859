"""Words of a command that cannot be read: one line on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tonnage.cli import app
from tonnage.cli.usage import OURS
from tonnage.errors import UsageError

REFUSED = {
    "unknown option": ("plan x --tpp 3", "--tpp: no option of tonnage plan; expected --tp or --pp\n"),
    "nothing is near": ("gpus --zzz", "--zzz: no option of tonnage gpus; expected tonnage gpus [OPTIONS]; see tonnage gpus -h"),
    "name of vLLM": ("plan x --max-model-len 9", "--max-model-len: no option of tonnage plan; expected --context"),
    "value that the source has": ("plan x --dtype half", "--dtype: no option of tonnage plan; expected SOURCE of that dtype"),
    "only the dashes are near": ("plan x --output y", "--output: no option of tonnage plan; expected tonnage plan [OPTIONS] "),
    "short for a name of vLLM": ("plan x --tensor-parallel 8", "--tensor-parallel: no option of tonnage plan; expected --tp\n"),
    "misspelt name of vLLM": ("fit x --max-modle-len 8", "--max-modle-len: no option of tonnage fit; expected --context\n"),
    "spelled as in Python": ("fit x --max_num_seqs=9", "--max_num_seqs: no option of tonnage fit; expected --profile cC-pP"),
    "for the engine": ("serve x --zzz", "--zzz: no option of tonnage serve; expected -- before what is for the engine"),
    "before the command": ("--json plan x", "--json: no option of tonnage; expected it behind the command"),
    "no value": ("plan x --tp", "--tp: needs a value"),
    "a value too many": ("plan x --json=1", "--json: takes no value"),
    "no integer": ("plan x --tp a", "--tp: cannot be used; expected a valid integer; found 'a'"),
    "no integer, repeatable": ("calibrate x --measured y --tp b", "--tp: cannot be used; expected a valid integer"),
    "no choice": ("export-names x -o y --style a", "--style: cannot be used; expected one of 'exl3', 'vllm-sharded'; found 'a'"),
    "no choice, with a quote in it": ("export-names x -o y --style a'b", "--style: cannot be used; expected one of 'exl3', 'vllm-sharded'; found \"a'b\""),
    "missing argument": ("compare", "A: missing; expected tonnage compare [OPTIONS] "),
    "missing option": ("prepare x", "--output: missing; expected --output PATH"),
    "missing option without a word for its value": ("join a -o b --part-key c", "--key: missing; expected --key KEY\n"),
    "too many words": ("plan x y z", "tonnage plan: too many words; expected tonnage plan [OPTIONS] "),
    "unknown command": ("plna", "plna: no command of tonnage; expected plan"),
    "unknown command of a group": ("calibrations lst", "lst: no command of tonnage calibrations; expected list"),
    "no command": ("./weights --tp 8", "./weights: no command of tonnage; expected a command out of `tonnage -h`"),
    "option of a group": ("calibrations show --jsn", "--jsn: no option of tonnage calibrations show; expected --json"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "line"), REFUSED.values(), ids=REFUSED)
def test_words_that_cannot_be_read_are_refused_in_one_line(tonnage_here, words, line):
    done = tonnage_here(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tonnage: {line}")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_an_empty_command_is_shown_as_such(tonnage_here):
    done = tonnage_here("", "x")
    assert done.stderr == "tonnage: '': no command of tonnage; expected a command out of `tonnage -h`\n"


@pytest.mark.parametrize("bound", ["--rank=-1", "--rank=-99999999999999999999999999"])
def test_a_number_out_of_range_is_named_with_its_bound(tonnage_here, bound):
    done = tonnage_here("verify", "x", bound)
    assert done.returncode == 2
    assert done.stderr.startswith("tonnage: --rank: cannot be used; expected ")
    assert "0; found " in done.stderr
    assert bound.removeprefix("--rank=") in done.stderr


def test_a_process_says_it_as_any_other_refusal(tonnage):
    for words in (("plan", "x", "--json", "--context-length", "9"), ("calibrations", "show")):
        done = tonnage(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith("tonnage: ")


@pytest.mark.parametrize(
    "words",
    [("plan", "x", "--\x1b]0;title\x07"), ("\x1b]0;title\x07",), ("plan", "x", "--tp", "\x1b]0;\n"), ("plan", "x", "\x9b2J\n")],
)  # fmt: skip
def test_what_was_typed_reaches_the_terminal_escaped(tonnage_here, words):
    done = tonnage_here(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.rstrip("\n").isprintable()


def test_a_caller_in_the_same_process_gets_the_refusal():
    done = CliRunner().invoke(app, ["plan", "x", "--tensor-parallel-size", "8"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "--tensor-parallel-size: no option of tonnage plan; expected --tp"
    assert done.output == ""


def test_without_words_help_is_shown(tonnage_here):
    for words in ((), ("calibrations",)):
        done = tonnage_here(*words)
        assert "Commands:" in done.stdout + done.stderr


def commands(group: Any, *before: str) -> dict[tuple[str, ...], Any]:
    """Return every command by the words that call it."""
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        inner = hasattr(command, "commands")
        found |= commands(command, *before, name) if inner else {(*before, name): command}
    return found


def test_a_name_of_an_engine_leads_to_an_option_the_command_has():
    led, group = set(), get_command(app)
    for words, command in commands(group).items():
        own = {"--help", *(name for param in command.params for name in (*param.opts, param.metavar) if name)}
        for theirs, ours in OURS.items():
            if theirs in own:
                continue
            with pytest.raises(UsageError) as refused:
                group.main([*words, theirs], standalone_mode=False)
            expected = refused.value.problems[0].expected
            assert expected is not None
            if ours.split()[0] in own:
                assert expected == ours
                led.add(theirs)
            elif not expected.startswith(("tonnage ", "-- before")):
                assert {name.strip(",") for name in expected.partition(", or -- ")[0].split(" or ")} <= own
    assert led == {*OURS}
