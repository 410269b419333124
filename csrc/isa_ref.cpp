// The portable table: the baseline of the architecture, on any CPU.
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

const Kernels kernels_ref = {
    /*isa=*/"ref",
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
