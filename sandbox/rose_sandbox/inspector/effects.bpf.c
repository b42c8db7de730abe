// What sandboxes ask of the kernel, by their group: how many calls, and which of the calls whose
// effect leaves no trace that `witness` could find afterwards. Only groups in `watched` are counted;
// a call of anybody else costs one look-up. Next step: `bpf` loads it and reads `watched`.
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum rare {
	URING,	       // work that is done without calls
	OTHERS_MEMORY, // a process writes into another one
	SYSTEM_V,      // shared memory, queues and semaphores that outlive processes
	METADATA,      // times and attributes, which a folder's listing does not show
	RARE,
};

struct counters {
	__u64 calls;
	__u64 starts; // processes begun
	__u64 rare[RARE];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct counters);
} watched SEC(".maps");

// The head of a call's registers on x86-64, as the kernel keeps them.
struct registers {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
};

#define WRITES 3 // O_WRONLY | O_RDWR

static __always_inline int opens_memory(const struct registers *at, int with_folder)
{
	struct registers registers;
	char path[8] = {};
	unsigned long flags, name;

	if (bpf_probe_read_kernel(&registers, sizeof(registers), at))
		return 1; // not known: count it
	flags = with_folder ? registers.dx : registers.si;
	name = with_folder ? registers.si : registers.di;
	if (!(flags & WRITES))
		return 0;
	// "/proc/N/mem" and "/proc/self/mem"; not "/proc/sys", which is read-only.
	if (bpf_probe_read_user_str(path, sizeof(path), (const void *)name) < 0)
		return 0;
	return path[0] == '/' && path[1] == 'p' && path[2] == 'r' && path[3] == 'o' &&
	       path[4] == 'c' && path[5] == '/';
}

static __always_inline int sets_attributes(const struct registers *at)
{
	struct registers registers;

	if (bpf_probe_read_kernel(&registers, sizeof(registers), at))
		return 1;
	// FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
	return (__u32)registers.si == 0x40086602 || (__u32)registers.si == 0x401c5820;
}

SEC("raw_tracepoint/sys_enter")
int call_begins(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 group = bpf_get_current_cgroup_id();
	struct counters *counters = bpf_map_lookup_elem(&watched, &group);
	int rare = RARE;

	if (!counters)
		return 0;
	__sync_fetch_and_add(&counters->calls, 1);
	switch (ctx->args[1]) {
	case 425: case 426: case 427: // io_uring_setup, _enter, _register
		rare = URING;
		break;
	case 101: case 311: // ptrace, process_vm_writev
		rare = OTHERS_MEMORY;
		break;
	case 2: // open
		if (opens_memory((const void *)ctx->args[0], 0))
			rare = OTHERS_MEMORY;
		break;
	case 257: // openat
		if (opens_memory((const void *)ctx->args[0], 1))
			rare = OTHERS_MEMORY;
		break;
	case 437: // openat2, whose flags lie in memory: rare enough to count every one
		rare = OTHERS_MEMORY;
		break;
	case 29: case 30: case 31: case 64: case 65: case 66: case 68: case 69: case 70: case 71:
	case 220: // shm*, sem*, msg*
	case 240: case 241: case 242: case 243: case 244: case 245: // mq_*
		rare = SYSTEM_V;
		break;
	case 132: case 235: case 261: case 280: // utime, utimes, futimesat, utimensat
	case 188: case 189: case 190: case 197: case 198: case 199: // *setxattr, *removexattr
	case 463: case 466: // setxattrat, removexattrat
		rare = METADATA;
		break;
	case 16: // ioctl
		if (sets_attributes((const void *)ctx->args[0]))
			rare = METADATA;
		break;
	}
	if (rare < RARE)
		__sync_fetch_and_add(&counters->rare[rare], 1);
	return 0;
}

SEC("raw_tracepoint/sched_process_fork")
int process_begins(void *ctx)
{
	__u64 group = bpf_get_current_cgroup_id();
	struct counters *counters = bpf_map_lookup_elem(&watched, &group);

	if (counters)
		__sync_fetch_and_add(&counters->starts, 1);
	return 0;
}
