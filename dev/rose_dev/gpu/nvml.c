/* NVIDIA's management library (NVML) without a GPU: the C ABI over a state file that is mapped.
 *
 * The file is named by ROSE_NVML_STATE, else it lies beside this library as "nvml.state", so that
 * a container needs no more than one mounted folder. Without it nvmlInit answers
 * DRIVER_NOT_LOADED, as on a machine without a driver. Any process may change the state meanwhile
 * (state.py); nothing is cached here but handles.
 *
 * Every call is counted in the file, may be made slow or made to fail there, and is refused where
 * the real library refuses it: before nvmlInit, after the driver was loaded anew, of a GPU that is
 * lost, with arrays that are too small. Names without a function here stand in stubs.c, which
 * library.py writes: they are counted and answer NOT_SUPPORTED. Structures and codes are those of
 * the public nvml.h; where a function has versions, each keeps its own layout.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

typedef int Code;
typedef char *Device; /* points into `handles` */

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4,
  NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15,
  NO_MEMORY = 20, VERSION_MISMATCH = 25, UNKNOWN = 999
};

static const struct { int code; const char *text; } TEXTS[] = {
  {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
  {4, "Insufficient Permissions"}, {5, "Already Initialized"}, {6, "Not Found"},
  {7, "Insufficient Size"}, {8, "Insufficient External Power"}, {9, "Driver Not Loaded"},
  {10, "Timeout"}, {11, "Interrupt Request Issue"}, {12, "NVML Shared Library Not Found"},
  {13, "Function Not Found"}, {14, "Corrupted infoROM"}, {15, "GPU is lost"},
  {16, "GPU requires restart"}, {17, "The operating system has blocked the request"},
  {18, "RM has detected an NVML/RM version mismatch"}, {19, "In use by another client"},
  {20, "Insufficient Memory"}, {21, "No data"}, {25, "Argument Version Mismatch"},
  {28, "GPU not found"}, {999, "Unknown Error"},
};

/* --- the mapped state */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct header *state;
static char mapped[PATH_MAX];
static int counting;
static _Atomic unsigned uses;
static uint32_t load;
static char handles[MOST_GPUS];

static void path_of_state(char *path, size_t size) {
  const char *named = getenv("ROSE_NVML_STATE");
  Dl_info own;
  if (named && *named) {
    snprintf(path, size, "%s", named);
    return;
  }
  path[0] = 0;
  if (!dladdr((void *)&path_of_state, &own) || !own.dli_fname) return;
  const char *slash = strrchr(own.dli_fname, '/');
  if (slash) snprintf(path, size, "%.*s/nvml.state", (int)(slash - own.dli_fname), own.dli_fname);
}

/* A container may have the file read-only; then its calls are not counted. */
static struct header *map_state(const char *path, int *writable) {
  int file = open(path, O_RDWR | O_CLOEXEC);
  *writable = file >= 0;
  if (file < 0) file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return NULL;
  struct stat found;
  struct header *map = MAP_FAILED;
  int rights = *writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (fstat(file, &found) == 0 && (size_t)found.st_size >= sizeof(struct header))
    map = mmap(NULL, sizeof(struct header), rights, MAP_SHARED, file, 0);
  close(file);
  if (map == MAP_FAILED) return NULL;
  if (map->magic == MAGIC && map->size == sizeof(struct header) && map->names == NAMES) return map;
  munmap(map, sizeof(struct header));
  return NULL;
}

/* Under the lock. A process whose environment names another file by now gets that one; the old
   mapping stays, because other threads may be reading it. */
static int follow_state(void) {
  char path[PATH_MAX];
  path_of_state(path, sizeof path);
  if (state && !strcmp(path, mapped)) return 1;
  int writable = 0;
  struct header *map = map_state(path, &writable);
  if (!map) return 0;
  state = map;
  counting = writable;
  snprintf(mapped, sizeof mapped, "%s", path);
  uses = 0;
  return 1;
}

static void rest(uint64_t microseconds) {
  struct timespec left = {microseconds / 1000000, (microseconds % 1000000) * 1000};
  if (microseconds)
    while (nanosleep(&left, &left) == -1) continue;
}

static Code count(int function) {
  struct function *own = &state->functions[function];
  if (counting) {
    atomic_fetch_add((_Atomic uint64_t *)&own->calls, 1);
    atomic_fetch_add((_Atomic uint64_t *)&state->calls, 1);
  }
  rest(state->delay_microseconds + own->delay_microseconds);
  return (Code)own->error;
}

Code rose_begin(int function) {
  if (!state) return UNINITIALIZED;
  Code code = count(function);
  if (code) return code;
  if (!uses) return UNINITIALIZED;
  return state->loaded && state->load == load ? SUCCESS : UNKNOWN;
}

static Code begin_gpu(int function, Device device, struct gpu **gpu) {
  Code code = rose_begin(function);
  if (code) return code;
  long index = device - handles;
  if (!device || index < 0 || index >= (long)state->gpu_count) return INVALID_ARGUMENT;
  *gpu = &state->gpus[index];
  rest((*gpu)->delay_microseconds);
  return (Code)(*gpu)->lost;
}

#define BEGIN(name) do { Code c_ = rose_begin(F_##name); if (c_) return c_; } while (0)
#define BEGIN_GPU(name) \
  struct gpu *gpu; \
  do { Code c_ = begin_gpu(F_##name, device, &gpu); if (c_) return c_; } while (0)

static Code write_text(const char *text, char *out, unsigned size) {
  if (!out) return INVALID_ARGUMENT;
  if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
  memcpy(out, text, strlen(text) + 1);
  return SUCCESS;
}

/* --- the library itself */

static Code initialise(int function) {
  pthread_mutex_lock(&lock);
  Code code = follow_state() ? count(function) : DRIVER_NOT_LOADED;
  if (!code && !state->loaded) code = DRIVER_NOT_LOADED;
  if (!code && uses++ == 0) load = state->load;
  pthread_mutex_unlock(&lock);
  return code;
}

Code nvmlInit(void) { return initialise(F_nvmlInit); }
Code nvmlInit_v2(void) { return initialise(F_nvmlInit_v2); }
Code nvmlInitWithFlags(unsigned flags) { (void)flags; return initialise(F_nvmlInitWithFlags); }

Code nvmlShutdown(void) {
  pthread_mutex_lock(&lock);
  Code code = state ? count(F_nvmlShutdown) : UNINITIALIZED;
  if (!code && !uses) code = UNINITIALIZED;
  if (!code) uses--;
  pthread_mutex_unlock(&lock);
  return code;
}

const char *nvmlErrorString(Code code) {
  for (size_t i = 0; i < sizeof TEXTS / sizeof *TEXTS; i++)
    if (TEXTS[i].code == code) return TEXTS[i].text;
  return "Unknown Error";
}

Code nvmlSystemGetDriverVersion(char *out, unsigned size) {
  BEGIN(nvmlSystemGetDriverVersion);
  return write_text(state->driver_version, out, size);
}

Code nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  BEGIN(nvmlSystemGetNVMLVersion);
  return write_text(state->nvml_version, out, size);
}

Code nvmlSystemGetCudaDriverVersion(int *out) {
  BEGIN(nvmlSystemGetCudaDriverVersion);
  *out = (int)state->cuda_version;
  return SUCCESS;
}

Code nvmlSystemGetCudaDriverVersion_v2(int *out) {
  BEGIN(nvmlSystemGetCudaDriverVersion_v2);
  *out = (int)state->cuda_version;
  return SUCCESS;
}

Code nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
  BEGIN(nvmlSystemGetProcessName);
  char path[64], name[1024];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return NOT_FOUND;
  ssize_t got = read(file, name, sizeof name - 1);
  close(file);
  name[got > 0 ? got : 0] = 0;
  snprintf(out, size, "%s", name);
  return SUCCESS;
}

/* --- which GPUs there are */

static Code device_count(unsigned *out) {
  if (!out) return INVALID_ARGUMENT;
  *out = state->gpu_count;
  return SUCCESS;
}

Code nvmlDeviceGetCount(unsigned *out) {
  BEGIN(nvmlDeviceGetCount);
  return device_count(out);
}

Code nvmlDeviceGetCount_v2(unsigned *out) {
  BEGIN(nvmlDeviceGetCount_v2);
  return device_count(out);
}

static Code by_index(unsigned index, Device *out) {
  if (!out || index >= state->gpu_count) return INVALID_ARGUMENT;
  rest(state->gpus[index].delay_microseconds);
  *out = &handles[index];
  return (Code)state->gpus[index].lost;
}

Code nvmlDeviceGetHandleByIndex(unsigned index, Device *out) {
  BEGIN(nvmlDeviceGetHandleByIndex);
  return by_index(index, out);
}

Code nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
  BEGIN(nvmlDeviceGetHandleByIndex_v2);
  return by_index(index, out);
}

