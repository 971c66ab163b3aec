/* A CUDA runtime without a GPU: see device.h. Compiled against the runtime's own headers, so signatures cannot drift. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <cupti_runtime_cbid.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

#define PAGE (2ull << 20)
#define QUEUE 1024                 /* launches that may wait in a stream before the next one blocks, as on a GPU */
#define FILL_LIMIT (4ull << 20)    /* bytes that a fill writes at most: what nobody reads need not take host memory */

/* ------------------------------------------------------------------ the model */

static double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtod(text, NULL) : otherwise;
}

static struct fc_model model;
static size_t copy_limit;
static int visible[FC_MAX_DEVICES], visible_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int forked;                 /* a context does not survive a fork */

static void in_child(void);

static void see(int device) {
    for (int i = 0; i < visible_count; i++)
        if (visible[i] == device) { visible_count = 0; return; }  /* twice the same: none, as CUDA has it */
    if (visible_count < FC_MAX_DEVICES) visible[visible_count++] = device;
}

static void set_up(void) {
    model.devices = (int)setting("FAKECUDA_DEVICES", 1);
    if (model.devices > FC_MAX_DEVICES) model.devices = FC_MAX_DEVICES;
    model.memory = (uint64_t)(setting("FAKECUDA_MEMORY_MIB", 81559) * 1048576);
    model.context = (uint64_t)(setting("FAKECUDA_CONTEXT_MIB", 520) * 1048576);
    model.kernel_ns = setting("FAKECUDA_KERNEL_US", 10) * 1e3;
    model.flops = setting("FAKECUDA_TFLOPS", 400) * 1e12;
    model.host_bandwidth = setting("FAKECUDA_HOST_GBPS", 25);
    model.device_bandwidth = setting("FAKECUDA_DEVICE_GBPS", 2500);
    copy_limit = (size_t)(setting("FAKECUDA_COPY_KIB", 4) * 1024);
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
        for (int i = 0; i < model.devices; i++) visible[visible_count++] = i;
    } else {
        char *copy = strdup(list), *rest = copy, *word;
        while ((word = strsep(&rest, ","))) {
            while (*word == ' ') word++;
            int device;
            if (!strncmp(word, "GPU-", 4)) {
                const char *last = strrchr(word, '-');
                device = last ? (int)strtol(last + 1, NULL, 16) : -1;
            } else {
                char *end;
                device = (int)strtol(word, &end, 10);
                if (end == word) device = -1;
            }
            if (device < 0 || device >= model.devices) break;  /* what follows an invalid one is not seen */
            see(device);
        }
        free(copy);
    }
    pthread_atfork(NULL, NULL, in_child);
}

const char *fc_name(void) {
    const char *name = getenv("FAKECUDA_NAME");
    return name && *name ? name : "NVIDIA H100 80GB HBM3 (simulated)";
}

const struct fc_model *fc_model(void) {
    pthread_once(&once, set_up);
    return &model;
}

int fc_physical(int device) {
    fc_model();
    return device >= 0 && device < visible_count ? visible[device] : 0;
}

int64_t fc_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void fc_sleep_until(int64_t when) {
    struct timespec t = {when / 1000000000ll, when % 1000000000ll};
    if (when > fc_now())
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {}
}

static int traced(void) { return setting("FAKECUDA_TRACE", 0) != 0; }  /* a fork may set it */
void fc_note(const char *function) { if (traced()) fprintf(stderr, "fakecuda: %s\n", function); }

/* ------------------------------------------------------------------ state */

static pthread_mutex_t lock;
static __thread int current;
static __thread cudaError_t last;
void (*fc_tracer)(const struct fc_record *);
__thread uint32_t fc_correlation;
static uint32_t correlations;

__attribute__((constructor)) static void make_lock(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
}
static void unlock(void *unused) { (void)unused; pthread_mutex_unlock(&lock); }
#define LOCKED pthread_mutex_lock(&lock); __attribute__((cleanup(unlock), unused)) int locked_ = 0

struct graph;
struct fc_stream {
    int device, priority;
    unsigned flags;
    unsigned number;
    int64_t tail;
    int64_t queue[QUEUE];
    unsigned issued;
    struct graph *capture;
    struct fc_stream *next;
};
struct fc_event {
    unsigned flags;
    int device, recorded;
    int64_t when;
    struct graph *capture;
};
struct graph { double ns; unsigned long long id; int broken; enum cudaStreamCaptureMode mode; pthread_t thread; };
static __thread enum cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

static struct fc_device {
    int active;
    uint64_t used;                 /* by this process, its context included */
    struct fc_stream standard;     /* the default stream */
} devices[FC_MAX_DEVICES];
static struct fc_stream *streams;  /* all that were created */
static unsigned stream_numbers = 7;

static cudaError_t fail(cudaError_t error) {
    if (error) last = error;
    return error;
}

static struct fc_stream *stream_of(cudaStream_t handle) {
    if (handle == NULL || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
        struct fc_stream *standard = &devices[current].standard;
        if (!standard->number) { standard->number = 7; standard->device = current; }
        return standard;
    }
    return (struct fc_stream *)handle;
}

/* FAKECUDA_TRACE: what the program asks of a stream, "cudaEventRecord cuda:0 stream 7". */
static void note_on(const char *function, const struct fc_stream *stream) {
    if (traced()) fprintf(stderr, "fakecuda: %s cuda:%d stream %u\n", function, stream->device, stream->number);
}

