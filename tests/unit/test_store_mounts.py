"""mountinfo as the kernel writes it, and as it never does."""

from __future__ import annotations

import os

import pytest

from flashckpt.store.mounts import Mount, find_mount, huge_page_bytes, parse_mountinfo

LINE = r"42 27 0:39 /sub /mnt/my\040disk\134x rw,relatime shared:5 master:1 - tmpfs none rw,size=64k,huge=always"


def test_line_with_escapes_and_optional_fields():
    (mount,) = parse_mountinfo(LINE + "\n")
    assert mount == Mount(42, os.makedev(0, 39), "/sub", "/mnt/my disk\\x", "tmpfs", ("rw", "size=64k", "huge=always"))


def test_other_lines_are_left_out():
    bad = ["", "x", LINE.replace(" - ", " "), LINE.replace("0:39", "39"), LINE.replace("42 ", "x "), "1 2 3 - 4"]
    assert parse_mountinfo("\n".join([*bad, LINE])) == parse_mountinfo(LINE)


def test_find_mount():
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        mount = find_mount(fd)
        assert (mount.fs_type, mount.mount_point, mount.device) == ("tmpfs", "/dev/shm", os.fstat(fd).st_dev)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("fs_type", "option", "switch", "expected"),
    [
        ("tmpfs", "huge=always", "never", 2 << 20),
        ("tmpfs", "huge=within_size", "never", 2 << 20),
        ("tmpfs", "huge=advise", "never", 2 << 20),
        ("tmpfs", "huge=never", "never", 0),
        ("tmpfs", "size=5k", "always", 0),
        ("tmpfs", "size=5k", "force", 2 << 20),
        ("tmpfs", "huge=always", "deny", 0),
        ("ramfs", "huge=always", "force", 0),
    ],
)
def test_huge_pages(tmp_path, fs_type, option, switch, expected):
    words = ["always", "within_size", "advise", "never", "deny", "force"]
    (tmp_path / "shmem_enabled").write_text(" ".join(f"[{w}]" if w == switch else w for w in words) + "\n")
    (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    mount = Mount(1, 2, "/", "/m", fs_type, ("rw", option))
    assert huge_page_bytes(mount, -1, tmp_path) == expected


def test_huge_pages_that_are_too_large_or_unknown(tmp_path):
    mount = Mount(1, 2, "/", "/m", "tmpfs", ("huge=always",))
    assert huge_page_bytes(mount, -1, tmp_path) == 0
    (tmp_path / "shmem_enabled").write_text("[always]")
    (tmp_path / "hpage_pmd_size").write_text(str(512 << 20))
    assert huge_page_bytes(mount, -1, tmp_path) == 0