/* By one of a GPU's names, which lies `offset` bytes into its structure. */
static Code by_text(const char *text, size_t offset, Device *out) {
  if (!text || !out) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < state->gpu_count; i++)
    if (!strcasecmp((const char *)&state->gpus[i] + offset, text)) return by_index(i, out);
  return NOT_FOUND;
}

Code nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
  BEGIN(nvmlDeviceGetHandleByUUID);
  return by_text(uuid, offsetof(struct gpu, uuid), out);
}

Code nvmlDeviceGetHandleBySerial(const char *serial, Device *out) {
  BEGIN(nvmlDeviceGetHandleBySerial);
  return by_text(serial, offsetof(struct gpu, serial), out);
}

/* With a domain of eight digits or of four. */
static Code by_bus(const char *bus, Device *out) {
  if (!bus) return INVALID_ARGUMENT;
  char whole[64];
  snprintf(whole, sizeof whole, "%s%s", strchr(bus, ':') == bus + 4 ? "0000" : "", bus);
  return by_text(whole, offsetof(struct gpu, bus_id), out);
}

Code nvmlDeviceGetHandleByPciBusId(const char *bus, Device *out) {
  BEGIN(nvmlDeviceGetHandleByPciBusId);
  return by_bus(bus, out);
}

Code nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *out) {
  BEGIN(nvmlDeviceGetHandleByPciBusId_v2);
  return by_bus(bus, out);
}

