// The norms of the tail in one pass over memory: an x that is either finalized here from the routes'
// rows or given as a row, its post-norm, the scaled residual add, the next norm. A token's sum of
// squares needs all of its row, so a token belongs to one block, or to one cluster of blocks.
#include <algorithm>

#include "binding.h"
#include "stages.cuh"

namespace moetail {
namespace {

struct TailParams {
  Experts experts;  // kRoutes > 0
  const bf16* x;    // [T, H], kRoutes = 0
  Boundary boundary;
  float routed_scale;
  int chunks;       // H / 256
  int blocks_per_token;
  int64_t tokens;
};

// kVectors: 16-byte vectors a thread holds. kRoutes: rows of a token in flight at a time (0: x is a
// row); kPasses: K may be more than that. kCluster: a token is spread over a cluster of blocks.
template <int kRoutes, int kVectors, bool kCluster, int kMaxThreads, int kMinBlocks,
          bool kPasses = false>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    tail_kernel(const __grid_constant__ TailParams p) {
  constexpr Team kTeam = kCluster ? Team::kCluster : Team::kBlock;
  __shared__ TokenSum places[2];
  const Boundary& b = p.boundary;
  const int lane = threadIdx.x % kWarp;
  const int block = kCluster ? blockIdx.x % p.blocks_per_token : 0;
  const int64_t token = kCluster ? blockIdx.x / p.blocks_per_token : blockIdx.x;
  const int warp = block * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int warps = (kCluster ? p.blocks_per_token : 1) * (blockDim.x / kWarp);
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  const int64_t row = token * hidden_size;
  // A warp's chunks lie one after the other: their addresses then differ by constants.
  auto held = [&](int v) { return warp * kVectors + v < p.chunks; };
  auto column = [&](int v) { return (warp * kVectors + v) * kChunk + lane * kVector; };
  Sums sums{places, warp, warps, p.blocks_per_token};
  sums_init<kTeam, kVectors>(sums);
  wait_for_previous_grid();

  // A thread of one vector asks for everything at the start, norm weights too, since its time is
  // latency; one of several keeps its registers for rows.
  constexpr bool kAllAtOnce = kVectors == 1;
  uint4 value[kVectors], residual[kVectors], post_weight[kVectors], next_weight[kVectors];
  Route route{-1, 0};
  if constexpr (kRoutes > 0) route = load_route(p.experts, token);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kAllAtOnce) {
      post_weight[v] = load_once(b.post_weight + column(v), held(v) && b.post_weight);
      next_weight[v] = load_once(b.next_weight + column(v), held(v) && b.next_weight);
    }
    residual[v] = load_once(b.residual + row + column(v), held(v) && b.residual);
    if constexpr (kRoutes == 0) value[v] = load_once(p.x + row + column(v), held(v));
  }
  if constexpr (kRoutes > 0) {
    float sum[kVectors][kVector] = {};
    if constexpr (kPasses) {
#pragma unroll 1
      for (int first = 0; first < p.experts.top_k; first += kRoutes) {
        add_routes<kRoutes>(sum, p.experts, route, first, hidden_size, held, column);
      }
    } else {
      add_routes<kRoutes>(sum, p.experts, route, 0, hidden_size, held, column);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) value[v] = round_scale(sum[v], p.routed_scale);
  }
  let_next_grid_launch();
  if constexpr (kCluster) cluster_sums_ready();

  auto weight_of_norm = [&](const bf16* weight, const uint4& loaded, int v) {
    if constexpr (kAllAtOnce) return loaded;
    return weight && held(v) ? load_kept(weight + column(v)) : make_uint4(0, 0, 0, 0);
  };
  to_hidden<kTeam>(
      b, value, residual, [&](int v) { return weight_of_norm(b.post_weight, post_weight[v], v); },
      sums);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (held(v)) store(b.hidden + row + column(v), value[v]);
  }
  if (!b.normalized) return;
  to_normalized<kTeam>(
      b, value, [&](int v) { return weight_of_norm(b.next_weight, next_weight[v], v); }, sums);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (held(v)) store(b.normalized + row + column(v), value[v]);
  }
}

