// Operation 6 in one kernel: a rank finalizes the tokens it owns, and all ranks end with all tokens.
//
// oneshot: finalized rows are sent, and every rank evaluates the boundary of every token.
// twoshot: the owner evaluates the boundary, and both outputs are sent.
//
// Few tokens: a block, or a cluster of blocks, has one token, so that all are under way at once.
// Many: a block goes through the tokens of its rank in steps, and in each step, while its rows are
// under way, takes what the peers sent in the step before; memory and links are busy all the time.
// A step waits for steps before it only, and all blocks of all ranks are resident: so no circle of
// waiting can close.
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
};

__device__ __forceinline__ int64_t offset_of(const GatherParams& p, const Place& place,
                                             int64_t row) {
  return (row * p.chunks * kChunk + place.column) * static_cast<int64_t>(sizeof(bf16));
}

// From the rows of an own token to what is written, and sent on the way.
template <bool kTwoshot, bool kCluster, int kRoutes>
__device__ __forceinline__ void take_own(const GatherParams& p, Call call, const Place& place,
                                         int64_t token, const Rows<kRoutes>& rows, uint4 residual,
                                         const NormWeights& weights, Sums& sums) {
  const Exchange& x = p.exchange;
  const Boundary& b = p.boundary;
  constexpr Team kTeam = kCluster ? Team::kCluster : Team::kBlock;
  const int64_t hidden_size = int64_t{p.chunks} * kChunk, row = token * hidden_size;
  uint4 value = finalize_rows(p.experts, place, rows, hidden_size, p.routed_scale);
  if constexpr (!kTwoshot) {
    value = without_empty(value);
    if (place.held) send(x, call, offset_of(p, place, token), value);
  }
  if constexpr (kCluster) {
    let_next_grid_launch_early(x);
    cluster_sums_ready();
  } else {
    residual = load_residual(b, place, row);
  }
  Outputs out = evaluate<kTeam>(b, place, value, residual, weights, sums, !kCluster);
  if constexpr (kTwoshot) {
    out.hidden = without_empty(out.hidden);
    out.normalized = without_empty(out.normalized);
    if (place.held) {
      send(x, call, offset_of(p, place, token), out.hidden);
      if (b.normalized) send(x, call, offset_of(p, place, p.tokens + token), out.normalized);
    }
  }
  write(b, place, row, out);
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

// A block or a cluster a token: first those that wait for nobody, the first one for the peers.
template <bool kTwoshot, int kRoutes, bool kCluster, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    gather_kernel(const __grid_constant__ GatherParams p) {
  __shared__ TokenSum places[2];
  Sums sums{places};
  const Exchange& x = p.exchange;
  const Place place = place_of<kCluster>(p.chunks, p.blocks_per_token);
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  const int64_t item = int64_t{blockIdx.x / place.blocks} - 1;
  if constexpr (kCluster) cluster_sums_init(places, 2, place.warps);
  wait_for_previous_grid();
  const Call call = begin_call(x);
  if (blockIdx.x == 0) announce(x, call);
  NormWeights weights = {};
  if (kCluster && item >= 0) weights = load_weights(p.boundary, place);
  if (item >= 0 && item < p.owned) {
    const int64_t token = p.first_owned + item;
    uint4 residual = make_uint4(0, 0, 0, 0);
    if constexpr (kCluster) residual = load_residual(p.boundary, place, token * hidden_size);
    const Rows<kRoutes> rows = load_rows<kRoutes>(p.experts, place, item, hidden_size);
    take_own<kTwoshot, kCluster>(p, call, place, token, rows, residual, weights, sums);
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
  for (int64_t item = blockIdx.x;; item += gridDim.x) {
    Rows<kRoutes> rows;
    const bool own = item < p.owned;
    if (own) rows = load_rows<kRoutes>(p.experts, place, item, hidden_size);
    const int64_t before = item - int64_t{gridDim.x};
    for (int step = 1; step < x.ranks && before >= 0; ++step) {
      int source = x.rank + step;
      if (source >= x.ranks) source -= x.ranks;
      const int64_t token = source * p.tokens_per_rank + before;
      if (before >= p.tokens_per_rank || token >= p.tokens) continue;
      Sums sums{places};
      take_remote<kTwoshot, false>(p, call, place, token, source, late, sums);
      __syncthreads();  // before the places are used again
    }
    if (own) {
      Sums sums{places};
      take_own<kTwoshot, false>(p, call, place, p.first_owned + item, rows,
                                make_uint4(0, 0, 0, 0), late, sums);
      __syncthreads();
    }
    if (before >= 0 && item >= p.tokens_per_rank) break;
  }
  finish_call(x, call);
}

using Kernel = void (*)(GatherParams);

enum Shape { kSpread, kOne, kStream };  // a cluster a token, a block a token, steps

template <bool kTwoshot, int kRoutes>
Kernel kernel_of(Shape shape) {
  if (shape == kSpread) return gather_kernel<kTwoshot, kRoutes, true, 512>;
  if (shape == kOne) return gather_kernel<kTwoshot, kRoutes, false, 1024>;
  return gather_stream_kernel<kTwoshot, kRoutes, 1024>;
}

Kernel kernel_of(bool twoshot, int top_k, Shape shape) {
  if (top_k == 1) return twoshot ? kernel_of<true, 1>(shape) : kernel_of<false, 1>(shape);
  return twoshot ? kernel_of<true, 8>(shape) : kernel_of<false, 8>(shape);
}

}  // namespace

// rows [slots * K, H] and weights [slots, K], or rows [slots, H] without weights: this rank's tokens,
// the owned ones first. hidden and normalized are [T, H]. No residual, no post_eps and no normalized:
// hidden is the finalized rows of all ranks.
void gather(bool twoshot, TensorView rows, Optional<TensorView> weights, double routed_scale,
            Optional<TensorView> post_weight, Optional<double> post_eps,
            Optional<TensorView> residual, double x_scale, double r_scale,
            Optional<TensorView> next_weight, double next_eps, TensorView hidden,
            Optional<TensorView> normalized, TensorView buffers, int64_t rank, int64_t slot_rows,
            TensorView state, TensorView report, double deadline_s, int64_t share, bool pdl) {
  const int64_t tokens = hidden.size(0), hidden_size = hidden.size(1);
  if (tokens == 0) return;
  GatherParams p = {};
  p.boundary = boundary_of(residual, post_weight, post_eps, x_scale, r_scale, next_weight, next_eps,
                           hidden, normalized);
  p.exchange = exchange_of(
      buffers, rank, slot_rows, hidden_size, state, report, deadline_s,
      signature_of(twoshot ? kTwoshot : kOneshot, p.boundary.normalized != nullptr, tokens), share);
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
  }
  p.blocks_per_token = layout.cluster;
  launch(kernel, dl, {layout.blocks, layout.warps * kWarp, layout.cluster, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, moetail::gather);
