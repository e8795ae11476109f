// Operation 6 in one kernel: a rank finalizes the tokens it owns, and all ranks end with all tokens.
//
// oneshot: finalized rows are sent, and every rank evaluates the boundary of every token.
// twoshot: the owner evaluates the boundary, and both outputs are sent.
//
// Few tokens: a block, or a cluster of blocks, has one token, so that all are under way at once.
// More: a block goes through the tokens of its rank in steps, and in each step, while its rows are
// under way, takes what the peers sent in the step before. A step waits for steps before it only,
// and all blocks of all ranks are resident: so no circle of waiting can close.
// Many long ones: some blocks take the tokens of their rank, which wait for nobody, and the others
// what the peers send, four tokens at a time, since these have few loads each.
#include "exchange.h"

namespace moetail {
namespace {

struct GatherParams {
  Exchange exchange;
  Experts experts;  // of the owned tokens
  Boundary boundary;
  float routed_scale;
  int64_t tokens;       // T
  int64_t first_owned;  // this rank's tokens are first_owned .. first_owned + owned - 1
  int64_t owned;
  int64_t tokens_per_rank;
  int chunks;  // H / 256
  int blocks_per_token;
  int receivers;  // blocks that take what the peers send, where blocks are divided
};

__device__ __forceinline__ int64_t offset_of(const GatherParams& p, const Place& place,
                                             int64_t row) {
  return (row * p.chunks * kChunk + place.column) * static_cast<int64_t>(sizeof(bf16));
}

// An own token in two parts, as callers load its residual at different times: from its rows to what
// is finalized, which oneshot sends; and from there to what is written, which twoshot sends.
template <bool kTwoshot, int kRoutes>
__device__ __forceinline__ uint4 finalize_own(const GatherParams& p, Call call, const Place& place,
                                              int64_t token, const Rows<kRoutes>& rows) {
  const uint4 value =
      finalize_rows(p.experts, place, rows, int64_t{p.chunks} * kChunk, p.routed_scale);
  if constexpr (!kTwoshot) {
    if (place.held) send(p.exchange, call, offset_of(p, place, token), value);
  }
  return value;
}

template <bool kTwoshot, bool kCluster>
__device__ __forceinline__ void finish_own(const GatherParams& p, Call call, const Place& place,
                                           int64_t token, uint4 value, uint4 residual,
                                           const NormWeights& weights, Sums& sums,
                                           bool whole = true) {
  const Exchange& x = p.exchange;
  const Boundary& b = p.boundary;
  constexpr Team kTeam = kCluster ? Team::kCluster : Team::kBlock;
  Outputs out = evaluate<kTeam>(b, place, value, residual, weights, sums, !kCluster, whole);
  if constexpr (kTwoshot) {
    if (place.held) {
      send(x, call, offset_of(p, place, token), out.hidden);
      if (b.normalized) send(x, call, offset_of(p, place, p.tokens + token), out.normalized);
    }
  }
  write(b, place, token * p.chunks * kChunk, out);
}

template <bool kTwoshot, bool kCluster>
__device__ __forceinline__ void take_remote(const GatherParams& p, Call call, const Place& place,
                                            int64_t token, int source, const NormWeights& weights,
                                            Sums& sums) {
  const Exchange& x = p.exchange;
  const Boundary& b = p.boundary;
  constexpr Team kTeam = kCluster ? Team::kCluster : Team::kBlock;
  const int64_t row = token * p.chunks * kChunk;
  const int64_t first = offset_of(p, place, token);
  const int64_t second = offset_of(p, place, p.tokens + token);
  Outputs out = {};
  if constexpr (kTwoshot) {
    if (place.held) {
      const char* mine = slot_of(x, call, x.rank);
      const uint4 hidden = peek(mine + first);
      const uint4 normalized = b.normalized ? peek(mine + second) : hidden;
      out.hidden = receive(x, call, first, source, hidden);
      if (b.normalized) out.normalized = receive(x, call, second, source, normalized);
    }
  } else {
    const uint4 residual = load_residual(b, place, row);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (place.held) value = receive(x, call, first, source);
    __syncwarp();
    out = evaluate<kTeam>(b, place, value, residual, weights, sums, !kCluster);
  }
  write(b, place, row, out);
}

// A quarter of a block: every so many'th of the peers' tokens, in the order in which they send. Four
// vectors a thread.
template <bool kTwoshot>
__device__ __forceinline__ void receive_by_quarters(const GatherParams& p, Call call,
                                                    unsigned receiver,
                                                    TokenSum (&places)[kQuarters][2]) {
  const Exchange& x = p.exchange;
  const Boundary& b = p.boundary;
  const int warps = blockDim.x / kWarp / kQuarters;
  const int quarter = threadIdx.x / kWarp / warps, warp = threadIdx.x / kWarp % warps;
  const Sums untouched{places[quarter], warp, warps, 1, quarter + 1};
  sums_init<Team::kQuarter, kQuarters>(untouched);
  auto held = [&](int v) { return warp * kQuarters + v < p.chunks; };
  constexpr int kStep = kChunk * static_cast<int>(sizeof(bf16));  // from vector to vector
  const int column = warp * kQuarters * kChunk + static_cast<int>(threadIdx.x % kWarp) * kVector;
  auto weight_of = [&](const bf16* weight, int v) {
    return weight && held(v) ? load_kept(weight + column + v * kChunk) : make_uint4(0, 0, 0, 0);
  };
  const unsigned peers = x.ranks - 1;
  const unsigned items = static_cast<unsigned>(p.tokens_per_rank) * peers;
  for (unsigned item = receiver * kQuarters + quarter; item < items;
       item += p.receivers * kQuarters) {
    int source = x.rank + 1 + static_cast<int>(item % peers);
    if (source >= x.ranks) source -= x.ranks;
    const int64_t token = source * p.tokens_per_rank + item / peers;
    if (token >= p.tokens) continue;
    const int64_t row = token * p.chunks * kChunk + column;
    const int64_t offset = row * static_cast<int64_t>(sizeof(bf16));
    const int64_t other = offset + p.tokens * p.chunks * kChunk * static_cast<int64_t>(sizeof(bf16));
    const char* mine = slot_of(x, call, x.rank);
    // Twoshot: hidden and normalized. Oneshot: what was finalized, and the residual.
    uint4 first[kQuarters], second[kQuarters];
#pragma unroll
    for (int v = 0; v < kQuarters; ++v) {
      first[v] = held(v) ? peek(mine + offset + v * kStep) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int v = 0; v < kQuarters; ++v) {
      if constexpr (kTwoshot) {
        second[v] = held(v) && b.normalized ? peek(mine + other + v * kStep) : first[v];
      } else {
        second[v] = load_once(b.residual + row + v * kChunk, b.residual && held(v));
      }
    }
#pragma unroll
    for (int v = 0; v < kQuarters; ++v) {
      if (!held(v)) continue;
      first[v] = receive(x, call, offset + v * kStep, source, first[v]);
      if (kTwoshot && b.normalized) {
        second[v] = receive(x, call, other + v * kStep, source, second[v]);
      }
    }
    Sums sums = untouched;
    if constexpr (!kTwoshot) {
      __syncwarp();
      // Of two sums a token, each keeps the other's place from being used again too early.
      if (!b.post_norm || !b.normalized) quarter_sync(sums);
      to_hidden<Team::kQuarter>(
          b, first, second, [&](int v) { return weight_of(b.post_weight, v); }, sums);
    }
#pragma unroll
    for (int v = 0; v < kQuarters; ++v) {
      if (held(v)) store(b.hidden + row + v * kChunk, first[v]);
    }
    if (!b.normalized) continue;
    if constexpr (!kTwoshot) {
      to_normalized<Team::kQuarter>(
          b, first, [&](int v) { return weight_of(b.next_weight, v); }, sums);
    }
#pragma unroll
    for (int v = 0; v < kQuarters; ++v) {
      if (held(v)) store(b.normalized + row + v * kChunk, kTwoshot ? second[v] : first[v]);
    }
  }
}

// A block or a cluster a token: first those that wait for nobody, the first one for the peers.
template <bool kTwoshot, int kRoutes, bool kCluster, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    gather_kernel(const __grid_constant__ GatherParams p) {
  __shared__ TokenSum places[2];
  const Exchange& x = p.exchange;
  const Place place = place_of<kCluster>(p.chunks, p.blocks_per_token);
  Sums sums = sums_of(places, place);
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  const int64_t item = int64_t{blockIdx.x / place.blocks} - 1;
  sums_init<kCluster ? Team::kCluster : Team::kBlock>(sums);
  wait_for_previous_grid();
  const Call call = begin_call(x);
  if (blockIdx.x == 0) announce(x, call);
  NormWeights weights = {};
  if (kCluster && item >= 0) weights = load_weights(p.boundary, place);
  if (item >= 0 && item < p.owned) {
    const int64_t token = p.first_owned + item;
    uint4 residual = make_uint4(0, 0, 0, 0);
    if constexpr (kCluster) residual = load_residual(p.boundary, place, token * hidden_size);
    const Rows<kRoutes> rows =
        load_rows<kRoutes>(p.experts, item, hidden_size, place.column, place.held);
    const uint4 value = finalize_own<kTwoshot>(p, call, place, token, rows);
    if constexpr (kCluster) {
      let_next_grid_launch_early(x);
      cluster_sums_ready();
    } else {
      residual = load_residual(p.boundary, place, token * hidden_size);
    }
    finish_own<kTwoshot, kCluster>(p, call, place, token, value, residual, weights, sums);
  } else {
    let_next_grid_launch_early(x);
    if constexpr (kCluster) cluster_sums_ready();
    if (item >= 0) {
      const int64_t other = item - p.owned;
      const int64_t token = other < p.first_owned ? other : item;
      take_remote<kTwoshot, kCluster>(p, call, place, token,
                                      static_cast<int>(token / p.tokens_per_rank), weights, sums);
    }
  }
  finish_call(x, call);
}

template <bool kTwoshot, int kRoutes, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    gather_stream_kernel(const __grid_constant__ GatherParams p) {
  __shared__ TokenSum places[2];
  const Exchange& x = p.exchange;
  const Place place = place_of<false>(p.chunks, 1);
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  wait_for_previous_grid();
  const Call call = begin_call(x);
  if (blockIdx.x == 0) announce(x, call);
  const NormWeights late = {};
  sums_init<Team::kBlock>(sums_of(places, place));
  for (int64_t item = blockIdx.x;; item += gridDim.x) {
    Rows<kRoutes> rows;
    const bool own = item < p.owned;
    if (own) rows = load_rows<kRoutes>(p.experts, item, hidden_size, place.column, place.held);
    const int64_t before = item - int64_t{gridDim.x};
    for (int step = 1; step < x.ranks && before >= 0; ++step) {
      int source = x.rank + step;
      if (source >= x.ranks) source -= x.ranks;
      const int64_t token = source * p.tokens_per_rank + before;
      if (before >= p.tokens_per_rank || token >= p.tokens) continue;
      Sums sums = sums_of(places, place);
      take_remote<kTwoshot, false>(p, call, place, token, source, late, sums);
      __syncthreads();  // before the places are used again
    }
    if (own) {
      const int64_t token = p.first_owned + item;
      Sums sums = sums_of(places, place);
      const uint4 value = finalize_own<kTwoshot>(p, call, place, token, rows);
      const uint4 residual = load_residual(p.boundary, place, token * hidden_size);
      finish_own<kTwoshot, false>(p, call, place, token, value, residual, late, sums);
      __syncthreads();
    }
    if (before >= 0 && item >= p.tokens_per_rank) break;
  }
  finish_call(x, call);
}

template <bool kTwoshot, int kRoutes, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    gather_divided_kernel(const __grid_constant__ GatherParams p) {
  __shared__ TokenSum places[kQuarters][2];
  const Exchange& x = p.exchange;
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  wait_for_previous_grid();
  const Call call = begin_call(x);
  if (blockIdx.x == 0) announce(x, call);
  // Receivers lie evenly among the blocks, and so among the parts of the GPU: as the grid's last
  // blocks they make 8192 tokens take 226 to 280 us on two H200s instead of 220.
  const unsigned receiver = blockIdx.x * p.receivers / gridDim.x;  // of those before this block
  if (receiver == (blockIdx.x + 1) * p.receivers / gridDim.x) {
    const unsigned senders = gridDim.x - p.receivers;
    const Place place = place_of<false>(p.chunks, 1);
    Sums sums = sums_of(places[0], place);
    sums_init<Team::kBlock>(sums);
    const NormWeights late = {};
    for (int64_t item = blockIdx.x - receiver; item < p.owned; item += senders) {
      const int64_t token = p.first_owned + item;
      const uint4 residual = load_residual(p.boundary, place, token * hidden_size);
      const Rows<kRoutes> rows =
          load_rows<kRoutes>(p.experts, item, hidden_size, place.column, place.held);
      const uint4 value = finalize_own<kTwoshot>(p, call, place, token, rows);
      finish_own<kTwoshot, false>(p, call, place, token, value, residual, late, sums, false);
    }
  } else {
    receive_by_quarters<kTwoshot>(p, call, receiver, places);
  }
  finish_call(x, call);
}

using Kernel = void (*)(GatherParams);

enum Shape { kSpread, kOne, kStream, kDivided };  // a cluster or a block a token, steps, divided

// 28 warps leave each thread 72 registers, which 32 would not.
constexpr int kDividedWarps = 28;

template <bool kTwoshot, int kRoutes>
Kernel kernel_of(Shape shape) {
  if (shape == kSpread) return gather_kernel<kTwoshot, kRoutes, true, 512>;
  if (shape == kOne) return gather_kernel<kTwoshot, kRoutes, false, 1024>;
  if (shape == kDivided) return gather_divided_kernel<kTwoshot, kRoutes, kDividedWarps * kWarp>;
  return gather_stream_kernel<kTwoshot, kRoutes, 1024>;
}

Kernel kernel_of(bool twoshot, int top_k, Shape shape) {
  if (top_k == 1) return twoshot ? kernel_of<true, 1>(shape) : kernel_of<false, 1>(shape);
  return twoshot ? kernel_of<true, 8>(shape) : kernel_of<false, 8>(shape);
}

// Of so many blocks, those that take what the peers send: three for eight blocks of a sender and for
// each peer. Measured on two H200s: 34 to 38 of 132 blocks are best for K = 4 and 8, 40 for K = 1.
int receivers_of(int64_t blocks, int ranks) {
  const int64_t received = 3 * (ranks - 1);
  return static_cast<int>(std::clamp<int64_t>(blocks * received / (received + 8), 1, blocks - 1));
}

}  // namespace

// rows [slots * K, H] and weights [slots, K], or rows [slots, H] without weights: this rank's tokens,
// the owned ones first. hidden and normalized are [T, H]. No residual, no post_eps and no normalized:
// hidden is the finalized rows of all ranks.
void gather(bool twoshot, TensorView rows, Optional<TensorView> weights, double routed_scale,
            Optional<TensorView> post_weight, Optional<double> post_eps,
            Optional<TensorView> residual, double x_scale, double r_scale,
            Optional<TensorView> next_weight, double next_eps, TensorView hidden,
            Optional<TensorView> normalized, int64_t rank, double deadline_s,
            TensorView buffers, int64_t width, int64_t slot_rows, TensorView state,
            TensorView report, int64_t share, bool pdl) {
  const int64_t tokens = hidden.size(0), hidden_size = hidden.size(1);
  if (tokens == 0) return;
  TVM_FFI_ICHECK(width == hidden_size);
  GatherParams p = {};
  p.boundary = boundary_of(residual, post_weight, post_eps, x_scale, r_scale, next_weight, next_eps,
                           hidden, normalized);
  p.exchange = exchange_of(
      rank, deadline_s, buffers, width, slot_rows, state, report, share,
      signature_of(twoshot ? kTwoshot : kOneshot, p.boundary.normalized != nullptr, tokens));
  p.experts = experts_of(rows, weights, Optional<TensorView>());
  p.routed_scale = static_cast<float>(routed_scale);
  const int64_t per_rank = (tokens + p.exchange.ranks - 1) / p.exchange.ranks;
  p.tokens = tokens;
  p.tokens_per_rank = per_rank;
  p.first_owned = std::min(rank * per_rank, tokens);
  p.owned = std::min((rank + 1) * per_rank, tokens) - p.first_owned;
  p.chunks = static_cast<int>(hidden_size / kChunk);
  const DLDevice dl = hidden.device();
  const Device& device = device_of(dl);
  const int cluster = cluster_of(tokens, p.chunks, static_cast<int>(share), device);
  Kernel kernel = kernel_of(twoshot, p.experts.top_k, cluster > 1 ? kSpread : kOne);
  Layout layout = layout_of(kernel, tokens, p.chunks, cluster, static_cast<int>(share), device);
  if (!layout.watch) {
    kernel = kernel_of(twoshot, p.experts.top_k, kStream);
    layout = layout_of(kernel, tokens, p.chunks, 1, static_cast<int>(share), device);
    // Where an SM has one block at a time. Several blocks an SM do as well in steps; and so do few
    // tokens, of which the receivers would wait for the last step.
    if (p.exchange.ranks > 1 && p.chunks > kMaxWarps / 2 && p.chunks <= kDividedWarps) {
      const Kernel divided = kernel_of(twoshot, p.experts.top_k, kDivided);
      const int whole = (p.chunks + kQuarters - 1) / kQuarters * kQuarters;
      const Layout other = layout_of(divided, tokens, whole, 1, static_cast<int>(share), device);
      const int receivers = other.blocks > 1 ? receivers_of(other.blocks, p.exchange.ranks) : 0;
      if (receivers > 0 && per_rank >= 5 * (other.blocks - receivers)) {
        p.receivers = receivers;
        kernel = divided;
        layout = other;
      }
    }
  }
  p.blocks_per_token = layout.cluster;
  launch(kernel, dl, {layout.blocks, layout.warps * kWarp, layout.cluster, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, moetail::gather);