/* --- names and constants of a GPU */

#define TEXT_OF_GPU(name, field) \
  Code name(Device device, char *out, unsigned size) { \
    BEGIN_GPU(name); \
    return write_text(gpu->field, out, size); \
  }

/* Answers one number; `type` is that of the C ABI. */
#define NUMBER_OF_GPU(name, type, value) \
  Code name(Device device, type *out) { \
    BEGIN_GPU(name); \
    if (!out) return INVALID_ARGUMENT; \
    *out = (type)(value); \
    return SUCCESS; \
  }

TEXT_OF_GPU(nvmlDeviceGetUUID, uuid)
TEXT_OF_GPU(nvmlDeviceGetName, name)
TEXT_OF_GPU(nvmlDeviceGetSerial, serial)
NUMBER_OF_GPU(nvmlDeviceGetIndex, unsigned, gpu - state->gpus)
NUMBER_OF_GPU(nvmlDeviceGetMinorNumber, unsigned, gpu->minor)
NUMBER_OF_GPU(nvmlDeviceGetBoardId, unsigned, gpu->bus)
NUMBER_OF_GPU(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
NUMBER_OF_GPU(nvmlDeviceGetBrand, int, 14) /* NVIDIA */
NUMBER_OF_GPU(nvmlDeviceGetArchitecture, unsigned, gpu->architecture)
NUMBER_OF_GPU(nvmlDeviceGetNumGpuCores, unsigned, gpu->cores)
NUMBER_OF_GPU(nvmlDeviceGetNumaNodeId, unsigned, gpu->numa_node)
NUMBER_OF_GPU(nvmlDeviceGetBusType, unsigned, 2) /* PCIe */
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER_OF_GPU(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, 5)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 5)
NUMBER_OF_GPU(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER_OF_GPU(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NUMBER_OF_GPU(nvmlDeviceGetDisplayMode, int, 0)
NUMBER_OF_GPU(nvmlDeviceGetDisplayActive, int, 0)
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, int, gpu->persistence)

Code nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
  BEGIN_GPU(nvmlDeviceGetCudaComputeCapability);
  *major = (int)gpu->capability_major;
  *minor = (int)gpu->capability_minor;
  return SUCCESS;
}

