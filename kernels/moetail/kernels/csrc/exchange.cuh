// How ranks exchange rows: over peer memory, the payload being its own flag.
//
// Every rank has one symmetric buffer: two slots of rows, and a header for each slot and source. A
// word that holds kEmpty is empty. No payload word ever does: its halves are NaN with all bits set,
// and payload is sent as it comes from a rounding to BF16, whose only NaN is 0x7fff.
// Call n of a workspace, counted on the device so that a replayed graph counts too, uses slot n % 2:
//
//   1. announce: this rank's header of call n, n with the call's signature, goes to every peer.
//   2. send: 16-byte stores of payload into the peers' slots. No fence: every word tells by itself
//      whether it has arrived.
//   3. receive: poll the own slot until no word is empty, then empty it again. Each word is read by
//      the one thread that empties it.
//   4. meet: the kernel does not end before the headers of call n of all peers have arrived.
//
// Why two slots are enough. A rank sends in call n+2 after its call n+1 has ended; that needed every
// peer's header of call n+1 (4), which a peer sends after its call n has ended; and in that the
// peer emptied all it had been sent (3). So a slot is empty when it is written again, and what lies
// in it is never read as another call's. The header is needed for that: a rank may have nothing to
// send (fewer tokens than ranks). Sizes do not enter, so any sequence of them is right.
// tests/test_exchange_model.py runs all schedules of this, and of protocols without one of its parts.
//
// Replicas are bit-identical (OWN-3). Payload is exchanged after its rounding to BF16; its owner too
// goes on from what it sent. From there on all ranks evaluate the same functions over the same bits:
// a sum over a token is made by the same additions however tokens are divided, and one over ranks in
// the order of ranks. Whether a token is exchanged or not changes none of its bits either.
#pragma once

#include "stages.cuh"

namespace moetail {

constexpr int kMaxRanks = 8;
constexpr uint32_t kEmpty = 0xffffffffu;
constexpr uint32_t kNaN = 0x7fc07fc0u;  // where a rank did not arrive
// Of `calls`, one call's worth: the blocks of a grid add up to it.
constexpr int kCallShift = 16;

// On the rank's own device.
struct ExchangeState {
  unsigned long long calls;
  unsigned dead;  // set once, by the first thread that waited in vain
};

// In host memory that the device writes, once: the host may look without synchronizing.
struct Report {
  int64_t code;  // 0: all is well; 1: a rank did not arrive; 2: a rank made another call
  int64_t rank, call, signature, other_signature;
};

struct Exchange {
  char* buffer[kMaxRanks];  // the ranks' symmetric buffers, in this address space
  int64_t slot_bytes;
  ExchangeState* state;
  Report* report;
  int64_t deadline_ns;
  uint32_t signature;
  int rank, ranks;
  bool alone;  // no other rank is on this GPU
};

struct Call {
  uint32_t number;
  bool dead;
};

__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// `calls` is a multiple of 2^16 when a grid starts, and less than the next one until its last block
// has added its part: so every thread of the grid reads the same number, whenever it reads.
__device__ __forceinline__ Call begin_call(const Exchange& x) {
  unsigned long long calls;
  unsigned dead;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(calls) : "l"(&x.state->calls));
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(dead) : "l"(&x.state->dead));
  return {static_cast<uint32_t>(calls >> kCallShift), dead != 0};
}

static __device__ __noinline__ void mark_dead(const Exchange& x, Call call, int code, int rank,
                                       uint32_t other_signature) {
  if (atomicCAS(&x.state->dead, 0u, 1u) != 0u) return;
  volatile Report* report = x.report;
  report->rank = rank;
  report->call = call.number;
  report->signature = x.signature;
  report->other_signature = other_signature;
  __threadfence_system();
  report->code = code;
}

// A wait's patience. The clock is looked at seldom, and for the first time after a while.
struct Patience {
  unsigned spins = 0;
  uint64_t start = 0;

