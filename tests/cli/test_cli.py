"""The command line: what it lists, what it refuses, and that help costs nothing."""

import fakes
import pytest

from vllm_zen import cli, envs


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
