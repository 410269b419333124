// The portable table: the baseline of the architecture, on any CPU.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

#include "quantize.inc"
#include "attention.inc"

namespace vllm_zen {

const Kernels kernels_ref = {
    /*isa=*/"ref",
    /*quantize_rows_s8=*/quantize_rows_s8,
    /*write_kv=*/write_kv,
    /*attend=*/attend,
    /*merge_spans=*/merge_spans,
};

}  // namespace vllm_zen
