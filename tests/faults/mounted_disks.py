"""File systems of our own: images that are mounted, lose their power, become full, or are for reading only."""

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
import time

from tests.helpers.servers import tool, unavailable

SHUTDOWN = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125  # _IOR('X', 125, __u32): ext4 and xfs both know it
NOLOGFLUSH = 2
KINDS = ("ext4", "xfs")
MiB = 1 << 20
SIZES = {"ext4": 48 * MiB, "xfs": 300 * MiB, "btrfs": 128 * MiB}  # sparse; xfs and btrfs take no less


class Disk:
    """A file system in an image. `lose_power()` is for processes that write there; `again()` is the next start."""

    def __init__(self, kind, folder, *, options="", features=()):
        if os.geteuid() != 0:
            unavailable("only root can mount")
        self.kind = kind
        self.image = folder / f"{kind}.img"
        self.mount = folder / kind
        self.mount.mkdir()
        self._options = options
        if kind != "tmpfs":
            program = tool(f"mkfs.{kind}", "apt-get install e2fsprogs xfsprogs", "/usr/sbin", "/sbin")
            with open(self.image, "wb") as file:
                file.truncate(SIZES[kind])
            quick = ("-F", "-E", "lazy_itable_init=1") if kind == "ext4" else ("-f",)
            subprocess.run([program, "-q", *quick, *features, self.image], check=True, capture_output=True)
        self.start()

    def start(self):
        options = f"loop,{self._options}".strip(",") if self.kind != "tmpfs" else self._options
        source = self.image if self.kind != "tmpfs" else "none"
        done = subprocess.run(
            ["mount", "-t", self.kind, "-o", options, source, self.mount], check=False, capture_output=True, text=True
        )
        if done.returncode:
            unavailable(f"{self.kind} cannot be mounted: {done.stderr.strip()}")

    def stop(self):
        for _ in range(100):
            done = subprocess.run(["umount", self.mount], check=False, capture_output=True, text=True)
            if done.returncode == 0:
                return
            time.sleep(0.05)  # who was killed there is not quite gone yet
        subprocess.run(["umount", "-l", self.mount], check=False)
        raise OSError(done.stderr)

    def again(self):
        self.stop()
        self.start()

    def remount(self, how):
        subprocess.run(["mount", "-o", f"remount,{how}", self.mount], check=True)

    def sync(self):
        descriptor = os.open(self.mount, os.O_RDONLY)
        try:
            ctypes.CDLL(None).syncfs(descriptor)
        finally:
            os.close(descriptor)

    def used(self):
        """How many bytes and inodes are in use."""
        self.sync()
        found = os.statvfs(self.mount)
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree


def lose_power(mount):
    """What is not on the disk now never will be; and nobody reads or writes there any more."""
    descriptor = os.open(mount, os.O_RDONLY)
    fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NOLOGFLUSH))
    os.close(descriptor)


@contextlib.contextmanager
def disk(kind, folder, **options):
    """A file system for a while."""
    made = Disk(kind, folder, **options)
    try:
        yield made
    finally:
        made.stop()
