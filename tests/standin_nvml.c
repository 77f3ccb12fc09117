/* A stand-in for libnvidia-ml.so.1: what it says is read from a directory at every call, so that a test can turn any knob at
 * any time, and any process can "allocate". Memory follows processes: who is killed gives back what he held, as the driver has it.
 *
 * $SLIMPROC_FAKE_NVML/
 *   init, init_hang_ms        nvmlReturn_t of nvmlInit (9: no driver, 18: driver and library differ, 999); how long it takes
 *   driver                    the driver's version
 *   gpuN/                     a GPU, N from 0 in the order of the PCI bus; gpuN/migM/ an instance of it, with the same files
 *     uuid, name              its identity
 *     total, reserved, other  bytes; other: held by processes that NVML does not show
 *     alloc/PID, graphics/PID bytes held by a process, as a compute or a graphics one
 *     alloc/PID.dead          made by whoever first sees that the process is gone: the instant (CLOCK_MONOTONIC, ms)
 *     linger_ms               how much longer a dead process's memory is in use, attributed to nobody
 *     fail                    nvmlReturn_t of every call (15: lost)
 *     fail_memory, fail_processes   of those calls alone (3: not supported, 4: no permission)
 *     hang_ms                 every call takes so long: a wedged driver
 *     hide_bytes              present: nobody's bytes are known (WSL, some containers)
 *     hide_processes          present: the list of processes is empty (an old driver in a container)
 *     shift_pids              added to every PID in the list: the numbers of another namespace (containers)
 *     mig                     present: in MIG mode, even without instances
 *
 * Compiled with -DOLD_DRIVER it lacks the functions that came with driver 510.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_INSTANCES 7

typedef unsigned long long u64;
typedef struct { char directory[16]; } Device;
typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 bytes; unsigned gpu_instance, compute_instance; } Process;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25
};

static Device gpus[MAX_GPUS], instances[MAX_GPUS][MAX_INSTANCES];
static int initialized;

/* --- the directory ------------------------------------------------------------------------------------------- */

static void path_of(char *out, size_t size, const char *directory, const char *file) {
    const char *root = getenv("SLIMPROC_FAKE_NVML");
    snprintf(out, size, "%s/%s/%s", root ? root : "/nonexistent", directory, file);
}

static int read_text(const char *directory, const char *file, char *out, size_t size) {
    char path[1024];
    path_of(path, sizeof path, directory, file);
    FILE *stream = fopen(path, "re");
    if (!stream) return 0;
    size_t length = fread(out, 1, size - 1, stream);
    fclose(stream);
    out[length] = 0;
    out[strcspn(out, "\r\n")] = 0;
    return 1;
}

static u64 number(const char *directory, const char *file, u64 otherwise) {
    char text[64];
    return read_text(directory, file, text, sizeof text) ? strtoull(text, NULL, 0) : otherwise;
}

static int present(const char *directory, const char *file) {
    char text[4];
    return read_text(directory, file, text, sizeof text);
}

static void pause_ms(u64 ms) {
    struct timespec left = { (time_t)(ms / 1000), (long)(ms % 1000) * 1000000 };
    while (ms && nanosleep(&left, &left)) { }
}

static u64 now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000 + (u64)now.tv_nsec / 1000000;
}

/* --- who holds what ------------------------------------------------------------------------------------------- */

static int alive(int pid) { /* a zombie is not: its memory is gone */
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *stream = fopen(path, "re");
    if (!stream) return 0;
    size_t length = fread(text, 1, sizeof text - 1, stream);
    fclose(stream);
    text[length] = 0;
    char *name_end = strrchr(text, ')');
    return name_end && name_end[2] != 'Z' && name_end[2] != 'X';
}

static int lingers(const char *directory, const char *list, int pid) {
    u64 linger = number(directory, "linger_ms", 0);
    char file[64], path[1024], text[32];
    if (!linger) return 0;
    snprintf(file, sizeof file, "%s/%d.dead", list, pid);
    if (!present(directory, file)) {
        path_of(path, sizeof path, directory, file);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        int length = snprintf(text, sizeof text, "%llu", now_ms());
        if (fd >= 0) {
            if (write(fd, text, (size_t)length) != length) { }
            close(fd);
        }
    }
    return now_ms() - number(directory, file, now_ms()) < linger;
}

