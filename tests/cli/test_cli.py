"""The command line: what it lists, what it refuses, and that help costs nothing."""

import subprocess
import sys

import fakes
import pytest

from vllm_zen import __version__, cli, envs


def run(*arguments, **options):
    """`vllm-zen ARGUMENTS` in a child."""
    code = "import sys; from vllm_zen import cli; sys.exit(cli.main(sys.argv[1:]))"
    return fakes.python(code, arguments=arguments, **options)


def test_help_lists_every_command_and_variable():
    text = cli.build_parser().format_help()
    for name in ("doctor", "demo-model", *(variable.name for variable in envs.VARIABLES)):
        assert name in text


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import sys; from vllm_zen import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    result = fakes.python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--version"], f"vllm-zen {__version__}\n"),
        (["--help"], "environment variables:"),
        (["doctor", "--help"], "--json"),
    ],
)
def test_what_is_asked_for_is_on_stdout(arguments, words):
    result = run(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert words in result.stdout


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_a_wrong_command_line_exits_2_with_the_usage(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert "usage: vllm-zen" in result.stderr


def test_an_error_for_people_has_no_traceback(tmp_path):
    file_in_the_way = tmp_path / "cache"
    file_in_the_way.write_text("")
    result = run("demo-model", VLLM_ZEN_CACHE_DIR=str(file_in_the_way / "below"))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("vllm-zen: ")
    assert "Traceback" not in result.stderr


def test_a_home_that_does_not_exist_is_an_error_for_people():
    result = run("demo-model", VLLM_ZEN_CACHE_DIR="~no-such-user/models")
    assert result.returncode == 2
    assert result.stderr.startswith("vllm-zen: VLLM_ZEN_CACHE_DIR='~no-such-user/models'")


def test_a_reader_that_has_enough_is_no_error():
    """As in `vllm-zen doctor | head -1`: the exit status a signal would give, and no traceback."""
    code = "import sys; from vllm_zen import cli; sys.exit(cli.main(['doctor']))"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline().startswith("ok    vllm-zen")
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=60) == cli.SIGPIPE_STATUS, said
    assert "Traceback" not in said and "BrokenPipe" not in said
