"""Kernel limits that a process puts on itself before it runs foreign code: Landlock, a seccomp filter, rlimits.

Standard library only, because the child imports it before anything else. Nothing here can be undone by the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
_READ = 1 << 2 | 1 << 3  # LANDLOCK_ACCESS_FS_READ_FILE, _READ_DIR
_FILE_READ = 1 << 2
_SCOPES = 0b11  # abstract unix sockets, signals to processes outside

# System calls that a test of a function has no use for: (x86_64, aarch64); None where the architecture lacks it.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    # What the machine itself is: root could change it from here.
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setrlimit": (160, 164),  # root could raise a hard limit again
    "prlimit64": (302, 261),
}
_CLONE, _CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
_CLONE_THREAD = 0x10000
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _REFUSE, _MISSING, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000  # EPERM, ENOSYS


def limit_resources(*, cpu_seconds: int, memory_bytes: int, file_bytes: int, processes: int) -> None:
    """Hard rlimits. `processes` counts all processes of the user, and root is exempt: seccomp does the real work."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def confine_files(writable: Path) -> None:
    """From now on: read the Python installation and the system's libraries, read and write below `writable`, no more.

    Raises OSError where the kernel has no Landlock (Linux < 5.13, other systems).
    """
    libc = _libc()
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        raise OSError("no Landlock")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    ruleset = struct.pack("QQQ", everything, 0b11 if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    handle = _checked(libc.syscall(_LANDLOCK_CREATE, ruleset, size, 0), "landlock_create_ruleset")
    for path in _readable():
        _allow(libc, handle, path, _READ if path.is_dir() else _FILE_READ)
    _allow(libc, handle, writable, everything)
    _no_new_privileges(libc)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, handle, 0), "landlock_restrict_self")
    os.close(handle)


def refuse_system_calls() -> None:
    """No network, no new process or program, no signal or attachment to another process; threads stay possible.

    Raises OSError where seccomp is missing or the architecture is neither x86_64 nor aarch64.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURE or sys.platform != "linux":
        raise OSError("no seccomp filter for this machine")
    column = list(_ARCHITECTURE).index(machine)
    numbers = [pair[column] for pair in _REFUSED.values()]
    code = _filter(_ARCHITECTURE[machine], _CLONE[machine], [n for n in numbers if n is not None])
    libc = _libc()
    _no_new_privileges(libc)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def _filter(architecture: int, clone: int, refused: Iterable[int]) -> bytes:
    """A classic BPF program over `struct seccomp_data` {nr, arch, instruction pointer, args}."""
    code = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_JUMP_AT_LEAST, 0, 1, 1 << 30),  # x86_64's x32 calls would go past every number below
        (_RETURN, 0, 0, _KILL),
        (_JUMP_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer: glibc falls back to clone
        (_RETURN, 0, 0, _MISSING),
        (_JUMP_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, 16),
        (_JUMP_SET, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in refused:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _readable() -> list[Path]:
    roots = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), "/usr/lib", "/usr/share/zoneinfo"]
    files = ["/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom", "/dev/random"]
    return [path for path in sorted({Path(root) for root in [*roots, *files]}) if path.exists()]


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, handle)
        _checked(libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(handle)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _no_new_privileges(libc: ctypes.CDLL) -> None:
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
