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

// Who shares a token: a block, a quarter of a block's warps, or a cluster of blocks.
enum class Team { kBlock, kQuarter, kCluster };
constexpr int kQuarters = 4;

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

// A thread's part of a token's first kRoutes rows, to be added later, so that something else can be
// done while they are under way.
template <int kRoutes>
struct Rows {
  Route route;
  uint4 data[kRoutes];
};

template <int kRoutes>
__device__ __forceinline__ Rows<kRoutes> load_rows(const Experts& experts, int64_t token,
                                                   int64_t hidden_size, int column,
                                                   bool held = true) {
  Rows<kRoutes> rows;
  rows.route = load_route(experts, token);
#pragma unroll
  for (int k = 0; k < kRoutes; ++k) {
    const int row = __shfl_sync(kFull, rows.route.row, k);
    rows.data[k] = load_once(experts.rows + row * hidden_size + column, held && row >= 0);
  }
  return rows;
}

template <int kRoutes>
__device__ __forceinline__ void add_rows(float (&sum)[kVector], const Experts& experts,
                                         const Rows<kRoutes>& rows) {
  const float mine = weight_of(experts, rows.route);
#pragma unroll
  for (int k = 0; k < kRoutes; ++k) accumulate(sum, __shfl_sync(kFull, mine, k), rows.data[k]);
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

// Butterfly over so many neighbouring lanes, or all 32: every lane ends with the same bits, since
// a + b = b + a.
template <int kLanes = kWarp>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFull, value, offset);
  }
  return value;
}

// The sums of several vectors of a thread over the lanes, by the additions of sum_over_lanes, and in as
// many exchanges: half the lanes go on with half the vectors, and so on. Lane l ends with the sum of
// vector l / (32 / kVectors).
template <int kVectors>
__device__ __forceinline__ float sums_over_lanes(const float (&value)[kVectors]) {
  const int lane = threadIdx.x % kWarp;
  float sum[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) sum[v] = value[v];
#pragma unroll
  for (int count = kVectors / 2, offset = kWarp / 2; count > 0; count /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int v = 0; v < count; ++v) {
      const float given = upper ? sum[v] : sum[count + v];
      sum[v] = (upper ? sum[count + v] : sum[v]) + __shfl_xor_sync(kFull, given, offset);
    }
  }
  return sum_over_lanes<kWarp / kVectors>(sum[0]);
}

// One sum over a token, by the same additions whoever makes it, so that its bits depend on nothing
// but the token: those of a lane's eight elements of a chunk, of a chunk's lanes, of the chunks. A
// warp hands the sum of each of its chunks to every block of the token, in the chunk's slot; each
// warp then adds up all slots.
struct alignas(16) TokenSum {
  float partial[kMaxWarps];
  uint64_t arrived;  // mbarrier, for a cluster: counts the bytes that have arrived
};

// A warp's part in a token's sums. They take turns at two places, so that nothing that is still read
// is overwritten: who writes a place again has met all others at the sum between.
struct Sums {
  TokenSum* places;
  int warp, warps;  // this one of those that share the token
  int blocks = 1;   // of a cluster
  int barrier = 0;  // of a quarter
  int turn = 1;

  __device__ __forceinline__ TokenSum* next() {
    turn ^= 1;
    return places + turn;
  }
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

// What other blocks of the cluster have sent is then there.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}
#endif

// Before the first sum, by all of a team's threads: slots that no warp has are zero. For a cluster,
// cluster_sums_ready() comes between: the barriers exist before anybody signals them.
template <Team kTeam, int kVectors = 1>
__device__ __forceinline__ void sums_init(const Sums& sums) {
  const int slots = kVectors * sums.warps;
  const int thread = kTeam == Team::kQuarter ? threadIdx.x % (sums.warps * kWarp) : threadIdx.x;
  if (thread >= slots && thread < kMaxWarps) {
    sums.places[0].partial[thread] = sums.places[1].partial[thread] = 0.0f;
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kTeam == Team::kCluster) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        barrier_init(&sums.places[i].arrived, 1);
        barrier_expect(&sums.places[i].arrived, sums.warps * sizeof(float));
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
#endif
}

__device__ __forceinline__ void cluster_sums_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Eight lanes read the slots, four each, so that three exchanges between lanes do instead of five.
__device__ __forceinline__ float sum_of_slots(const TokenSum* sum) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kLanes = kMaxWarps / 4;
  const float4 slots = reinterpret_cast<const float4*>(sum->partial)[lane % kLanes];
  return sum_over_lanes<kLanes>((slots.x + slots.y) + (slots.z + slots.w));
}