int fc_current(void) { return current; }
void fc_set_current(int device) { current = device; }

/* --- Shared with other processes, which ask NVML */

struct fc_shared *fc_shared(void) {
    static struct fc_shared *shared;
    LOCKED;
    if (!shared) {
        char path[256];
        const char *named = getenv("FAKECUDA_STATE");
        snprintf(path, sizeof path, "%s", named ? named : "");
        if (!*path) snprintf(path, sizeof path, "/dev/shm/fakecuda-%d", (int)getuid());
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (file >= 0 && ftruncate(file, sizeof *shared) == 0)
            shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (!shared || shared == MAP_FAILED) shared = calloc(1, sizeof *shared);
    }
    return shared;
}

static struct fc_process *mine;

static struct fc_use *use_of(int device) {
    if (!mine) {
        struct fc_shared *shared = fc_shared();
        for (int i = 0; i < FC_MAX_PROCESSES && !mine; i++) {
            int pid = shared->processes[i].pid;
            if (pid && (kill(pid, 0) == 0 || errno != ESRCH) && pid != getpid()) continue;
            if (__sync_bool_compare_and_swap(&shared->processes[i].pid, pid, getpid())) {
                mine = &shared->processes[i];
                for (int j = 0; j < FC_MAX_DEVICES; j++) mine->use[j].bytes = 0;  /* its busy time stays on the device's account */
            }
        }
        if (!mine) mine = calloc(1, sizeof *mine);
    }
    return &mine->use[fc_physical(device)];
}

__attribute__((destructor)) static void leave(void) { if (mine && mine->pid == getpid()) mine->pid = 0; }
static void in_child(void) {
    mine = NULL;
    for (int i = 0; i < FC_MAX_DEVICES; i++) if (devices[i].active) forked = 1;
}

static uint64_t used_on(int device) {
    int physical = fc_physical(device);
    struct fc_shared *shared = fc_shared();
    uint64_t sum = 0;
    use_of(device);
    for (int i = 0; i < FC_MAX_PROCESSES; i++) {
        int pid = shared->processes[i].pid;
        if (pid && (pid == getpid() || kill(pid, 0) == 0)) sum += shared->processes[i].use[physical].bytes;
    }
    return sum;
}

int fc_take(int device, uint64_t bytes) {
    LOCKED;
    if (used_on(device) + bytes > model.memory) return 2;
    use_of(device)->bytes += bytes;
    devices[device].used += bytes;
    return 0;
}
void fc_give(int device, uint64_t bytes) {
    LOCKED;
    use_of(device)->bytes -= bytes;
    devices[device].used -= bytes;
}

int fc_context_active(int device) { return device >= 0 && device < FC_MAX_DEVICES && devices[device].active; }
void fc_activate(int device) {
    LOCKED;
    fc_model();
    if (device < visible_count && !devices[device].active) {
        devices[device].active = 1;
        fc_take(device, model.context);
    }
}

/* Every function that needs a context begins with this. */
static cudaError_t ready(void) {
    fc_model();
    if (forked) return fail(cudaErrorInitializationError);
    if (!visible_count) return fail(cudaErrorNoDevice);
    fc_activate(current);
    return cudaSuccess;
}
#define READY do { cudaError_t ready_ = ready(); if (ready_) return ready_; } while (0)

/* --- Ranges of memory that the device knows */

struct range { char *base; size_t bytes; int type, device; unsigned flags; };
static struct range *ranges;
static size_t range_count, range_room;

static struct range *range_at(const void *pointer) {
    for (size_t i = 0; i < range_count; i++)
        if ((char *)pointer >= ranges[i].base && (char *)pointer < ranges[i].base + ranges[i].bytes) return &ranges[i];
    return NULL;
}
void fc_add_range(void *base, size_t bytes, int type, int device) {
    LOCKED;
    if (range_count == range_room)
        ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 64) * sizeof *ranges);
    ranges[range_count++] = (struct range){base, bytes, type, device, 0};
}
void fc_drop_range(void *base) {
    LOCKED;
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i].base == base) { ranges[i] = ranges[--range_count]; return; }
}
void *fc_range(const void *pointer, size_t *bytes) {
    LOCKED;
    struct range *range = range_at(pointer);
    if (!range) return NULL;
    *bytes = range->bytes;
    return range->base;
}
/* Whether bytes lie in memory that the device knows; an expandable segment is mapped in several ranges. */
static int known(const void *pointer, size_t bytes) {
    for (const char *at = pointer, *end = at + bytes; at < end;) {
        struct range *range = range_at(at);
        if (!range) return 0;
        at = range->base + range->bytes;
    }
    return 1;
}
static int type_of(const void *pointer) {
    struct range *range = range_at(pointer);
    return range ? range->type : cudaMemoryTypeUnregistered;
}

/* ------------------------------------------------------------------ the timeline */

enum deed { COPY, SET, FILL, CALL, CALLBACK };
struct pending {
    int64_t due;
    enum deed deed;
    void *to;
    const void *from;
    size_t bytes;
    union { unsigned char pattern[16]; cudaHostFn_t call; cudaStreamCallback_t callback; } as;
    size_t width;
    void *data;
    cudaStream_t stream;
    struct pending *next;
};
static struct pending *first_pending;
static int arithmetic;             /* see fc_arithmetic */

