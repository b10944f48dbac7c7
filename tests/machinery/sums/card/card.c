/* Answers CUDA's runtime, cuBLAS and NCCL for CARDS cards (one) that keep what is copied to them and compute nothing:
   a kernel that is launched leaves its results as they were, zeros in new memory. What makes the host wait, and what
   is copied from memory that is not pinned, is told on stderr. All that is not here answers 0 (see cards.py). */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

#define MEMORY (1ul << 37)
#define TELL(...) fprintf(stderr, "card: " __VA_ARGS__)

/* Devices */

static __thread int here;

cudaError_t cudaGetDeviceCount(int *count) {
    static int cards = -1; /* the variables are read once, as CUDA does */
    const char *asked = getenv("CARDS"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (cards < 0) cards = visible && !*visible ? 0 : asked ? atoi(asked) : 1;
    *count = cards;
    return cards ? cudaSuccess : cudaErrorNoDevice;
}

int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(int *count) { return cudaGetDeviceCount(count); }

cudaError_t cudaGetDevice(int *device) { *device = here; return cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
    int count;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count) return cudaErrorInvalidDevice;
    here = device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *facts, int device) {
    memset(facts, 0, sizeof *facts);
    strcpy(facts->name, "a card that computes nothing");
    facts->totalGlobalMem = MEMORY;
    facts->major = 9;
    facts->multiProcessorCount = 4;
    facts->warpSize = 32;
    facts->maxThreadsPerBlock = 1024;
    facts->maxThreadsPerMultiProcessor = 2048;
    facts->maxBlocksPerMultiProcessor = 32;
    facts->regsPerBlock = facts->regsPerMultiprocessor = 65536;
    facts->sharedMemPerBlock = 49152;
    facts->sharedMemPerBlockOptin = facts->sharedMemPerMultiprocessor = 232448;
    facts->maxThreadsDim[0] = facts->maxThreadsDim[1] = 1024;
    facts->maxThreadsDim[2] = 64;
    facts->maxGridSize[0] = 2147483647;
    facts->maxGridSize[1] = facts->maxGridSize[2] = 65535;
    facts->l2CacheSize = 1 << 25;
    facts->pciBusID = facts->uuid.bytes[0] = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
    *value = what == cudaDevAttrComputeCapabilityMajor ? 9
           : what == cudaDevAttrComputeCapabilityMinor ? 0
           : what == cudaDevAttrWarpSize ? 32
           : what == cudaDevAttrMaxThreadsPerBlock ? 1024
           : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 : 4;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *facts, const void *kernel) {
    memset(facts, 0, sizeof *facts);
    facts->maxThreadsPerBlock = 1024;
    facts->numRegs = 32;
    facts->binaryVersion = facts->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *kernel, int threads, size_t shared) {
    *count = 2;
    return cudaSuccess;
}

/* Memory: the host's */

struct block { char *start; size_t size; int pinned, device; struct block *next; };
static struct block *blocks;
static size_t taken;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t take(void **memory, size_t size, int pinned) {
    struct block *block = malloc(sizeof *block);
    *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *block = (struct block){*memory, size, pinned, here};
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    taken += pinned ? 0 : size;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t give(void *memory) {
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->start == memory) {
            struct block *block = *at;
            *at = block->next;
            taken -= block->pinned ? 0 : block->size;
            munmap(block->start, block->size);
            free(block);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static struct block *find(const void *memory) {
    struct block *block;
    pthread_mutex_lock(&lock);
    for (block = blocks; block; block = block->next)
        if ((const char *)memory >= block->start && (const char *)memory < block->start + block->size) break;
    pthread_mutex_unlock(&lock);
    return block;
}

cudaError_t cudaMalloc(void **memory, size_t size) { return take(memory, size, 0); }
cudaError_t cudaFree(void *memory) { return give(memory); }

cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    return take(memory, size, 1);
}

cudaError_t cudaFreeHost(void *memory) { return give(memory); }

cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
    *all = MEMORY;
    *left = MEMORY - taken;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *facts, const void *memory) {
    struct block *block = find(memory);
    memset(facts, 0, sizeof *facts);
    if (!block) return cudaSuccess;
    facts->type = block->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    facts->device = block->device;
    facts->devicePointer = facts->hostPointer = (void *)memory;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (!find(to) || !find(from)) TELL("%zu bytes copied, not pinned\n", size);
    /* CARD_ZEROS: a number that the host reads, as the size of a result, is 0, and not what lay there before. */
    if (kind == cudaMemcpyDeviceToHost && size <= 8 && getenv("CARD_ZEROS")) memset(to, 0, size);
    else memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t size, cudaStream_t stream) {
    memset(memory, value, size);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char memory[1 << 20];
    *address = memory;
    return cudaSuccess;
}