// A block goes through the tokens in steps of the grid. A step's sums and stores find the next
// step's rows under way. One vector a thread, whose norm weights stay in shared memory: loaded again,
// they would arrive after the rows that have been asked for before them.
template <int kRoutes, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    tail_steps_kernel(const __grid_constant__ TailParams p) {
  __shared__ TokenSum places[2];
  __shared__ uint4 norm_weights[2][kMaxThreads];
  const Boundary& b = p.boundary;
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  const int column = threadIdx.x * kVector;
  Sums sums{places, static_cast<int>(threadIdx.x / kWarp), p.chunks};
  sums_init<Team::kBlock>(sums);
  wait_for_previous_grid();
  norm_weights[0][threadIdx.x] = load_once(b.post_weight + column, b.post_weight);
  norm_weights[1][threadIdx.x] = load_once(b.next_weight + column, b.next_weight);
  Rows<kRoutes> rows;
  uint4 residual_ahead;
  auto load = [&](int64_t token) {
    rows = load_rows<kRoutes>(p.experts, token, hidden_size, column);
    residual_ahead = load_once(b.residual + token * hidden_size + column, b.residual);
  };
  load(blockIdx.x);
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    float sum[kVector] = {};
    add_rows(sum, p.experts, rows);
    uint4 value[1] = {round_scale(sum, p.routed_scale)};
    const uint4 residual[1] = {residual_ahead};
    if (token + gridDim.x < p.tokens) {
      load(token + gridDim.x);
    } else {
      let_next_grid_launch();
    }
    const int64_t here = token * hidden_size + column;
    to_hidden<Team::kBlock>(
        b, value, residual, [&](int) { return norm_weights[0][threadIdx.x]; }, sums);
    store(b.hidden + here, value[0]);
    if (!b.normalized) continue;
    to_normalized<Team::kBlock>(
        b, value, [&](int) { return norm_weights[1][threadIdx.x]; }, sums);
    store(b.normalized + here, value[0]);
  }
}

// One block a token, any H >= 1 and any address: elements one by one, in place where x is hidden.
// Rare, so it reads again what it could keep. Chunks are divided, and their sums made, as everywhere;
// past 32 chunks, a slot has every 32nd of them.
constexpr int kAnyWarps = 8;

__global__ void __launch_bounds__(kAnyWarps * kWarp)
    tail_any_kernel(const __grid_constant__ TailParams p, int64_t hidden_size) {
  constexpr int kSlots = kMaxWarps / kAnyWarps;  // a warp
  __shared__ TokenSum places[2];
  const Boundary& b = p.boundary;
  const int warp = threadIdx.x / kWarp;
  Sums sums{places, warp, kAnyWarps};
  wait_for_previous_grid();
  const int64_t row = blockIdx.x * hidden_size;
  // f(i) for each element of this thread, whose values' squares are added up.
  auto sum_of_squares_of = [&](auto f) {
    float sum[kSlots] = {};
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      for (int64_t chunk = warp * kSlots + s; chunk * kChunk < hidden_size; chunk += kMaxWarps) {
        const int64_t first = chunk * kChunk + threadIdx.x % kWarp * kVector;
        for (int64_t i = first; i < first + kVector && i < hidden_size; ++i) {
          const float v = f(i);
          sum[s] = fmaf(v, v, sum[s]);
        }
      }
    }
    return sum_over_token<Team::kBlock>(sum, sums);
  };
  float inv = 1.0f;
  if (b.post_norm) {
    const float sum =
        sum_of_squares_of([&](int64_t i) { return __bfloat162float(p.x[row + i]); });
    inv = inverse_rms(sum, b.reciprocal_of_size, b.post_eps);
  }
  const float sum = sum_of_squares_of([&](int64_t i) {
    float v = __bfloat162float(p.x[row + i]);
    if (b.post_norm) {
      v *= inv;
      if (b.post_weight) v *= __bfloat162float(b.post_weight[i]);
      v = round_to_bf16(v);
    }
    if (b.residual) {
      v = round_to_bf16(v * b.x_scale) +
          round_to_bf16(__bfloat162float(b.residual[row + i]) * b.r_scale);
    }
    const bf16 hidden = __float2bfloat16_rn(v);
    b.hidden[row + i] = hidden;
    return __bfloat162float(hidden);
  });
  if (!b.normalized) return;
  inv = inverse_rms(sum, b.reciprocal_of_size, b.next_eps);
  for (int64_t i = threadIdx.x; i < hidden_size; i += blockDim.x) {
    float v = __bfloat162float(b.hidden[row + i]) * inv;
    if (b.next_weight) v *= __bfloat162float(b.next_weight[i]);
    b.normalized[row + i] = __float2bfloat16_rn(v);
  }
}

using Kernel = void (*)(TailParams);

// The kernels, by what a thread and a block hold. Their last numbers bound the registers: a thread
// holds 4 for each row and vector in flight, and 64 Ki registers are what an SM has.
enum Shape {
  kOne,      // a block a token, one vector a thread
  kSpread,   // a cluster a token, one vector a thread
  kSeveral,  // a block a token, several vectors a thread
  kMany,     // from x: the same, for many tokens
  kPassing,  // a block a token, several passes of routes
};

