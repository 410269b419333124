"""vllm_zen.cpu on the text of other machines, of broken ones, and of none."""

import pytest
from fakes import CPUINFO
from hypothesis import given
from hypothesis import strategies as st

from vllm_zen import cpu
from vllm_zen.cpu import CpuInfo

AVX512 = "avx512f avx512bw avx512vl avx512dq"


def text_of(*flags: str, vendor: str = "AuthenticAMD", **fields: str) -> list[str]:
    """A cpuinfo file of one CPU for each of the flags given."""
    lines = []
    for number, own in enumerate(flags):
        lines += [f"processor\t: {number}", f"vendor_id\t: {vendor}"]
        lines += [f"{key.replace('_', ' ')}\t: {value}" for key, value in fields.items()]
        lines += [f"flags\t\t: {own}", ""]
    return lines


# The four cases of the in-tree backend's tests.


@pytest.mark.parametrize(
    ("vendor", "flags", "supported"),
    [
        pytest.param("AuthenticAMD", f"fpu avx2 {AVX512}", True, id="AMD with AVX-512"),
        pytest.param("AuthenticAMD", "fpu avx2", False, id="AMD without AVX-512"),
        pytest.param("GenuineIntel", f"fpu avx2 {AVX512}", False, id="Intel with AVX-512"),
    ],
)
def test_vendor_and_avx512_decide(tmp_path, vendor, flags, supported):
    path = tmp_path / "cpuinfo"
    path.write_text("\n".join(text_of(flags, vendor=vendor)))
    assert cpu.zen_platform_supported(cpu.read_cpuinfo(path))[0] is supported


def test_a_missing_file_is_an_answer(tmp_path):
    info = cpu.read_cpuinfo(tmp_path / "cpuinfo")
    supported, reason = cpu.zen_platform_supported(info)
    assert not supported
    assert str(tmp_path / "cpuinfo") in reason and "No such file" in reason


# Real machines


@pytest.mark.parametrize(
    ("name", "vendor", "family", "model", "generation", "words"),
    [
        ("genoa", "AuthenticAMD", 25, 17, "zen4", "EPYC 9654 zen4"),
        ("milan", "AuthenticAMD", 25, 1, "zen3", "EPYC 7763 zen3"),
        ("turin", "AuthenticAMD", 26, 2, "zen5", "EPYC 9755 zen5"),
        ("rome", "AuthenticAMD", 23, 49, "zen2", "EPYC 7742 zen2"),
        ("masked_vm", "AuthenticAMD", 25, 17, "zen4", "EPYC zen4"),
        ("sapphire_rapids", "GenuineIntel", 6, 143, "unknown", "Intel(R) Xeon(R) Platinum 8480+"),
        ("hygon", "HygonGenuine", 24, 1, "unknown", "Hygon C86 7285 32-core Processor"),
        ("neoverse", "0x41", None, None, "unknown", "0x41"),
    ],
)
def test_what_a_machine_is(name, vendor, family, model, generation, words):
    info = cpu.read_cpuinfo(CPUINFO / f"{name}.txt")
    assert (info.vendor, info.family, info.model) == (vendor, family, model)
    assert (info.generation, info.describe()) == (generation, words)
    assert (info.num_cpus, info.problem) == (2, "")


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("genoa", set(cpu.FEATURES) - {"avx512_fp16"}),
        ("masked_vm", set(cpu.FEATURES) - {"avx512_fp16"}),
        ("turin", set(cpu.FEATURES) - {"avx512_fp16"}),
        ("milan", {"avx2"}),
        ("rome", {"avx2"}),
        ("hygon", {"avx2"}),
        ("sapphire_rapids", set(cpu.FEATURES)),
        ("neoverse", set()),
    ],
)
def test_what_a_machine_supports(name, features):
    info = cpu.read_cpuinfo(CPUINFO / f"{name}.txt")
    assert {feature for feature in cpu.FEATURES if info.supports(feature)} == features


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("genoa", "EPYC 9654 zen4 has AVX-512 F, BW, VL and DQ"),
        ("milan", "EPYC 7763 zen3 does not report avx512f, avx512bw, avx512vl, avx512dq"),
        ("sapphire_rapids", "the CPU's vendor is GenuineIntel, not AuthenticAMD"),
        ("hygon", "the CPU's vendor is HygonGenuine, not AuthenticAMD"),
        ("neoverse", "the CPU's vendor is 0x41, not AuthenticAMD"),
    ],
)
def test_the_reason_names_the_machine(name, reason):
    info = cpu.read_cpuinfo(CPUINFO / f"{name}.txt")
    assert cpu.zen_platform_supported(info) == (name == "genoa", reason)


def test_this_machine_is_read_without_a_parameter():
    info = cpu.read_cpuinfo()
    assert info.num_cpus > 0 or info.problem


# Files that are no cpuinfo


def test_a_directory_is_an_answer(tmp_path):
    """Stands for every file that exists and cannot be read; as root, permissions do not."""
    supported, reason = cpu.zen_platform_supported(cpu.read_cpuinfo(tmp_path))
    assert not supported
    assert str(tmp_path) in reason and "directory" in reason


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\n\n:\n: :\n", id="colons"),
        pytest.param(bytes(range(256)) * 64, id="binary"),
        pytest.param(b"vendor_id : AuthenticAMD\nflags : avx512f avx512bw\n", id="no processor"),
    ],
)
def test_garbage_is_an_answer(tmp_path, content):
    path = tmp_path / "cpuinfo"
    path.write_bytes(content)
    info = cpu.read_cpuinfo(path)
    assert info == CpuInfo(problem="the text lists no processor")
    assert not cpu.zen_platform_supported(info)[0]


