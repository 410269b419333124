"""Which libraries would be preloaded on a system with these files."""

import pytest

from vllm_zen import preloads


@pytest.fixture
def folders(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    for file in (first / "libiomp5.so", first / "libtcmalloc.so.4", second / "libtcmalloc_minimal.so.4"):
        file.touch()
    return first, second


def test_the_best_allocator_of_any_folder(folders):
    assert preloads.find({}, folders) == (str(folders[1] / "libtcmalloc_minimal.so.4"),)
    assert preloads.find({}, folders[:1]) == (str(folders[0] / "libtcmalloc.so.4"),)


def test_nothing_where_nothing_is(tmp_path):
    assert preloads.find({}, [tmp_path]) == ()


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("/opt/libjemalloc.so.2", 0),
        ("libtcmalloc_minimal.so.4 /opt/libgomp.so.1", 0),
        ("/opt/libomp.so:/opt/libmimalloc.so", 0),
        ("/opt/libiomp5.so", 1),
    ],
)
def test_what_the_user_preloads_stays_first_and_is_not_doubled(folders, given, added):
    found = preloads.find({"LD_PRELOAD": given}, folders)
    users = given.replace(" ", ":").split(":")
    assert list(found[: len(users)]) == users
    assert len(found) - len(users) == added
