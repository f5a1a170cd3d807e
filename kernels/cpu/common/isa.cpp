#include "common/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace rayfin {

namespace {

#if defined(__x86_64__)

// Linux grants the 8 KiB of tile registers on request (Documentation/arch/x86/xstate.rst). It refuses if the kernel or
// the virtual machine does not know them, or if a thread's signal stack is too small for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned a, b, c, d, bfloat16;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if ((d & kNeeded) != kNeeded) return false;
  if (!__get_cpuid_count(7, 1, &bfloat16, &b, &c, &d) || !(bfloat16 & 1u << 5)) return false;  // AVX512-BF16
  return may_use_tiles();
}

const char* find_best_isa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return "portable";
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return "avx2";
  return has_amx() ? "amx" : "avx512";
}

#elif defined(__aarch64__) && defined(__linux__)

const char* find_best_isa() {
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & kDotProducts ? "neon" : "portable";
}

#elif defined(__aarch64__) && defined(__APPLE__)

const char* find_best_isa() { return "neon"; }  // all of Apple's processors for computers have dot products

#else

const char* find_best_isa() { return "portable"; }

#endif

}  // namespace

const char* best_isa() {
  static const char* const best = find_best_isa();
  return best;
}

}  // namespace rayfin
