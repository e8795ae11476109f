// What the memory gives: kernels that only stream, with the tail's numbers of reads and writes, and
// one that does nothing. They set the floors of the benchmark. Launched as the tail's kernels are,
// with programmatic dependent launch, so that they have what those have.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/function.h>

#include <cstdint>

namespace {

using tvm::ffi::TensorView;

cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

__global__ void empty_kernel() {}

// Every thread reads kReads vectors of 16 bytes, kept apart by `stride`, and writes kWrites.
template <int kReads, int kWrites>
__global__ void __launch_bounds__(256, 1)
    stream_kernel(const uint4* source, uint4* destination, int64_t stride) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  uint4 data[kReads];
#pragma unroll
  for (int r = 0; r < kReads; ++r) data[r] = source[r * stride + i];
  uint4 mix = data[0];
#pragma unroll
  for (int r = 1; r < kReads; ++r) {
    mix.x ^= data[r].x, mix.y ^= data[r].y, mix.z ^= data[r].z, mix.w ^= data[r].w;
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if constexpr (kWrites == 0) {
    // Never true for the benchmark's data, and the compiler cannot know.
    if (mix.x == 0x12345678u && mix.y == 0x9abcdef0u && mix.z == 0x0fedcba9u) destination[0] = mix;
  }
#pragma unroll
  for (int w = 0; w < kWrites; ++w) destination[w * stride + i] = mix;
}

void empty(TensorView any) {
  empty_kernel<<<1, 32, 0, current_stream(any.device())>>>();
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// source: reads * n vectors, destination: max(writes, 1) * n vectors; n a multiple of 256.
void stream(TensorView source, TensorView destination, int64_t n, int reads, int writes) {
  void (*kernel)(const uint4*, uint4*, int64_t) =
      reads == 8 && writes == 0   ? stream_kernel<8, 0>
      : reads == 1 && writes == 1 ? stream_kernel<1, 1>
      : reads == 8 && writes == 1 ? stream_kernel<8, 1>
      : reads == 9 && writes == 2 ? stream_kernel<9, 2>
      : reads == 2 && writes == 2 ? stream_kernel<2, 2>
                                  : nullptr;
  TVM_FFI_ICHECK(kernel != nullptr) << "no stream kernel of that shape";
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(n / 256));
  config.blockDim = dim3(256);
  config.stream = current_stream(source.device());
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernelEx(
      &config, kernel, static_cast<const uint4*>(source.data_ptr()),
      static_cast<uint4*>(destination.data_ptr()), n));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(empty, empty);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream, stream);
