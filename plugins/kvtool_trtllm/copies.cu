// Device copies of KV blocks: gather and scatter of pages, checksums, and packing to 8 bits, behind a C interface.
//
// Every kernel is a loop over tasks, without barriers, shuffles or shared memory: a thread needs no other thread, and any
// order of threads gives the same bytes. So the same source compiles as plain C++ (KVTOOL_HOST, tests/plugins/host.h),
// where the arithmetic is proven on a CPU, threads in shuffled order; what is left to a GPU is the launch.
//
// A task is one chunk of one run of bytes; blocks of threads take tasks in turn, so that the caller decides by their
// number how much of the GPU a copy may take. Nothing here checks pages: copies.py has, before the launch.

#ifdef KVTOOL_HOST
#include "host.h"
#else
#include <cuda_runtime.h>
#define LAUNCH(kernel, blocks, stream, ...) kernel<<<(blocks), THREADS, 0, (stream)>>>(__VA_ARGS__)
#endif

typedef unsigned char byte;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static const int THREADS = 256;
static const int UNROLL = 4;                        // loads in flight in each thread
static const i64 COPY_CHUNK = 16 * THREADS * UNROLL;  // bytes
static const i64 SUM_CHUNK = 8 * THREADS * 64;        // bytes; one atomic a thread and chunk

// One run of a packed block, as copies.py lays it out: four 64-bit words.
struct Piece {
    byte *memory;  // row 0
    i64 stride;    // bytes from row to row
    i64 size;      // bytes of a row that belong to the block
    i64 at;        // where they lie in a packed block
};

// ---- copies -------------------------------------------------------------------------------------------------------

template <typename Word>
static __device__ void copy_words(const byte *__restrict__ from, byte *__restrict__ to, i64 count) {
    const Word *source = reinterpret_cast<const Word *>(from);
    Word *target = reinterpret_cast<Word *>(to);
    for (i64 first = threadIdx.x; first < count; first += (i64)THREADS * UNROLL) {
        Word held[UNROLL];
#pragma unroll
        for (int step = 0; step < UNROLL; step++) {
            const i64 at = first + (i64)step * THREADS;
            if (at < count) held[step] = from ? source[at] : Word();
        }
#pragma unroll
        for (int step = 0; step < UNROLL; step++) {
            const i64 at = first + (i64)step * THREADS;
            if (at < count) target[at] = held[step];
        }
    }
}

// `size` bytes; zeros where `from` is null. Words as wide as both sides' alignment has in common; what stands before the
// first whole word and after the last goes byte by byte.
static __device__ void copy_bytes(const byte *__restrict__ from, byte *__restrict__ to, i64 size) {
    const u64 apart = from ? (u64)from ^ (u64)to : 0;
    const int width = (apart & 15) == 0 ? 16 : (apart & 7) == 0 ? 8 : (apart & 3) == 0 ? 4 : 1;
    i64 head = (i64)((width - ((u64)to & (u64)(width - 1))) & (u64)(width - 1));
    if (head > size) head = size;
    const i64 words = (size - head) / width;
    const i64 behind = head + words * width;
    const byte *body = from ? from + head : nullptr;
    switch (width) {
        case 16: copy_words<uint4>(body, to + head, words); break;
        case 8: copy_words<u64>(body, to + head, words); break;
        case 4: copy_words<u32>(body, to + head, words); break;
        default: copy_words<byte>(body, to + head, words); break;
    }
    const i64 edge = head + size - behind;  // under 2 * width: one a thread
    if ((i64)threadIdx.x < edge) {
        const i64 at = (i64)threadIdx.x < head ? (i64)threadIdx.x : behind + (i64)threadIdx.x - head;
        to[at] = from ? from[at] : (byte)0;
    }
}

template <bool GATHER>
static __global__ void copy_pages(const Piece *__restrict__ pieces, i64 piece_count, i64 chunks,
                                  const i64 *__restrict__ pages, i64 blocks, byte *packed, i64 packed_stride) {
    const i64 tasks = blocks * piece_count * chunks;
    for (i64 task = blockIdx.x; task < tasks; task += gridDim.x) {
        const i64 offset = task % chunks * COPY_CHUNK;
        const Piece piece = pieces[task / chunks % piece_count];
        const i64 block = task / chunks / piece_count;
        const i64 page = pages[block];
        if (offset >= piece.size || (!GATHER && page < 0)) continue;
        const i64 size = piece.size - offset < COPY_CHUNK ? piece.size - offset : COPY_CHUNK;
        byte *there = packed + block * packed_stride + piece.at + offset;
        byte *here = page < 0 ? nullptr : piece.memory + page * piece.stride + offset;
        if (GATHER) copy_bytes(here, there, size);
        else copy_bytes(there, here, size);
    }
}