/* Streams and events: all is done at once */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    *most = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { TELL("the host waits for a stream\n"); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { TELL("the host waits for the device\n"); return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = malloc(sizeof(struct timespec));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    struct timespec *from = (struct timespec *)start, *to = (struct timespec *)end;
    *milliseconds = (to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) / 1e6;
    return cudaSuccess;
}

/* What the runtime says of itself, and kernels */

cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "what this card does not have"; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaError"; }

cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int device) {
    snprintf(name, size, "0000:0%d:00.0", device);
    return cudaSuccess;
}

static int nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *found = nothing;
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *code) { static void *handle; return &handle; }

cudaError_t __cudaPopCallConfiguration(unsigned grid[3], unsigned block[3], size_t *shared, void **stream) {
    for (int i = 0; i < 3; i++) grid[i] = block[i] = 1;
    *shared = 0;
    *stream = NULL;
    return cudaSuccess;
}

/* cuBLAS */

static int make(void **handle) { *handle = calloc(1, 512); return 0; }

int cublasCreate_v2(void **handle) { return make(handle); }
int cublasLtMatmulDescCreate(void **handle) { return make(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return make(handle); }
int cublasLtMatrixLayoutCreate(void **handle) { return make(handle); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *wish, int most,
                                   void *results, int *found) {
    *found = 1;
    return 0;
}

/* NCCL: every rank is answered as if the others had what it has. Groups alone are known to all, by a file each in
   CARD_FOLDER. */

struct id { unsigned long number; char rest[120]; };
struct group { struct id id; int size, rank, splits; };
static const size_t WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */

int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id, sizeof id->number, 0) < 0;
}

int ncclCommInitRankConfig(struct group **group, int size, struct id id, int rank, void *config) {
    *group = malloc(sizeof **group);
    **group = (struct group){id, size, rank, 0};
    return 0;
}

/* Those of one color are a new group; all of the old one must come. */
int ncclCommSplit(struct group *of, int color, int key, struct group **group, void *config) {
    char path[4096];
    long own = color + 2l, *colors = calloc(of->size, sizeof own); /* 0: has not come */
    snprintf(path, sizeof path, "%s/%lx_%d", getenv("CARD_FOLDER"), of->id.number, of->splits++);
    int file = open(path, O_RDWR | O_CREAT, 0600), size = 0, rank = 0, there = 0;
    pwrite(file, &own, sizeof own, of->rank * sizeof own);
    for (int tries = 0; there < of->size && tries < 60000; tries++) {
        usleep(1000);
        pread(file, colors, of->size * sizeof own, 0);
        for (there = 0; there < of->size && colors[there];) there++;
    }
    close(file);
    for (int other = 0; other < of->size; other++) {
        rank += other < of->rank && colors[other] == own;
        size += colors[other] == own;
    }
    free(colors);
    if (there < of->size) return 1;
    if (color < 0) { *group = NULL; return 0; } /* in none of the new ones */
    struct id id = {of->id.number * 1000003 + of->splits * 31 + color};
    return ncclCommInitRankConfig(group, size, id, rank, config);
}

static int same(const void *from, void *to, size_t count, int type) {
    if (from != to) memmove(to, from, count * WIDTH[type]);
    return 0;
}

int ncclGetVersion(int *version) { *version = 22800; return 0; }
int ncclCommCount(struct group *group, int *count) { *count = group->size; return 0; }
int ncclCommGetAsyncError(void *group, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int error) { return "what this NCCL does not have"; }
const char *ncclGetLastError(void *group) { return ""; }

int ncclAllReduce(const void *from, void *to, size_t count, int type) { return same(from, to, count, type); }
int ncclBroadcast(const void *from, void *to, size_t count, int type) { return same(from, to, count, type); }

int ncclAllGather(const char *from, char *to, size_t count, int type, struct group *group) {
    for (int rank = 0; rank < group->size; rank++) same(from, to + rank * count * WIDTH[type], count, type);
    return 0;
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type) { return same(from, to, count, type); }