__device__ __forceinline__ void quarter_sync(const Sums& sums) {
  asm volatile("bar.sync %0, %1;" ::"r"(sums.barrier), "r"(sums.warps * kWarp) : "memory");
}

// From a thread's part of each of its chunks: a warp holds consecutive ones.
template <Team kTeam, int kVectors>
__device__ __forceinline__ float sum_over_token(const float (&value)[kVectors], Sums& sums) {
  TokenSum* sum = sums.next();
  const int lane = threadIdx.x % kWarp;
  const float mine = sums_over_lanes(value);
  if constexpr (kTeam == Team::kCluster) {
    static_assert(kVectors == 1, "a block of a cluster awaits one sum of every warp");
#if __CUDA_ARCH__ >= 900
    if (lane < sums.blocks) {
      uint32_t there, arrived;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(there)
                   : "r"(shared_address(&sum->partial[sums.warp])), "r"(lane));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(arrived)
                   : "r"(shared_address(&sum->arrived)), "r"(lane));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
          "r"(__float_as_uint(mine)), "r"(arrived)
          : "memory");
    }
    barrier_wait(&sum->arrived, 0);
#endif
  } else {
    constexpr int kLanes = kWarp / kVectors;
    if (lane % kLanes == 0) sum->partial[sums.warp * kVectors + lane / kLanes] = mine;
    if constexpr (kTeam == Team::kQuarter) {
      quarter_sync(sums);
    } else {
      __syncthreads();
    }
  }
  return sum_of_slots(sum);
}

template <Team kTeam, int kVectors>
__device__ __forceinline__ float squares_over_token(const uint4 (&value)[kVectors], Sums& sums) {
  float sum[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) sum[v] = sum_of_squares(value[v], 0.0f);
  return sum_over_token<kTeam>(sum, sums);
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

// The norm of a thread's vectors of a token, in place. weight_of(v) gives a vector's weights. What a
// thread does not hold is zeros, weights too, and stays zeros: it is in the sum.
template <Team kTeam, int kVectors, typename Weight>
__device__ __forceinline__ void norm(uint4 (&value)[kVectors], Weight weight_of, bool affine,
                                     float reciprocal_of_size, float eps, Sums& sums) {
  // Asked for before the sum, but where they would not fit beside what a thread holds.
  constexpr bool kEarly = kTeam != Team::kQuarter;
  uint4 weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kEarly) weight[v] = weight_of(v);
  }
  const float inv = inverse_rms(squares_over_token<kTeam>(value, sums), reciprocal_of_size, eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    value[v] = normalize(value[v], inv, kEarly ? weight[v] : weight_of(v), affine);
  }
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

// From what was finalized to hidden, in place.
template <Team kTeam, int kVectors, typename Weight>
__device__ __forceinline__ void to_hidden(const Boundary& b, uint4 (&value)[kVectors],
                                          const uint4 (&residual)[kVectors], Weight post_weight,
                                          Sums& sums) {
  if (b.post_norm) {
    norm<kTeam>(value, post_weight, b.post_weight != nullptr, b.reciprocal_of_size, b.post_eps,
                sums);
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
                                              Weight next_weight, Sums& sums) {
  norm<kTeam>(value, next_weight, b.next_weight != nullptr, b.reciprocal_of_size, b.next_eps, sums);
}

}  // namespace moetail