struct attributes {
  unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices,
      compute_slices;
  unsigned long long memory_mebibytes;
};

/* Only a MIG device has them. */
Code nvmlDeviceGetAttributes_v2(Device device, struct attributes *out) {
  BEGIN_GPU(nvmlDeviceGetAttributes_v2);
  (void)out;
  return NOT_SUPPORTED;
}

struct pci_v2 {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id, reserved[4];
};

struct pci_v3 {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

static Code pci(const struct gpu *gpu, struct pci_v2 *out) {
  if (!out) return INVALID_ARGUMENT;
  memset(out, 0, sizeof *out);
  snprintf(out->legacy, sizeof out->legacy, "%.12s", gpu->bus_id + 4);
  out->domain = gpu->domain;
  out->bus = gpu->bus;
  out->device = gpu->device;
  out->device_id = gpu->pci_device_id;
  out->subsystem_id = gpu->pci_subsystem_id;
  return SUCCESS;
}

Code nvmlDeviceGetPciInfo(Device device, struct pci_v2 *out) {
  BEGIN_GPU(nvmlDeviceGetPciInfo);
  return pci(gpu, out);
}

Code nvmlDeviceGetPciInfo_v2(Device device, struct pci_v2 *out) {
  BEGIN_GPU(nvmlDeviceGetPciInfo_v2);
  return pci(gpu, out);
}

Code nvmlDeviceGetPciInfo_v3(Device device, struct pci_v3 *out) {
  BEGIN_GPU(nvmlDeviceGetPciInfo_v3);
  struct pci_v2 old;
  if (!out) return INVALID_ARGUMENT;
  pci(gpu, &old);
  memset(out, 0, sizeof *out);
  memcpy(out, &old, offsetof(struct pci_v3, bus_id));
  memcpy(out->bus_id, gpu->bus_id, sizeof out->bus_id);
  return SUCCESS;
}

/* nvidia-smi 550 asks this one, 535 the one above. */
struct pci_ext {
  unsigned version, domain, bus, device, device_id, subsystem_id, base_class, sub_class;
  char bus_id[32];
};

Code nvmlDeviceGetPciInfoExt(Device device, struct pci_ext *out) {
  BEGIN_GPU(nvmlDeviceGetPciInfoExt);
  if (!out) return INVALID_ARGUMENT;
  if (out->version != (sizeof *out | 1u << 24)) return VERSION_MISMATCH;
  *out = (struct pci_ext){
      .version = out->version, .domain = gpu->domain, .bus = gpu->bus, .device = gpu->device,
      .device_id = gpu->pci_device_id, .subsystem_id = gpu->pci_subsystem_id,
      .base_class = 3, .sub_class = 2}; /* a 3D controller */
  memcpy(out->bus_id, gpu->bus_id, sizeof out->bus_id);
  return SUCCESS;
}

/* --- memory, clocks, heat, faults */

struct memory_v1 { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

static unsigned long long held(const struct gpu *gpu) {
  unsigned long long held = gpu->memory_used;
  return held > gpu->memory_total ? gpu->memory_total : held;
}

/* The first version counts what the driver reserves as used. */
Code nvmlDeviceGetMemoryInfo(Device device, struct memory_v1 *out) {
  BEGIN_GPU(nvmlDeviceGetMemoryInfo);
  if (!out) return INVALID_ARGUMENT;
  *out = (struct memory_v1){gpu->memory_total, gpu->memory_total - held(gpu), held(gpu)};
  return SUCCESS;
}

Code nvmlDeviceGetMemoryInfo_v2(Device device, struct memory_v2 *out) {
  BEGIN_GPU(nvmlDeviceGetMemoryInfo_v2);
  if (!out) return INVALID_ARGUMENT;
  if (out->version != (sizeof *out | 2u << 24)) return VERSION_MISMATCH;
  unsigned long long reserved = gpu->memory_reserved, used = held(gpu);
  out->total = gpu->memory_total;
  out->reserved = reserved;
  out->free = gpu->memory_total - used;
  out->used = used > reserved ? used - reserved : 0;
  return SUCCESS;
}

Code nvmlDeviceGetBAR1MemoryInfo(Device device, struct memory_v1 *out) {
  BEGIN_GPU(nvmlDeviceGetBAR1MemoryInfo);
  unsigned long long whole = 128ull << 30;
  *out = (struct memory_v1){whole, whole - (2ull << 20), 2ull << 20};
  return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetComputeMode, int, gpu->compute_mode)

Code nvmlDeviceSetComputeMode(Device device, int mode) {
  BEGIN_GPU(nvmlDeviceSetComputeMode);
  if (geteuid() || !counting) return NO_PERMISSION;
  gpu->compute_mode = (uint32_t)mode;
  return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, unsigned, gpu->power_milliwatts)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementLimit, unsigned, gpu->power_limit_milliwatts)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, gpu->power_limit_milliwatts)
