"""vllm_zen.options: what --additional-config may hold under our key."""

import pytest

from vllm_zen.errors import UnsupportedError
from vllm_zen.options import Options


@pytest.mark.parametrize(
    "additional_config",
    [
        pytest.param(None, id="None"),
        pytest.param({}, id="empty"),
        pytest.param({"other": {"pack_tied_head": False}}, id="another plugin's"),
        pytest.param({"vllm_zen": {}}, id="an empty entry"),
        pytest.param({"vllm_zen": {"pack_tied_head": True}}, id="the default, said"),
        pytest.param(object(), id="an object of another plugin"),
    ],
)
def test_what_is_not_given_is_the_default(additional_config):
    assert Options.from_additional_config(additional_config) == Options(pack_tied_head=True)


def test_what_is_given_is_read():
    given = {"vllm_zen": {"pack_tied_head": False}, "other": 1}
    assert Options.from_additional_config(given) == Options(pack_tied_head=False)


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"pack_tied_heads": False}, id="a misspelt key"),
        pytest.param({"pack_tied_head": False, "x": 1}, id="one key too many"),
        pytest.param({1: 2}, id="a key that is no name"),
        pytest.param([("pack_tied_head", False)], id="a list"),
        pytest.param(None, id="null"),
        pytest.param("pack_tied_head", id="a string"),
    ],
)
def test_a_wrong_entry_is_refused_with_the_keys(entry):
    with pytest.raises(UnsupportedError) as refused:
        Options.from_additional_config({"vllm_zen": entry})
    assert f"'vllm_zen' holds {entry!r}" in str(refused.value)
    assert "with the keys pack_tied_head, quantization." in str(refused.value)


@pytest.mark.parametrize("value", [0, 1, "false", None, []])
def test_a_wrong_value_is_refused_with_the_rule(value):
    """0 and 1 too: equal to False and True, but the message says true or false."""
    with pytest.raises(UnsupportedError, match=r"vllm_zen\.pack_tied_head=.* must be true or false"):
        Options.from_additional_config({"vllm_zen": {"pack_tied_head": value}})
