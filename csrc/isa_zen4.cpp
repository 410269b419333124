// The table for Zen 4 and later: AVX-512 with BF16 and VNNI. Flags in CMakeLists.txt.
// No standard-library templates here: an inline function compiled for AVX-512 could be the copy the linker
// keeps for everyone, and crash other CPUs.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

#include "rotate.inc"
#include "quantize.inc"
#include "attention.inc"
#include "gemm.inc"
#include "gemm_w8a8.inc"
#include "gemm_w4a8.inc"
#include "gemm_w4a16.inc"
#include "search_s4.inc"
#include "moe.inc"

namespace vllm_zen {

const Kernels kernels_zen4 = {
    /*isa=*/"zen4",
    /*quantize_rows_s8=*/quantize_rows_s8,
    /*write_kv=*/write_kv,
    /*attend=*/attend,
    /*merge_spans=*/merge_spans,
    /*prepare_activations=*/prepare_activations,
    /*linear_w8a8=*/linear_w8a8,
    /*linear_w4a8=*/linear_w4a8,
    /*linear_w4a16=*/linear_w4a16,
    /*search_groups_s4=*/search_groups_s4,
    /*rows_w8=*/rows_w8,
    /*gate=*/gate,
    /*combine=*/combine,
};

}  // namespace vllm_zen
