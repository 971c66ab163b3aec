/* libnccl: ranks exchange their data through files in /dev/shm, when a collective is issued; its time passes on the stream.
 *
 * A message is a file that appears whole. Every rank of a collective posts one (empty where it gives nothing), reads those of the others,
 * and removes its own once the next collective shows that all have read it. The receiver of a send removes the file.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum { DONE = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };
#define MOST_RANKS 64

struct id { char bytes[128]; };
struct comm {
    char folder[96];
    int ranks, rank, splits;
    unsigned collectives, sent[MOST_RANKS], received[MOST_RANKS];
    volatile int aborted;
};

void fc_flush(void);
int fc_capturing(void);

/* ------------------------------------------------------------------ messages */

static void path_of(char *path, size_t room, struct comm *comm, const char *kind, int from, int to, unsigned number) {
    snprintf(path, room, "%s/%s-%d-%d-%u", comm->folder, kind, from, to, number);
}
static int post(struct comm *comm, const char *kind, int to, unsigned number, const void *data, size_t bytes) {
    char path[160], hidden[176];
    path_of(path, sizeof path, comm, kind, comm->rank, to, number);
    snprintf(hidden, sizeof hidden, "%s.part", path);
    int file = open(hidden, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return SYSTEM_ERROR;
    for (size_t at = 0; at < bytes;) {
        ssize_t written = write(file, (const char *)data + at, bytes - at);
        if (written < 0 && errno != EINTR) { close(file); return SYSTEM_ERROR; }
        if (written > 0) at += (size_t)written;
    }
    close(file);
    return rename(hidden, path) ? SYSTEM_ERROR : DONE;
}
static int take(struct comm *comm, const char *kind, int from, int to, unsigned number, void *data, size_t bytes, int remove) {
    char path[160];
    path_of(path, sizeof path, comm, kind, from, to, number);
    int file;
    for (long pause = 20000; (file = open(path, O_RDONLY | O_CLOEXEC)) < 0; pause += pause < 1000000 ? pause / 4 : 0) {
        if (comm->aborted) return INTERNAL_ERROR;
        nanosleep(&(struct timespec){0, pause}, NULL);
    }
    struct stat about;
    int error = fstat(file, &about) || (size_t)about.st_size != bytes ? INVALID_USAGE : DONE;
    for (size_t at = 0; at < bytes && !error;) {
        ssize_t got = read(file, (char *)data + at, bytes - at);
        if (got <= 0 && errno != EINTR) error = SYSTEM_ERROR;
        if (got > 0) at += (size_t)got;
    }
    close(file);
    if (remove) unlink(path);
    return error;
}

/* Each rank gives `bytes`; `all` is what every rank gave, in order. `given[rank]` tells how many each gives, NULL: all as many. */
static int gather(struct comm *comm, const void *data, size_t bytes, char *all, const size_t *given) {
    unsigned number = ++comm->collectives;
    int error = post(comm, "c", 0, number, data, bytes);
    for (int rank = 0; rank < comm->ranks && !error; rank++) {
        size_t size = given ? given[rank] : bytes;
        error = take(comm, "c", rank, 0, number, all, size, 0);
        all += size;
    }
    char path[160];
    path_of(path, sizeof path, comm, "c", comm->rank, 0, number - 1);
    if (!error) unlink(path);
    return error;
}

/* ------------------------------------------------------------------ reductions */

static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? widths[type] : 1;
}
static double number_at(const void *data, size_t i, int type) {
    switch (type) {
    case 0: return ((const int8_t *)data)[i];
    case 1: return ((const uint8_t *)data)[i];
    case 2: return ((const int32_t *)data)[i];
    case 3: return ((const uint32_t *)data)[i];
    case 4: return (double)((const int64_t *)data)[i];
    case 5: return (double)((const uint64_t *)data)[i];
    case 6: return (double)((const _Float16 *)data)[i];
    case 7: return ((const float *)data)[i];
    case 8: return ((const double *)data)[i];
    case 9: { uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16; float value; memcpy(&value, &bits, 4); return value; }
    default: return 0;
    }
}
static void put_number(void *data, size_t i, int type, double value) {
    switch (type) {
    case 0: ((int8_t *)data)[i] = (int8_t)value; break;
    case 1: ((uint8_t *)data)[i] = (uint8_t)value; break;
    case 2: ((int32_t *)data)[i] = (int32_t)value; break;
    case 3: ((uint32_t *)data)[i] = (uint32_t)value; break;
    case 4: ((int64_t *)data)[i] = (int64_t)value; break;
    case 5: ((uint64_t *)data)[i] = (uint64_t)value; break;
    case 6: ((_Float16 *)data)[i] = (_Float16)value; break;
    case 7: ((float *)data)[i] = (float)value; break;
    case 8: ((double *)data)[i] = value; break;
    case 9: {
        float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, 4);
        if (!isnan(single)) bits += 0x7fff + (bits >> 16 & 1);  /* to the nearest, ties to even */
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        break;
    }
    }
}
static void reduce(void *out, const char *all, size_t stride, size_t skipped, size_t count, int ranks, int type, int op) {
    for (size_t i = 0; i < count; i++) {
        double value = number_at(all + skipped, i, type);
        for (int rank = 1; rank < ranks; rank++) {
            double other = number_at(all + (size_t)rank * stride + skipped, i, type);
            if (op == PRODUCT) value *= other;
            else if (op == MAXIMUM) value = other > value || isnan(other) ? other : value;
            else if (op == MINIMUM) value = other < value || isnan(other) ? other : value;
            else value += other;
        }
        put_number(out, i, type, op == AVERAGE ? value / ranks : value);
    }
}

