// How a function of this folder is compiled: for a GPU's thread, or into its caller on the CPU. Headers of this folder
// are shared by the kernels of resonator networks and by those of one's own processes. They include nothing but each
// other, since CUDA's sources are compiled at run time, where no header is found: the host puts their texts together.
#pragma once

#ifdef __CUDACC__
#define COMMON_MEMBER __device__ __forceinline__
#else
#define COMMON_MEMBER inline __attribute__((always_inline))
#endif
#define COMMON_INLINE static COMMON_MEMBER
