"""Options and commands that do not exist: the word that was typed, a suggestion, and the help of its own command."""

import pytest

from exactknn import cli

COMMANDS = ["search", "groundtruth", "evaluate", "match", "info"]


def refusal(capsys, *words):
    assert cli.main([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.removeprefix("exactknn: error: ").rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("rest", [(), ("x",), ("-k", "3"), ("--nothing",)])
def test_an_unknown_option_is_named_before_required_ones(capsys, command, rest):
    assert (
        refusal(capsys, command, "--unheard-of", *rest)
        == f"unknown option --unheard-of (see: exactknn {command} --help)"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("groundtruth --bse x", "unknown option --bse; did you mean --base? (see: exactknn groundtruth --help)"),
        ("search --querry=x -k 3", "unknown option --querry; did you mean --query? (see: exactknn search --help)"),
        ("match --treshold 3", "unknown option --treshold; did you mean --threshold? (see: exactknn match --help)"),
        ("search -K 3", "unknown option -K; did you mean -k? (see: exactknn search --help)"),
        ("--versoin", "unknown option --versoin; did you mean --version? (see: exactknn --help)"),
        ("--query q.npy", "unknown option --query (see: exactknn --help)"),
        ("serch --query q.npy", "unknown command 'serch'; did you mean search? (see: exactknn --help)"),
        ("7", "unknown command '7' (see: exactknn --help)"),
        ("search q.npy --query q -k 1 --output o", "unexpected argument 'q.npy' (see: exactknn search --help)"),
        ("info --json --json x", "unexpected argument 'x' (see: exactknn info --help)"),
    ],
)
def test_the_word_that_was_typed_is_named(capsys, words, message):
    assert refusal(capsys, *words.split(" ")) == message


@pytest.mark.parametrize("command", COMMANDS)
def test_help_wins_over_mistakes(capsys, command):
    assert cli.main([command, "--unheard-of", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: exactknn {command} ")


def test_values_that_look_like_options_are_values(capsys, tmp_path):
    missing = f"{tmp_path}/q.npy"
    for threshold in (["--threshold", "-1e-3"], ["--threshold=-inf"], ["--threshold", "-.5"]):
        text = refusal(capsys, "match", "--query", missing, *threshold, "--output", "o.csv")
        assert "unknown option" not in text
    assert refusal(capsys, "search", "-k3", "--query", missing, "--output", "o.npz") == f"{missing}: no such file"
    assert refusal(capsys, "search", "-k", "-3", "--query", "q", "--output", "o").startswith("argument -k: expected")
