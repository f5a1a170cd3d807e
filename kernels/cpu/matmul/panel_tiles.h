// Splits the panels of a weight into tiles for threads.
//
// An operation ends with its last tile. So each thread gets the same number of tiles of about the same size, made of
// whole groups of panels that are read side by side, and the remaining panels form smaller tiles: of 18 panels, four
// side by side, two threads get 4 + 4 + 1 each instead of 4 + 4 + 2 and 4 + 4.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rayfin {

class PanelTiles {
 public:
  struct Range {
    int64_t first, last;
  };

  // A tile has up to `wanted` panels, fewer if some of `threads` would get less than two tiles. Each of `chunks` chunks
  // of rows uses the same panels.
  PanelTiles(int64_t panels, int64_t side, int64_t wanted, int64_t chunks, int threads) : panels_(panels), side_(side) {
    const int64_t sharing = std::max<int64_t>(1, threads / chunks);  // threads on the same chunk
    const int64_t each = panels / (side * sharing);                  // whole groups per thread
    const int64_t limit = std::clamp<int64_t>(each / 2, 1, (wanted + side - 1) / side);
    groups_ = each * sharing;
    even_ = (each + limit - 1) / limit * sharing;
    const int64_t left = panels - groups_ * side;
    rest_ = std::max<int64_t>(1, left / sharing);
    count_ = even_ + (left + rest_ - 1) / rest_;
  }

  int64_t count() const { return count_; }

  Range operator[](int64_t tile) const {
    if (tile < even_) return {groups_ * tile / even_ * side_, groups_ * (tile + 1) / even_ * side_};
    const int64_t first = groups_ * side_ + (tile - even_) * rest_;
    return {first, std::min(first + rest_, panels_)};
  }

 private:
  int64_t panels_, side_;
  int64_t groups_, even_;  // groups of `side` panels, and the tiles that hold them
  int64_t rest_, count_;   // panels in a tile of the remainder; number of tiles
};

}  // namespace rayfin