NUMBER_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, unsigned, gpu->power_limit_milliwatts)
NUMBER_OF_GPU(nvmlDeviceGetPowerManagementMode, int, 1)
NUMBER_OF_GPU(nvmlDeviceGetPerformanceState, int, 0)
NUMBER_OF_GPU(nvmlDeviceGetPowerState, int, 0)
NUMBER_OF_GPU(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, gpu->throttle_reasons)
NUMBER_OF_GPU(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, gpu->throttle_reasons)
NUMBER_OF_GPU(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 0x1ff)
NUMBER_OF_GPU(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0x1ff)

Code nvmlDeviceGetTemperature(Device device, int sensor, unsigned *out) {
  BEGIN_GPU(nvmlDeviceGetTemperature);
  if (sensor || !out) return INVALID_ARGUMENT;
  *out = gpu->temperature;
  return SUCCESS;
}

/* Shutdown, slowdown, memory's and GPU's limit. */
Code nvmlDeviceGetTemperatureThreshold(Device device, int threshold, unsigned *out) {
  BEGIN_GPU(nvmlDeviceGetTemperatureThreshold);
  static const unsigned limits[] = {92, 89, 95, 87};
  if (threshold < 0 || threshold > 3) return NOT_SUPPORTED;
  *out = limits[threshold];
  return SUCCESS;
}

struct utilization { unsigned gpu, memory; };

Code nvmlDeviceGetUtilizationRates(Device device, struct utilization *out) {
  BEGIN_GPU(nvmlDeviceGetUtilizationRates);
  *out = (struct utilization){gpu->utilization_gpu, gpu->utilization_memory};
  return SUCCESS;
}

/* Graphics, SM, memory, video. */
static Code clock_of(const struct gpu *gpu, int type, unsigned *out) {
  if (type < 0 || type > 3 || !out) return INVALID_ARGUMENT;
  *out = type == 2 ? gpu->clock_memory : gpu->clock_sm;
  return SUCCESS;
}

Code nvmlDeviceGetClockInfo(Device device, int type, unsigned *out) {
  BEGIN_GPU(nvmlDeviceGetClockInfo);
  return clock_of(gpu, type, out);
}

Code nvmlDeviceGetMaxClockInfo(Device device, int type, unsigned *out) {
  BEGIN_GPU(nvmlDeviceGetMaxClockInfo);
  return clock_of(gpu, type, out);
}

Code nvmlDeviceGetEccMode(Device device, int *current, int *pending) {
  BEGIN_GPU(nvmlDeviceGetEccMode);
  *current = *pending = (int)gpu->ecc_mode;
  return SUCCESS;
}