static void clear(char *to, size_t bytes) {
    char *from = (char *)(((uintptr_t)to + 4095) & ~4095ull), *until = (char *)((uintptr_t)(to + bytes) & ~4095ull);
    if (bytes < PAGE || type_of(to) != cudaMemoryTypeDevice) { memset(to, 0, bytes); return; }
    memset(to, 0, (size_t)(from - to));
    memset(until, 0, (size_t)(to + bytes - until));
    if (madvise(from, (size_t)(until - from), MADV_DONTNEED)) memset(from, 0, (size_t)(until - from));
}

static void do_deed(struct pending *work) {
    switch (work->deed) {
    case COPY:  /* large data stays out: bytes of weights, read as something else where kernels do nothing, would be NaN */
        if (arithmetic || work->bytes <= copy_limit || type_of(work->to) != cudaMemoryTypeDevice || type_of(work->from) == cudaMemoryTypeDevice)
            memmove(work->to, work->from, work->bytes);
        else clear(work->to, work->bytes);
        free(work->data);  /* the bytes as they were when the copy was issued */
        break;
    case SET:
        if (work->as.pattern[0]) memset(work->to, work->as.pattern[0], work->bytes < FILL_LIMIT || arithmetic ? work->bytes : FILL_LIMIT);
        else clear(work->to, work->bytes);
        break;
    case FILL: {
        size_t bytes = work->bytes < FILL_LIMIT || arithmetic ? work->bytes : FILL_LIMIT;
        for (size_t at = 0; at + work->width <= bytes; at += work->width)
            memcpy((char *)work->to + at, work->as.pattern, work->width);
        break;
    }
    case CALL: work->as.call(work->data); break;
    case CALLBACK: work->as.callback(work->stream, cudaSuccess, work->data); break;
    }
}

/* Do what is due. Host functions run without the lock, for they may take others. */
static void settle(int64_t now) {
    pthread_mutex_lock(&lock);
    while (first_pending && first_pending->due <= now) {
        struct pending *work = first_pending;
        first_pending = work->next;
        if (work->deed == CALL || work->deed == CALLBACK) {
            pthread_mutex_unlock(&lock);
            do_deed(work);
            pthread_mutex_lock(&lock);
        } else do_deed(work);
        free(work);
    }
    pthread_mutex_unlock(&lock);
}
void fc_settle_all(void) { settle(INT64_MAX); }

/* Arithmetic is done when its operator is issued (arithmetic.cpp): what is pending and ends in device memory is done before it, in order. */
void fc_arithmetic(void) { arithmetic = 1; }
void fc_flush(void) {
    LOCKED;
    for (struct pending **at = &first_pending; *at;) {
        struct pending *work = *at;
        if (work->deed == CALL || work->deed == CALLBACK || type_of(work->to) != cudaMemoryTypeDevice) { at = &work->next; continue; }
        *at = work->next;
        do_deed(work);
        free(work);
    }
}
int fc_capturing(void) {
    for (struct fc_stream *stream = streams; stream; stream = stream->next) if (stream->capture) return 1;
    return 0;
}

static void put_off(struct pending work) {
    if (arithmetic && work.deed == COPY && type_of(work.to) != cudaMemoryTypeDevice && type_of(work.from) == cudaMemoryTypeDevice) {
        fc_flush();
        work.data = malloc(work.bytes);
        work.from = memcpy(work.data, work.from, work.bytes);
    }
    struct pending *kept = malloc(sizeof *kept), **at = &first_pending;
    *kept = work;
    while (*at && (*at)->due <= work.due) at = &(*at)->next;
    kept->next = *at;
    *at = kept;
}

/* Give the stream this much more to do; when it starts and ends. Blocks, unlocked, while the stream's queue is full. */
static int64_t issue(struct fc_stream *stream, double ns, int64_t *start) {
    int64_t now = fc_now(), begin;
    if (stream->capture) {
        stream->capture->ns += ns;
        if (start) *start = now;
        return now;
    }
    int64_t oldest = stream->queue[stream->issued % QUEUE];
    if (oldest > now) {
        pthread_mutex_unlock(&lock);
        fc_sleep_until(oldest);
        pthread_mutex_lock(&lock);
        now = fc_now();
    }
    begin = now + 2000 > stream->tail ? now + 2000 : stream->tail;  /* 2 us from the host to the device */
    struct fc_stream *standard = &devices[stream->device].standard;
    if (stream == standard) {
        for (struct fc_stream *other = streams; other; other = other->next)
            if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking) && other->tail > begin)
                begin = other->tail;
    } else if (!(stream->flags & cudaStreamNonBlocking) && standard->tail > begin) begin = standard->tail;
    stream->tail = begin + (int64_t)ns;
    stream->queue[stream->issued++ % QUEUE] = stream->tail;
    struct fc_use *use = use_of(stream->device);
    int64_t from = use->busy_until > begin ? use->busy_until : begin;
    if (stream->tail > from) { use->busy_ns += stream->tail - from; use->busy_until = stream->tail; }
    if (start) *start = begin;
    return stream->tail;
}

static void tell(struct fc_record record) {
    if (fc_tracer) { record.correlation = record.correlation ? record.correlation : fc_correlation; fc_tracer(&record); }
}

/* --- The runtime's own calls, as the profiler sees them */