// ---- checksums ----------------------------------------------------------------------------------------------------

static __device__ u64 mix(u64 x) {  // splitmix64's finaliser: a bijection in which each input bit reaches all others
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static __device__ u64 word_at(const byte *row, i64 at, i64 size) {  // little-endian, zeros behind the end
    if (at + 8 <= size && ((u64)row & 7) == 0) return *reinterpret_cast<const u64 *>(row + at);
    u64 word = 0;
    for (int index = 0; index < 8 && at + index < size; index++) word |= (u64)row[at + index] << (8 * index);
    return word;
}

// sums[block] += mix(word ^ mix(seed + (index + 1) * golden)) over the words, += mix(size ^ mix(seed)).
static __global__ void sum_blocks(const byte *rows, i64 stride, i64 size, i64 blocks, u64 seed, u64 *sums) {
    const i64 chunks = size / SUM_CHUNK + 1;
    for (i64 task = blockIdx.x; task < blocks * chunks; task += gridDim.x) {
        const i64 block = task / chunks, start = task % chunks * SUM_CHUNK;
        const byte *row = rows + block * stride;
        u64 sum = start == 0 && threadIdx.x == 0 ? mix((u64)size ^ mix(seed)) : 0;
        const i64 end = start + SUM_CHUNK < size ? start + SUM_CHUNK : size;
        for (i64 at = start + 8 * (i64)threadIdx.x; at < end; at += 8 * THREADS) {
            sum += mix(word_at(row, at, size) ^ mix(seed + (u64)(at / 8 + 1) * 0x9e3779b97f4a7c15ull));
        }
        if (sum) atomicAdd(sums + block, sum);
    }
}

// ---- numbers ------------------------------------------------------------------------------------------------------

static __device__ float from_bits(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static __device__ u32 to_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static __device__ bool is_number(u32 bits) { return (bits & 0x7f800000u) != 0x7f800000u; }

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <int KIND> static __device__ float load_number(const byte *row, i64 index) {
    if (KIND == FLOAT32) return reinterpret_cast<const float *>(row)[index];
    const u32 raw = reinterpret_cast<const unsigned short *>(row)[index];
    if (KIND == BFLOAT16) return from_bits(raw << 16);
    const u32 sign = (raw & 0x8000u) << 16, rest = raw & 0x7fffu;
    if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest < 0x400u) return from_bits(sign | to_bits((float)rest * 5.9604644775390625e-8f));  // 2^-24
    return from_bits(sign | ((rest << 13) + (112u << 23)));
}

static __device__ u32 rounded(u32 bits, int dropped) {  // half to even
    return (bits + ((1u << (dropped - 1)) - 1) + (bits >> dropped & 1)) >> dropped;
}

template <int KIND> static __device__ void store_number(byte *row, i64 index, float value) {
    if (KIND == FLOAT32) {
        reinterpret_cast<float *>(row)[index] = value;
        return;
    }
    const u32 bits = to_bits(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    u32 raw;
    if (KIND == BFLOAT16) {
        raw = rest > 0x7f800000u ? 0x7fc0u : rounded(rest, 16);
    } else if (rest > 0x7f800000u) {
        raw = 0x7e00u;
    } else if (rest >= 0x477ff000u) {  // 65520: rounds to infinity
        raw = 0x7c00u;
    } else if (rest < 0x38800000u) {  // under 2^-14: a multiple of 2^-24
        raw = (u32)rintf(from_bits(rest) * 16777216.0f);
    } else {
        raw = rounded(rest, 13) - (112u << 10);
    }
    reinterpret_cast<unsigned short *>(row)[index] = (unsigned short)(sign | raw);
}

static __device__ byte to_e4m3(float value) {  // beyond 448 saturates; no number stays none
    const u32 bits = to_bits(value), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (byte)(sign | 0x7f);
    if (rest >= 0x43e00000u) return (byte)(sign | 0x7e);
    if (rest < 0x3c800000u) return (byte)(sign | (u32)rintf(from_bits(rest) * 512.0f));  // under 2^-6
    return (byte)(sign | (rounded(rest, 20) - (120u << 3)));
}

static __device__ float from_e4m3(byte raw) {
    const u32 sign = (u32)(raw & 0x80) << 24, rest = raw & 0x7f;
    if (rest == 0x7f) return from_bits(sign | 0x7fc00000u);
    if (rest < 8) return from_bits(sign | to_bits((float)rest * 0.001953125f));
    return from_bits(sign | ((rest << 20) + (120u << 23)));
}

static __device__ byte to_int8(float value) {
    if (value != value) return 0;
    const float whole = rintf(value);
    return (byte)(signed char)(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
}

// ---- packing ------------------------------------------------------------------------------------------------------

// What a packed block looks like: rows * row_elements bytes, then `rows` float32 scales at `scales_at`.
struct Shape {
    i64 blocks, rows, row_elements, wide_stride, packed_stride, scales_at;
};

static __device__ u32 *scale_of(byte *packed, const Shape &shape, i64 task) {
    return reinterpret_cast<u32 *>(packed + task / shape.rows * shape.packed_stride + shape.scales_at) +
           task % shape.rows;
}

// Magnitudes of one sign order as their bits do, so the largest is an integer maximum.
template <int KIND> static __global__ void find_peaks(const byte *wide, byte *packed, Shape shape) {
    for (i64 task = blockIdx.x; task < shape.blocks * shape.rows; task += gridDim.x) {
        const byte *block = wide + task / shape.rows * shape.wide_stride;
        const i64 first = task % shape.rows * shape.row_elements;
        u32 peak = 0;
        for (i64 index = threadIdx.x; index < shape.row_elements; index += THREADS) {
            const u32 bits = to_bits(load_number<KIND>(block, first + index)) & 0x7fffffffu;
            if (is_number(bits) && bits > peak) peak = bits;
        }
        if (peak) atomicMax(scale_of(packed, shape, task), peak);
    }
}

static __global__ void peaks_to_scales(byte *packed, Shape shape, float largest) {
    const i64 step = (i64)gridDim.x * THREADS;
    for (i64 task = (i64)blockIdx.x * THREADS + threadIdx.x; task < shape.blocks * shape.rows; task += step) {
        u32 *scale = scale_of(packed, shape, task);
        const float value = from_bits(*scale) / largest;
        *scale = value > 0.0f ? to_bits(value) : 0x3f800000u;
    }
}

template <int KIND, bool FP8> static __global__ void narrow(const byte *wide, byte *packed, Shape shape) {
    for (i64 task = blockIdx.x; task < shape.blocks * shape.rows; task += gridDim.x) {
        const byte *from = wide + task / shape.rows * shape.wide_stride;
        byte *to = packed + task / shape.rows * shape.packed_stride;
        const i64 first = task % shape.rows * shape.row_elements;
        const float scale = from_bits(*scale_of(packed, shape, task));
        for (i64 index = first + threadIdx.x; index < first + shape.row_elements; index += THREADS) {
            const float value = load_number<KIND>(from, index) / scale;
            to[index] = FP8 ? to_e4m3(value) : to_int8(value);
        }
    }
}

template <int KIND, bool FP8> static __global__ void widen(byte *packed, byte *wide, Shape shape) {
    for (i64 task = blockIdx.x; task < shape.blocks * shape.rows; task += gridDim.x) {
        const byte *from = packed + task / shape.rows * shape.packed_stride;
        byte *to = wide + task / shape.rows * shape.wide_stride;
        const i64 first = task % shape.rows * shape.row_elements;
        const float scale = from_bits(*scale_of(packed, shape, task));
        for (i64 index = first + threadIdx.x; index < first + shape.row_elements; index += THREADS) {
            const float value = FP8 ? from_e4m3(from[index]) : (float)(signed char)from[index];
            store_number<KIND>(to, index, value * scale);
        }
    }
}

// ---- the C interface ----------------------------------------------------------------------------------------------
// Each returns a cudaError_t; `device` is made current first. `limit`: blocks of threads at most.

static u32 grid(i64 tasks, i64 limit) { return (u32)(tasks < 1 ? 1 : tasks < limit ? tasks : limit); }

static i64 threads_to_blocks(i64 threads) { return (threads + THREADS - 1) / THREADS; }

template <int KIND> static cudaError_t pack_kind(int fp8, const byte *wide, byte *packed, const Shape &shape, i64 limit,
                                                 cudaStream_t stream) {
    const i64 rows = shape.blocks * shape.rows;
    LAUNCH(find_peaks<KIND>, grid(rows, limit), stream, wide, packed, shape);
    LAUNCH(peaks_to_scales, grid(threads_to_blocks(rows), limit), stream, packed, shape, fp8 ? 448.0f : 127.0f);
    if (fp8) LAUNCH((narrow<KIND, true>), grid(rows, limit), stream, wide, packed, shape);
    else LAUNCH((narrow<KIND, false>), grid(rows, limit), stream, wide, packed, shape);
    return cudaGetLastError();
}

template <int KIND> static cudaError_t unpack_kind(int fp8, byte *packed, byte *wide, const Shape &shape, i64 limit,
                                                   cudaStream_t stream) {
    const u32 blocks = grid(shape.blocks * shape.rows, limit);
    if (fp8) LAUNCH((widen<KIND, true>), blocks, stream, packed, wide, shape);
    else LAUNCH((widen<KIND, false>), blocks, stream, packed, wide, shape);
    return cudaGetLastError();
}

extern "C" {

int kvtool_abi() { return 1; }

const char *kvtool_error(int code) { return cudaGetErrorString((cudaError_t)code); }

// Where the device sees pinned host memory.
int kvtool_device_pointer(int device, void *host, void **seen) {
    const cudaError_t error = cudaSetDevice(device);
    return error != cudaSuccess ? error : cudaHostGetDevicePointer(seen, host, 0);
}

int kvtool_copy(int device, int gathering, const void *pieces, i64 piece_count, i64 largest_piece, const i64 *pages,
                i64 blocks, void *packed, i64 packed_stride, i64 limit, cudaStream_t stream) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    const i64 chunks = (largest_piece + COPY_CHUNK - 1) / COPY_CHUNK;
    const u32 count = grid(blocks * piece_count * chunks, limit);
    const Piece *table = static_cast<const Piece *>(pieces);
    byte *rows = static_cast<byte *>(packed);
    if (gathering) LAUNCH(copy_pages<true>, count, stream, table, piece_count, chunks, pages, blocks, rows, packed_stride);
    else LAUNCH(copy_pages<false>, count, stream, table, piece_count, chunks, pages, blocks, rows, packed_stride);
    return cudaGetLastError();
}

// `sums`: u64 [blocks], zero.
int kvtool_checksum(int device, const void *rows, i64 stride, i64 size, i64 blocks, u64 seed, u64 *sums, i64 limit,
                    cudaStream_t stream) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    const u32 count = grid(blocks * (size / SUM_CHUNK + 1), limit);
    LAUNCH(sum_blocks, count, stream, static_cast<const byte *>(rows), stride, size, blocks, seed, sums);
    return cudaGetLastError();
}

// Lossy. `kind`: of the wide numbers; `fp8`: e4m3, else int8. Where packing goes, scales are zero before.
int kvtool_pack(int device, int packing, int kind, int fp8, void *wide, i64 wide_stride, void *packed,
                i64 packed_stride, i64 scales_at, i64 blocks, i64 rows, i64 row_elements, i64 limit,
                cudaStream_t stream) {
    const cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess) return error;
    const Shape shape = {blocks, rows, row_elements, wide_stride, packed_stride, scales_at};
    byte *numbers = static_cast<byte *>(wide), *bytes = static_cast<byte *>(packed);
    if (packing) {
        if (kind == FLOAT32) return pack_kind<FLOAT32>(fp8, numbers, bytes, shape, limit, stream);
        if (kind == BFLOAT16) return pack_kind<BFLOAT16>(fp8, numbers, bytes, shape, limit, stream);
        if (kind == FLOAT16) return pack_kind<FLOAT16>(fp8, numbers, bytes, shape, limit, stream);
    } else {
        if (kind == FLOAT32) return unpack_kind<FLOAT32>(fp8, bytes, numbers, shape, limit, stream);
        if (kind == BFLOAT16) return unpack_kind<BFLOAT16>(fp8, bytes, numbers, shape, limit, stream);
        if (kind == FLOAT16) return unpack_kind<FLOAT16>(fp8, bytes, numbers, shape, limit, stream);
    }
    return cudaErrorInvalidValue;
}
}
