// Every operation of the C interface on awkward sizes and exact allocations, for the sanitizers (`make sanitize`):
// a read past an end, an overflow or a data race ends the program. Results are only compared between thread
// counts; that they are right is the Python tests' business. A file as argument gets the results, to compare
// instruction sets of a machine that is only emulated (test_arm.py).
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "paged_attention/attention.h"
#include "layers/allowed.h"
#include "layers/decoder.h"
#include "layers/experts.h"
#include "layers/highest.h"
#include "common/isa.h"
#include "matmul/matmul.h"
#include "matmul/round_weights.h"
#include "layers/norms.h"

using namespace rayfin;

namespace {

std::mt19937 random_numbers(1);
std::FILE* results = nullptr;

std::vector<float> floats(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  // The same bits on every machine; std::normal_distribution asks its logarithm. From -2 to 2.
  for (float& value : values) value = float(int32_t(random_numbers())) * 0x1p-30f;
  return values;
}

std::vector<BFloat16> halves(int64_t count) {
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (BFloat16& value : values) narrow(floats(1)[0], &value);
  return values;
}

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s differs between thread counts\n", what);
  std::exit(1);
}

// Runs an operation that fills `out` on one thread and on four; again and again for a sanitizer, which an emulator,
// where an operation takes a hundred times as long, does not have.
void on_pools(const char* what, int64_t size, const std::function<void(Pool&, float*)>& operation) {
  std::vector<float> first(static_cast<size_t>(size)), second(static_cast<size_t>(size));
  Pool one(1), four(4);
  operation(one, first.data());
  if (results) std::fwrite(first.data(), sizeof(float), first.size(), results);
  for (int i = 0; i < (results ? 1 : 3); ++i) operation(four, second.data());
  check(first == second, what);
}

// How many codes there are; of floats no NaN.
int codes_of(Storage storage) {
  if (has_six_bits(storage)) return 64;
  return storage == kFp8 ? 120 : storage == kCodes8 || storage == kLevels8 ? 256 : 16;
}

// Weights of 4 to 8 bits, in groups that do not fill the inputs, with inputs in another order.
void coded_matmuls() {
  for (int64_t rows : {1, 2, 4, 5, 13, 101}) {
    for (auto [outputs, inputs, group] : {std::array<int64_t, 3>{1, 1, 1}, {34, 19, 8}, {66, 300, 128}, {40, 70, 20}}) {
      for (Storage storage : {kInt4, kCodes8, kFp8, kTable4, kFp4, kLevels4, kLevels8, kInt6, kLevels6}) {
        const bool zeros = storage == kInt4 || storage == kCodes8 || has_levels(storage);
        const int64_t groups = (inputs + group - 1) / group, count = groups * outputs;
        std::vector<uint8_t> codes(static_cast<size_t>(outputs * inputs));
        for (size_t i = 0; i < codes.size(); ++i) codes[i] = uint8_t(i * 7 % size_t(codes_of(storage)));
        const std::vector<int16_t> points(static_cast<size_t>(count), 3);
        std::vector<int32_t> order(static_cast<size_t>(inputs));
        for (int64_t k = 0; k < inputs; ++k) order[static_cast<size_t>(k)] = int32_t(inputs - 1 - k);
        Matrix weight(outputs, inputs, storage, false, group, zeros), copy(outputs, inputs, storage, false, group, zeros);
        const auto least = floats(count);  // of levels
        const void* lowest = has_levels(storage) ? static_cast<const void*>(least.data()) : points.data();
        weight.fill_codes(0, outputs, codes.data(), floats(count).data(), zeros ? lowest : nullptr);
        copy.copy_codes(0, weight, 0, outputs);
        copy.set_order(order.data());
        copy.set_table(floats(16).data());
        // The same codes with scales that are factors on those of two groups.
        const bool shares = storage != kFp8 && storage != kFp4;
        const int64_t supers = (groups + 1) / 2;
        const std::vector<uint16_t> halves(static_cast<size_t>(supers * outputs), 0x3801);
        std::vector<int8_t> factors(static_cast<size_t>(count));
        for (size_t i = 0; i < factors.size(); ++i) factors[i] = int8_t(int(i * 37 % 256) - 128);
        const SharedFloats floats_of{halves.data(), factors.data()};
        const SharedScales two{2, true};
        Matrix first(outputs, inputs, storage, false, group, has_levels(storage), nullptr, two);
        Matrix shared(outputs, inputs, storage, false, group, has_levels(storage), nullptr, two);
        if (shares) {
          first.fill_codes(0, outputs, codes.data(), floats_of, has_levels(storage) ? floats_of : SharedFloats{});
          shared.copy_codes(0, first, 0, outputs);
          shared.set_table(floats(16).data());
        }
        std::vector<float> row(static_cast<size_t>(inputs));
        if (shares) shared.read_row(outputs - 1, row.data());
        copy.read_row(outputs - 1, row.data());
        const auto x = floats(rows * inputs);
        for (bool rounds : {false, true}) {
          if (rounds ? storage == kFp8 || storage == kFp4 || storage == kLevels8 : has_six_bits(storage)) continue;
          copy.row_bytes = shared.row_bytes = rounds;
          for (bool vnni : {true, false}) {
            on_pools("coded matmul", rows * outputs, [&](Pool& pool, float* out) {
              pool.vnni = pool.vnni && vnni;
              matmul(pool, copy, x.data(), inputs, rows, out, outputs, {});
            });
            if (!shares) continue;
            on_pools("coded matmul of shared scales", rows * outputs, [&](Pool& pool, float* out) {
              pool.vnni = pool.vnni && vnni;
              matmul(pool, shared, x.data(), inputs, rows, out, outputs, {});
            });
          }
        }
      }
    }
  }
}