  // Whether to give up; marks the workspace if `rank` is late.
  __device__ __forceinline__ bool ends(const Exchange& x, Call call, int rank) {
    if (call.dead) return true;
    if (++spins % 256 != 0) return false;
    unsigned dead;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(dead) : "l"(&x.state->dead));
    if (dead) return true;
    const uint64_t now = globaltimer();
    if (start == 0) start = now;
    if (now - start < static_cast<uint64_t>(x.deadline_ns)) return false;
    mark_dead(x, call, 1, rank, 0);
    return true;
  }
};

// ---- Headers -----------------------------------------------------------------------------------

__device__ __forceinline__ char* header(const Exchange& x, Call call, int at, int of) {
  return x.buffer[at] + 2 * x.slot_bytes + ((call.number & 1) * kMaxRanks + of) * 8;
}

// By one block, first thing: a release, since it says that the calls before have ended.
__device__ __forceinline__ void announce(const Exchange& x, Call call) {
  const int peer = threadIdx.x;
  if (peer >= x.ranks || peer == x.rank) return;
  const uint64_t value = (uint64_t{call.number + 1} << 32) | x.signature;
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(header(x, call, peer, x.rank)),
               "l"(value)
               : "memory");
}

__device__ __forceinline__ void meet(const Exchange& x, Call call) {
  const int peer = threadIdx.x;
  if (peer >= x.ranks || peer == x.rank) return;
  const char* at = header(x, call, x.rank, peer);
  Patience patience;
  while (true) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    if (static_cast<uint32_t>(value >> 32) == call.number + 1) {
      const uint32_t other = static_cast<uint32_t>(value);
      if (other != x.signature) mark_dead(x, call, 2, peer, other);
      return;
    }
    if (patience.ends(x, call, peer)) return;
  }
}

// Once a block has sent what it has to send, and at the end at the latest. Where ranks share a GPU,
// not before nothing is waited for: the next grid's blocks could keep a peer's from starting.
__device__ __forceinline__ void let_next_grid_launch_early(const Exchange& x) {
  if (x.alone) let_next_grid_launch();
}

// Last thing of every block.
__device__ __forceinline__ void finish_call(const Exchange& x, Call call) {
  if (blockIdx.x == 0) meet(x, call);
  __syncthreads();
  let_next_grid_launch();
  if (threadIdx.x == 0) {
    const unsigned long long part =
        blockIdx.x == 0 ? (1ull << kCallShift) - (gridDim.x - 1) : 1ull;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&x.state->calls), "l"(part)
                 : "memory");
  }
}

// ---- Payload -----------------------------------------------------------------------------------

__device__ __forceinline__ bool any_empty(uint4 v) {
  return v.x == kEmpty || v.y == kEmpty || v.z == kEmpty || v.w == kEmpty;
}

__device__ __forceinline__ char* slot_of(const Exchange& x, Call call, int rank) {
  return x.buffer[rank] + (call.number & 1) * x.slot_bytes;
}

