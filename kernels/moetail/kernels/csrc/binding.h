// From tensors and options to kernel parameters and a launch. Arguments are checked before anything
// here is called: by the checks that the reference uses too, or by arguments.h.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "stages.cuh"

namespace moetail {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

template <typename T>
T* data_or_null(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? static_cast<T*>((*tensor).data_ptr()) : nullptr;
}

template <typename... T>
bool aligned(const T*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

inline Experts experts_of(TensorView rows, const Optional<TensorView>& weights,
                          const Optional<TensorView>& map) {
  Experts experts = {};
  experts.rows = static_cast<const bf16*>(rows.data_ptr());
  experts.map = data_or_null<const int32_t>(map);
  experts.top_k = 1;
  if (weights.has_value()) {
    const DLDataType dtype = (*weights).dtype();
    experts.weights = (*weights).data_ptr();
    experts.weight_type = dtype.bits == 32          ? WeightType::kFloat32
                          : dtype.code == kDLBfloat ? WeightType::kBFloat16
                                                    : WeightType::kFloat16;
    experts.top_k = static_cast<int>((*weights).size(1));
  }
  return experts;
}

inline Boundary boundary_of(const Optional<TensorView>& residual,
                            const Optional<TensorView>& post_weight,
                            const Optional<double>& post_eps, double x_scale, double r_scale,
                            const Optional<TensorView>& next_weight, double next_eps,
                            TensorView hidden, const Optional<TensorView>& normalized) {
  Boundary b = {};
  b.residual = data_or_null<const bf16>(residual);
  b.post_weight = data_or_null<const bf16>(post_weight);
  b.next_weight = data_or_null<const bf16>(next_weight);
  b.hidden = static_cast<bf16*>(hidden.data_ptr());
  b.normalized = data_or_null<bf16>(normalized);
  b.post_norm = post_eps.has_value();
  b.post_eps = b.post_norm ? static_cast<float>(*post_eps) : 0.0f;
  b.next_eps = static_cast<float>(next_eps);
  b.x_scale = static_cast<float>(x_scale);
  b.r_scale = static_cast<float>(r_scale);
  b.reciprocal_of_size = 1.0f / static_cast<float>(hidden.size(1));
  return b;
}

struct Device {
  int processors;   // SMs
  int capability;   // 90 for 9.0
};

// Read once a device: attributes cost a few microseconds.
inline Device device_of(DLDevice device) {
  constexpr int kMaxDevices = 64;
  static Device known[kMaxDevices] = {};
  TVM_FFI_ICHECK(device.device_id < kMaxDevices);
  Device& found = known[device.device_id];
  if (found.processors == 0) {
    int major, minor, processors;
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id));
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.device_id));
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id));
    found.capability = 10 * major + minor;
    found.processors = processors;
  }
  return found;
}

struct Grid {
  int64_t blocks;
  int threads;
  int cluster;  // blocks a cluster; 1: no cluster
  bool pdl;     // programmatic dependent launch, where the GPU has it
};

// On the current stream of `device`.
template <typename... Args>
void launch(void (*kernel)(Args...), DLDevice device, const Grid& grid, Args... arguments) {
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(grid.threads);
  config.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = grid.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (grid.pdl && device_of(device).capability >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // or the next caller is blamed for it
  TVM_FFI_CHECK_CUDA_ERROR(error);
}

// tail falls back on finalize for tensors that do not begin at a multiple of 16 bytes.
void finalize(TensorView rows, Optional<TensorView> weights, Optional<TensorView> map,
              Optional<TensorView> shared, TensorView output, double routed_scale, bool pdl);

void tail(TensorView x, Optional<TensorView> weights, double routed_scale,
          Optional<TensorView> post_weight, Optional<double> post_eps,
          Optional<TensorView> residual, double x_scale, double r_scale,
          Optional<TensorView> next_weight, double next_eps, TensorView hidden,
          Optional<TensorView> normalized, bool pdl);

void gather(bool twoshot, TensorView rows, Optional<TensorView> weights, double routed_scale,
            Optional<TensorView> post_weight, Optional<double> post_eps,
            Optional<TensorView> residual, double x_scale, double r_scale,
            Optional<TensorView> next_weight, double next_eps, TensorView hidden,
            Optional<TensorView> normalized, int64_t rank, double deadline_s,
            TensorView buffers, int64_t width, int64_t slot_rows, TensorView state,
            TensorView report, int64_t share, bool pdl);

void allreduce(TensorView rows, Optional<TensorView> weights, Optional<TensorView> map,
               Optional<TensorView> shared, double routed_scale, Optional<TensorView> post_weight,
               Optional<double> post_eps, Optional<TensorView> residual, double x_scale,
               double r_scale, Optional<TensorView> next_weight, double next_eps, TensorView hidden,
               Optional<TensorView> normalized, int64_t rank, double deadline_s,
               TensorView buffers, int64_t width, int64_t slot_rows, TensorView state,
               TensorView report, int64_t share, bool pdl);

}  // namespace moetail