template <int kRoutes>
Kernel kernel_of(Shape shape) {
  if constexpr (kRoutes == 0) {
    if (shape == kOne) return tail_kernel<0, 2, false, 512, 2>;
    if (shape == kSpread) return tail_kernel<0, 1, true, 512, 1>;
    if (shape == kSeveral) return tail_kernel<0, 4, false, 224, 4>;
    return tail_kernel<0, 2, false, 512, 3>;
  } else if constexpr (kRoutes <= 2) {
    if (shape == kSpread) return tail_kernel<kRoutes, 1, true, 512, 1>;
    return tail_kernel<kRoutes, 2, false, 512, 3>;
  } else if constexpr (kRoutes <= 8) {
    if (shape == kOne) return tail_kernel<kRoutes, 1, false, 1024, 1>;
    if (shape == kSpread) return tail_kernel<kRoutes, 1, true, 512, 1>;
    if (shape == kSeveral) return tail_kernel<kRoutes, 2, false, 320, 2>;
    if constexpr (kRoutes == 4) return tail_kernel<4, 2, false, 448, 2, true>;
    return tail_kernel<8, 1, false, 1024, 1, true>;
  } else if constexpr (kRoutes == 10) {
    if (shape == kOne) return tail_kernel<kRoutes, 1, false, 512, 1>;
    return tail_kernel<kRoutes, 1, true, 512, 1>;
  } else {
    return tail_kernel<kRoutes, 1, true, kRoutes <= 16 ? 512 : 256, 1>;
  }
}

// Blocks a token; top_k is 0 for one that begins with x. Times of eight, four and two, with 8 rows
// of 7168: T = 8: 1.92, 2.09, 2.86 us; 24: 2.88, 2.50, 3.06; 56: 3.71, 3.34, 3.67; 64: 3.75, 5.23,
// 3.72, where the clusters of four no longer find room; 80: 5.66, 7.48, 8.42, and 6.65 of one.
int cluster_of(int64_t tokens, int chunks, int top_k, const Device& device) {
  const int64_t processors = device.processors;
  if (device.capability < 90 || chunks == 1) return 1;
  // More than 16 rows in flight a thread: an SM has room for one block of seven warps.
  if (top_k > 16) return tokens * 8 <= 2 * processors ? 8 : 1;
  if (tokens * 14 <= processors) return 8;
  const bool much = chunks > 20 && (top_k == 0 || top_k > 4);  // to divide
  if (tokens * (much ? 16 : 32) <= 7 * processors) return 4;
  if (tokens * 2 <= processors) return 2;
  if (tokens * 3 > 2 * processors) return 1;
  return top_k == 0 ? 4 : chunks > 16 ? 8 : 1;
}

struct Plan {
  Kernel kernel;
  int vectors;  // a thread
  int cluster;  // blocks a token
  bool steps = false;
};

