// How the panels of a weight are dealt out to threads.
//
// An operation ends with its last tile. So each thread has the same number of tiles of about the same size, of whole
// groups of panels that are read side by side, and what is left over is shared out in smaller ones: of 18 panels, four
// side by side, two threads get 4 + 4 + 1 each, and not 4 + 4 + 2 and 4 + 4.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rayfin {

class PanelTiles {
 public:
  struct Range {
    int64_t first, last;
  };

  // `wanted` panels a tile, as far as `threads` get two tiles each; `chunks` times the same panels, by other rows.
  PanelTiles(int64_t panels, int64_t side, int64_t wanted, int64_t chunks, int threads) : panels_(panels), side_(side) {
    const int64_t sharing = std::max<int64_t>(1, threads / chunks);  // threads at the same chunk
    const int64_t each = panels / (side * sharing);                  // groups
    const int64_t most = std::clamp<int64_t>(each / 2, 1, (wanted + side - 1) / side);
    groups_ = each * sharing;
    even_ = (each + most - 1) / most * sharing;
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
  int64_t rest_, count_;   // panels in a tile of what is left; tiles in all
};

}  // namespace rayfin