static Code ecc(const struct gpu *gpu, int type, unsigned long long *out) {
  if (!gpu->ecc_mode) return NOT_SUPPORTED;
  if (type < 0 || type > 1 || !out) return INVALID_ARGUMENT;
  *out = type ? gpu->ecc_uncorrected : gpu->ecc_corrected;
  return SUCCESS;
}

Code nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long *out) {
  BEGIN_GPU(nvmlDeviceGetTotalEccErrors);
  (void)counter;
  return ecc(gpu, type, out);
}

Code nvmlDeviceGetMemoryErrorCounter(Device device, int type, int counter, int place,
                                     unsigned long long *out) {
  BEGIN_GPU(nvmlDeviceGetMemoryErrorCounter);
  (void)counter;
  if (place == 2) return ecc(gpu, type, out); /* of the device's memory */
  if (!out) return INVALID_ARGUMENT;
  *out = 0;
  return SUCCESS;
}

Code nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected,
                               unsigned *pending, unsigned *failed) {
  BEGIN_GPU(nvmlDeviceGetRemappedRows);
  *corrected = gpu->remap_corrected;
  *uncorrected = gpu->remap_uncorrected;
  *pending = gpu->remap_pending;
  *failed = gpu->remap_failed;
  return SUCCESS;
}

Code nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
  BEGIN_GPU(nvmlDeviceGetMigMode);
  if (!gpu->mig_capable) return NOT_SUPPORTED;
  *current = gpu->mig_current;
  *pending = gpu->mig_pending;
  return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetMaxMigDeviceCount, unsigned, gpu->mig_current ? 7 : 0)
NUMBER_OF_GPU(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
NUMBER_OF_GPU(nvmlDeviceGetVirtualizationMode, int, gpu->virtualization)

/* No instances are made in a GPU with MIG: that it is on is all that there is to know. */
Code nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *out) {
  BEGIN_GPU(nvmlDeviceGetMigDeviceHandleByIndex);
  (void)index, (void)out;
  return gpu->mig_current ? NOT_FOUND : NOT_SUPPORTED;
}

/* --- places: every GPU reaches every other by NVLink within one node */

Code nvmlDeviceGetTopologyCommonAncestor(Device device, Device other, int *out) {
  BEGIN_GPU(nvmlDeviceGetTopologyCommonAncestor);
  long index = other - handles;
  if (index < 0 || index >= (long)state->gpu_count || !out) return INVALID_ARGUMENT;
  *out = gpu == &state->gpus[index] ? 0 : gpu->numa_node == state->gpus[index].numa_node ? 40 : 50;
  return SUCCESS;
}

Code nvmlDeviceGetP2PStatus(Device device, Device other, int kind, int *out) {
  BEGIN_GPU(nvmlDeviceGetP2PStatus);
  (void)other, (void)kind;
  *out = 0;
  return SUCCESS;
}

Code nvmlDeviceGetCpuAffinity(Device device, unsigned words, unsigned long *out) {
  BEGIN_GPU(nvmlDeviceGetCpuAffinity);
  memset(out, 0, words * sizeof *out);
  long count = sysconf(_SC_NPROCESSORS_ONLN);
  for (long i = 0; i < count && i / 64 < (long)words; i++) out[i / 64] |= 1ul << i % 64;
  return SUCCESS;
}

Code nvmlDeviceGetMemoryAffinity(Device device, unsigned words, unsigned long *out, int scope) {
  BEGIN_GPU(nvmlDeviceGetMemoryAffinity);
  (void)scope;
  memset(out, 0, words * sizeof *out);
  if (words) out[0] = 1ul << gpu->numa_node;
  return SUCCESS;
}

/* --- processes: a list that is too small is refused with the size that it needs */

struct process_v1 { unsigned pid; unsigned long long used; };
struct process_v2 { unsigned pid; unsigned long long used; unsigned gpu_part, compute_part; };

