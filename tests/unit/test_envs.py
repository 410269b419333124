"""vllm_zen.envs: each variable's default, its values, and what is refused."""

from pathlib import Path

import pytest

from vllm_zen import envs
from vllm_zen.errors import EnvironmentVariableError, ZenError

DEFAULTS = {
    "VLLM_ZEN_ISA": "auto",
    "VLLM_ZEN_LINEAR": "auto",
    "VLLM_ZEN_ATTENTION": "auto",
    "VLLM_ZEN_CACHE_DIR": "~/.cache/vllm-zen",
    "VLLM_ZEN_STRICT": "0",
    "VLLM_ZENTORCH_WEIGHT_PREPACK": "1",
}
ALLOWED = {
    "VLLM_ZEN_ISA": ("auto", "ref", "zen4"),
    "VLLM_ZEN_LINEAR": ("auto", "zentorch", "vllm", "torch"),
    "VLLM_ZEN_ATTENTION": ("auto", "native", "vllm"),
    "VLLM_ZEN_CACHE_DIR": (),
    "VLLM_ZEN_STRICT": ("0", "1"),
    "VLLM_ZENTORCH_WEIGHT_PREPACK": ("0", "1"),
}
REFUSED = ("bogus", "AUTO", "true", "yes", "2", "-1", "auto,ref", "01")

every_variable = pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
listed = [variable for variable in envs.VARIABLES if variable.allowed]
every_listed_variable = pytest.mark.parametrize("variable", listed, ids=lambda variable: variable.name)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)


def test_the_variables_are_these():
    """A new one is added here, with its default and values, on purpose."""
    assert {variable.name: variable.default for variable in envs.VARIABLES} == DEFAULTS
    assert {variable.name: variable.allowed for variable in envs.VARIABLES} == ALLOWED


@every_variable
@pytest.mark.parametrize("value", [None, "", "  \t"], ids=["unset", "empty", "blank"])
def test_nothing_is_the_default(variable, value):
    environ = {} if value is None else {variable.name: value}
    assert variable.read(environ) == variable.default


@every_listed_variable
def test_allowed_values_are_taken_with_blanks_around(variable):
    assert variable.default in variable.allowed
    for value in variable.allowed:
        assert variable.read({variable.name: value}) == value
        assert variable.read({variable.name: f"  {value}\n"}) == value


@every_listed_variable
@pytest.mark.parametrize("value", REFUSED)
def test_other_values_are_refused_with_value_list_and_default(variable, value):
    with pytest.raises(EnvironmentVariableError) as refused:
        variable.read({variable.name: value})
    message = str(refused.value)
    assert f"{variable.name}={value!r}" in message
    assert ", ".join(variable.allowed) in message
    assert f"Unset it for the default, {variable.default!r}" in message
    assert isinstance(refused.value, ZenError) and isinstance(refused.value, ValueError)


@every_variable
def test_each_has_a_meaning_for_the_help(variable):
    assert variable.meaning.endswith(".")


def test_readers_give_the_defaults():
    found = (envs.isa(), envs.linear(), envs.strict(), envs.weight_prepack())
    assert found == ("auto", "auto", False, True)


def test_readers_see_the_environment_of_now(monkeypatch):
    assert not envs.strict()
    monkeypatch.setenv("VLLM_ZEN_STRICT", "1")
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    monkeypatch.setenv("VLLM_ZEN_ISA", "ref")
    monkeypatch.setenv("VLLM_ZEN_LINEAR", "torch")
    found = (envs.isa(), envs.linear(), envs.strict(), envs.weight_prepack())
    assert found == ("ref", "torch", True, False)


@pytest.mark.parametrize(
    ("value", "folder"),
    [
        ("", "home/.cache/vllm-zen"),
        ("~/models", "home/models"),
        ("~", "home"),
        (" ~/a b ", "home/a b"),
        ("relative/~", None),
        ("/var/cache/zen", None),
    ],
)
def test_cache_dir_resolves_the_home_folder(tmp_path, monkeypatch, value, folder):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VLLM_ZEN_CACHE_DIR", value)
    assert envs.cache_dir() == (Path(value) if folder is None else tmp_path / folder)


def test_a_home_that_does_not_exist_is_refused(monkeypatch):
    """As for a container's user id without an account, where even the default has no folder."""
    monkeypatch.setenv("VLLM_ZEN_CACHE_DIR", "~no-such-user/models")
    with pytest.raises(EnvironmentVariableError, match=r"'~no-such-user/models'.*absolute path"):
        envs.cache_dir()


def test_check_all_passes_what_is_right(monkeypatch):
    envs.check_all()
    envs.check_all({})
    envs.check_all({variable.name: variable.allowed[-1] for variable in listed})
    monkeypatch.setenv("VLLM_ZEN_STRICT", "bogus")
    envs.check_all({})


@every_listed_variable
def test_check_all_refuses_each(variable, monkeypatch):
    with pytest.raises(EnvironmentVariableError, match=variable.name):
        envs.check_all({variable.name: "bogus"})
    monkeypatch.setenv(variable.name, "bogus")
    with pytest.raises(EnvironmentVariableError, match=variable.name):
        envs.check_all()
