// Whether an operation takes its arguments: the conditions of moetail.spec.checks without their words,
// looked at once and cheaply. A "no" is not a refusal yet: who hears it goes to those checks, which
// say what is wrong, or that nothing is. So these may be stricter than the checks, and never laxer.
#pragma once

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <cmath>
#include <cstdint>

namespace moetail {

using tvm::ffi::AnyView;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int64_t kMaxTopK = 32, kMinHidden = 256, kMaxHidden = 8192, kHiddenMultiple = 256;

// None, where a tensor must be, is none of these.
using MaybeTensor = Optional<TensorView>;

inline bool has_type(const TensorView& tensor, uint8_t code, uint8_t bits) {
  const DLDataType type = tensor.dtype();
  return type.code == code && type.bits == bits && type.lanes == 1;
}

inline bool is_bf16(const TensorView& tensor) { return has_type(tensor, kDLBfloat, 16); }
inline bool is_fp32(const TensorView& tensor) { return has_type(tensor, kDLFloat, 32); }
inline bool is_int32(const TensorView& tensor) { return has_type(tensor, kDLInt, 32); }
inline bool is_weight(const TensorView& tensor) {
  return is_fp32(tensor) || is_bf16(tensor) || has_type(tensor, kDLFloat, 16);
}

// A contiguous tensor of that type and rank, in memory of that device.
inline bool is_packed(const MaybeTensor& tensor, bool (*type)(const TensorView&), int rank,
                      DLDevice device) {
  if (!tensor.has_value()) return false;
  const TensorView& t = *tensor;
  return t.device().device_type == device.device_type && t.device().device_id == device.device_id &&
         type(t) && t.ndim() == rank && t.IsContiguous() &&
         (t.data_ptr() != nullptr || t.numel() == 0);
}

// An int or a float, and no bool.
inline bool is_number(const AnyView& value) {
  const int32_t type = value.type_index();
  return type == tvm::ffi::TypeIndex::kTVMFFIFloat || type == tvm::ffi::TypeIndex::kTVMFFIInt;
}

inline bool is_none(const AnyView& value) {
  return value.type_index() == tvm::ffi::TypeIndex::kTVMFFINone;
}

// Of a number, or of None.
inline Optional<double> number_of(const AnyView& value) {
  if (is_none(value)) return Optional<double>();
  return value.cast<double>();
}

// A norm's weight and eps; no eps: no norm.
struct NormArguments {
  const MaybeTensor& weight;
  const AnyView& eps;

  bool there() const { return !is_none(eps); }

  bool fit(int64_t hidden_size, DLDevice device) const {
    if (!is_number(eps)) return false;
    const double value = eps.cast<double>();
    return std::isfinite(value) && value >= 0.0 &&
           (!weight.has_value() ||
            (is_packed(weight, is_bf16, 1, device) && (*weight).size(0) == hidden_size));
  }

  bool fit_as_post(int64_t hidden_size, DLDevice device) const {
    return there() ? fit(hidden_size, device) : !weight.has_value();
  }

  // Whether there is a next norm is said by its eps alone.
  bool fit_as_next(int64_t hidden_size, DLDevice device) const {
    return !there() || fit(hidden_size, device);
  }
};

// What every boundary takes beside x.
struct TailArguments {
  NormArguments post, next;
  const AnyView& x_scale;
  const AnyView& r_scale;

