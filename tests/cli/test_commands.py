"""The command's arguments, its exit codes, and what it loads."""

import json
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import streamoff.cli
from streamoff.cli import main

from .running import streamoff as run

WATCH = """
import sys
from streamoff.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(*(name for name in ("torch", "trio", "sklearn", "rich") if name in loaded), file=sys.stderr)
sys.exit(code)
"""


def _words(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else "-"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a safetensors file in it."""
    directory = tmp_path_factory.mktemp("place")
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (directory / "a.safetensors").write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["simulate", "--help"], 0),
        (["scratch", "--help"], 0),
        (["scratch", "ls", "--scratch", "."], 0),
        (["scratch", "gc", "--scratch", "."], 0),
        (["inspect", "a.safetensors"], 0),
        (["inspect", "missing"], 2),
        (["simulate", "--sites", "0"], 2),
        (["simulate", "--output", "missing/model"], 2),
        (["simulate", "--json", "missing/report"], 2),
    ],
    ids=_words,
)
def test_small_commands_load_nothing_large(place: Path, arguments: list[str], code: int) -> None:
    """Help, the small commands and wrong arguments answer without torch, trio or an extra."""
    ended = subprocess.run(
        [sys.executable, "-c", WATCH, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=place,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["simulate", "--recipe", "fedfoo"],
        ["simulate", "--sites", "many"],
        ["simulate", "--model-size", "huge"],
        ["simulate", "--backend", "curio"],
        ["simulate", "--unknown"],
        ["scratch"],
        ["inspect"],
    ],
    ids=_words,
)
def test_arguments_that_do_not_parse_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the parser refuses ends with 2, the usage and the reason on stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: streamoff")
    assert "error: " in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sites", "0"], "sites is out of range: expected 1 to 100000, got 0"),
        (["--sites", "4", "--min-responses", "5"], "min_responses is out of range"),
        (["--model-size", "1MiB"], "model_size has no meaning here"),
        (["--task", "checkpoint"], "needs a model"),
        (["--task", "checkpoint", "--model", "missing"], "model is no file"),
        (["--task", "checkpoint", "--model-size", "8MiB", "--site-tensors", "few"], "site_tensors"),
        (["--scratch", "missing"], "scratch is no directory"),
        (["--output", "."], "output is a directory"),
        (["--json", "."], "json is a directory"),
        (["--output", "x", "--json", "x"], "the same file"),
    ],
    ids=_words,
)
def test_arguments_that_do_not_fit_are_usage_errors(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong with the settings is said in one line, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("streamoff simulate: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_and_the_module_are_the_same() -> None:
    """``streamoff`` and ``python -m streamoff`` run the same function and know their version."""
    (script,) = entry_points(group="console_scripts", name="streamoff")
    assert script.load() is streamoff.cli.main
    assert run("--version").stdout == f"streamoff {version('streamoff')}\n"


def test_the_exit_codes_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever scripts the command finds its exit codes in its help."""
    for arguments in (["--help"], ["simulate", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        told = capsys.readouterr().out
        assert all(
            code in told for code in ("0 done", "1 the job failed", "2 the", "129", "130", "143")
        )


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    """Output into a pipe that closes early ends like any program that a SIGPIPE stops."""
    names = (
        f'"{index}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for index in range(50_000)
    )
    header = ("{" + ",".join(names) + "}").encode()
    path = tmp_path / "wide.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with subprocess.Popen(
        [sys.executable, "-m", "streamoff", "inspect", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_json_is_all_there_is_on_stdout(place: Path) -> None:
    """With --json the output is one JSON document, nothing before and nothing after."""
    for arguments in (["scratch", "ls"], ["scratch", "gc"]):
        json.loads(run(*arguments, "--json", "--scratch", place).stdout)
    json.loads(run("inspect", "--json", place / "a.safetensors").stdout)
