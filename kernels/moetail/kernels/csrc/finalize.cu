// finalize: the weighted sum over routes, rounded, scaled, rounded; optionally plus a shared part.
// Nothing here crosses columns, so a warp takes any 256 elements of any token: the grid is flat over
// tokens * H / 256 chunks, and even one token is spread over many SMs.
#include "binding.h"
#include "stages.cuh"

namespace moetail {
namespace {

struct FinalizeParams {
  Experts experts;
  const bf16* shared;  // [T, H] or nullptr
  bf16* output;        // [T, H]
  float routed_scale;
  unsigned chunks_per_token;  // H / 256
  unsigned chunks;            // of all tokens: 512 bytes each, so 32 bits hold any GPU's memory
};

// Warps a block at most. Blocks of eight warps start 0.2 us later than blocks of seven; and four are
// what leaves an SM three blocks of threads that hold 32 rows.
constexpr int max_warps(int routes, int chunks) { return routes * chunks > 16 ? 4 : 7; }

// Blocks an SM at least, which bounds the registers: a thread of kRoutes rows and kChunks chunks
// holds 4 registers for each while they are in flight. Without a bound the compiler trades loads in
// flight for more threads.
constexpr int min_blocks(int routes, int chunks) { return routes * chunks > 8 ? 3 : 4; }

// kChunks: few routes are too few loads in flight for the memory, so a thread takes several chunks.
template <int kRoutes, int kChunks>
__global__ void __launch_bounds__(max_warps(kRoutes, kChunks) * kWarp, min_blocks(kRoutes, kChunks))
    finalize_kernel(const __grid_constant__ FinalizeParams p) {
  const unsigned warps = blockDim.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t hidden_size = int64_t{p.chunks_per_token} * kChunk;
  wait_for_previous_grid();
  uint4 shared[kChunks], data[kChunks][kRoutes];
  Route route[kChunks];
  int64_t here[kChunks];
  bool held[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const unsigned chunk = (blockIdx.x * kChunks + c) * warps + threadIdx.x / kWarp;
    held[c] = chunk < p.chunks;
    const int64_t token = chunk / p.chunks_per_token;
    const int column = static_cast<int>(chunk % p.chunks_per_token) * kChunk + lane * kVector;
    here[c] = token * hidden_size + column;
    route[c] = load_route(p.experts, token, held[c]);
    shared[c] = load_once(p.shared + here[c], p.shared && held[c]);
#pragma unroll
    for (int k = 0; k < kRoutes; ++k) {
      const int row = __shfl_sync(kFull, route[c].row, k);
      data[c][k] = load_once(p.experts.rows + row * hidden_size + column, row >= 0);
    }
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const float mine = weight_of(p.experts, route[c]);
    float sum[kVector] = {};
#pragma unroll
    for (int k = 0; k < kRoutes; ++k) accumulate(sum, __shfl_sync(kFull, mine, k), data[c][k]);
    uint4 result = round_scale(sum, p.routed_scale);
    if (p.shared) result = map_rounded([](float s, float h) { return s + h; }, result, shared[c]);
    if (c == 0) let_next_grid_launch();
    if (held[c]) store(p.output + here[c], result);
  }
}

// Any H, any K, any address: an element a thread.
__global__ void finalize_any_kernel(const __grid_constant__ FinalizeParams p, int64_t hidden_size,
                                    int64_t elements) {
  wait_for_previous_grid();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= elements) return;
  const int64_t token = i / hidden_size, column = i - token * hidden_size;
  float sum = 0.0f;
  for (int k = 0; k < p.experts.top_k; ++k) {
    const int64_t slot = token * p.experts.top_k + k;
    const int64_t row = p.experts.map ? p.experts.map[slot] : slot;
    if (row < 0) continue;
    const float weight = weight_of(p.experts, load_weight_bits(p.experts, slot, true));
    sum = fmaf(weight, __bfloat162float(p.experts.rows[row * hidden_size + column]), sum);
  }
  float value = round_to_bf16(round_to_bf16(sum) * p.routed_scale);
  if (p.shared) value = value + __bfloat162float(p.shared[i]);
  p.output[i] = __float2bfloat16_rn(value);
}

struct Choice {
  void (*kernel)(FinalizeParams);
  int chunks, max_warps;
};

template <int kRoutes, int kChunks>
Choice choice() {
  return {finalize_kernel<kRoutes, kChunks>, kChunks, max_warps(kRoutes, kChunks)};
}

// One load is too few for a thread, but where there are so few that latency is all.
Choice choose(int top_k, bool few) {
  if (top_k <= 1) return few ? choice<1, 1>() : choice<1, 4>();
  if (top_k <= 2) return choice<2, 1>();
  if (top_k <= 4) return choice<4, 1>();
  if (top_k <= 8) return choice<8, 1>();
  if (top_k <= 10) return choice<10, 1>();
  if (top_k <= 16) return choice<16, 1>();
  return choice<32, 1>();
}

// Warps a block, for so many pieces of work for a warp. Where blocks are at most one an SM, the fewer
// the sooner: T = 32 takes 1.76 us with seven warps, 2.02 with four. Where there are a few on each,
// the SM with the most warps counts.
int warps_of(int64_t pieces, int most, int64_t processors) {
  auto blocks_an_sm = [&](int warps) {
    return ((pieces + warps - 1) / warps + processors - 1) / processors;
  };
  if (blocks_an_sm(most) == 1 || blocks_an_sm(most) > 4) return most;
  int best = most;
  for (int warps = most - 1; warps >= 4; --warps) {
    if (blocks_an_sm(warps) * warps < blocks_an_sm(best) * best) best = warps;
  }
  return best;
}

}  // namespace

// rows [rows, H]; weights [T, K] or none (K = 1, weight 1); map [T, K] or none (row t*K+k); shared
// and output [T, H].
void finalize(TensorView rows, Optional<TensorView> weights, Optional<TensorView> map,
              Optional<TensorView> shared, TensorView output, double routed_scale, bool pdl) {
  const int64_t tokens = output.size(0), hidden_size = output.size(1);
  if (tokens == 0) return;
  FinalizeParams p = {};
  p.experts = experts_of(rows, weights, map);
  p.shared = data_or_null<const bf16>(shared);
  p.output = static_cast<bf16*>(output.data_ptr());
  p.routed_scale = static_cast<float>(routed_scale);
  const int top_k = p.experts.top_k;
  const DLDevice device = output.device();
  if (top_k > kWarp || hidden_size % kChunk || !aligned(p.experts.rows, p.shared, p.output)) {
    const int64_t elements = tokens * hidden_size;
    launch(finalize_any_kernel, device, {(elements + 255) / 256, 256, 1, pdl}, p, hidden_size,
           elements);
    return;
  }
  p.chunks_per_token = static_cast<unsigned>(hidden_size / kChunk);
  p.chunks = static_cast<unsigned>(tokens * p.chunks_per_token);
  const int processors = device_of(device).processors;
  const Choice chosen = choose(top_k, p.chunks <= 36u * processors);
  const int64_t pieces = (p.chunks + chosen.chunks - 1) / chosen.chunks;
  const int warps = warps_of(pieces, chosen.max_warps, processors);
  const int per_block = warps * chosen.chunks;
  launch(chosen.kernel, device, {(p.chunks + per_block - 1) / per_block, warps * kWarp, 1, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(finalize, moetail::finalize);