  bool fit(int64_t hidden_size, DLDevice device) const {
    return post.fit_as_post(hidden_size, device) && next.fit_as_next(hidden_size, device) &&
           is_number(x_scale) && is_number(r_scale);
  }
};

inline bool fits_hidden(int64_t hidden_size) {
  return hidden_size >= kMinHidden && hidden_size <= kMaxHidden &&
         hidden_size % kHiddenMultiple == 0;
}

inline bool is_disjoint(const TensorView& a, const TensorView& b) {
  auto end = [](const TensorView& t) {
    return static_cast<const char*>(t.data_ptr()) + t.numel() * (t.dtype().bits / 8);
  };
  return a.data_ptr() >= end(b) || b.data_ptr() >= end(a);
}

inline bool finalize_fits(const MaybeTensor& rows, const MaybeTensor& weights,
                          const MaybeTensor& output, const AnyView& routed_scale,
                          const NormArguments& post) {
  if (!output.has_value()) return false;
  const DLDevice device = (*output).device();
  if (!is_packed(rows, is_bf16, 3, device) || !is_packed(weights, is_fp32, 2, device) ||
      !is_packed(output, is_bf16, 2, device)) {
    return false;
  }
  const int64_t live = (*output).size(0), top_k = (*rows).size(1), hidden_size = (*rows).size(2);
  return top_k >= 1 && top_k <= kMaxTopK && fits_hidden(hidden_size) &&
         (*output).size(1) == hidden_size && live <= (*rows).size(0) &&
         (*weights).size(1) == top_k && live <= (*weights).size(0) && is_number(routed_scale) &&
         post.fit_as_post(hidden_size, device) && is_disjoint(*output, *rows) &&
         is_disjoint(*output, *weights) &&
         (!post.weight.has_value() || is_disjoint(*output, *post.weight));
}

inline bool boundary_fits(const MaybeTensor& x, const MaybeTensor& residual,
                          const TailArguments& tail) {
  if (!x.has_value()) return false;
  const DLDevice device = (*x).device();
  return is_packed(x, is_bf16, 2, device) && is_packed(residual, is_bf16, 2, device) &&
         (*x).size(0) == (*residual).size(0) && (*x).size(1) == (*residual).size(1) &&
         (*x).size(1) >= 1 && tail.fit((*x).size(1), device);
}

// Rows that view as [capacity, K, H], with weights and a map for `live` tokens at least.
inline bool slots_fit(const MaybeTensor& rows, const MaybeTensor& weights, const MaybeTensor& map,
                      int64_t live, DLDevice device) {
  if (!is_packed(rows, is_bf16, 2, device) || !is_packed(weights, is_fp32, 2, device) ||
      !is_packed(map, is_int32, 2, device)) {
    return false;
  }
  const int64_t top_k = (*weights).size(1);
  return top_k >= 1 && top_k <= kMaxTopK && fits_hidden((*rows).size(1)) &&
         (*rows).size(0) % top_k == 0 && (*map).size(1) == top_k &&
         live <= (*rows).size(0) / top_k && live <= (*weights).size(0) && live <= (*map).size(0);
}

inline bool fused_fits(const MaybeTensor& rows, const MaybeTensor& weights, const MaybeTensor& map,
                       const MaybeTensor& residual, const TailArguments& tail,
                       const AnyView& routed_scale) {
  if (!residual.has_value()) return false;
  const DLDevice device = (*residual).device();
  return is_packed(residual, is_bf16, 2, device) &&
         slots_fit(rows, weights, map, (*residual).size(0), device) &&
         (*residual).size(1) == (*rows).size(1) && tail.fit((*residual).size(1), device) &&
         is_number(routed_scale);
}

// rows with weights and a map, or finalized rows without either; shared as in MoEOutput.
inline bool output_fits(const MaybeTensor& rows, const MaybeTensor& weights, const MaybeTensor& map,
                        const MaybeTensor& shared, const AnyView& factor, bool route_major) {
  if (!rows.has_value()) return false;
  const DLDevice device = (*rows).device();
  if (!is_packed(rows, is_bf16, 2, device) || !is_number(factor)) return false;
  int64_t tokens = (*rows).size(0);
  if (weights.has_value() || map.has_value()) {
    if (!is_packed(weights, is_weight, 2, device) || !is_packed(map, is_int32, 2, device)) {
      return false;
    }
    tokens = (*weights).size(0);
    if ((*map).size(0) != tokens || (*map).size(1) != (*weights).size(1) ||
        (*map).size(1) < 1 || (route_major && (*rows).size(0) != (*weights).numel())) {
      return false;
    }
  }
  return (*rows).size(1) >= 1 &&
         (!shared.has_value() ||
          (is_packed(shared, is_bf16, 2, device) && (*shared).size(0) == tokens &&
           (*shared).size(1) == (*rows).size(1)));
}

// What a workspace was made for.
struct WorkspaceArguments {
  int64_t world_size, hidden_size, max_tokens;

  bool fit(int64_t tokens, int64_t width) const {
    return world_size >= 1 && hidden_size == width && tokens <= max_tokens;
  }
};

inline bool gather_fits(const MaybeTensor& rows, const MaybeTensor& weights, const MaybeTensor& map,
                        const MaybeTensor& residual, const TailArguments& tail,
                        const AnyView& routed_scale, const WorkspaceArguments& workspace) {
  if (!residual.has_value()) return false;
  const DLDevice device = (*residual).device();
  if (!is_packed(residual, is_bf16, 2, device)) return false;
  const int64_t tokens = (*residual).size(0), hidden_size = (*residual).size(1);
  return workspace.fit(tokens, hidden_size) &&
         slots_fit(rows, weights, map, (tokens + workspace.world_size - 1) / workspace.world_size,
                   device) &&
         (*rows).size(1) == hidden_size && tail.fit(hidden_size, device) && is_number(routed_scale);
}

inline bool allreduce_fits(const MaybeTensor& rows, const MaybeTensor& weights,
                           const MaybeTensor& map, const MaybeTensor& shared, const AnyView& factor,
                           bool route_major, const MaybeTensor& residual, const TailArguments& tail,
                           const WorkspaceArguments& workspace) {
  if (!output_fits(rows, weights, map, shared, factor, route_major)) return false;
  const DLDevice device = (*rows).device();
  const int64_t tokens = (*(weights.has_value() ? weights : rows)).size(0);
  const int64_t hidden_size = (*rows).size(1);
  return is_packed(residual, is_bf16, 2, device) && (*residual).size(0) == tokens &&
         (*residual).size(1) == hidden_size && workspace.fit(tokens, hidden_size) &&
         tail.fit(hidden_size, device);
}

}  // namespace moetail