@pytest.mark.parametrize("value", ["", "unknown", "0x19", "2.5", "9" * 10000])
def test_a_family_that_is_no_number_is_unknown(value):
    info = cpu.parse_cpuinfo([*text_of(AVX512), f"cpu family : {value}", "model : 17"])
    assert info.family is None
    assert info.generation == "unknown"
    assert cpu.zen_platform_supported(info)[0]


@given(
    st.lists(st.one_of(st.text(), st.sampled_from(["processor : 0", "flags : avx2", "model : x", "flags:"])))
)
def test_parsing_never_raises(lines):
    info = cpu.parse_cpuinfo(lines)
    assert info.problem or info.num_cpus > 0
    supported, reason = cpu.zen_platform_supported(info)
    assert isinstance(supported, bool) and reason
    assert info.describe() and info.generation == "unknown"


# Flags


@pytest.mark.parametrize(
    "token", ["avx512foo", "xavx512f", "avx512f=1", "AVX512F", "avx512_f", "avx512f,avx2", "avx512"]
)
def test_tokens_are_matched_whole(token):
    info = cpu.parse_cpuinfo(text_of(f"fpu {token} xavx2 avx2x"))
    assert not info.supports("avx512f")
    assert not info.supports("avx2")


@pytest.mark.parametrize("feature", cpu.REQUIRED_FEATURES)
def test_one_missing_required_feature_is_named(feature):
    flags = " ".join(flag for flag in AVX512.split() if flag != feature)
    supported, reason = cpu.zen_platform_supported(cpu.parse_cpuinfo(text_of(flags)))
    assert not supported
    assert reason.endswith(f"does not report {feature}")


@pytest.mark.parametrize(
    ("flags", "common"),
    [
        pytest.param(["a b c", "b c d"], {"b", "c"}, id="each lacks one"),
        pytest.param(["a b", "b a"], {"a", "b"}, id="another order"),
        pytest.param(["a", "b"], set(), id="nothing in common"),
        pytest.param(["a b", ""], set(), id="a CPU without any"),
        pytest.param(["a", "a b", "a"], {"a"}, id="the first and last alike"),
    ],
)
def test_the_flags_every_cpu_has_count(flags, common):
    info = cpu.parse_cpuinfo(text_of(*flags))
    assert info.flags == common
    assert info.num_cpus == len(flags)


def test_an_unknown_feature_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"'sse9'.*avx2, avx512f.*avx512_fp16"):
        CpuInfo().supports("sse9")


@pytest.mark.timeout(20)
def test_thousands_of_cpus(tmp_path):
    """15 MB of text, as on a machine of 4096 CPUs; one of them is different."""
    block = (CPUINFO / "genoa.txt").read_text().split("\n\n")[0]
    blocks = [block] * 4095 + [block.replace(" avx512_bf16", "")]
    path = tmp_path / "cpuinfo"
    path.write_text("\n\n".join(blocks) + "\n\n")
    info = cpu.read_cpuinfo(path)
    assert info.num_cpus == 4096
    assert info.supports("avx512_vnni") and not info.supports("avx512_bf16")


# Generations: the ends of every range, and their neighbours.


@pytest.mark.parametrize(
    ("family", "models", "generation"),
    [
        (0x17, (0x00, 0x01, 0x2F, 0x50, 0x5F), "zen1"),
        (0x17, (0x30, 0x31, 0x4F, 0x60, 0x7F, 0x90, 0x91, 0xA0, 0xAF), "zen2"),
        (0x19, (0x00, 0x01, 0x0F, 0x20, 0x5F), "zen3"),
        (0x19, (0x10, 0x11, 0x1F, 0x60, 0x61, 0xA0, 0xAF), "zen4"),
        (0x1A, (0x00, 0x02, 0x2F, 0x40, 0x4F, 0x60, 0x7F), "zen5"),
        (0x1A, (0x50, 0x5F, 0x80, 0xAF, 0xC0, 0xCF), "zen6"),
        (0x17, (0x80, 0x8F, 0x92, 0x9F, 0xB0, 0xFF), "unknown"),
        (0x19, (0xB0, 0xFF), "unknown"),
        (0x1A, (0x30, 0x3F, 0xB0, 0xBF, 0xD0), "unknown"),
        (0x15, (0x00, 0x30), "unknown"),
        (0x18, (0x00, 0x01), "unknown"),
        (0x1B, (0x00, 0x11), "unknown"),
    ],
)
def test_generation_by_family_and_model(family, models, generation):
    found = {hex(model): CpuInfo(vendor=cpu.AMD, family=family, model=model).generation for model in models}
    assert found == {hex(model): generation for model in models}


@pytest.mark.parametrize(
    "info",
    [
        CpuInfo(vendor="GenuineIntel", family=0x19, model=0x11),
        CpuInfo(vendor=cpu.AMD, model=0x11),
        CpuInfo(vendor=cpu.AMD, family=0x19),
        CpuInfo(),
    ],
)
def test_no_generation_without_vendor_family_and_model(info):
    assert info.generation == "unknown"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AMD EPYC 9654 96-Core Processor", "EPYC 9654 zen4"),
        ("AMD EPYC 9B14", "EPYC 9B14 zen4"),
        ("AMD EPYC Processor", "EPYC zen4"),
        ("AMD EPYC-Genoa Processor", "AMD EPYC-Genoa Processor zen4"),
        ("AMD EPYC(R) 9654", "EPYC 9654 zen4"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 9 7950X 16-Core Processor zen4"),
        ("", "AuthenticAMD zen4"),
    ],
)
def test_describe_is_short(name, words):
    assert CpuInfo(vendor=cpu.AMD, family=0x19, model=0x11, model_name=name).describe() == words
