"""Which table of kernels a process gets: the best, or the forced one, or an error."""

import platform
import re
import shutil
import subprocess

import fakes
import pytest

from vllm_zen import activation, ops

ZEN4 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
PRINT_ISA = "from vllm_zen import ops; assert ops.load().ok, ops.load().reason; print(ops.isa())"


def isa_of_a_process(isa: str) -> subprocess.CompletedProcess[str]:
    return fakes.python(PRINT_ISA, VLLM_ZEN_ISA=isa)


def test_chooses_the_best_table_of_this_cpu():
    expected = "zen4" if activation.cpuid_features() >= ZEN4 else "ref"
    assert isa_of_a_process("").stdout.strip() == expected


def test_forcing_ref_works_everywhere():
    assert isa_of_a_process("ref").stdout.strip() == "ref"


def test_an_unknown_table_is_an_error_with_the_list():
    result = isa_of_a_process("avx3")
    assert result.returncode != 0
    assert "VLLM_ZEN_ISA=avx3 is not a table of this build; allowed:" in result.stderr


def test_a_table_the_cpu_lacks_is_an_error():
    assert ops.load().ok
    if activation.cpuid_features() >= ZEN4:
        pytest.skip("this CPU runs every table")
    with pytest.raises(
        RuntimeError, match=r"VLLM_ZEN_ISA=zen4 (needs a CPU with|is not a table of this build)"
    ):
        ops.force_isa("zen4")
    assert ops.isa() == "ref"


def test_the_zen4_table_is_compiled_for_whole_registers():
    """Wrong flags would leave it correct and slow, which no other test sees."""
    if platform.machine() != "x86_64" or not shutil.which("objdump"):
        pytest.skip("needs objdump on x86-64")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(ops.LIBRARY)], capture_output=True, text=True, timeout=120
    ).stdout
    assert re.search(r"vpmaxuw[^\n]*%zmm", listing), "the loops of quantize.inc are not vectorized"
