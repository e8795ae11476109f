// The stages of the tail, one function each, as the kernels share them. A warp holds 256 consecutive
// elements of one token, 8 a lane (16 bytes), and H is a multiple of 256: so a warp never straddles
// two tokens, and every branch below is taken by whole warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace moetail {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr int kVector = 8;                // BF16 elements in 16 bytes
constexpr int kChunk = kWarp * kVector;   // elements a warp holds at a time
constexpr int kMaxWarps = 32;             // of one token: H <= 8192
constexpr unsigned kFull = 0xffffffffu;

enum class WeightType : int { kFloat32, kBFloat16, kFloat16 };

// Who shares a token: a block, or a cluster of blocks.
enum class Team { kBlock, kCluster };

// ---- Programmatic dependent launch -------------------------------------------------------------
// Everything may come from the kernel before, norm weights too, so nothing is read above wait().
// Every block waits: then "this grid is complete" also means "the grids before it are".

__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// After a block's loads: its stores and the next grid's launch then overlap. Not at the top, where
// it is 0.4 us slower at 32 tokens and more: the next grid's blocks then crowd onto the SMs that
// this grid leaves room on, and stay there.
__device__ __forceinline__ void let_next_grid_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Memory ------------------------------------------------------------------------------------
// Offsets are 64 bits wide: rows * H passes 2^31 at 300,000 rows of H = 7168.

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 8 elements read once. Predicated, not branched, so that a remote route costs no divergence and all
// loads of a thread are issued back to back.
__device__ __forceinline__ uint4 load_once(const bf16* source, bool wanted = true) {
  uint4 data;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(data.x), "=&r"(data.y), "=&r"(data.z), "=&r"(data.w)
      : "l"(source), "r"(static_cast<int>(wanted)));
  return data;
}

// 8 elements that other blocks read too (norm weights): these may stay in L1.
__device__ __forceinline__ uint4 load_kept(const bf16* source) {
  return *reinterpret_cast<const uint4*>(source);
}

__device__ __forceinline__ void store(bf16* destination, uint4 data) {
  *reinterpret_cast<uint4*>(destination) = data;
}

// ---- Values ------------------------------------------------------------------------------------

__device__ __forceinline__ float2 widen(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// RN of the contract, two elements at a time. NaN stays NaN, subnormals stay subnormals.
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t&>(pair);
}

__device__ __forceinline__ float round_to_bf16(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// Eight BF16 values in four registers, and elementwise functions over them: f takes and gives FP32,
// and each result is rounded.
template <typename F>
__device__ __forceinline__ uint4 map_rounded(F f, uint4 a) {
  uint4 r;
  auto step = [&](uint32_t x) {
    float2 v = widen(x);
    return round_pair(f(v.x), f(v.y));
  };
  r.x = step(a.x), r.y = step(a.y), r.z = step(a.z), r.w = step(a.w);
  return r;
}

template <typename F>
__device__ __forceinline__ uint4 map_rounded(F f, uint4 a, uint4 b) {
  uint4 r;
  auto step = [&](uint32_t x, uint32_t y) {
    float2 v = widen(x), w = widen(y);
    return round_pair(f(v.x, w.x), f(v.y, w.y));
  };
  r.x = step(a.x, b.x), r.y = step(a.y, b.y), r.z = step(a.z, b.z), r.w = step(a.w, b.w);
  return r;
}

__device__ __forceinline__ float sum_of_squares(uint4 a, float sum) {
  const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 v = widen(words[i]);
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
  }
  return sum;
}

// ---- reduce, round, scale ----------------------------------------------------------------------

struct Experts {
  const bf16* rows;      // [rows, H]
  const void* weights;   // [T, K]; nullptr: every weight is 1
  const int32_t* map;    // [T, K]; nullptr: row t*K+k holds route (t, k)
  WeightType weight_type;
  int top_k;
};

// The bits of a weight, loaded where wanted, and their value: apart, so that a thread does not wait
// for its weight before it asks for its rows.
__device__ __forceinline__ uint32_t load_weight_bits(const Experts& experts, int64_t slot,
                                                     bool wanted) {
  uint32_t bits = 0x3f800000u;  // 1.0f
  if (!experts.weights) return bits;
  if (experts.weight_type == WeightType::kFloat32) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\nmov.b32 %0, 0;\n"
        "@wanted ld.global.b32 %0, [%1];\n}\n"
        : "=&r"(bits)
        : "l"(static_cast<const float*>(experts.weights) + slot), "r"(static_cast<int>(wanted)));
  } else {
    uint16_t half;
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %2, 0;\nmov.b16 %0, 0;\n"
        "@wanted ld.global.b16 %0, [%1];\n}\n"
        : "=&h"(half)
        : "l"(static_cast<const uint16_t*>(experts.weights) + slot),
          "r"(static_cast<int>(wanted)));
    bits = half;
  }
  return bits;
}

