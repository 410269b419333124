// The table for Zen 4 and later: AVX-512 with BF16 and VNNI. Flags in CMakeLists.txt.
// No standard-library templates here: an inline function compiled for AVX-512 could be the copy the linker
// keeps for everyone, and crash other CPUs.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

#include "quantize.inc"
#include "attention.inc"

namespace vllm_zen {

const Kernels kernels_zen4 = {
    /*isa=*/"zen4",
    /*quantize_rows_s8=*/quantize_rows_s8,
    /*write_kv=*/write_kv,
    /*attend=*/attend,
    /*merge_spans=*/merge_spans,
};

}  // namespace vllm_zen
