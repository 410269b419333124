// Which table of kernels this CPU gets. Compiled for the baseline of the architecture, so it runs anywhere.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace vllm_zen {
namespace {

struct Candidate {
  const Kernels* table;
  bool (*runs_here)();
  const char* needs;
};

bool any_cpu() { return true; }

#if defined(VLLM_ZEN_EMULATE)
bool has_zen4() { return true; }
#elif defined(__x86_64__)
// __builtin_cpu_supports also asks the operating system (XGETBV), so a kernel that does not save the
// 512-bit registers counts as a CPU without them.
bool has_zen4() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

// Best first.
const Candidate candidates[] = {
#if defined(__x86_64__)
    {&kernels_zen4, has_zen4, "AVX-512 F, BW, VL, DQ, VNNI and BF16"},
#endif
    {&kernels_ref, any_cpu, "nothing beyond the baseline"},
};

const Kernels* table_named(const std::string& name) {
  std::string known;
  for (const Candidate& candidate : candidates) {
    if (name == candidate.table->isa) {
      if (!candidate.runs_here()) {
        throw std::runtime_error("VLLM_ZEN_ISA=" + name + " needs a CPU with " + candidate.needs +
                                 ", which this one does not report; unset it to let vllm-zen choose");
      }
      return candidate.table;
    }
    known += known.empty() ? candidate.table->isa : std::string(", ") + candidate.table->isa;
  }
  throw std::runtime_error("VLLM_ZEN_ISA=" + name + " is not a table of this build; allowed: " + known);
}

const Kernels* choose() {
  const char* forced = std::getenv("VLLM_ZEN_ISA");
  if (forced != nullptr && std::strcmp(forced, "") != 0 && std::strcmp(forced, "auto") != 0) {
    return table_named(forced);
  }
  for (const Candidate& candidate : candidates) {
    if (candidate.runs_here()) {
      return candidate.table;
    }
  }
  return &kernels_ref;
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = current.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = choose();  // two threads may both get here; they choose the same
    current.store(table, std::memory_order_release);
  }
  return *table;
}

void force_isa(const char* name) { current.store(table_named(name), std::memory_order_release); }

}  // namespace vllm_zen