__device__ __forceinline__ float weight_of(const Experts& experts, uint32_t bits) {
  if (!experts.weights || experts.weight_type == WeightType::kFloat32) return __uint_as_float(bits);
  if (experts.weight_type == WeightType::kBFloat16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// Lane k keeps route k (K <= 32). A slot that is remote, or past K, has row -1 and counts as weight
// +0: with a row of zeros it adds exactly nothing. Its weight may be NaN in memory and is dropped.
struct Route {
  int row;
  uint32_t weight_bits;
};

__device__ __forceinline__ Route load_route(const Experts& experts, int64_t token,
                                            bool wanted = true) {
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = token * experts.top_k + lane;
  const bool valid = wanted && lane < experts.top_k;
  Route route;
  route.weight_bits = load_weight_bits(experts, slot, valid);
  route.row = static_cast<int>(slot);
  if (experts.map && valid) route.row = experts.map[slot];
  if (!valid) route.row = -1;
  return route;
}

__device__ __forceinline__ float weight_of(const Experts& experts, Route route) {
  const float weight = weight_of(experts, route.weight_bits);
  return route.row >= 0 ? weight : 0.0f;
}

__device__ __forceinline__ void accumulate(float (&sum)[kVector], float weight, uint4 data) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = widen(words[i]);
    sum[2 * i] = fmaf(weight, v.x, sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, v.y, sum[2 * i + 1]);
  }
}

__device__ __forceinline__ uint4 round_scale(const float (&sum)[kVector], float routed_scale) {
  uint4 rounded;
  rounded.x = round_pair(sum[0], sum[1]);
  rounded.y = round_pair(sum[2], sum[3]);
  rounded.z = round_pair(sum[4], sum[5]);
  rounded.w = round_pair(sum[6], sum[7]);
  return map_rounded([=](float r) { return r * routed_scale; }, rounded);
}

// Adds routes [first, first + kRoutes) of the token to a thread's vectors. All their rows' loads, of
// all the vectors, are in flight before the first is used.
template <int kRoutes, int kVectors, typename Held, typename Column>
__device__ __forceinline__ void add_routes(float (&sum)[kVectors][kVector], const Experts& experts,
                                           Route route, int first, int64_t hidden_size, Held held,
                                           Column column) {
  uint4 data[kVectors][kRoutes];
#pragma unroll
  for (int k = 0; k < kRoutes; ++k) {
    const int row = __shfl_sync(kFull, route.row, first + k);
    const bf16* source = experts.rows + row * hidden_size;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      data[v][k] = load_once(source + column(v), held(v) && row >= 0);
    }
  }
  const float mine = weight_of(experts, route);
#pragma unroll
  for (int k = 0; k < kRoutes; ++k) {
    const float weight = __shfl_sync(kFull, mine, first + k);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) accumulate(sum[v], weight, data[v][k]);
  }
}

// ---- norm --------------------------------------------------------------------------------------

// Butterfly: every lane ends with the same bits, since a + b = b + a.
__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFull, value, offset);
  }
  return value;
}

// One sum over a token's warps. Each warp adds up its lanes and hands the result to every block of
// the token, in its own slot; each warp then adds up the slots in the same order, so that all have
// the same bits, run after run.
struct TokenSum {
  float partial[kMaxWarps];
  uint64_t arrived;  // mbarrier, for a cluster: counts the bytes that have arrived
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

template <bool kCluster = false>
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, unsigned parity) {
  unsigned done;
  do {
    if constexpr (kCluster) {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}\n"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}\n"
          : "=r"(done)
          : "r"(shared_address(barrier)), "r"(parity)
          : "memory");
    }
  } while (!done);
}
#endif