void roundings() {
  const auto weights = floats(33 * 70);
  std::vector<uint8_t> codes(33 * 70);
  std::vector<uint16_t> scales(33 * 3), leasts(33 * 2);
  std::vector<int8_t> factors(33 * 3), least_factors(33 * 3);
  const auto copy = [&](const auto& from, float* out) { std::copy(from.begin(), from.end(), out); };
  on_pools("rounding to 8 bits", 33 * 70, [&](Pool& pool, float* out) {
    round_int8(pool, weights.data(), 33, 70, reinterpret_cast<int8_t*>(codes.data()), scales.data());
    copy(codes, out);
  });
  on_pools("rounding to levels", 33 * 70, [&](Pool& pool, float* out) {
    round_levels(pool, weights.data(), 33, 70, 15, 2, codes.data(), {scales.data(), factors.data()},
                 {leasts.data(), least_factors.data()});
    copy(codes, out);
  });
}

void matmuls() {
  const int64_t many = results ? 230 : 530;  // several chunks of rows, in an emulator two
  for (int64_t rows : std::array<int64_t, 9>{1, 2, 3, 5, 7, 13, 30, 101, many}) {
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {34, 19}, {66, 300}}) {
      for (Storage storage : {kFloat32, kBFloat16}) {
        for (bool paired : {false, true}) {
          const int64_t total = paired ? 2 * outputs : outputs;
          Matrix weight(total, inputs, storage, paired);
          weight.fill(0, total, floats(total * inputs).data(), inputs);
          const auto x = floats(rows * inputs), bias = floats(total), residual = floats(rows * outputs);
          Epilogue epilogue;
          epilogue.bias = bias.data();
          epilogue.residual = paired ? nullptr : residual.data();
          epilogue.residual_stride = outputs;
          epilogue.activation = paired ? kGelu : kNone;
          on_pools("matmul", rows * outputs, [&](Pool& pool, float* out) {
            matmul(pool, weight, x.data(), inputs, rows, out, outputs, epilogue);
          });
        }
      }
    }
  }
}

void norms() {
  for (int64_t dim : {1, 7, 33, 576}) {
    const auto x = floats(90 * dim), weight = floats(dim), residual = floats(90 * dim);
    on_pools("norm", 90 * dim, [&](Pool& pool, float* out) {
      rms_norm(pool, x.data(), dim, 90, dim, weight.data(), 1e-5f, residual.data(), dim, 0.5f, out, dim);
    });
  }
}

