// All-reduce tail of operation 8 in one kernel: every rank finalizes its part of every token and
// sends it to all, adds up all ranks' parts in FP32 in the order of ranks, rounds once, and
// evaluates the boundary.
//
// A block sends all its tokens before it waits for one.
#include "exchange.h"

namespace moetail {
namespace {

struct AllReduceParams {
  Exchange exchange;
  Experts experts;
  const bf16* shared;  // [T, H] or nullptr
  Boundary boundary;
  float routed_scale;
  int64_t tokens;
  int chunks;  // H / 256
  int blocks_per_token;
  int watch;
};

// kSingle: a block has at most one token, whose own part stays in registers; otherwise it goes
// through the rank's own slot.
template <int kRoutes, bool kCluster, bool kSingle, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    allreduce_kernel(const __grid_constant__ AllReduceParams p) {
  constexpr Team kTeam = kCluster ? Team::kCluster : Team::kBlock;
  __shared__ TokenSum places[2];
  const Exchange& x = p.exchange;
  const Boundary& b = p.boundary;
  const Place place = place_of<kCluster>(p.chunks, p.blocks_per_token);
  const int64_t hidden_size = int64_t{p.chunks} * kChunk;
  const int64_t workers = int64_t{gridDim.x / place.blocks} - p.watch;
  const int64_t worker = int64_t{blockIdx.x / place.blocks} - p.watch;
  auto offset_of = [&](int64_t token, int source) {
    return ((token * x.ranks + source) * hidden_size + place.column) *
           static_cast<int64_t>(sizeof(bf16));
  };
  sums_init<kTeam>(sums_of(places, place));
  wait_for_previous_grid();
  const Call call = begin_call(x);
  if (blockIdx.x == 0) announce(x, call);

  uint4 value = make_uint4(0, 0, 0, 0);
  if (worker >= 0) {
    for (int64_t token = worker; token < p.tokens; token += workers) {
      const int64_t here = token * hidden_size + place.column;
      const uint4 shared = load_once(p.shared + here, p.shared && place.held);
      value = finalize_token<kRoutes>(p.experts, place, token, hidden_size, p.routed_scale);
      if (p.shared) value = map_rounded([](float s, float h) { return s + h; }, value, shared);
      if (place.held) {
        send(x, call, offset_of(token, x.rank), value);
        if constexpr (!kSingle) put(slot_of(x, call, x.rank) + offset_of(token, x.rank), value);
      }
      if constexpr (kSingle) break;
    }
  }
  let_next_grid_launch_early(x);
  if constexpr (kCluster) cluster_sums_ready();
  if (worker >= 0) {
    const NormWeights weights = load_weights(b, place);
    for (int64_t token = worker; token < p.tokens; token += workers) {
      const int64_t row = token * hidden_size;
      const uint4 residual = load_residual(b, place, row);
      const char* mine = slot_of(x, call, x.rank);
      // Ranks of a group are looked at before the first is waited for. A group is what a thread has
      // registers for.
      constexpr int kGroup = kCluster ? kMaxRanks : kMaxRanks / 2;
      float sum[kVector] = {};
#pragma unroll 1
      for (int first = 0; first < x.ranks && place.held; first += kGroup) {
        uint4 part[kGroup];
#pragma unroll
        for (int r = 0; r < kGroup; ++r) {
          const int source = first + r;
          if (source >= x.ranks) continue;
          part[r] = kSingle && source == x.rank ? value : peek(mine + offset_of(token, source));
        }
#pragma unroll
        for (int r = 0; r < kGroup; ++r) {
          const int source = first + r;
          if (source >= x.ranks) continue;
          if (!kSingle || source != x.rank) {
            part[r] = receive(x, call, offset_of(token, source), source, part[r]);
          }
          accumulate(sum, 1.0f, part[r]);
        }
      }
      __syncwarp();
      const uint4 total =
          make_uint4(round_pair(sum[0], sum[1]), round_pair(sum[2], sum[3]),
                     round_pair(sum[4], sum[5]), round_pair(sum[6], sum[7]));
      Sums sums = sums_of(places, place);
      write(b, place, row, evaluate<kTeam>(b, place, total, residual, weights, sums));
      if constexpr (kSingle) break;
      __syncthreads();  // before the places are used again
    }
  }
  finish_call(x, call);
}

using Kernel = void (*)(AllReduceParams);

template <int kRoutes>
Kernel kernel_of(int cluster, bool single) {
  if (cluster > 1) return allreduce_kernel<kRoutes, true, true, 512>;
  if (single) return allreduce_kernel<kRoutes, false, true, 1024>;
  return allreduce_kernel<kRoutes, false, false, 1024>;
}

}  // namespace

// rows with weights [T, K] and map [T, K], or finalized rows [T, H] without; shared, hidden and
// normalized [T, H].
void allreduce(TensorView rows, Optional<TensorView> weights, Optional<TensorView> map,
               Optional<TensorView> shared, double routed_scale, Optional<TensorView> post_weight,
               Optional<double> post_eps, Optional<TensorView> residual, double x_scale,
               double r_scale, Optional<TensorView> next_weight, double next_eps, TensorView hidden,
               Optional<TensorView> normalized, int64_t rank, double deadline_s,
               TensorView buffers, int64_t width, int64_t slot_rows, TensorView state,
               TensorView report, int64_t share, bool pdl) {
  const int64_t tokens = hidden.size(0), hidden_size = hidden.size(1);
  if (tokens == 0) return;
  AllReduceParams p = {};
  p.boundary = boundary_of(residual, post_weight, post_eps, x_scale, r_scale, next_weight, next_eps,
                           hidden, normalized);
  p.exchange = exchange_of(
      rank, deadline_s, buffers, width, slot_rows, state, report, share,
      signature_of(kAllReduce, p.boundary.normalized != nullptr, tokens));
  p.experts = experts_of(rows, weights, map);
  p.shared = data_or_null<const bf16>(shared);
  p.routed_scale = static_cast<float>(routed_scale);
  p.tokens = tokens;
  p.chunks = static_cast<int>(hidden_size / kChunk);
  TVM_FFI_ICHECK(width == hidden_size && tokens * p.exchange.ranks <= slot_rows);
  const DLDevice dl = hidden.device();
  const Device& device = device_of(dl);
  const int cluster = cluster_of(tokens, p.chunks, static_cast<int>(share), device);
  auto choose = [&](bool single) {
    return p.experts.top_k == 1 ? kernel_of<1>(cluster, single) : kernel_of<8>(cluster, single);
  };
  Kernel kernel = choose(true);
  Layout layout = layout_of(kernel, tokens, p.chunks, cluster, static_cast<int>(share), device);
  if (cluster == 1 && !layout.watch) {
    kernel = choose(false);
    layout = layout_of(kernel, tokens, p.chunks, cluster, static_cast<int>(share), device);
  }
  p.blocks_per_token = layout.cluster;
  p.watch = layout.watch;
  launch(kernel, dl, {layout.blocks, layout.warps * kWarp, layout.cluster, pdl}, p);
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(allreduce, moetail::allreduce);