/* ------------------------------------------------------------------ groups of sends and receives */

struct part { int receives; void *data; size_t bytes; int peer; struct comm *comm; void *stream; };
static __thread struct part *parts;
static __thread size_t part_count, part_room;
static __thread int groups;

static int spend(void *stream, double bytes, const char *name) { return fc_launch(stream, name, 10e3 + bytes / 150) ? 1 : DONE; }

static int finish_group(void) {
    int error = DONE;
    fc_flush();
    for (size_t i = 0; i < part_count && !error; i++)
        if (!parts[i].receives) error = post(parts[i].comm, "p", parts[i].peer, ++parts[i].comm->sent[parts[i].peer], parts[i].data, parts[i].bytes);
    for (size_t i = 0; i < part_count && !error; i++) {
        struct part *part = &parts[i];
        if (part->receives)
            error = take(part->comm, "p", part->peer, part->comm->rank, ++part->comm->received[part->peer], part->data, part->bytes, 1);
    }
    double bytes = 0;
    for (size_t i = 0; i < part_count; i++) bytes += (double)parts[i].bytes;
    if (part_count && !error) error = spend(parts[0].stream, bytes, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)");
    part_count = 0;
    return error;
}
int ncclGroupStart(void) { groups++; return DONE; }
int ncclGroupEnd(void) { return --groups ? DONE : finish_group(); }
static int add(struct part part) {
    if (part.peer < 0 || part.peer >= part.comm->ranks) return INVALID_ARGUMENT;
    if (fc_capturing()) return DONE;
    if (part_count == part_room) parts = realloc(parts, (part_room = part_room ? 2 * part_room : 16) * sizeof *parts);
    parts[part_count++] = part;
    return groups ? DONE : finish_group();
}
int ncclSend(const void *from, size_t count, int type, int peer, struct comm *comm, void *stream) {
    return add((struct part){0, (void *)from, count * width(type), peer, comm, stream});
}
int ncclRecv(void *to, size_t count, int type, int peer, struct comm *comm, void *stream) {
    return add((struct part){1, to, count * width(type), peer, comm, stream});
}