void highest_of_rows() {
  for (int64_t count : {1, 33, 4096, 9000}) {
    const auto x = floats(7 * count);
    on_pools("highest", 7, [&](Pool& pool, float* out) {
      std::vector<int64_t> index(7);
      highest(pool, x.data(), count, 7, count, index.data());
      std::copy(index.begin(), index.end(), out);
    });
  }
}

void allowed_of_rows() {
  for (int64_t count : {1, 33, 4096, 9000}) {
    const auto x = floats(7 * count);
    const int64_t words = (count + 31) / 32;
    std::vector<uint32_t> bits(size_t(3 * words), 0x5a5a00ffu);
    std::fill(bits.begin(), bits.begin() + words, 0u);
    const std::vector<int64_t> place = {0, -1, 1, 2, -1, 1, 0};
    const Allowed allowed{bits.data(), words, place.data()};
    on_pools("highest_allowed", 7, [&](Pool& pool, float* out) {
      std::vector<int64_t> index(7);
      highest_allowed(pool, x.data(), count, 7, count, allowed, index.data());
      std::copy(index.begin(), index.end(), out);
    });
    on_pools("copy_allowed", 7 * count,
             [&](Pool& pool, float* out) { copy_allowed(pool, x.data(), count, 7, count, allowed, out); });
  }
}

// A step of decoding rows and chunks over pages in a shuffled order.
struct Pages {
  int64_t page_size = 3, widest = 0, count = 0;
  std::vector<int32_t> starts{0}, lengths, tables;
  std::vector<int64_t> positions, slots;
  int64_t decoding = 0;

  Pages() {
    const std::vector<std::pair<int, int>> rows = {{0, 1}, {140, 1}, {8, 1}, {0, 9}, {70, 40}, {5, 2}};
    for (auto [cached, chunk] : rows) {
      decoding += chunk == 1;
      lengths.push_back(cached + chunk);
      starts.push_back(starts.back() + chunk);
      widest = std::max<int64_t>(widest, (cached + chunk + page_size - 1) / page_size);
    }
    for (size_t row = 0; row < rows.size(); ++row) {
      const size_t first = tables.size();
      for (int64_t i = 0; i < widest; ++i) tables.push_back(0);
      for (int64_t i = 0; i < (lengths[row] + page_size - 1) / page_size; ++i)
        tables[first + size_t(i)] = int32_t(count++);
      for (int64_t p = rows[row].first; p < lengths[row]; ++p) {
        positions.push_back(p);
        slots.push_back(tables[first + size_t(p / page_size)] * page_size + p % page_size);
      }
    }
  }
};

template <class Stored>
void attentions(int64_t storage, std::vector<Stored> (*make)(int64_t)) {
  const Pages pages;
  for (auto [heads, kv_heads, key_dim, value_dim] :
       {std::array<int64_t, 4>{6, 2, 8, 5}, {5, 1, 20, 36}, {3, 3, 64, 64}}) {
    const int64_t tokens = pages.starts.back(), slots = pages.count * pages.page_size;
    const auto query = floats(tokens * heads * key_dim), sinks = floats(heads);
    const auto keys = make(slots * kv_heads * key_dim), values = make(slots * kv_heads * value_dim);
    std::vector<int32_t> last(static_cast<size_t>(tokens));  // each token sees its whole row
    for (size_t row = 0; row < pages.lengths.size(); ++row)
      for (int64_t t = pages.starts[row]; t < pages.starts[row + 1]; ++t) last[size_t(t)] = pages.lengths[row] - 1;
    for (int64_t window : {0, 1, 50}) {
      Attention a{query.data(), keys.data(), values.data(), pages.tables.data(), pages.starts.data(),
                  pages.lengths.data(), nullptr, window ? sinks.data() : nullptr, nullptr, heads * key_dim, pages.widest,
                  int64_t(pages.lengths.size()), pages.decoding, pages.page_size, heads, kv_heads, key_dim,
                  value_dim, window, storage, 0.3f, window ? 2.0f : 0.0f};
      on_pools("attention", tokens * heads * value_dim, [&](Pool& pool, float* out) {
        Attention own = a;
        own.out = out;
        attention(pool, own);
      });
      on_pools("attention to later tokens", tokens * heads * value_dim, [&](Pool& pool, float* out) {
        Attention own = a;
        own.sees_to = last.data();
        own.out = out;
        attention(pool, own);
      });
    }
  }
}

