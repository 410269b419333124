"""`vllm-zen quantize`: what it writes, as compressed-tensors itself reads it, and what it leaves behind."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

from vllm_zen import cli
from vllm_zen.errors import ModelError, UnsupportedError
from vllm_zen.quantization import export


def tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.fixture
def quantize(tiny_models, tmp_path):
    def run(scheme, group=64, model=tiny_models["untied"]):
        return tmp_path / "out", export.export(model, tmp_path / "out", scheme, group, lambda line: None)

    return run


@pytest.mark.parametrize("scheme", export.SCHEMES)
def test_every_layer_comes_back(quantize, tiny_models, scheme):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    out, layers = quantize(scheme)
    before, after = tensors(tiny_models["untied"]), tensors(out)
    assert len(layers) == 2 * 7
    for layer in layers:
        weight = before[f"{layer.name}.weight"].float()
        scale = after[f"{layer.name}.weight_scale"].float()
        if scheme == "int8":
            restored = after[f"{layer.name}.weight"].float() * scale
        else:
            assert after[f"{layer.name}.weight_shape"].tolist() == list(weight.shape)
            codes = unpack_from_int32(after[f"{layer.name}.weight_packed"], 4, weight.shape)
            restored = codes.float() * scale.repeat_interleave(64, dim=1)
        error = float((restored - weight).norm() / weight.norm())
        assert error == pytest.approx(layer.error, rel=1e-3)
        assert error < (0.01 if scheme == "int8" else 0.11)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 8), ("int4", 4)])
def test_compressed_tensors_reads_the_configuration(quantize, scheme, bits):
    from compressed_tensors.quantization import QuantizationConfig

    out, _ = quantize(scheme)
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(described)
    weights = read.config_groups["group_0"].weights
    assert weights.num_bits == bits and read.ignore == ["lm_head"]


def test_a_layer_that_groups_do_not_divide_stays_and_is_named(quantize):
    out, layers = quantize("int4", 128)  # 704 inputs of down_proj
    assert len(layers) == 2 * 6
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))]


def test_refusals_leave_nothing_behind(quantize, tiny_models, tmp_path, monkeypatch):
    out, _ = quantize("int8")
    with pytest.raises(UnsupportedError, match=r"exists\. Remove it"):
        quantize("int8")
    with pytest.raises(UnsupportedError, match=r"already quantized \(compressed-tensors\)"):
        export.export(out, tmp_path / "again", "int8", 64, lambda line: None)
    shutil.rmtree(out)
    with pytest.raises(UnsupportedError, match=r"is no folder\. Make it first"):
        export.export(tiny_models["tied"], tmp_path / "no" / "out", "int8", 64, lambda line: None)
    full = shutil.disk_usage(tmp_path)._replace(free=2**20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: full)
        with pytest.raises(UnsupportedError, match=r"has 0\.00 GiB free, and the checkpoint takes about"):
            quantize("int8")
    with monkeypatch.context() as patch:
        patch.setattr(export, "_quantize", lambda *_: (_ for _ in ()).throw(ModelError("broken")))
        with pytest.raises(ModelError, match="broken"):
            quantize("int8")
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_run_left_is_removed(quantize, tmp_path):
    (tmp_path / "out.tmp-x").mkdir()
    (tmp_path / "out.tmp-x" / "config.json").write_text("{}")
    out, _ = quantize("int8")
    assert list(tmp_path.iterdir()) == [out]


def test_the_command_reports(tiny_models, tmp_path, capsys):
    command = ["quantize", str(tiny_models["tied"]), str(tmp_path / "out"), "--scheme", "int4", "--report"]
    assert cli.main([*command, "--group-size", "32"]) == 0
    printed = capsys.readouterr().out
    assert "| model.layers.1.mlp.down_proj | 0.0" in printed and "| all 14 layers |" in printed
    assert printed.endswith(f"{tmp_path / 'out'}\n")