struct api { int64_t start; uint32_t cbid, outer; };
static void api_end(struct api *api) {
    if (api->start && fc_tracer)
        tell((struct fc_record){.kind = FC_API, .start = api->start, .end = fc_now(), .api = api->cbid});
    fc_correlation = api->outer;
}
static struct api api_begin(uint32_t cbid) {
    struct api api = {0, cbid, fc_correlation};
    if (fc_tracer && !fc_correlation) {
        api.start = fc_now();
        fc_correlation = __sync_add_and_fetch(&correlations, 1);
    }
    return api;
}
#define API(cbid) __attribute__((cleanup(api_end), unused)) struct api api_ = api_begin(CUPTI_RUNTIME_TRACE_CBID_##cbid)

/* --- Synchronising */

static cudaError_t wait_for(int64_t when, int device, unsigned stream, int kind) {
    int64_t start = fc_now();
    fc_sleep_until(when);
    settle(fc_now());
    tell((struct fc_record){.kind = FC_SYNC, .start = start, .end = fc_now(), .device = device, .stream = stream, .sync = kind});
    return cudaSuccess;
}

/* --- What a capture forbids. An attempt invalidates it: all that follows on its streams fails, up to its end. */

static cudaError_t invalidate(struct graph *graph) {
    graph->broken = 1;
    return fail(cudaErrorStreamCaptureUnsupported);
}

/* Of a call that is "potentially unsafe", as CUDA names those that may wait for work or enqueue it without being asked to
 * (cudaThreadExchangeStreamCaptureMode): it is forbidden to the thread that captures, and to all threads by a capture in
 * the mode "global", on whatever stream it is. */
static cudaError_t safe(void) {
    LOCKED;
    if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    cudaError_t found = cudaSuccess;
    for (struct fc_stream *stream = streams; stream; stream = stream->next) {
        struct graph *graph = stream->capture;
        if (!graph || graph->mode == cudaStreamCaptureModeRelaxed) continue;
        int here = pthread_equal(graph->thread, pthread_self());
        if (here || (graph->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal))
            found = invalidate(graph);
    }
    return found;
}
#define SAFE do { cudaError_t safe_ = safe(); if (safe_) return safe_; } while (0)

/* Of a call that a stream cannot have while it is captured, in any mode. */
static cudaError_t uncaptured(struct fc_stream *stream) { return stream->capture ? invalidate(stream->capture) : cudaSuccess; }
#define UNCAPTURED(stream) do { cudaError_t there_ = uncaptured(stream); if (there_) return there_; } while (0)

/* Of work that a capture takes up, unless it is invalid. */
#define VALID(stream) do { if ((stream)->capture && (stream)->capture->broken) return fail(cudaErrorStreamCaptureInvalidated); } while (0)

static struct graph *captured_on(int device) {
    for (struct fc_stream *stream = streams; stream; stream = stream->next)
        if (stream->capture && stream->device == device) return stream->capture;
    return NULL;
}

cudaError_t cudaDeviceSynchronize(void) {
    API(cudaDeviceSynchronize_v3020);
    READY;
    int64_t when;
    {
        LOCKED;
        note_on("cudaDeviceSynchronize", stream_of(NULL));
        struct graph *graph = captured_on(current);
        if (graph) return invalidate(graph);
        SAFE;
        when = devices[current].standard.tail;
        for (struct fc_stream *stream = streams; stream; stream = stream->next)
            if (stream->device == current && stream->tail > when) when = stream->tail;
    }
    return wait_for(when, current, 0, 4);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    API(cudaStreamSynchronize_v3020);
    READY;
    struct fc_stream *stream = stream_of(handle);
    note_on("cudaStreamSynchronize", stream);
    UNCAPTURED(stream);
    SAFE;
    return wait_for(stream->tail, stream->device, stream->number, 3);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    API(cudaStreamQuery_v3020);
    READY;
    struct fc_stream *stream = stream_of(handle);
    note_on("cudaStreamQuery", stream);
    UNCAPTURED(stream);
    SAFE;
    int64_t now = fc_now();
    settle(now);
    return stream->tail <= now ? cudaSuccess : fail(cudaErrorNotReady);
}

/* ------------------------------------------------------------------ errors and versions */