static unsigned processes(const struct gpu *gpu, uint32_t kind, struct process *out) {
  for (;;) {
    uint32_t epoch = atomic_load((_Atomic uint32_t *)&gpu->process_epoch);
    unsigned found = 0;
    for (unsigned i = 0; i < gpu->process_count && i < MOST_PROCESSES; i++)
      if (gpu->processes[i].kinds & kind) out[found++] = gpu->processes[i];
    atomic_thread_fence(memory_order_acquire);
    if (epoch % 2 == 0 && epoch == atomic_load((_Atomic uint32_t *)&gpu->process_epoch))
      return found;
    rest(50);
  }
}

static Code list_v1(const struct gpu *gpu, uint32_t kind, unsigned *size, struct process_v1 *out) {
  struct process found[MOST_PROCESSES];
  if (!size) return INVALID_ARGUMENT;
  unsigned room = *size;
  *size = processes(gpu, kind, found);
  if (*size > room) return INSUFFICIENT_SIZE;
  if (*size && !out) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < *size; i++)
    out[i] = (struct process_v1){found[i].pid, found[i].used};
  return SUCCESS;
}

static Code list_v2(const struct gpu *gpu, uint32_t kind, unsigned *size, struct process_v2 *out) {
  struct process found[MOST_PROCESSES];
  if (!size) return INVALID_ARGUMENT;
  unsigned room = *size;
  *size = processes(gpu, kind, found);
  if (*size > room) return INSUFFICIENT_SIZE;
  if (*size && !out) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < *size; i++)
    out[i] = (struct process_v2){found[i].pid, found[i].used, ~0u, ~0u};
  return SUCCESS;
}

#define PROCESS_LISTS(name, kind) \
  Code name(Device device, unsigned *size, struct process_v1 *out) { \
    BEGIN_GPU(name); \
    return list_v1(gpu, kind, size, out); \
  } \
  Code name##_v2(Device device, unsigned *size, struct process_v2 *out) { \
    BEGIN_GPU(name##_v2); \
    return list_v2(gpu, kind, size, out); \
  } \
  Code name##_v3(Device device, unsigned *size, struct process_v2 *out) { \
    BEGIN_GPU(name##_v3); \
    return list_v2(gpu, kind, size, out); \
  }