// Before the first sum of a cluster: the barriers exist before anybody signals them.
__device__ __forceinline__ void cluster_sums_init(TokenSum* sums, int count, int warps) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) {
      barrier_init(&sums[i].arrived, 1);
      barrier_expect(&sums[i].arrived, warps * sizeof(float));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sums_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A token has up to two sums, and each a place of its own: nothing that is still read is overwritten.
struct Sums {
  TokenSum* place;
  int turn = 1;

  __device__ __forceinline__ TokenSum* next() {
    turn ^= 1;
    return place + turn;
  }
};

template <Team kTeam>
__device__ __forceinline__ float sum_over_token(float value, Sums& sums, int warp, int warps,
                                                int blocks) {
  TokenSum* sum = sums.next();
  const int lane = threadIdx.x % kWarp;
  value = sum_over_warp(value);
  if constexpr (kTeam == Team::kCluster) {
#if __CUDA_ARCH__ >= 900
    if (lane < blocks) {
      uint32_t there, arrived;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(there)
                   : "r"(shared_address(&sum->partial[warp])), "r"(lane));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(arrived)
                   : "r"(shared_address(&sum->arrived)), "r"(lane));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
          "r"(__float_as_uint(value)), "r"(arrived)
          : "memory");
    }
    barrier_wait<true>(&sum->arrived, 0);
#endif
  } else {
    if (lane == 0) sum->partial[warp] = value;
    __syncthreads();
  }
  return sum_over_warp(lane < warps ? sum->partial[lane] : 0.0f);
}

// 1 / sqrt(mean + eps). rsqrtf is within 2 ulp (2^-22), far inside the contract's 2^-16.
__device__ __forceinline__ float inverse_rms(float sum, float reciprocal_of_size, float eps) {
  return rsqrtf(fmaf(sum, reciprocal_of_size, eps));
}

// n = RN(s * inv * w)
__device__ __forceinline__ uint4 normalize(uint4 s, float inv, uint4 weight, bool affine) {
  return affine ? map_rounded([=](float v, float w) { return v * inv * w; }, s, weight)
                : map_rounded([=](float v) { return v * inv; }, s);
}

// ---- post-norm, residual add, next norm --------------------------------------------------------

struct Boundary {
  const bf16* residual;     // [T, H] or nullptr: no residual add
  const bf16* post_weight;  // [H] or nullptr: no affine
  const bf16* next_weight;
  bf16* hidden;             // [T, H]
  bf16* normalized;         // [T, H] or nullptr: no next norm
  float post_eps, next_eps, x_scale, r_scale, reciprocal_of_size;
  bool post_norm;
};

// A thread's vectors of a token, which `warps` warps in `blocks` blocks share: from what was
// finalized to hidden. post_weight(v) gives the vector's norm weights. What a thread does not hold
// is zeros, weights too, and stays zeros: it is in the sums.
template <Team kTeam, int kVectors, typename Weight>
__device__ __forceinline__ void to_hidden(const Boundary& b, uint4 (&value)[kVectors],
                                          const uint4 (&residual)[kVectors], Weight post_weight,
                                          Sums& sums, int warp, int warps, int blocks) {
  if (b.post_norm) {
    uint4 weight[kVectors];
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      weight[v] = post_weight(v);
      sum = sum_of_squares(value[v], sum);
    }
    sum = sum_over_token<kTeam>(sum, sums, warp, warps, blocks);
    const float inv = inverse_rms(sum, b.reciprocal_of_size, b.post_eps);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      value[v] = normalize(value[v], inv, weight[v], b.post_weight != nullptr);
    }
  }
  if (b.residual) {
    const float x_scale = b.x_scale, r_scale = b.r_scale;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint4 m = map_rounded([=](float n) { return n * x_scale; }, value[v]);
      const uint4 n = map_rounded([=](float r) { return r * r_scale; }, residual[v]);
      value[v] = map_rounded([](float s, float t) { return s + t; }, m, n);
    }
  }
}

// From hidden to normalized, in place.
template <Team kTeam, int kVectors, typename Weight>
__device__ __forceinline__ void to_normalized(const Boundary& b, uint4 (&value)[kVectors],
                                              Weight next_weight, Sums& sums, int warp, int warps,
                                              int blocks) {
  uint4 weight[kVectors];
  float sum = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = next_weight(v);
    sum = sum_of_squares(value[v], sum);
  }
  sum = sum_over_token<kTeam>(sum, sums, warp, warps, blocks);
  const float inv = inverse_rms(sum, b.reciprocal_of_size, b.next_eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    value[v] = normalize(value[v], inv, weight[v], b.next_weight != nullptr);
  }
}

}  // namespace moetail
