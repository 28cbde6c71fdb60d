// The words of CUDA that copies.cu uses, as plain C++: a launch is a loop over blocks and threads, in an order shuffled
// anew each time, so that code in which threads wait for each other, or write over each other, gives other bytes.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct Index {
    unsigned int x;
};
static Index blockIdx, threadIdx, gridDim;

typedef int cudaError_t;
typedef void *cudaStream_t;
static const cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1;
static int refuse_at = 0, refuse_with = 0;  // the n-th call of the runtime from now answers with this
extern "C" void host_refuse(int call, int code) { refuse_at = call, refuse_with = code; }
static cudaError_t answer() { return refuse_at && --refuse_at == 0 ? refuse_with : cudaSuccess; }
static cudaError_t cudaSetDevice(int) { return answer(); }
static cudaError_t cudaGetLastError() { return answer(); }
static const char *cudaGetErrorString(cudaError_t code) { return code == 1 ? "invalid argument" : "unknown error"; }
static cudaError_t cudaHostGetDevicePointer(void **seen, void *host, unsigned) { return *seen = host, cudaSuccess; }

static unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    const unsigned long long before = *at;
    return *at = before + value, before;
}
static unsigned int atomicMax(unsigned int *at, unsigned int value) {
    const unsigned int before = *at;
    return *at = before > value ? before : value, before;
}

static std::vector<unsigned> shuffled(unsigned count) {
    static std::mt19937 random(1);
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), random);
    return order;
}

#define LAUNCH(kernel, blocks, stream, ...)                                   \
    do {                                                                      \
        (void)(stream);                                                       \
        gridDim.x = (blocks);                                                 \
        for (unsigned block : shuffled(gridDim.x))                            \
            for (unsigned thread : shuffled(THREADS)) {                       \
                blockIdx.x = block;                                           \
                threadIdx.x = thread;                                         \
                kernel(__VA_ARGS__);                                          \
            }                                                                 \
    } while (0)