__device__ __forceinline__ void put(char* address, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 peek(const char* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// To all peers, each rank beginning with the one after it, so that no link is everybody's first.
__device__ __forceinline__ void send(const Exchange& x, Call call, int64_t offset, uint4 v) {
  for (int step = 1; step < x.ranks; ++step) {
    int peer = x.rank + step;
    if (peer >= x.ranks) peer -= x.ranks;
    put(slot_of(x, call, peer) + offset, v);
  }
}

// v is what a first look found.
__device__ __forceinline__ uint4 receive(const Exchange& x, Call call, int64_t offset, int source,
                                         uint4 v) {
  char* at = slot_of(x, call, x.rank) + offset;
  Patience patience;
  while (any_empty(v)) {
    if (patience.ends(x, call, source)) return make_uint4(kNaN, kNaN, kNaN, kNaN);
    v = peek(at);
  }
  put(at, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  return v;
}

__device__ __forceinline__ uint4 receive(const Exchange& x, Call call, int64_t offset,
                                         int source) {
  return receive(x, call, offset, source, peek(slot_of(x, call, x.rank) + offset));
}

// ---- What a thread does with its eight elements of a token -------------------------------------

// The place of a thread, and of its block among those of a token.
struct Place {
  int column;  // in the row; the thread's warp is column / 256
  int warp, warps, blocks;
  bool held;   // the last block of a token may be longer than the row
};

template <bool kCluster>
__device__ __forceinline__ Place place_of(int chunks, int blocks_per_token) {
  const int blocks = kCluster ? blocks_per_token : 1;
  const int block = kCluster ? blockIdx.x % blocks_per_token : 0;
  const int warps = blockDim.x / kWarp;
  const int warp = block * warps + threadIdx.x / kWarp;
  return {warp * kChunk + static_cast<int>(threadIdx.x % kWarp) * kVector, warp, blocks * warps,
          blocks, warp < chunks};
}

__device__ __forceinline__ Sums sums_of(TokenSum* places, const Place& place) {
  return {places, place.warp, place.warps, place.blocks};
}

// In registers, or to be loaded where they are used.
struct NormWeights {
  uint4 post, next;
};

__device__ __forceinline__ NormWeights load_weights(const Boundary& b, const Place& place) {
  return {load_once(b.post_weight + place.column, b.post_weight && place.held),
          load_once(b.next_weight + place.column, b.next_weight && place.held)};
}

__device__ __forceinline__ uint4 load_residual(const Boundary& b, const Place& place, int64_t row) {
  return load_once(b.residual + row + place.column, b.residual && place.held);
}

struct Outputs {
  uint4 hidden, normalized;
};

// Both outputs of one token, in registers. whole: every warp holds a part of the row.
template <Team kTeam>
__device__ __forceinline__ Outputs evaluate(const Boundary& b, const Place& place, uint4 value,
                                            uint4 residual, const NormWeights& weights, Sums& sums,
                                            bool load_late = false, bool whole = true) {
  auto weight_of_norm = [&](const bf16* weight, const uint4& loaded) {
    const bool wanted = load_late && weight && (whole || place.held);
    return wanted ? load_kept(weight + place.column) : loaded;
  };
  Outputs out = {};
  uint4 held[1] = {value};
  const uint4 added[1] = {residual};
  to_hidden<kTeam>(
      b, held, added, [&](int) { return weight_of_norm(b.post_weight, weights.post); }, sums);
  out.hidden = held[0];
  if (b.normalized) {
    to_normalized<kTeam>(
        b, held, [&](int) { return weight_of_norm(b.next_weight, weights.next); }, sums);
    out.normalized = held[0];
  }
  return out;
}

__device__ __forceinline__ void write(const Boundary& b, const Place& place, int64_t row,
                                      const Outputs& out) {
  if (!place.held) return;
  store(b.hidden + row + place.column, out.hidden);
  if (b.normalized) store(b.normalized + row + place.column, out.normalized);
}

// This rank's finalization of one token, whose first routes' rows are under way; further ones are
// loaded here.
template <int kRoutes>
__device__ __forceinline__ uint4 finalize_rows(const Experts& experts, const Place& place,
                                               const Rows<kRoutes>& rows, int64_t hidden_size,
                                               float routed_scale) {
  // Finalized rows, of one route and no weights, stay what they are, zeros' signs too.
  const float start = experts.weights ? 0.0f : -0.0f;
  float sum[1][kVector];
#pragma unroll
  for (float& element : sum[0]) element = start;
  add_rows(sum[0], experts, rows);
#pragma unroll 1
  for (int first = kRoutes; first < experts.top_k; first += kRoutes) {
    add_routes<kRoutes>(
        sum, experts, rows.route, first, hidden_size, [&](int) { return place.held; },
        [&](int) { return place.column; });
  }
  return round_scale(sum[0], routed_scale);
}

template <int kRoutes>
__device__ __forceinline__ uint4 finalize_token(const Experts& experts, const Place& place,
                                                int64_t token, int64_t hidden_size,
                                                float routed_scale) {
  return finalize_rows(experts, place,
                       load_rows<kRoutes>(experts, token, hidden_size, place.column, place.held),
                       hidden_size, routed_scale);
}

}  // namespace moetail
