"""Random numbers as a pure function of (seed, position): no generator, no state.

A request's draw for its token at `position` is the same whatever the batch, the step, the process
or the device, so a replay after a preemption or a restart repeats the same tokens. Counter-based
generation is from Salmon et al., SC 2011 ("Parallel random numbers: as easy as 1, 2, 3"); the
mixing function is splitmix64's (Steele, Lea and Flood, OOPSLA 2014).
"""

import torch

# splitmix64's constants as signed 64-bit integers: torch has no full uint64 arithmetic, and int64
# products wrap around to the same 64 bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 bit patterns: zeros come in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser: a bijection of 64 bits in which each input bit flips half of them."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def random_bits(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """64 random bits per row: [S] int64, [S] int64 -> [S] int64.

    The seed is mixed before the position is added: neighbouring seeds give unrelated streams.
    """
    return _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per row, a multiple of 2**-53: [S] int64, [S] int64 -> [S] fp64."""
    return _shift_right(random_bits(seed, position), 11).double() * 2.0**-53