/* ------------------------------------------------------------------ collectives */

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, struct comm *comm, void *stream) {
    size_t bytes = count * width(type);
    char *all = malloc(bytes * (size_t)comm->ranks + 1);
    fc_flush();
    int error = fc_capturing() ? DONE : gather(comm, from, bytes, all, NULL);
    if (!error && !fc_capturing()) reduce(to, all, bytes, 0, count, comm->ranks, type, op);
    free(all);
    return error ? error : spend(stream, 2 * (double)bytes, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}
static int from_root(const void *from, void *to, size_t bytes, int root, struct comm *comm) {
    size_t given[MOST_RANKS] = {0};
    given[root] = bytes;
    char *all = malloc(bytes + 1);
    fc_flush();
    int error = gather(comm, from, comm->rank == root ? bytes : 0, all, given);
    if (!error) memcpy(to, all, bytes);
    free(all);
    return error;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct comm *comm, void *stream) {
    size_t bytes = count * width(type);
    int error = fc_capturing() ? DONE : from_root(from, to, bytes, root, comm);
    return error ? error : spend(stream, (double)bytes, "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}
int ncclBcast(void *both, size_t count, int type, int root, struct comm *comm, void *stream) { return ncclBroadcast(both, both, count, type, root, comm, stream); }
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, struct comm *comm, void *stream) {
    size_t bytes = count * width(type);
    char *all = malloc(bytes * (size_t)comm->ranks + 1);
    fc_flush();
    int error = gather(comm, from, bytes, all, NULL);
    if (!error && comm->rank == root) reduce(to, all, bytes, 0, count, comm->ranks, type, op);
    free(all);
    return error ? error : spend(stream, (double)bytes, "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}
int ncclAllGather(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream) {
    size_t bytes = count * width(type);
    fc_flush();
    char *given = memcpy(malloc(bytes + 1), from, bytes);  /* `from` may lie within `to` */
    int error = gather(comm, given, bytes, to, NULL);
    free(given);
    return error ? error : spend(stream, (double)bytes * comm->ranks, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, struct comm *comm, void *stream) {
    size_t part = count * width(type), bytes = part * (size_t)comm->ranks;
    char *all = malloc(bytes * (size_t)comm->ranks + 1);
    fc_flush();
    int error = gather(comm, from, bytes, all, NULL);
    if (!error) reduce(to, all, bytes, part * (size_t)comm->rank, count, comm->ranks, type, op);
    free(all);
    return error ? error : spend(stream, (double)bytes, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)");
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct comm *comm, void *stream) {
    size_t bytes = count * width(type);
    ncclGroupStart();
    for (int peer = 0; peer < comm->ranks; peer++) {
        ncclSend((const char *)from + (size_t)peer * bytes, count, type, peer, comm, stream);
        ncclRecv((char *)to + (size_t)peer * bytes, count, type, peer, comm, stream);
    }
    return ncclGroupEnd();
}

/* ------------------------------------------------------------------ communicators */

static int join(struct comm **made, int ranks, int rank, const char *folder) {
    if (ranks > MOST_RANKS) return INVALID_ARGUMENT;
    *made = calloc(1, sizeof **made);
    (*made)->ranks = ranks;
    (*made)->rank = rank;
    snprintf((*made)->folder, sizeof (*made)->folder, "%s", folder);
    return mkdir(folder, 0700) && errno != EEXIST ? SYSTEM_ERROR : DONE;
}
int ncclGetVersion(int *version) { *version = 22907; return DONE; }
int ncclGetUniqueId(struct id *id) {
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/dev/shm/fakenccl-%d-%lld", (int)getpid(), (long long)fc_now());
    return DONE;
}
const char *ncclGetErrorString(int error) { return error ? "error of the simulated NCCL" : "no error"; }
const char *ncclGetLastError(void *comm) { (void)comm; return ""; }
int ncclCommInitRank(struct comm **made, int ranks, struct id id, int rank) { return join(made, ranks, rank, id.bytes); }
int ncclCommInitRankConfig(struct comm **made, int ranks, struct id id, int rank, void *config) { (void)config; return join(made, ranks, rank, id.bytes); }
int ncclCommInitRankScalable(struct comm **made, int ranks, int rank, int ids, struct id *id, void *config) { (void)ids; (void)config; return join(made, ranks, rank, id->bytes); }
int ncclCommSplit(struct comm *comm, int color, int key, struct comm **made, void *config) {
    (void)config;
    int mine[2] = {color, key}, all[2 * MOST_RANKS], ranks = 0, rank = 0;
    int error = gather(comm, mine, sizeof mine, (char *)all, NULL);
    comm->splits++;
    *made = NULL;
    if (error || color < 0) return error;
    for (int other = 0; other < comm->ranks; other++) {
        if (all[2 * other] != color) continue;
        ranks++;
        rank += all[2 * other + 1] < key || (all[2 * other + 1] == key && other < comm->rank);
    }
    char folder[96];
    snprintf(folder, sizeof folder, "%.70s-%d-%d", comm->folder, comm->splits, color);
    return join(made, ranks, rank, folder);
}
/* The last rank to leave removes the folder: a slower one may still have to read the last messages. */
static void leave(struct comm *comm) {
    char path[400];
    snprintf(path, sizeof path, "%s/left-%d", comm->folder, comm->rank);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    for (int rank = 0; rank < comm->ranks; rank++) {
        snprintf(path, sizeof path, "%s/left-%d", comm->folder, rank);
        if (access(path, F_OK)) return;
    }
    DIR *folder = opendir(comm->folder);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "%s/%s", comm->folder, entry->d_name);
        if (entry->d_name[0] != '.') unlink(path);
    }
    if (folder) closedir(folder);
    rmdir(comm->folder);
}
int ncclCommDestroy(struct comm *comm) { leave(comm); free(comm); return DONE; }
int ncclCommAbort(struct comm *comm) { comm->aborted = 1; leave(comm); return DONE; }  /* not freed: another thread may still wait in it */
int ncclCommCount(struct comm *comm, int *count) { *count = comm->ranks; return DONE; }
int ncclCommUserRank(struct comm *comm, int *rank) { *rank = comm->rank; return DONE; }
int ncclCommGetAsyncError(struct comm *comm, int *error) { *error = comm->aborted ? SYSTEM_ERROR : DONE; return DONE; }
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int ncclMemAlloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes) ? 1 : DONE; }
int ncclMemFree(void *pointer) { return cudaFree(pointer) ? 1 : DONE; }