static const struct { cudaError_t error; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
};
const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].error == error) return errors[i].name;
    return "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].error == error) return errors[i].text;
    return "unknown error";
}
cudaError_t cudaGetLastError(void) { cudaError_t error = last; last = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

/* ------------------------------------------------------------------ devices */

cudaError_t cudaGetDeviceCount(int *count) {
    fc_model();
    *count = visible_count;
    if (forked) return fail(cudaErrorInitializationError);
    return visible_count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { fc_model(); *device = current; return visible_count ? cudaSuccess : fail(cudaErrorNoDevice); }
cudaError_t cudaSetDevice(int device) {
    fc_model();
    if (forked) return fail(cudaErrorInitializationError);
    if (device < 0 || device >= visible_count) return fail(cudaErrorInvalidDevice);
    current = device;
    fc_activate(device);
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device) {
    fc_model();
    if (device < 0 || device >= visible_count) return fail(cudaErrorInvalidDevice);
    memset(prop, 0, sizeof *prop);
    snprintf(prop->name, sizeof prop->name, "%s", fc_name());
    memset(&prop->uuid, 0, sizeof prop->uuid);
    prop->uuid.bytes[0] = (char)0xfa; prop->uuid.bytes[1] = (char)0xce;
    prop->uuid.bytes[15] = (char)fc_physical(device);
    prop->totalGlobalMem = model.memory;
    prop->sharedMemPerBlock = 48 << 10;
    prop->sharedMemPerBlockOptin = 227 << 10;
    prop->sharedMemPerMultiprocessor = 228 << 10;
    prop->reservedSharedMemPerBlock = 1 << 10;
    prop->regsPerBlock = prop->regsPerMultiprocessor = 65536;
    prop->warpSize = 32;
    prop->memPitch = 0x7fffffff;
    prop->maxThreadsPerBlock = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024; prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7fffffff; prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->totalConstMem = 65536;
    prop->major = 9; prop->minor = 0;
    prop->textureAlignment = 512; prop->texturePitchAlignment = 32;
    prop->multiProcessorCount = 132;
    prop->canMapHostMemory = prop->concurrentKernels = prop->ECCEnabled = 1;
    prop->pciBusID = 0x10 + fc_physical(device);
    prop->asyncEngineCount = 3;
    prop->unifiedAddressing = 1;
    prop->memoryBusWidth = 5120;
    prop->l2CacheSize = 50 << 20;
    prop->maxThreadsPerMultiProcessor = 2048;
    prop->maxBlocksPerMultiProcessor = 32;
    prop->streamPrioritiesSupported = prop->globalL1CacheSupported = prop->localL1CacheSupported = 1;
    prop->managedMemory = prop->concurrentManagedAccess = prop->computePreemptionSupported = 1;
    prop->hostNativeAtomicSupported = 0;
    prop->canUseHostPointerForRegisteredMem = prop->cooperativeLaunch = prop->clusterLaunch = 1;
    prop->hostRegisterSupported = prop->memoryPoolsSupported = prop->ipcEventSupported = prop->unifiedFunctionPointers = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp prop;
    cudaError_t error = cudaGetDeviceProperties(&prop, device);
    if (error) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = prop.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)prop.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)prop.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)prop.sharedMemPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrL2CacheSize: *value = prop.l2CacheSize; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrPciBusId: *value = prop.pciBusID; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrHostRegisterSupported: case cudaDevAttrCanUseHostPointerForRegisteredMem: case cudaDevAttrClusterLaunch:
    case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, (size_t)length, "0000:%02X:00.0", 0x10 + fc_physical(device));
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { (void)peer; (void)flags; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode was = capture_mode;
    capture_mode = *mode;
    *mode = was;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ memory */

static uint64_t rounded(size_t bytes) { return (bytes + PAGE - 1) & ~(PAGE - 1); }

/* Aligned to 2 MiB, and backed by nothing until it is written. RLIMIT_DATA limits private memory and not shared memory:
 * with arithmetic, device memory is limited with the rest of the process; without, a full-sized model is never written. */
void *fc_reserve(size_t bytes, int protection) {
    int sharing = arithmetic ? MAP_PRIVATE : MAP_SHARED;
    char *base = mmap(NULL, bytes + PAGE, protection, sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return NULL;
    char *aligned = (char *)(((uintptr_t)base + PAGE - 1) & ~(PAGE - 1));
    if (aligned > base) munmap(base, (size_t)(aligned - base));
    if (base + PAGE > aligned) munmap(aligned + bytes, (size_t)(base + PAGE - aligned));
    return aligned;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    API(cudaMalloc_v3020);
    READY;
    SAFE;
    LOCKED;
    note_on("cudaMalloc", stream_of(NULL));
    if (!bytes) { *pointer = NULL; return cudaSuccess; }
    uint64_t size = rounded(bytes);
    if (fc_take(current, size)) { *pointer = NULL; return fail(cudaErrorMemoryAllocation); }
    *pointer = fc_reserve(size, PROT_READ | PROT_WRITE);
    if (!*pointer) { fc_give(current, size); return fail(cudaErrorMemoryAllocation); }
    fc_add_range(*pointer, size, cudaMemoryTypeDevice, current);
    return cudaSuccess;
}
cudaError_t cudaFree(void *pointer) {
    API(cudaFree_v3020);
    READY;
    if (!pointer) return cudaSuccess;
    SAFE;
    int64_t when = 0;
    LOCKED;
    struct range *range = range_at(pointer);
    if (!range || range->base != pointer || range->type != cudaMemoryTypeDevice) return fail(cudaErrorInvalidValue);
    struct range gone = *range;
    for (struct fc_stream *stream = streams; stream; stream = stream->next)  /* freeing waits for the device */
        if (stream->device == gone.device && stream->tail > when) when = stream->tail;
    if (devices[gone.device].standard.tail > when) when = devices[gone.device].standard.tail;
    fc_sleep_until(when);
    settle(when);
    fc_drop_range(pointer);
    munmap(gone.base, gone.bytes);
    fc_give(gone.device, gone.bytes);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) { (void)stream; return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { (void)stream; return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    API(cudaMemGetInfo_v3020);
    READY;
    LOCKED;
    uint64_t used = used_on(current);
    *total = model.memory;
    *available = used < model.memory ? model.memory - used : 0;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    API(cudaHostAlloc_v3020);
    (void)flags;
    READY;
    LOCKED;
    size_t size = (bytes + 4095) & ~4095ull;
    *pointer = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    fc_add_range(*pointer, size, cudaMemoryTypeHost, current);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer) {
    LOCKED;
    struct range *range = range_at(pointer);
    if (!range || range->type != cudaMemoryTypeHost) return fail(cudaErrorInvalidValue);
    size_t bytes = range->bytes;
    fc_settle_all();
    fc_drop_range(pointer);
    munmap(pointer, bytes);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    READY;
    LOCKED;
    if (range_at(pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
    fc_add_range(pointer, bytes, cudaMemoryTypeHost, current);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
    LOCKED;
    if (!range_at(pointer)) return fail(cudaErrorHostMemoryNotRegistered);
    fc_settle_all();
    fc_drop_range(pointer);
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    READY;
    LOCKED;
    struct range *range = range_at(pointer);
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    if (range) {
        attributes->type = (enum cudaMemoryType)range->type;
        attributes->device = range->device;
        attributes->devicePointer = (void *)pointer;
        if (range->type == cudaMemoryTypeHost) attributes->hostPointer = (void *)pointer;
    }
    return cudaSuccess;
}

/* --- Copies. Synchronous ones wait; those from pageable memory do too, as it must be staged. */

static enum cudaMemcpyKind kind_of(const void *to, const void *from) {
    int there = type_of(to) == cudaMemoryTypeDevice, here = type_of(from) == cudaMemoryTypeDevice;
    return there ? (here ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice) : (here ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost);
}

static cudaError_t copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t handle, int blocking) {
    READY;
    if (!bytes) return cudaSuccess;
    int64_t start, end;
    int pageable;
    struct fc_stream *stream = stream_of(handle);
    static const char *names[] = {"HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice"};
    char called[64];
    snprintf(called, sizeof called, "cudaMemcpy%s %s", blocking ? "" : "Async", names[kind_of(to, from)]);
    note_on(called, stream);
    VALID(stream);
    if (blocking) SAFE;
    {
        LOCKED;
        enum cudaMemcpyKind real = kind_of(to, from);
        if (kind == cudaMemcpyDefault) kind = real;
        if (kind != real) return fail(cudaErrorInvalidValue);  /* a pointer that the device does not know, or a wrong direction */
        if ((range_at(to) && !known(to, bytes)) || (range_at(from) && !known(from, bytes))) return fail(cudaErrorInvalidValue);
        pageable = (kind == cudaMemcpyHostToDevice && type_of(from) == cudaMemoryTypeUnregistered) ||
                   (kind == cudaMemcpyDeviceToHost && type_of(to) == cudaMemoryTypeUnregistered);
        if (pageable) UNCAPTURED(stream);
        double speed = kind == cudaMemcpyDeviceToDevice ? model.device_bandwidth / 2 : model.host_bandwidth / (pageable ? 2 : 1);
        end = issue(stream, 1500 + (double)bytes / speed, &start);
        put_off((struct pending){.due = end, .deed = COPY, .to = to, .from = from, .bytes = bytes});
        tell((struct fc_record){.kind = FC_MEMCPY, .start = start, .end = end, .device = stream->device, .stream = stream->number,
                                .bytes = bytes, .copy = kind, .pinned = !pageable});
    }
    if (blocking || pageable) { fc_sleep_until(end); settle(end > fc_now() ? end : fc_now()); }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    API(cudaMemcpy_v3020);
    return copy(to, from, bytes, kind, NULL, 1);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    API(cudaMemcpyAsync_v3020);
    return copy(to, from, bytes, kind, stream, 0);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t bytes, cudaStream_t stream) {
    API(cudaMemcpyPeerAsync_v4000);
    (void)device; (void)source;
    return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, 0);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t source_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) {
        cudaError_t error = copy((char *)to + row * pitch, (const char *)from + row * source_pitch, width, kind, stream, 0);
        if (error) return error;
    }
    return cudaSuccess;
}
int fc_copy(void *stream, void *to, const void *from, size_t bytes, double ns, const char *name) {
    int error = fc_launch(stream, name, ns);
    if (error || to == from || !bytes) return error;
    LOCKED;
    put_off((struct pending){.due = stream_of(stream)->tail, .deed = COPY, .to = to, .from = from, .bytes = bytes});
    return 0;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t handle) {
    API(cudaMemsetAsync_v3020);
    READY;
    if (!bytes) return cudaSuccess;
    LOCKED;
    if (!known(to, bytes)) return fail(cudaErrorInvalidValue);
    struct fc_stream *stream = stream_of(handle);
    VALID(stream);
    int64_t start, end = issue(stream, 1500 + (double)bytes / model.device_bandwidth, &start);
    put_off((struct pending){.due = end, .deed = SET, .to = to, .bytes = bytes, .as.pattern = {(unsigned char)value}});
    tell((struct fc_record){.kind = FC_MEMSET, .start = start, .end = end, .device = stream->device, .stream = stream->number,
                            .bytes = bytes, .value = value});
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

/* --- Pools: enough for the allocator's cudaMallocAsync backend to start */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (cudaMemPool_t)&devices[device]; return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    (void)attribute;
    *(uint64_t *)value = ((struct fc_device *)pool)->used;
    return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) { (void)handle; (void)pointer; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) { (void)pointer; (void)handle; (void)flags; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { (void)handle; (void)event; return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { (void)event; (void)handle; return fail(cudaErrorNotSupported); }

/* ------------------------------------------------------------------ streams and events */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    API(cudaStreamCreateWithPriority_v5050);
    READY;
    LOCKED;
    struct fc_stream *stream = calloc(1, sizeof *stream);
    stream->device = current;
    stream->flags = flags;
    stream->priority = priority;
    stream->number = ++stream_numbers;
    stream->next = streams;
    streams = stream;
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    LOCKED;
    for (struct fc_stream **at = &streams; *at; at = &(*at)->next)
        if (*at == (struct fc_stream *)handle) {
            struct fc_stream *gone = *at;
            *at = gone->next;
            free(gone);
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) { *priority = stream_of(handle)->priority; return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    API(cudaEventCreateWithFlags_v3020);
    READY;
    struct fc_event *event = calloc(1, sizeof *event);
    event->flags = flags;
    event->device = current;
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) { free(handle); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
    API(cudaEventRecord_v3020);
    (void)flags;
    READY;
    LOCKED;
    struct fc_event *event = (struct fc_event *)handle;
    struct fc_stream *stream = stream_of(stream_handle);
    note_on("cudaEventRecord", stream);
    if (event->device != stream->device) return fail(cudaErrorInvalidResourceHandle);
    VALID(stream);
    event->recorded = 1;
    event->capture = stream->capture;
    event->when = issue(stream, 0, NULL);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    API(cudaEventQuery_v3020);
    struct fc_event *event = (struct fc_event *)handle;
    fc_note("cudaEventQuery");
    if (event->capture) return fail(cudaErrorStreamCaptureUnsupported);
    SAFE;
    int64_t now = fc_now();
    if (event->recorded && event->when > now) return fail(cudaErrorNotReady);
    settle(now);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    API(cudaEventSynchronize_v3020);
    struct fc_event *event = (struct fc_event *)handle;
    fc_note("cudaEventSynchronize");
    if (event->capture) return fail(cudaErrorStreamCaptureUnsupported);
    SAFE;
    return event->recorded ? wait_for(event->when, event->device, 0, 1) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    API(cudaEventElapsedTime_v3020);
    struct fc_event *a = (struct fc_event *)from, *b = (struct fc_event *)to;
    fc_note("cudaEventElapsedTime");
    if (a->capture || b->capture) return fail(cudaErrorStreamCaptureUnsupported);
    if (!a->recorded || !b->recorded || (a->flags | b->flags) & cudaEventDisableTiming || a->device != b->device)
        return fail(cudaErrorInvalidResourceHandle);
    int64_t now = fc_now();
    if (a->when > now || b->when > now) return fail(cudaErrorNotReady);
    *ms = (float)((double)((b->when - a->when) / 32 * 32) / 1e6);  /* device clocks tick every 32 ns */
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
    API(cudaStreamWaitEvent_v3020);
    (void)flags;
    READY;
    LOCKED;
    struct fc_event *event = (struct fc_event *)event_handle;
    struct fc_stream *stream = stream_of(handle);
    note_on("cudaStreamWaitEvent", stream);
    VALID(stream);
    if (event->capture) stream->capture = event->capture;
    else if (event->recorded && event->when > stream->tail) stream->tail = event->when;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void *data) {
    LOCKED;
    put_off((struct pending){.due = issue(stream_of(handle), 0, NULL), .deed = CALL, .as.call = call, .data = data});
    return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void *data, unsigned flags) {
    (void)flags;
    LOCKED;
    put_off((struct pending){.due = issue(stream_of(handle), 0, NULL), .deed = CALLBACK, .as.callback = callback, .data = data,
                             .stream = handle});
    return cudaSuccess;
}

/* --- Graphs: the sum of what was captured, launched as one */

static unsigned long long captures;
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    LOCKED;
    if (!handle) return fail(cudaErrorStreamCaptureUnsupported);
    struct graph *graph = calloc(1, sizeof *graph);
    graph->id = ++captures;
    graph->mode = mode;
    graph->thread = pthread_self();
    stream_of(handle)->capture = graph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    LOCKED;
    struct graph *captured = stream_of(handle)->capture;
    if (!captured) return fail(cudaErrorInvalidValue);
    for (struct fc_stream *stream = streams; stream; stream = stream->next)
        if (stream->capture == captured) stream->capture = NULL;
    if (captured->broken) { *graph = NULL; return fail(cudaErrorStreamCaptureInvalidated); }
    *graph = (cudaGraph_t)captured;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    struct graph *graph = stream_of(handle)->capture;
    *status = !graph ? cudaStreamCaptureStatusNone : graph->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData **edges,
#else
#define EDGES
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, EDGES size_t *count) {
    struct graph *capture = stream_of(handle)->capture;
    cudaStreamIsCapturing(handle, status);
    if (id) *id = capture ? capture->id : 0;
    if (graph) *graph = (cudaGraph_t)capture;
    if (nodes) *nodes = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    struct graph *copied = malloc(sizeof *copied);
    *copied = *(struct graph *)graph;
    *made = (cudaGraphExec_t)copied;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    note_on("cudaGraphLaunch", stream_of(stream));
    return (cudaError_t)fc_launch(stream, "graph", ((struct graph *)graph)->ns);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { free(graph); return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) { (void)graph; (void)nodes; *count = 1; return cudaSuccess; }

/* ------------------------------------------------------------------ kernels */

struct kernel { const void *host; const char *name; };
static struct kernel *registered, *table;
static size_t registered_count, registered_room, table_size;

void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid, void *bid,
                            void *block, void *grid, int *size) {
    (void)handle; (void)device; (void)limit; (void)tid; (void)bid; (void)block; (void)grid; (void)size;
    LOCKED;
    if (registered_count == registered_room)
        registered = realloc(registered, (registered_room = registered_room ? 2 * registered_room : 4096) * sizeof *registered);
    registered[registered_count++] = (struct kernel){host, name};
    free(table);
    table = NULL;
}
static size_t slot_of(const void *host) { return ((uintptr_t)host * 0x9e3779b97f4a7c15ull >> 20) % table_size; }
static const char *name_of(const void *host) {
    if (!table) {
        table_size = 2 * registered_count + 1;
        table = calloc(table_size, sizeof *table);
        for (size_t i = 0; i < registered_count; i++) {
            size_t at = slot_of(registered[i].host);
            while (table[at].host) at = (at + 1) % table_size;
            table[at] = registered[i];
        }
    }
    for (size_t at = slot_of(host); table[at].host; at = (at + 1) % table_size) if (table[at].host == host) return table[at].name;
    return "unknown_kernel";
}

static struct { const void *host; void *device; size_t size; } *variables;
static size_t variable_count;
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global) {
    (void)handle; (void)device; (void)name; (void)external; (void)constant; (void)global;
    LOCKED;
    variables = realloc(variables, (variable_count + 1) * sizeof *variables);
    variables[variable_count].host = host;
    variables[variable_count].device = NULL;
    variables[variable_count++].size = size;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    READY;
    LOCKED;
    for (size_t i = 0; i < variable_count; i++)
        if (variables[i].host == symbol) {
            if (!variables[i].device) {
                variables[i].device = fc_reserve(rounded(variables[i].size), PROT_READ | PROT_WRITE);
                fc_add_range(variables[i].device, rounded(variables[i].size), cudaMemoryTypeDevice, current);
            }
            *pointer = variables[i].device;
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidValue);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration[8];
static __thread int configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration[configurations].grid = grid;
    configuration[configurations].block = block;
    configuration[configurations].shared = shared;
    configuration[configurations++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    configurations--;
    *grid = configuration[configurations].grid;
    *block = configuration[configurations].block;
    *shared = configuration[configurations].shared;
    *(void **)stream = configuration[configurations].stream;
    return cudaSuccess;
}

/* The few kernels whose effect a program is likely to look at: torch's fill, and its sleep. */

static size_t fill_width(const char *type) {  /* of T in FillFunctor<T>, from its mangled name */
    switch (type[0]) {
    case 'b': case 'a': case 'h': return 1;
    case 's': case 't': return 2;
    case 'i': case 'j': case 'f': return 4;
    case 'l': case 'm': case 'd': case 'x': case 'y': return 8;
    case 'N': return strncmp(type, "N3c108BFloat16E", 15) && strncmp(type, "N3c104HalfE", 11) ? 0 : 2;
    default: return 0;
    }
}
static void effect(const char *name, void **args, int64_t end) {
    const char *fill = strstr(name, "FillFunctorI");
    if (fill && strstr(name, "vectorized_elementwise_kernel")) {
        size_t width = fill_width(fill + 12);
        if (!width) return;
        struct pending work = {.due = end, .deed = FILL, .to = *(void **)args[2], .bytes = width * (size_t)*(int *)args[0], .width = width};
        memcpy(work.as.pattern, args[1], width);
        /* A negative integer (labels of -100) is NaN to whoever gets the block next as floats: zeros instead. */
        if (!arithmetic && strchr("alisx", fill[12]) && work.as.pattern[width - 1] & 0x80) memset(work.as.pattern, 0, width);
        struct range *range = range_at(work.to);
        if (range && (char *)work.to + work.bytes <= range->base + range->bytes) put_off(work);
    }
}

static cudaError_t launch(const void *function, const char *name, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t handle,
                          double ns) {
    READY;
    LOCKED;
    struct fc_stream *stream = stream_of(handle);
    if (function) name = name_of(function);
    note_on("cudaLaunchKernel", stream);
    VALID(stream);
    if (block.x * block.y * block.z > 1024 || !grid.x || !grid.y || !grid.z || !block.x) return fail(cudaErrorInvalidConfiguration);
    if (ns <= 0) ns = model.kernel_ns;
    if (args && strstr(name, "spin_kernel")) ns = (double)*(int64_t *)args[0] / 1.98;
    int64_t start, end = issue(stream, ns, &start);
    if (args && !stream->capture) effect(name, args, end);
    tell((struct fc_record){.kind = FC_KERNEL, .name = name, .start = start, .end = end, .device = stream->device, .stream = stream->number,
                            .grid = {(int)grid.x, (int)grid.y, (int)grid.z}, .block = {(int)block.x, (int)block.y, (int)block.z},
                            .shared = (int)shared});
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    API(cudaLaunchKernel_v7000);
    return launch(function, NULL, grid, block, args, shared, stream, 0);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    API(cudaLaunchCooperativeKernel_v9000);
    return launch(function, NULL, grid, block, args, shared, stream, 0);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    API(cudaLaunchKernelExC_v11060);
    return launch(function, NULL, config->gridDim, config->blockDim, args, config->dynamicSmemBytes, config->stream, 0);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    API(cudaLaunchKernel_v7000);
    return launch(kernel, NULL, grid, block, args, shared, stream, 0);
}
int fc_launch(void *stream, const char *name, double ns) {
    API(cudaLaunchKernel_v7000);
    dim3 one = {132, 1, 1}, block = {128, 1, 1};
    return launch(NULL, name, one, block, NULL, 0, stream, ns);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 227 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    (void)function; (void)shared;
    *blocks = size > 0 && size <= 1024 ? 2048 / size : 1;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size, size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, size, shared);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **pointer, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)version; (void)flags;
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", symbol);
    *pointer = driver ? dlsym(driver, versioned) : NULL;
    if (!*pointer && driver) *pointer = dlsym(driver, symbol);
    if (status) *status = *pointer ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*pointer) fc_note(symbol);
    return cudaSuccess;
}
