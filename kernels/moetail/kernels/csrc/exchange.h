// From tensors to the parameters of an exchange, and how a grid of it is laid out.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "binding.h"
#include "exchange.cuh"

namespace moetail {

// buffers: int64 [W] on the CPU, addresses. state: int64 [2] on the device. report: int64 [5],
// pinned. rows: of `width` elements a slot.
inline Exchange exchange_of(int64_t rank, double deadline_s, TensorView buffers, int64_t width,
                            int64_t rows, TensorView state, TensorView report, int64_t share,
                            uint32_t signature) {
  Exchange x = {};
  x.ranks = static_cast<int>(buffers.size(0));
  TVM_FFI_ICHECK(x.ranks <= kMaxRanks);
  for (int r = 0; r < x.ranks; ++r) {
    x.buffer[r] = reinterpret_cast<char*>(static_cast<const int64_t*>(buffers.data_ptr())[r]);
  }
  x.rank = static_cast<int>(rank);
  x.slot_bytes = rows * width * static_cast<int64_t>(sizeof(bf16));
  x.state = static_cast<ExchangeState*>(state.data_ptr());
  x.report = static_cast<Report*>(report.data_ptr());
  x.deadline_ns = static_cast<int64_t>(deadline_s * 1e9);
  x.signature = signature;
  x.alone = share == 1;
  return x;
}

enum CallKind : uint32_t { kOneshot, kTwoshot, kAllReduce };

// What all ranks of a call must agree on: the operation, whether there is a second output, T.
inline uint32_t signature_of(CallKind kind, bool normalized, int64_t tokens) {
  return (static_cast<uint32_t>(kind) << 30) | (static_cast<uint32_t>(normalized) << 29) |
         (static_cast<uint32_t>(tokens) & 0x1fffffffu);
}

// Where ranks share a GPU, one's blocks may wait on every SM for another, whose kernels must find room
// beside them. An SM that is busy does not change how its memory is divided, and a kernel of small
// blocks, 32 an SM and 1 KB for each, would wait for one that is idle. So waiting kernels ask for that
// much: 14% of an SM's 228 KB.
template <typename Kernel>
void leave_room(Kernel kernel) {
  static std::mutex mutex;
  static std::set<const void*> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.insert(reinterpret_cast<const void*>(kernel)).second) {
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 14));
  }
}

template <typename Kernel>
int blocks_an_sm(Kernel kernel, int threads) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{reinterpret_cast<const void*>(kernel), threads}];
  if (blocks == 0) {
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0));
  }
  return blocks;
}

// A grid is never larger than what is resident at once, so that no block that waits keeps out one
// that is waited for. `share` ranks are on one GPU: each takes its part of it.
struct Layout {
  int cluster;   // blocks a token
  int warps;     // a block
  int64_t blocks;
  bool watch;    // block 0 (or cluster 0) has no token: it meets the peers
};

// Few tokens: eight blocks read a token's rows eight times as fast, two twice, as in tail.cu. Of
// eight, four and two at T = 31 the gather takes 4.23, 4.34 and 4.82 us on two H200s; at 48 four take
// 4.92 and two 5.29, at 64 6.02 and 5.45.
inline int cluster_of(int64_t tokens, int chunks, int share, const Device& device) {
  const int64_t all = (tokens + 1) * share;
  if (device.capability < 90 || chunks == 1) return 1;
  if (all * 4 <= device.processors) return 8;
  if (all * 16 <= 7 * device.processors && chunks > 20) return 4;
  if (all * 2 <= device.processors) return 2;
  return 1;
}

template <typename Kernel>
Layout layout_of(Kernel kernel, int64_t tokens, int chunks, int cluster, int share,
                 const Device& device) {
  if (share > 1) leave_room(kernel);
  Layout layout = {};
  layout.warps = (chunks + cluster - 1) / cluster;
  layout.cluster = cluster > 1 ? (chunks + layout.warps - 1) / layout.warps : 1;
  if (cluster > 1) {
    layout.watch = true;
    layout.blocks = (tokens + 1) * layout.cluster;
    return layout;
  }
  const int64_t resident =
      std::max<int64_t>(1, int64_t{blocks_an_sm(kernel, layout.warps * kWarp)} *
                               device.processors / share);
  layout.watch = tokens < resident;
  layout.blocks = std::min(resident, tokens + 1);
  return layout;
}

}  // namespace moetail
