// Which of the libraries (setup.py compiles the same sources once per instruction set) this machine runs.
#pragma once

namespace rayfin {

// "portable", "avx2", "avx512" or "amx": the widest that this machine has. The first call asks the system for
// AMX's registers on behalf of the whole process, which Linux wants before their first use.
const char* best_isa();

}  // namespace rayfin
