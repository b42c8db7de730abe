// What sandboxes ask of the kernel, by their group: how many calls, and which of the calls whose
// effect leaves no trace that `witness` could find afterwards. Only groups in `watched` are counted;
// a call of anybody else costs one look-up. Next step: `bpf` loads it and reads `watched`.
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

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

// Of the kernel's own types what is read here; libbpf finds where it lies in the kernel that runs.
#define OF_THE_KERNEL __attribute__((preserve_access_index))
struct super_block { unsigned long s_magic; } OF_THE_KERNEL;
struct inode { struct super_block *i_sb; } OF_THE_KERNEL;
struct file { struct inode *f_inode; } OF_THE_KERNEL;
struct fdtable { unsigned int max_fds; struct file **fd; } OF_THE_KERNEL;
struct files_struct { struct fdtable *fdt; } OF_THE_KERNEL;
struct task_struct { struct files_struct *files; } OF_THE_KERNEL;

#define PROC_SUPER_MAGIC 0x9fa0

// Whether a descriptor is of the file system of processes: "/proc/N/mem", by whatever name it was
// opened and by whomever.
static __always_inline int is_of_processes(unsigned int descriptor)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files, *file;

	if (!table || descriptor >= BPF_CORE_READ(table, max_fds))
		return 0; // it has none such, and the call fails
	files = BPF_CORE_READ(table, fd);
	if (bpf_probe_read_kernel(&file, sizeof(file), files + descriptor))
		return 1; // not known: count it
	return file && BPF_CORE_READ(file, f_inode, i_sb, s_magic) == PROC_SUPER_MAGIC;
}

static __always_inline int writes_to_processes(const struct registers *at, int second)
{
	struct registers registers;

	if (bpf_probe_read_kernel(&registers, sizeof(registers), at))
		return 1;
	return is_of_processes(second ? registers.dx : registers.di);
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
	case 1: case 18: case 20: case 296: case 328: // write, pwrite64, writev, pwritev, pwritev2
	case 40: // sendfile
		if (writes_to_processes((const void *)ctx->args[0], 0))
			rare = OTHERS_MEMORY;
		break;
	case 275: case 326: // splice, copy_file_range
		if (writes_to_processes((const void *)ctx->args[0], 1))
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
