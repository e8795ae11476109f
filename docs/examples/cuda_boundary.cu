// `beam_norm_residual_norm` in CUDA: one block a token.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using bf16 = __nv_bfloat16;

constexpr int kThreads = 256;

struct Params {
  const bf16 *x, *residual, *post_weight, *next_weight;  // weights: null where there is none
  bf16 *hidden, *normalized;                             // normalized: null without a next norm
  int64_t size;
  float x_scale, r_scale, post_eps, next_eps;
  bool post, scaled;
};

// The inverse RMS of a row, eps inside the root, the mean over exactly `size` elements (ROUND-4).
__device__ float inverse_rms(const bf16* row, int64_t size, float eps) {
  __shared__ float partial[kThreads];
  float sum = 0.f;
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    const float value = __bfloat162float(row[i]);
    sum += value * value;
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  const float mean = partial[0] / static_cast<float>(size);
  __syncthreads();  // the next norm writes partial again
  return 1.f / sqrtf(mean + eps);
}

// RN(value * inv * weight): one rounding, after the affine multiply (ROUND-4).
__device__ bf16 normed(bf16 value, float inverse, const bf16* weight, int64_t i) {
  const float scaled = __bfloat162float(value) * inverse;
  return __float2bfloat16_rn(weight ? scaled * __bfloat162float(weight[i]) : scaled);
}

// __fmul_rn and __fadd_rn are never fused: each product is rounded by itself (ROUND-5).
__device__ float scale(bf16 value, float factor) {
  return __bfloat162float(__float2bfloat16_rn(__fmul_rn(__bfloat162float(value), factor)));
}

__global__ void boundary_kernel(Params p) {
  // 64 bits: rows times H passes 2^31 elements (RUN-6).
  const int64_t start = blockIdx.x * p.size;
  bf16* hidden = p.hidden + start;
  const float post = p.post ? inverse_rms(p.x + start, p.size, p.post_eps) : 1.f;
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads) {
    const bf16 x = p.x[start + i], residual = p.residual[start + i];
    const bf16 n = p.post ? normed(x, post, p.post_weight, i) : x;
    const float left = p.scaled ? scale(n, p.x_scale) : __bfloat162float(n);
    const float right = p.scaled ? scale(residual, p.r_scale) : __bfloat162float(residual);
    hidden[i] = __float2bfloat16_rn(__fadd_rn(left, right));
  }
  if (!p.normalized) return;
  __syncthreads();  // the block reads what its other threads wrote
  const float next = inverse_rms(hidden, p.size, p.next_eps);  // of the rounded hidden (ROUND-6)
  for (int64_t i = threadIdx.x; i < p.size; i += kThreads)
    p.normalized[start + i] = normed(hidden[i], next, p.next_weight, i);
}

static const bf16* data(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? static_cast<const bf16*>((*tensor).data_ptr()) : nullptr;
}

void boundary(TensorView x, TensorView residual, Optional<TensorView> post_weight,
              Optional<double> post_eps, Optional<TensorView> next_weight, double next_eps,
              Optional<double> x_scale, Optional<double> r_scale, TensorView hidden,
              Optional<TensorView> normalized) {
  Params p = {};
  p.x = static_cast<const bf16*>(x.data_ptr());
  p.residual = static_cast<const bf16*>(residual.data_ptr());
  p.post_weight = data(post_weight);
  p.next_weight = data(next_weight);
  p.hidden = static_cast<bf16*>(hidden.data_ptr());
  p.normalized = const_cast<bf16*>(data(normalized));
  p.size = x.size(1);
  p.post = post_eps.has_value();
  p.post_eps = p.post ? static_cast<float>(*post_eps) : 0.f;
  p.next_eps = static_cast<float>(next_eps);
  p.scaled = x_scale.has_value();
  p.x_scale = p.scaled ? static_cast<float>(*x_scale) : 1.f;
  p.r_scale = p.scaled ? static_cast<float>(*r_scale) : 1.f;
  const DLDevice device = x.device();
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  // The stream that torch works on (RUN-4).
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  boundary_kernel<<<static_cast<unsigned>(x.size(0)), kThreads, 0, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(boundary, boundary);
