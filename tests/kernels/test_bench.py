"""`bench kernels` on points that take no time, with the real kernels of both sides."""

import json

import pytest
import torch

from vllm_zen import cli, ops, zentorch
from vllm_zen.bench import attention, kernels, linear, moe
from vllm_zen.errors import BenchmarkError

DECODE = attention.Attention(2, 1, 200, 4, 2, 64)
CHUNK = attention.Attention(1, 40, 100, 4, 2, 64)


@pytest.fixture(autouse=True)
def native():
    status = ops.load()
    assert status.ok, status.reason


def test_both_sides_agree_and_the_figures_hang_together():
    rows, left_out = kernels.measure([DECODE, CHUNK], l3_bytes=2**20, pairs=3, say=lambda line: None)
    assert not left_out
    for row, point in zip(rows, (DECODE, CHUNK), strict=True):
        assert row.name == point.name and 0 <= row.difference < 2**-4
        assert row.limit > 0 and row.rate.ours.low > 0 and row.rate.stock.low > 0
        assert row.share("zen") == row.rate.ours.median / row.limit
    assert "| decode 2 x 200, 4/2 x 64 |" in kernels.markdown(rows, {}, {"cpu": "x"}, ["vllm-zen"])


# ZenDNN remembers weights by address: one where another scheme's was freed is read as if it were that.
_alive = []


@pytest.mark.parametrize(("scheme", "against"), linear.STOCK)
def test_linear_agrees_with_every_path_of_stock(scheme, against, monkeypatch):
    build, width = linear.STOCK[scheme, against]

    def build_and_keep(weights):
        _alive.append(build(weights))
        return _alive[-1]

    monkeypatch.setitem(linear.STOCK, (scheme, against), (build_and_keep, width))
    if "zentorch" in against and not zentorch.supports_linear(torch.bfloat16)[0]:
        pytest.skip(f"{against}: {zentorch.supports_linear(torch.bfloat16)[1]}")
    points = [linear.Linear(scheme, 128, 256, rows, against) for rows in (1, 33)]
    rows, left_out = kernels.measure(points, l3_bytes=2**16, pairs=1, say=lambda line: None)
    assert not left_out and all(0 <= row.difference < 2**-4 for row in rows)
    assert [row.limit_kind for row in rows] == ["bandwidth", "compute" if scheme == "w4a16" else "int8"]


@pytest.mark.parametrize(("bits", "against"), moe.STOCK)
def test_experts_agree_with_every_path_of_stock(bits, against):
    if not zentorch.load().usable:
        pytest.skip(zentorch.load().reason)
    model = moe.Model("tiny", experts=4, top_k=2, hidden=256, intermediate=128)
    points = [moe.Moe(bits, model, rows, against) for rows in (1, 64)]
    rows, left_out = kernels.measure(points, l3_bytes=2**16, pairs=1, say=lambda line: None)
    assert not left_out and all(0 <= row.difference < 2**-4 for row in rows)
    assert [row.limit_kind for row in rows] == ["bandwidth", "int8"]


def test_the_work_is_what_is_not_masked():
    assert DECODE.work == 2 * 200 * 2 * 64 * 2 * 2
    pairs = sum(60 + row + 1 for row in range(40))
    assert CHUNK.work == pairs * 4 * 64 * 4


def test_a_wrong_result_is_no_result():
    ours, stock = DECODE.sides(1)
    stock.query.neg_()
    with pytest.raises(BenchmarkError, match="the outputs differ"):
        kernels._difference(DECODE, ours.run(0), stock.run(0))


def test_a_wrong_result_does_not_end_the_others(monkeypatch):
    sides = attention.Attention.sides

    def wrong_at_first(point, copies):
        ours, stock = sides(point, copies)
        if point is DECODE:
            stock.query.neg_()
        return ours, stock

    monkeypatch.setattr(attention.Attention, "sides", wrong_at_first)
    rows, left_out = kernels.measure([DECODE, CHUNK], l3_bytes=0, pairs=1, say=lambda line: None)
    assert [row.name for row in rows] == [CHUNK.name]
    assert list(left_out) == [DECODE.name] and "the outputs differ" in left_out[DECODE.name]


def test_a_point_without_room_is_named():
    huge = attention.Attention(64, 1, 2**20, 64, 64, 256)
    rows, left_out = kernels.measure([huge], l3_bytes=0, pairs=1, say=lambda line: None)
    assert not rows and "GiB" in left_out[huge.name]


def test_the_command_writes_what_it_prints(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(attention, "grid", lambda: iter([DECODE, CHUNK]))
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert cli.main(["bench", "kernels", "--family", "attention", "--pairs", "1", *files]) == 0
    printed = capsys.readouterr().out
    names = [row["name"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]]
    assert names == [DECODE.name, CHUNK.name] and all(name in printed for name in names)
    assert (tmp_path / "r.png").stat().st_size > 5000


def test_a_filter_that_leaves_nothing_lists_the_points(capsys):
    assert cli.main(["bench", "kernels", "--family", "attention", "--only", "no such"]) != 0
    assert "decode 8 x 4096, 32/8 x 128" in capsys.readouterr().err
