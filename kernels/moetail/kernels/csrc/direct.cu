// Calls from eager code: the arguments are looked at and the kernel is launched, at the cost of one
// call. False: nothing has happened, and moetail.spec.checks say what is wrong, or the operator does
// what is done seldom. Outputs are new tensors of the right shape, but for finalize's.
#include "arguments.h"
#include "binding.h"

namespace moetail {
namespace {

// None where the norm is not there: a weight may be given all the same.
MaybeTensor weight_of(const NormArguments& norm) {
  return norm.there() ? norm.weight : MaybeTensor();
}

double next_eps_of(const TailArguments& tail) {
  return tail.next.there() ? tail.next.eps.cast<double>() : 0.0;
}

bool on_gpu(const TensorView& tensor) { return tensor.device().device_type == kDLCUDA; }

bool is_aligned(const MaybeTensor& tensor) { return aligned(data_or_null<const void>(tensor)); }

// What an exchange's kernel takes: vectors, one by one, from multiples of 16 bytes, and no report of
// a lost rank.
bool is_ready(const TensorView& report, const MaybeTensor& rows, const MaybeTensor& shared,
              const MaybeTensor& residual, const TailArguments& tail) {
  return *static_cast<volatile const int64_t*>(report.data_ptr()) == 0 && is_aligned(rows) &&
         is_aligned(shared) && is_aligned(residual) && is_aligned(weight_of(tail.post)) &&
         is_aligned(weight_of(tail.next));
}

}  // namespace

bool try_finalize(MaybeTensor rows, MaybeTensor weights, MaybeTensor output, AnyView routed_scale,
                  MaybeTensor post_weight, AnyView post_eps) {
  const NormArguments post{post_weight, post_eps};
  if (!finalize_fits(rows, weights, output, routed_scale, post)) return false;
  if (!on_gpu(*output) || (*output).size(0) == 0) return false;
  const double scale = routed_scale.cast<double>();
  if (post.there()) {
    tail(*rows, weights, scale, post_weight, number_of(post_eps), MaybeTensor(), 1.0, 1.0,
         MaybeTensor(), 0.0, *output, MaybeTensor(), true);
  } else {
    finalize(*rows, weights, MaybeTensor(), MaybeTensor(), *output, scale, true);
  }
  return true;
}

bool try_boundary(MaybeTensor x, MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps,
                  MaybeTensor next_weight, AnyView next_eps, AnyView x_scale, AnyView r_scale,
                  TensorView hidden, MaybeTensor normalized) {
  const TailArguments rest{{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale};
  if (!boundary_fits(x, residual, rest)) return false;
  if (!on_gpu(hidden) || hidden.size(0) == 0) return false;
  tail(*x, MaybeTensor(), 1.0, post_weight, number_of(post_eps), residual, x_scale.cast<double>(),
       r_scale.cast<double>(), weight_of(rest.next), next_eps_of(rest), hidden, normalized, true);
  return true;
}

bool try_fused(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, AnyView routed_scale,
               MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps,
               MaybeTensor next_weight, AnyView next_eps, AnyView x_scale, AnyView r_scale,
               TensorView hidden, MaybeTensor normalized) {
  const TailArguments rest{{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale};
  if (!fused_fits(rows, weights, map, residual, rest, routed_scale)) return false;
  if (!on_gpu(hidden) || hidden.size(0) == 0) return false;
  tail(*rows, weights, routed_scale.cast<double>(), post_weight, number_of(post_eps), residual,
       x_scale.cast<double>(), r_scale.cast<double>(), weight_of(rest.next), next_eps_of(rest),
       hidden, normalized, true);
  return true;
}

bool try_output(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, MaybeTensor shared,
                AnyView factor, bool route_major, TensorView output) {
  if (!output_fits(rows, weights, map, shared, factor, route_major)) return false;
  if (!on_gpu(output) || output.size(0) == 0) return false;
  finalize(*rows, weights, map, shared, output, factor.cast<double>(), true);
  return true;
}

bool try_gather(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, AnyView routed_scale,
                bool twoshot, MaybeTensor residual, MaybeTensor post_weight, AnyView post_eps,
                MaybeTensor next_weight, AnyView next_eps, AnyView x_scale, AnyView r_scale,
                TensorView hidden, MaybeTensor normalized, int64_t world_size, int64_t hidden_size,
                int64_t max_tokens, int64_t rank, double deadline_s, TensorView buffers,
                int64_t width, int64_t slot_rows, TensorView state, TensorView report,
                int64_t share) {
  const TailArguments rest{{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale};
  if (!gather_fits(rows, weights, map, residual, rest, routed_scale,
                   {world_size, hidden_size, max_tokens})) {
    return false;
  }
  if (!on_gpu(hidden) || hidden.device().device_id != state.device().device_id ||
      hidden.size(0) == 0 || width != hidden_size ||
      !is_ready(report, rows, MaybeTensor(), residual, rest)) {
    return false;
  }
  gather(twoshot, *rows, weights, routed_scale.cast<double>(), post_weight, number_of(post_eps),
         residual, x_scale.cast<double>(), r_scale.cast<double>(), weight_of(rest.next),
         next_eps_of(rest), hidden, normalized, rank, deadline_s, buffers, width, slot_rows, state,
         report, share, true);
  return true;
}

bool try_allreduce(MaybeTensor rows, MaybeTensor weights, MaybeTensor map, MaybeTensor shared,
                   AnyView factor, bool route_major, MaybeTensor residual, MaybeTensor post_weight,
                   AnyView post_eps, MaybeTensor next_weight, AnyView next_eps, AnyView x_scale,
                   AnyView r_scale, TensorView hidden, MaybeTensor normalized, int64_t world_size,
                   int64_t hidden_size, int64_t max_tokens, int64_t rank, double deadline_s,
                   TensorView buffers, int64_t width, int64_t slot_rows, TensorView state,
                   TensorView report, int64_t share) {
  const TailArguments rest{{post_weight, post_eps}, {next_weight, next_eps}, x_scale, r_scale};
  if (!allreduce_fits(rows, weights, map, shared, factor, route_major, residual, rest,
                      {world_size, hidden_size, max_tokens})) {
    return false;
  }
  // Other widths, more routes and more rows than a slot holds take several steps.
  if (!on_gpu(hidden) || hidden.device().device_id != state.device().device_id ||
      hidden.size(0) == 0 || width != hidden_size || hidden.size(0) * world_size > slot_rows ||
      (weights.has_value() && (*weights).size(1) > kMaxTopK) ||
      !is_ready(report, rows, shared, residual, rest)) {
    return false;
  }
  allreduce(*rows, weights, map, shared, factor.cast<double>(), post_weight, number_of(post_eps),
            residual, x_scale.cast<double>(), r_scale.cast<double>(), weight_of(rest.next),
            next_eps_of(rest), hidden, normalized, rank, deadline_s, buffers, width, slot_rows,
            state, report, share, true);
  return true;
}

}  // namespace moetail

TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_finalize, moetail::try_finalize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_boundary, moetail::try_boundary);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_fused, moetail::try_fused);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_output, moetail::try_output);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_gather, moetail::try_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(try_allreduce, moetail::try_allreduce);