PROCESS_LISTS(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
PROCESS_LISTS(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)
PROCESS_LISTS(nvmlDeviceGetMPSComputeRunningProcesses, MPS)

struct process_detail {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_part, compute_part;
  unsigned long long protected_bytes;
};

struct process_details { unsigned version, mode, count; struct process_detail *list; };

Code nvmlDeviceGetRunningProcessDetailList(Device device, struct process_details *out) {
  BEGIN_GPU(nvmlDeviceGetRunningProcessDetailList);
  static const uint32_t kinds[] = {COMPUTE, GRAPHICS, MPS};
  struct process found[MOST_PROCESSES];
  if (!out || out->mode > 2) return INVALID_ARGUMENT;
  if (out->version != (sizeof *out | 1u << 24)) return VERSION_MISMATCH;
  unsigned room = out->list ? out->count : 0;
  out->count = processes(gpu, kinds[out->mode], found);
  if (out->count > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < out->count; i++)
    out->list[i] = (struct process_detail){found[i].pid, found[i].used, ~0u, ~0u, 0};
  return SUCCESS;
}

/* --- faults as events: from the registration on, of each GPU in order, each once */

#define XID_EVENT 8ull

struct event_set { struct { int on; uint64_t seen; } gpus[MOST_GPUS]; };

struct event {
  Device device;
  unsigned long long type, data;
  unsigned gpu_part, compute_part;
};

Code nvmlEventSetCreate(struct event_set **out) {
  BEGIN(nvmlEventSetCreate);
  *out = calloc(1, sizeof **out);
  return *out ? SUCCESS : NO_MEMORY;
}

Code nvmlEventSetFree(struct event_set *set) {
  BEGIN(nvmlEventSetFree);
  free(set);
  return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetSupportedEventTypes, unsigned long long, XID_EVENT)

Code nvmlDeviceRegisterEvents(Device device, unsigned long long types, struct event_set *set) {
  BEGIN_GPU(nvmlDeviceRegisterEvents);
  if (!set) return INVALID_ARGUMENT;
  if (types & ~XID_EVENT) return NOT_SUPPORTED;
  long index = device - handles;
  if (!set->gpus[index].on) set->gpus[index].seen = gpu->xid_count;
  set->gpus[index].on = 1;
  return SUCCESS;
}

static int next_event(struct event_set *set, struct event *out) {
  for (unsigned i = 0; i < state->gpu_count; i++) {
    struct gpu *gpu = &state->gpus[i];
    uint64_t reported = atomic_load((_Atomic uint64_t *)&gpu->xid_count);
    if (!set->gpus[i].on || set->gpus[i].seen >= reported) continue;
    unsigned long long xid = gpu->xids[set->gpus[i].seen++ % MOST_XIDS];
    *out = (struct event){&handles[i], XID_EVENT, xid, ~0u, ~0u};
    return 1;
  }
  return 0;
}

/* An event that has come is given out even if its GPU is lost by now; waiting on is refused. */
static Code wait_for_event(struct event_set *set, struct event *out, unsigned milliseconds) {
  if (!set || !out) return INVALID_ARGUMENT;
  for (;;) {
    if (next_event(set, out)) return SUCCESS;
    for (unsigned i = 0; i < state->gpu_count; i++)
      if (set->gpus[i].on && state->gpus[i].lost) return (Code)state->gpus[i].lost;
    if (!state->loaded || state->load != load) return UNKNOWN;
    if (!milliseconds--) return TIMEOUT;
    rest(1000);
  }
}

Code nvmlEventSetWait(struct event_set *set, struct event *out, unsigned milliseconds) {
  BEGIN(nvmlEventSetWait);
  return wait_for_event(set, out, milliseconds);
}

Code nvmlEventSetWait_v2(struct event_set *set, struct event *out, unsigned milliseconds) {
  BEGIN(nvmlEventSetWait_v2);
  return wait_for_event(set, out, milliseconds);
}

/* --- nvidia-smi's private table
 *
 * nvidia-smi asks for GPUs by index through this table, not by the public functions. Its first
 * word is its size; the place of each function is fixed. What is not known answers that it worked
 * and found nothing, because nvidia-smi takes an error of some of them for a broken driver. */

#define PLACES 256
#define BY_INDEX 81

static Code table_call(unsigned place, void *first, void *second) {
  if (place == BY_INDEX && second && (uintptr_t)first < MOST_GPUS)
    return by_index((unsigned)(uintptr_t)first, second);
  long index = (char *)first - handles;
  if (second && first && index >= 0 && index < (long)MOST_GPUS) *(unsigned *)second = 0;
  return SUCCESS;
}

#define PLACE(high, low) \
  static Code place_##high##_##low(void *first, void *second) { \
    return table_call(high * 16 + low, first, second); \
  }
#define NAME(high, low) (void *)place_##high##_##low,
#define SIXTEEN(make, high) \
  make(high, 0) make(high, 1) make(high, 2) make(high, 3) make(high, 4) make(high, 5) \
  make(high, 6) make(high, 7) make(high, 8) make(high, 9) make(high, 10) make(high, 11) \
  make(high, 12) make(high, 13) make(high, 14) make(high, 15)
#define ALL(make) \
  SIXTEEN(make, 0) SIXTEEN(make, 1) SIXTEEN(make, 2) SIXTEEN(make, 3) SIXTEEN(make, 4) \
  SIXTEEN(make, 5) SIXTEEN(make, 6) SIXTEEN(make, 7) SIXTEEN(make, 8) SIXTEEN(make, 9) \
  SIXTEEN(make, 10) SIXTEEN(make, 11) SIXTEEN(make, 12) SIXTEEN(make, 13) SIXTEEN(make, 14) \
  SIXTEEN(make, 15)

ALL(PLACE)
static void *table[PLACES] = {ALL(NAME)};

Code nvmlInternalGetExportTable(void **out, const void *which) {
  (void)which;
  table[0] = (void *)(uintptr_t)sizeof table;
  if (!out) return INVALID_ARGUMENT;
  *out = table;
  return SUCCESS;
}
