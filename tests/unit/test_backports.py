"""vllm_zen.compile.backports on stand-in classes, and that the pinned torch is left as it is."""

import pickle

import pytest

from vllm_zen.compile import backports


class BypassError(Exception):
    """Stands for torch's BypassFxGraphCache."""


def new_pickler(fault=None):
    """A class like torch's FxGraphCachePickler: dumps(obj), with a fault for some objects."""

    class Pickler:
        def __init__(self):
            self.seen = []

        def dumps(self, obj):
            """The original's words."""
            self.seen.append(obj)
            if fault is not None:
                raise fault
            return pickle.dumps(obj)

    return Pickler


@pytest.mark.parametrize(
    ("version", "needed"),
    [
        ("2.9.1", False),
        ("2.9.1+cpu", False),
        ("2.10.0", True),
        ("2.10.0a0+git1234", True),
        ("2.10.1+cpu", True),
        ("2.11.0", False),
        ("2.13.0", False),
        ("2.13.0+cpu", False),
        ("2.100.0", False),
        ("2.1.0", False),
        ("12.10.0", False),
        ("1.10.0", False),
        ("2", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_only_torch_2_10_needs_it(version, needed):
    assert backports.needs_pickler_backport(version) is needed


def test_a_value_error_becomes_the_bypass():
    pickler = new_pickler(ValueError("cannot serialize a view"))
    assert backports.patch_pickler(pickler, BypassError) is True
    with pytest.raises(BypassError, match="cannot serialize a view") as bypassed:
        pickler().dumps("graph")
    assert isinstance(bypassed.value.__cause__, ValueError)


@pytest.mark.parametrize("fault", [TypeError("t"), RuntimeError("r"), BypassError("b"), KeyboardInterrupt()])
def test_other_exceptions_pass_untouched(fault):
    pickler = new_pickler(fault)
    backports.patch_pickler(pickler, BypassError)
    with pytest.raises(type(fault)) as raised:
        pickler().dumps("graph")
    assert raised.value is fault


def test_the_original_runs_and_its_result_passes_through():
    pickler = new_pickler()
    original = pickler.dumps
    backports.patch_pickler(pickler, BypassError)
    instance = pickler()
    assert instance.dumps([1, 2]) == pickle.dumps([1, 2])
    assert instance.seen == [[1, 2]]
    assert pickler.dumps is not original
    assert pickler.dumps.__wrapped__ is original
    assert pickler.dumps.__doc__ == "The original's words."


def test_patching_twice_wraps_once():
    pickler = new_pickler()
    assert backports.patch_pickler(pickler, BypassError) is True
    once = pickler.dumps
    assert backports.patch_pickler(pickler, BypassError) is False
    assert pickler.dumps is once


def test_a_subclass_of_a_patched_class_is_left_alone():
    pickler = new_pickler()
    backports.patch_pickler(pickler, BypassError)
    subclass = type("Subclass", (pickler,), {})
    assert backports.patch_pickler(subclass, BypassError) is False
    assert "dumps" not in vars(subclass)


def test_apply_leaves_a_torch_that_needs_nothing_as_it_is():
    import torch
    from torch._inductor.codecache import FxGraphCachePickler

    if backports.needs_pickler_backport(torch.__version__):
        pytest.skip(f"torch {torch.__version__} is the one release that needs the backport")
    before = FxGraphCachePickler.dumps
    backports.apply()
    backports.apply()
    assert FxGraphCachePickler.dumps is before
