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

constexpr int kMaxThreads = 128;

// Blocks an SM at least, which bounds the registers: a thread of kRoutes rows and kChunks chunks
// holds 4 registers for each while they are in flight. Without a bound the compiler trades loads in
// flight for more threads.
constexpr int min_blocks(int routes, int chunks) {
  return routes * chunks > 16 ? 3 : routes > 8 ? 5 : chunks > 1 ? 6 : 8;
}

// kChunks: few routes are too few loads in flight for the memory, so a thread takes several chunks.
template <int kRoutes, int kChunks>
__global__ void __launch_bounds__(kMaxThreads, min_blocks(kRoutes, kChunks))
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
  int chunks;
};

Choice choose(int top_k) {
  if (top_k <= 1) return {finalize_kernel<1, 4>, 4};
  if (top_k <= 2) return {finalize_kernel<2, 4>, 4};
  if (top_k <= 4) return {finalize_kernel<4, 2>, 2};
  if (top_k <= 8) return {finalize_kernel<8, 1>, 1};
  if (top_k <= 10) return {finalize_kernel<10, 1>, 1};
  if (top_k <= 16) return {finalize_kernel<16, 1>, 1};
  return {finalize_kernel<32, 1>, 1};
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
  const Choice choice = choose(top_k);
  // Few warps a block while they do not fill the SMs: the more SMs share the token, the sooner it
  // has arrived.
  const int warps = p.chunks <= 8u * device_of(device).processors ? 2 : kMaxThreads / kWarp;
  const int per_block = warps * choice.chunks;
  launch(choice.kernel, device, {(p.chunks + per_block - 1) / per_block, warps * kWarp, 1, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(finalize, moetail::finalize);
