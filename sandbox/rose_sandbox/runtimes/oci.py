"""A sandbox's ``config.json``: what it may see, use and call.

Everything that it does not need is left out: no network but its own loopback, no mount of the
host, no device but the harmless ones, no right of the host's root (its root is another user).
Next step: ``inside`` is its first process under runc, ``served`` under gVisor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose_sandbox.runtimes.inside import INIT
from rose_sandbox.runtimes.kernel import FIRST_ID, IDS
from rose_sandbox.runtimes.parts import SYSTEM_PATH
from rose_sandbox.runtimes.runtime import SandboxSpec
from rose_sandbox.runtimes.served import SERVED, WAY

CPU_PERIOD_US = 100_000
RUN_BYTES = 64 << 20
"""Of ``/run`` and of ``/dev/shm``, in memory: outputs of commands are there until they are read."""

# What root in a container usually has, without raw sockets; all within its own user namespace.
_CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
]
# The kernel's administration, its largest doors for attacks, and what CRIU cannot save.
_REFUSED_CALLS = [
    *("acct", "add_key", "adjtimex", "bpf", "clock_adjtime", "clock_settime", "create_module"),
    *("delete_module", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_mempolicy"),
    *("init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl"),
    *("kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mbind", "mount"),
    *("mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "nfsservctl"),
    *("open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "quotactl"),
    *("quotactl_fd", "reboot", "request_key", "set_mempolicy", "setns", "settimeofday", "swapoff"),
    *("swapon", "sysfs", "syslog", "umount", "umount2", "unshare", "uselib", "userfaultfd"),
    *("ustat", "vhangup", "vm86", "vm86old"),
]
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
# A namespace of its own would give it every right over a part of the kernel that it has no need of.
_NEW_NAMESPACES = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
_LAST_FAMILY = 16
"""Netlink's: local sockets and the internet's are below. Above are doors out of every network
namespace (vsock leads to the machine's own hypervisor) and what CRIU cannot save."""


# runc restores into an empty network, whose loopback nobody has switched on.
LOOPBACK = """\
#!/bin/sh
read -r state
pid=${state##*\\"pid\\":}
exec nsenter --target "${pid%%[!0-9]*}" --net ip link set lo up
"""


def config(spec: SandboxSpec, root: Path, cgroup: str, criu: Path, loopback: Path) -> object:
    """The whole file for runc, as JSON values.

    Args:
        spec: of the sandbox.
        root: its root folder, mounted.
        cgroup: its group, from the top of each hierarchy.
        criu: the configuration of CRIU.
        loopback: a program with the text ``LOOPBACK``.
    """
    made = _common(spec, root, cgroup, INIT)
    made["linux"] |= {
        "resources": made["linux"]["resources"]
        | {
            "devices": [{"allow": False, "access": "rwm"}],
            "pids": {"limit": spec.limits.pids},
        },
        "seccomp": {
            "defaultAction": "SCMP_ACT_ALLOW",
            "architectures": ["SCMP_ARCH_X86_64"],
            "syscalls": [
                _refuse(_EPERM, *_REFUSED_CALLS),
                # Its flags lie in memory, where no filter can read; libraries fall back.
                _refuse(_ENOSYS, "clone3"),
                *(
                    _refuse(
                        _EPERM,
                        "clone",
                        index=0,
                        op="SCMP_CMP_MASKED_EQ",
                        value=flag,
                        valueTwo=flag,
                    )
                    for flag in _NEW_NAMESPACES
                ),
                _refuse(
                    _EAFNOSUPPORT,
                    *("socket", "socketpair"),
                    index=0,
                    op="SCMP_CMP_GT",
                    value=_LAST_FAMILY,
                ),
            ],
        },
        "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger"],
        "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"],
    }
    return made | {
        "hooks": {"createRuntime": [{"path": str(loopback), "env": [f"PATH={SYSTEM_PATH}"]}]},
        "annotations": {"org.criu.config": str(criu)},
    }


def gvisor_config(spec: SandboxSpec, root: Path, cgroup: str, way: Path, *, out: bool) -> object:
    """The whole file for runsc, as JSON values.

    Args:
        spec: of the sandbox.
        root: its root folder, mounted.
        cgroup: its group, from the top of each hierarchy.
        way: folder of ``WAY``.
        out: whether the proxy is there.

    System calls meet gVisor's own kernel, so there is no filter for them. Its processes are no
    processes of the host, which therefore cannot count them: the kernel inside does, by user. What
    gVisor itself needs of the host's is bounded by memory.
    """
    made = _common(spec, root, cgroup, SERVED)
    most = {"type": "RLIMIT_NPROC", "hard": spec.limits.pids, "soft": spec.limits.pids}
    made["process"] |= {"rlimits": [most]}
    made["process"]["args"] += ["out"] if out else []
    # Read-only: what is written there would be on the host's own disk.
    bind = {"type": "bind", "source": str(way), "options": ["bind", "ro"]}
    made["mounts"].append({"destination": WAY, **bind})
    return made


def _common(spec: SandboxSpec, root: Path, cgroup: str, first: str) -> dict[str, Any]:
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    } | dict(spec.environment)
    namespaces = ["pid", "ipc", "uts", "mount", "network", "user"]
    ids = [{"containerID": 0, "hostID": FIRST_ID, "size": IDS}]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root)},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/bash", "--norc", "-c", first, "rose-init", spec.folder],
            "env": [f"{name}={value}" for name, value in sorted(variables.items())],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "noNewPrivileges": True,
        },
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "noexec", "strictatime", "mode=755", "size=64k"),
            _mount(
                *("/dev/pts", "devpts", "nosuid", "noexec", "newinstance"),
                *("ptmxmode=0666", "mode=0620", "gid=5"),
            ),
            _mount(
                *("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777"),  # noqa: S108
                f"size={RUN_BYTES}",
            ),
            _mount("/run", "tmpfs", "nosuid", "nodev", "mode=755", f"size={RUN_BYTES}"),
        ],
        "linux": {
            "namespaces": [{"type": name} for name in namespaces],
            "uidMappings": ids,
            "gidMappings": ids,
            "cgroupsPath": cgroup,
            "resources": {
                "memory": {"limit": spec.limits.memory_bytes},
                "cpu": {
                    "quota": max(1000, round(spec.limits.cpus * CPU_PERIOD_US)),
                    "period": CPU_PERIOD_US,
                },
            },
        },
    }


def _mount(destination: str, kind: str, *options: str) -> dict[str, object]:
    return {"destination": destination, "type": kind, "source": kind, "options": list(options)}


def _refuse(code: int, *names: str, **argument: object) -> dict[str, object]:
    """Calls that fail; with ``argument`` only those where it holds."""
    rule = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": code}
    return rule | ({"args": [argument]} if argument else {})
