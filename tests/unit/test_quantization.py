"""Settings of zen_int8 and zen_int4: what is allowed, what is refused, and which scheme a layer gets."""

import pytest

from vllm_zen.errors import UnsupportedError
from vllm_zen.options import Options
from vllm_zen.quantization.settings import INT4, INT8, Scheme, Settings

WHERE = "--additional-config: vllm_zen.quantization"
QKV = ["model.layers.0.self_attn.qkv_proj"]
QKV += [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def read(**given):
    return Options.from_additional_config({"vllm_zen": {"quantization": given}}).quantization


def test_defaults():
    settings = read()
    assert settings == Settings(group_size=128, act_bits=8, zero_points=False, head="int8", embedding="bf16")
    assert settings.scheme_of(INT8, QKV) == Scheme("int8", rotated=True)
    assert settings.scheme_of(INT4, QKV) == Scheme("int4", 128)


@pytest.mark.parametrize(
    ("given", "scheme", "text"),
    [
        ({"group_size": 32}, Scheme("int4", 32), "int4 g32 (w4a8)"),
        ({"zero_points": True}, Scheme("int4", 128, True), "int4 g128 zero points (w4a8)"),
        ({"act_bits": 16}, Scheme("int4", 128, False, 16), "int4 g128 (w4a16)"),
        ({"layers": {"*.qkv_proj": "int8"}}, Scheme("int8", rotated=True), "int8 (w8a8, rotated)"),
        ({"layers": {"*": "int8"}, "rotate": False}, Scheme("int8"), "int8 (w8a8)"),
        ({"layers": {"*.mlp.*": "bf16", "*.self_attn.*": "bf16"}}, Scheme("bf16"), "bf16"),
        ({"layers": {"*.[qkv]_proj": "bf16"}}, Scheme("bf16"), "bf16"),
        ({"layers": {"*": "bf16", "*.qkv_proj": "int8"}}, Scheme("bf16"), "bf16"),
    ],
)
def test_what_a_layer_gets(given, scheme, text):
    got = read(**given).scheme_of(INT4, QKV)
    assert got == scheme and str(got) == text


def test_a_part_of_a_fused_layer_is_refused():
    with pytest.raises(UnsupportedError, match=r"names a part of model\.layers\.0\.self_attn\.qkv_proj"):
        read(layers={"*.q_proj": "bf16"}).scheme_of(INT4, QKV)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"groupsize": 32},
            f"{WHERE} holds {{'groupsize': 32}}; it takes an object with the keys",
        ),
        ({"group_size": 48}, f"{WHERE}.group_size=48 must be one of 32, 64, 128."),
        ({"group_size": "32"}, f"{WHERE}.group_size='32' must be one of 32, 64, 128."),
        ({"rotate": "no"}, f"{WHERE}.rotate='no' must be one of true, false."),
        ({"zero_points": 1}, f"{WHERE}.zero_points=1 must be one of true, false."),
        ({"head": "int3"}, f"{WHERE}.head='int3' must be one of int8, int4, bf16."),
        ({"head": ["int8"]}, f"{WHERE}.head=['int8'] must be one of int8, int4, bf16."),
        ({"act_bits": True}, f"{WHERE}.act_bits=True must be one of 8, 16."),
        ({"layers": {"*": "fp8"}}, "must map patterns of layer names"),
        ({"layers": ["*"]}, "must map patterns of layer names"),
        ({"layers": {"*": ["int8"]}}, "must map patterns of layer names"),
        ({"embedding": "head", "head": "int4"}, 'needs head="int8"'),
    ],
)
def test_refused_with_what_is_allowed(given, message):
    with pytest.raises(UnsupportedError) as refused:
        read(**given)
    assert message in str(refused.value)
