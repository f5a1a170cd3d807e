// Picks the library for this machine; setup.py compiles the same sources once per instruction set.
#pragma once

namespace rayfin {

// Returns "portable", "avx2", "avx512" or "amx", the widest that this machine has. The first call requests AMX's
// registers for the whole process, which Linux requires before their first use.
const char* best_isa();

}  // namespace rayfin