/* The bytes in use through `list`; those of the living also go to `out`, of which there are *count then. */
static u64 holders(const char *directory, const char *list, Process *out, unsigned room, unsigned *count) {
    char path[1024], file[300];
    u64 sum = 0;
    *count = 0;
    path_of(path, sizeof path, directory, list);
    DIR *entries = opendir(path);
    if (!entries) return 0;
    for (struct dirent *entry; (entry = readdir(entries));) {
        int pid = atoi(entry->d_name);
        if (pid <= 0 || strchr(entry->d_name, '.')) continue;
        int lives = alive(pid);
        if (!lives && !lingers(directory, list, pid)) continue;
        snprintf(file, sizeof file, "%s/%s", list, entry->d_name);
        u64 bytes = number(directory, file, 0);
        sum += bytes;
        if (!lives || !bytes) continue;
        if (out && *count < room)
            out[*count] = (Process){ (unsigned)pid + (unsigned)number(directory, "shift_pids", 0),
                                     present(directory, "hide_bytes") ? ~0ull : bytes, ~0u, ~0u };
        ++*count;
    }
    closedir(entries);
    return sum;
}

/* --- the library ---------------------------------------------------------------------------------------------- */

static int check(const Device *device) {
    if (!initialized) return UNINITIALIZED;
    if (!device || !device->directory[0]) return INVALID_ARGUMENT;
    pause_ms(number(device->directory, "hang_ms", 0));
    return (int)number(device->directory, "fail", SUCCESS);
}

static int give_text(char *out, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int identity(const Device *device, const char *file, char *out, unsigned size) {
    char text[128] = "";
    int result = check(device);
    if (result) return result;
    read_text(device->directory, file, text, sizeof text);
    return give_text(out, size, text);
}

static unsigned count_gpus(void) {
    unsigned count = 0;
    while (count < MAX_GPUS && present(gpus[count].directory, "uuid")) count++;
    return count;
}

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pause_ms(number(".", "init_hang_ms", 0));
    int result = (int)number(".", "init", SUCCESS);
    if (result) return result;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        snprintf(gpus[gpu].directory, sizeof gpus[gpu].directory, "gpu%d", gpu);
        for (int place = 0; place < MAX_INSTANCES; place++)
            snprintf(instances[gpu][place].directory, sizeof gpus[gpu].directory, "gpu%d/mig%d", gpu, place);
    }
    initialized++;
    return SUCCESS;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

API const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    char text[80] = "550.54.15";
    if (!initialized) return UNINITIALIZED;
    read_text(".", "driver", text, sizeof text);
    return give_text(out, size, text);
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
    if (!initialized) return UNINITIALIZED;
    *count = count_gpus();
    return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (!initialized) return UNINITIALIZED;
    if (index >= count_gpus()) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return check(*device);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    char text[128];
    if (!initialized) return UNINITIALIZED;
    for (unsigned gpu = 0; gpu < count_gpus(); gpu++)
        for (int place = -1; place < MAX_INSTANCES; place++) {
            *device = place < 0 ? &gpus[gpu] : &instances[gpu][place];
            if (read_text((*device)->directory, "uuid", text, sizeof text) && !strcmp(text, uuid)) return check(*device);
        }
    return NOT_FOUND;
}

API int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) { return identity(device, "uuid", out, size); }
API int nvmlDeviceGetName(Device *device, char *out, unsigned size) { return identity(device, "name", out, size); }

static int memory(const Device *device, MemoryV2 *out) {
    unsigned count;
    int result = check(device);
    if (!result) result = (int)number(device->directory, "fail_memory", SUCCESS);
    if (result) return result;
    out->total = number(device->directory, "total", 0);
    out->reserved = number(device->directory, "reserved", 0);
    out->used = number(device->directory, "other", 0) + holders(device->directory, "alloc", NULL, 0, &count)
              + holders(device->directory, "graphics", NULL, 0, &count);
    u64 gone = out->reserved + out->used;
    out->free = gone < out->total ? out->total - gone : 0;
    return SUCCESS;
}

API int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) { /* here `used` includes what is reserved */
    MemoryV2 both;
    int result = memory(device, &both);
    if (!result) *out = (Memory){ both.total, both.free, both.total - both.free };
    return result;
}

API int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    return out->version == 0x02000028 ? memory(device, out) : VERSION_MISMATCH;
}

#ifndef OLD_DRIVER

static int processes(const Device *device, const char *list, unsigned *count, Process *out) {
    unsigned room = out ? *count : 0;
    int result = check(device);
    if (!result) result = (int)number(device->directory, "fail_processes", SUCCESS);
    if (result) return result;
    *count = 0;
    if (present(device->directory, "hide_processes")) return SUCCESS;
    holders(device->directory, list, out, room, count);
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    return processes(device, "alloc", count, out);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    return processes(device, "graphics", count, out);
}

API int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    int result = check(device);
    if (result) return result;
    if (!present(device->directory, "mig")) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    *count = MAX_INSTANCES;
    return check(device);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **instance) {
    int result = check(device);
    if (result) return result;
    if (device < gpus || device >= gpus + MAX_GPUS || index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    *instance = &instances[device - gpus][index];
    return present((*instance)->directory, "uuid") ? SUCCESS : NOT_FOUND;
}

#endif