// How a token is divided, from T, H, K and the number of SMs. Times are an H200's, at H = 7168.
Plan plan(int64_t tokens, int chunks, bool from_experts, int top_k, const Device& device) {
  // Few tokens: latency. Seven or eight blocks a token read it that much faster than one, which
  // takes 1 us for 8 rows, and a sum over a cluster costs 0.2 us: 1.9 us instead of 3.8 at T = 1.
  // Parts of a token that share an SM queue behind each other: so fewer parts for more tokens, and
  // past one token for two SMs a token has an SM for itself.
  const int cluster = cluster_of(tokens, chunks, top_k, device);
  const bool one_block = chunks > 16 && chunks <= 28;  // of a warp a chunk, an SM has room for one
  if (!from_experts) {
    // Two loads a vector are few: more vectors a thread once there are tokens for all SMs. Four
    // blocks of four vectors an SM take four tokens an SM at once, which three of two do not.
    if (cluster > 1) return {kernel_of<0>(kSpread), 1, cluster};
    if (tokens <= 2 * device.processors) return {kernel_of<0>(kOne), 2, 1};
    if (one_block && tokens <= 4 * device.processors) {
      return {kernel_of<0>(kSeveral), 4, 1};
    }
    return {kernel_of<0>(kMany), 2, 1};
  }
  if (cluster > 1) {
    if (top_k <= 1) return {kernel_of<1>(kSpread), 1, cluster};
    if (top_k <= 2) return {kernel_of<2>(kSpread), 1, cluster};
    if (top_k <= 4) return {kernel_of<4>(kSpread), 1, cluster};
    if (top_k <= 8) return {kernel_of<8>(kSpread), 1, cluster};
    if (top_k <= 10) return {kernel_of<10>(kSpread), 1, cluster};
    if (top_k <= 16) return {kernel_of<16>(kSpread), 1, cluster};
    return {kernel_of<32>(kSpread), 1, cluster};
  }
  // More tokens: bandwidth, that is loads in flight an SM, and whole rows at once, which the memory
  // serves 15% faster than their parts one after another.
  if (top_k <= 1) return {kernel_of<1>(kSeveral), 2, 1};
  if (top_k <= 2) return {kernel_of<2>(kSeveral), 2, 1};
  if (top_k == 9 || top_k == 10) {
    if (chunks <= 16) return {kernel_of<10>(kOne), 1, 1};
  }
  // 28 warps of one vector and eight rows fill an SM's registers, and more routes come in passes.
  if (top_k > 8) return {kernel_of<8>(kPassing), 1, 1};
  // 17 to 20 such warps would leave 40% of them empty: twice half as many, of two vectors.
  const Shape shape = one_block && chunks <= 20 ? kSeveral : kOne;
  const int vectors = shape == kSeveral ? 2 : 1;
  if (top_k <= 4) return {kernel_of<4>(shape), vectors, 1};
  // One block an SM, and few tokens: its sums and stores leave the memory idle, since all SMs are at
  // the same place. Two blocks of half the loads are better: 12.4 us instead of 14.8 at T = 256.
  if (one_block && chunks > 20 && tokens <= 2 * device.processors) {
    return {kernel_of<4>(kPassing), 2, 1};
  }
  // Of calls so short, beginning and end are a large part: 40.8 us instead of 44.8 at T = 1024. In
  // long ones the blocks drift apart, and the memory likes it less: 606 instead of 587 at 16384.
  if (one_block && tokens <= 20 * device.processors) {
    return {tail_steps_kernel<8, 28 * kWarp>, 1, 1, true};
  }
  return {kernel_of<8>(shape), vectors, 1};
}

}  // namespace

// x: [rows, H] with weights [>= T, K], rows of token t at t*K; [T, H] without. The other tensors are
// [T, H] and [H]. No post_eps: no post-norm; no residual: hidden is what the post-norm gives; no
// normalized: no next norm.
void tail(TensorView x, Optional<TensorView> weights, double routed_scale,
          Optional<TensorView> post_weight, Optional<double> post_eps,
          Optional<TensorView> residual, double x_scale, double r_scale,
          Optional<TensorView> next_weight, double next_eps, TensorView hidden,
          Optional<TensorView> normalized, bool pdl) {
  const int64_t tokens = hidden.size(0), hidden_size = hidden.size(1);
  if (tokens == 0) return;
  const bool from_experts = weights.has_value();
  TailParams p = {};
  if (from_experts) p.experts = experts_of(x, weights, Optional<TensorView>());
  p.x = static_cast<const bf16*>(x.data_ptr());
  p.boundary = boundary_of(residual, post_weight, post_eps, x_scale, r_scale, next_weight, next_eps,
                           hidden, normalized);
  p.routed_scale = static_cast<float>(routed_scale);
  p.chunks = static_cast<int>(hidden_size / kChunk);
  const Boundary& b = p.boundary;
  const DLDevice device = hidden.device();
  if (hidden_size % kChunk || hidden_size > kMaxWarps * kChunk ||
      !aligned(p.x, b.residual, b.post_weight, b.next_weight, b.hidden, b.normalized)) {
    if (from_experts) {
      finalize(x, weights, Optional<TensorView>(), Optional<TensorView>(), hidden, routed_scale,
               pdl);
      p.x = b.hidden;
    }
    launch(tail_any_kernel, device, {tokens, kAnyWarps * kWarp, 1, pdl}, p, hidden_size);
    return;
  }
  const Device& gpu = device_of(device);
  const Plan chosen = plan(tokens, p.chunks, from_experts, p.experts.top_k, gpu);
  const int parts = chosen.vectors * chosen.cluster;
  const int warps = (p.chunks + parts - 1) / parts;
  // 28 chunks in parts of 4 are 7 blocks, not 8.
  p.blocks_per_token = chosen.cluster > 1 ? (p.chunks + warps - 1) / warps : 1;
  p.tokens = tokens;
  const int64_t blocks =
      chosen.steps ? std::min<int64_t>(tokens, gpu.processors) : tokens * p.blocks_per_token;
  launch(chosen.kernel, device, {blocks, warps * kWarp, p.blocks_per_token, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(tail, moetail::tail);