void decoders() {
  const Pages pages;
  const int64_t hidden = 24, heads = 4, kv_heads = 2, dim = 6, inner = 21, vocabulary = 37, layers = 2;
  const int64_t qkv = (heads + 2 * kv_heads) * dim, slots = pages.count * pages.page_size;
  std::vector<std::unique_ptr<Matrix>> matrices;
  auto matrix = [&](int64_t outputs, int64_t inputs, bool paired = false) {
    matrices.push_back(std::make_unique<Matrix>(outputs, inputs, kBFloat16, paired));
    matrices.back()->fill(0, outputs, floats(outputs * inputs).data(), inputs);
    return matrices.back().get();
  };
  const auto norm = floats(hidden), head_norm = floats(dim), bias = floats(qkv), turns = floats(400 * dim / 2);
  auto keys = floats(layers * slots * kv_heads * dim), values = keys;
  std::vector<Layer> all(static_cast<size_t>(layers));
  for (size_t i = 0; i < all.size(); ++i) {
    Layer& layer = all[i];
    layer = {norm.data(), i ? norm.data() : nullptr, norm.data(), nullptr, matrix(qkv, hidden), nullptr,
             matrix(hidden, heads * dim), matrix(2 * inner, hidden, true), matrix(hidden, inner), bias.data(), nullptr,
             nullptr, nullptr, head_norm.data(), i ? head_norm.data() : nullptr, nullptr, turns.data(), turns.data(),
             keys.data() + int64_t(i) * slots * kv_heads * dim, values.data() + int64_t(i) * slots * kv_heads * dim,
             i ? 9 : 0, 0, 0.3f, 0.0f};
  }
  const Matrix* table = matrix(vocabulary, hidden);
  const Decoder decoder{all.data(), table, table, norm.data(), nullptr, layers, hidden, inner, vocabulary, heads,
                        kv_heads, dim, dim, dim, kFloat32, 0, kSilu, 1e-5f, 2.0f, 0.5f, 1.0f, 3.0f};
  const int64_t tokens = pages.starts.back();
  std::vector<int64_t> ids, sampled = {0, 1, 2, 11, tokens - 1};
  for (int64_t i = 0; i < tokens; ++i) ids.push_back(i * 5 % vocabulary);
  // An adapter of rank 5 for all layers, with query, key and value each on its own, and rows of it and of none.
  const int64_t rank = 5, kv = kv_heads * dim;
  std::vector<LoraPart> parts(size_t(layers * kProjections * kLoraParts));
  auto part = [&](int64_t layer, Projection projection, int64_t number, int64_t inputs, int64_t first, int64_t count) {
    parts[size_t((layer * kProjections + projection) * kLoraParts + number)] = {
        matrix(rank, inputs), matrix(count, rank), first, count, 0.5f};
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    part(layer, kQkv, 0, hidden, 0, heads * dim);
    part(layer, kQkv, 1, hidden, heads * dim, kv);
    part(layer, kQkv, 2, hidden, heads * dim + kv, kv);
    part(layer, kAttentionOut, 0, heads * dim, 0, hidden);
    part(layer, kGateUp, 0, hidden, 0, 2 * inner);
    part(layer, kDown, 0, inner, 0, hidden);
  }
  std::vector<int64_t> order, sampled_order = {4, 3, 2, 1, 0};
  for (int64_t i = 0; i < tokens; ++i) order.push_back(tokens - 1 - i);
  const std::vector<int64_t> starts = {0, 7, tokens}, sampled_starts = {0, 2, 5};
  const LoraPart* const owners[] = {nullptr, parts.data()};
  const LoraRows rows{order.data(), starts.data(), owners, 2, tokens, rank};
  const LoraRows sampled_rows{sampled_order.data(), sampled_starts.data(), owners, 2, 3, rank};
  for (const bool adapted : {false, true}) {
    Step step{ids.data(), pages.positions.data(), pages.slots.data(), sampled.data(), pages.tables.data(),
              pages.starts.data(), pages.lengths.data(), nullptr, nullptr, nullptr, adapted ? &rows : nullptr,
              adapted ? &sampled_rows : nullptr, nullptr, nullptr, nullptr, nullptr, tokens, int64_t(sampled.size()),
              pages.widest, int64_t(pages.lengths.size()), pages.decoding, pages.page_size, 0, 0};
    std::vector<float> workspace(size_t(workspace_floats(decoder, step)));
    step.workspace = workspace.data();
    on_pools(adapted ? "adapted decoder" : "decoder", int64_t(sampled.size()) * vocabulary, [&](Pool& pool, float* out) {
      Step own = step;
      own.logits = out;
      run_decoder(pool, decoder, own);
    });
  }
}

void mixtures() {
  const int64_t count = 5, hidden = 19, inner = 33, rows = 23, top_k = 3;
  const auto gate_up_bias = floats(count * 2 * inner), down_bias = floats(count * hidden);
  for (Storage storage : {kFloat32, kBFloat16}) {
    std::vector<std::unique_ptr<Matrix>> matrices;
    std::vector<const Matrix*> gate_up, down;
    for (int64_t i = 0; i < 2 * count; ++i) {
      const bool gate = i < count;
      const int64_t outputs = gate ? 2 * inner : hidden, inputs = gate ? hidden : inner;
      matrices.push_back(std::make_unique<Matrix>(outputs, inputs, storage, gate));
      matrices.back()->fill(0, outputs, floats(outputs * inputs).data(), inputs);
      (gate ? gate_up : down).push_back(matrices.back().get());
    }
    const auto x = floats(rows * hidden), weights = floats(rows * top_k);
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < rows * top_k; ++i) chosen.push_back(i * i % (count + 2) - 1);  // some do not exist
    const Experts plain{gate_up.data(), down.data(), nullptr, nullptr, count, hidden, inner, kSilu, {}};
    const Experts clamped{gate_up.data(),   down.data(), gate_up_bias.data(), down_bias.data(), count, hidden, inner,
                          kClampedSwish, {1.7f, 0.5f}};
    for (const Experts& experts : {plain, clamped}) {
      std::vector<float> workspace(size_t(experts_workspace_floats(experts, rows, top_k)));
      on_pools("experts", rows * hidden, [&](Pool& pool, float* out) {
        run_experts(pool, experts, {chosen.data(), weights.data(), rows, top_k}, x.data(), workspace.data(), out);
      });
    }
  }
}

// Threads that sleep, wake and end while operations come from two callers.
void pools() {
  for (int round = 0; round < 20; ++round) {
    Pool pool(3);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 2; ++caller) {
      callers.emplace_back([&pool] {
        for (int i = 0; i < 50; ++i) {
          std::lock_guard<std::mutex> turn(pool.entry);
          std::vector<int> seen(17);
          pool.run(17, [&](int64_t tile, int thread) {
            pool.scratch<int>(thread, 100)[tile] = 1;
            ++seen[size_t(tile)];
          });
          for (int count : seen) check(count == 1, "number of tiles");
          if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the workers doze off
        }
      });
    }
    for (auto& caller : callers) caller.join();
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) results = std::fopen(arguments[1], "wb");
  std::printf("this machine: %s\n", best_isa());  // which also asks for AMX's registers
  pools();
  matmuls();
  coded_matmuls();
  roundings();
  norms();
  highest_of_rows();
  allowed_of_rows();
  attentions<float>(kFloat32, floats);
  attentions<BFloat16>(kBFloat16, halves);
  decoders();
  mixtures();
  if (results) std::fclose(results);
  std::puts("every operation ran clean");
}
