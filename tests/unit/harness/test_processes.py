"""Finding and ending exactly the processes of a cluster, and what else it left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from driver.errors import EnvironmentFault
from tests.harness import cgroups, cleanup, host, processes
from tests.harness.cgroups import Cgroups
from tests.harness.guard import _still_of
from tests.harness.mounts import mounts_below
from tests.harness.processes import ProcessRecord, ProcessTable, record_of, wait_gone
from tests.harness.readiness import wait_ready
from tests.harness.waiting import wait_for

SLEEP = ["/bin/sleep", "600"]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ProcessTable]:
    (tmp_path / "run").mkdir()
    table = ProcessTable(tmp_path)
    yield table
    processes.kill(processes.marked(tmp_path))


def test_a_process_is_recorded_and_found_again(table: ProcessTable, tmp_path: Path) -> None:
    record = table.spawn("sleeper", SLEEP, tmp_path / "log")
    assert record.alive
    assert ProcessTable(tmp_path).get("sleeper") == record
    assert ProcessTable(tmp_path).all() == [record]
    assert os.getsid(record.pid) == record.pid, "Ctrl-C in our terminal must not reach it"


def test_its_output_goes_to_its_log(table: ProcessTable, tmp_path: Path) -> None:
    record = table.spawn("talker", ["/bin/sh", "-c", "echo out; echo err >&2"], tmp_path / "log")
    assert processes.wait_gone([record], 60) == []
    assert (tmp_path / "log").read_text() == "out\nerr\n"


def test_stopping_asks_first_and_then_insists(table: ProcessTable, tmp_path: Path) -> None:
    polite = table.spawn("polite", SLEEP, tmp_path / "log")
    stubborn = table.spawn("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "stubborn")
    while not (tmp_path / "stubborn").exists() or not (tmp_path / "stubborn").read_text():
        pass
    processes.stop([polite, stubborn], grace_s=0.1)
    assert not polite.alive
    assert not stubborn.alive


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)


def test_a_recycled_process_id_is_left_alone(table: ProcessTable, tmp_path: Path) -> None:
    innocent = table.spawn("innocent", SLEEP, tmp_path / "log")
    earlier = msgspec.structs.replace(innocent, started=innocent.started - 1)
    assert not earlier.alive
    assert not processes.send(earlier, signal.SIGKILL)
    processes.stop([earlier], grace_s=0)
    assert innocent.alive


def test_a_process_of_an_earlier_boot_is_gone(table: ProcessTable, tmp_path: Path) -> None:
    innocent = table.spawn("innocent", SLEEP, tmp_path / "log")
    assert not msgspec.structs.replace(innocent, boot="another").alive


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EINVAL])
def test_a_number_that_names_no_process_any_more(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert processes.open_process(ProcessRecord("gone", 1, 1, "boot")) is None


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["/bin/true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.start_ticks(child.pid) is None
        assert record_of("true", child.pid) is None


def test_a_name_with_brackets_does_not_confuse(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "600"]) as child:
        assert record_of("odd", child.pid)
        child.kill()


def test_processes_that_were_never_recorded_are_found_by_their_environment(table: ProcessTable, tmp_path: Path) -> None:
    record = table.spawn("parent", ["/bin/sh", "-c", "setsid sleep 600 & wait"], tmp_path / "log")
    while len(processes.marked(tmp_path)) < 2:
        pass
    (tmp_path / "run" / "parent.json").unlink()
    cleanup.end_processes(tmp_path)
    assert processes.marked(tmp_path) == []
    assert not record.alive


def test_a_neighbour_with_a_longer_name_is_not_ours(table: ProcessTable, tmp_path: Path) -> None:
    table.spawn("neighbour", SLEEP, tmp_path / "log")
    assert processes.marked(Path(str(tmp_path)[:-1])) == []


def test_a_half_written_record_is_ignored(table: ProcessTable, tmp_path: Path) -> None:
    (tmp_path / "run" / "torn.json").write_text('{"name": "to')
    assert table.all() == []


def test_a_process_that_ends_at_once_shows_its_log(table: ProcessTable, tmp_path: Path) -> None:
    record = table.spawn("etcd", ["/bin/sh", "-c", "echo bad flag; exit 1"], tmp_path / "log")
    with pytest.raises(EnvironmentFault, match=r"(?s)etcd ended right after its start; the end of .*bad flag"):
        wait_ready(record, lambda: False, tmp_path / "log", 60)


def test_a_process_that_is_late_shows_its_log(table: ProcessTable, tmp_path: Path) -> None:
    record = table.spawn("etcd", SLEEP, tmp_path / "log")
    with pytest.raises(EnvironmentFault, match=r"etcd was not ready within 0 s"):
        wait_ready(record, lambda: False, tmp_path / "log", 0)


MOUNTINFO = """\
22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:30 / /base/one/a rw shared:1 - tmpfs tmpfs rw
31 30 0:31 / /base/one/a/with\\040space rw - tmpfs tmpfs rw
32 22 0:32 / /base/one-more/a rw - tmpfs tmpfs rw
"""


def test_mounts_are_listed_inside_out_and_only_our_own(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    found = mounts_below(Path("/base/one"), tmp_path / "mountinfo")
    assert found == [Path("/base/one/a/with space"), Path("/base/one/a")]


def test_the_files_stay_while_a_mount_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "no-real-cluster"
    directory.mkdir()
    (directory / "state.json").touch()
    monkeypatch.setattr("tests.harness.mounts.mounts_below", lambda folder: [folder / "stuck"])
    with pytest.raises(EnvironmentFault, match=r"can't unmount .*stuck; nothing below"):
        cleanup.destroy(directory)
    assert (directory / "state.json").exists()


def test_logs_are_kept_when_asked_for(tmp_path: Path) -> None:
    directory = tmp_path / "no-real-cluster"
    (directory / "log").mkdir(parents=True)
    (directory / "log" / "etcd.log").touch()
    (directory / "etcd").mkdir()
    cleanup.destroy(directory, keep_logs=True)
    assert [entry.name for entry in directory.iterdir()] == ["log"]
    cleanup.destroy(directory)
    assert not directory.exists()


def test_ending_what_is_not_there_is_fine(tmp_path: Path) -> None:
    cleanup.destroy(tmp_path / "nothing")


def test_only_log_links_into_our_directory_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "containers"
    links.mkdir()
    (links / "ours.log").symlink_to(tmp_path / "cluster" / "pods" / "0.log")
    (links / "theirs.log").symlink_to(tmp_path / "cluster-2" / "pods" / "0.log")
    monkeypatch.setattr(cleanup, "CONTAINER_LOG_LINKS", links)
    cleanup._remove_log_links(tmp_path / "cluster")
    assert [link.name for link in links.iterdir()] == ["theirs.log"]


def test_the_machine_is_put_back_after_the_last_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysctl, folder, base = tmp_path / "panic", tmp_path / "kubelet", tmp_path / "base"
    sysctl.write_text("1\n")
    (base / "one").mkdir(parents=True)
    monkeypatch.setattr(host, "SYSCTLS", (sysctl,))
    monkeypatch.setattr(host, "FOLDERS", (folder,))
    host.remember(base)
    sysctl.write_text("10\n")
    folder.mkdir()
    (base / "one" / "state.json").touch()
    host.restore(base)
    assert sysctl.read_text() == "10\n", "a cluster is left"
    (base / "one" / "state.json").unlink()
    host.restore(base)
    assert sysctl.read_text() == "1"
    assert not folder.exists()


def test_a_folder_with_somebodys_files_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kubelet"
    monkeypatch.setattr(host, "SYSCTLS", ())
    monkeypatch.setattr(host, "FOLDERS", (folder,))
    host.remember(tmp_path)
    folder.mkdir()
    (folder / "config.yaml").touch()
    host.restore(tmp_path)
    assert folder.exists()


def test_one_kubelet_starts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "kubelet.sock"
    monkeypatch.setattr(host, "KUBELET_SOCKET", socket)
    socket.touch()
    with host.kubelet_start(tmp_path) as done:
        assert not done(), "the socket is still that of another"
        socket.rename(tmp_path / "old")
        assert not done()
        socket.touch()
        assert done()


def test_a_guard_leaves_the_next_owners_cluster_alone(tmp_path: Path) -> None:
    assert not _still_of(tmp_path, ProcessRecord("owner", 1, 1, "boot"))


def hierarchy(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def test_v1_and_v2_are_told_apart(tmp_path: Path) -> None:
    v2 = hierarchy(tmp_path / "v2", cgroup__controllers="cpuset cpu memory pids")
    (tmp_path / "mounts").write_text(f"cgroup2 {v2} cgroup2 rw 0 0\n")
    only_v2 = Cgroups.detect(tmp_path / "mounts")
    assert (only_v2.version, only_v2.mounts, only_v2.missing) == ("v2", (v2,), ())
    (tmp_path / "mounts").write_text(
        "cgroup /cg/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup /cg/memory cgroup rw,memory 0 0\n"
        f"cgroup2 {v2} cgroup2 rw 0 0\n"
    )
    hybrid = Cgroups.detect(tmp_path / "mounts")
    assert (hybrid.version, hybrid.beside) == ("v1", (v2,))
    assert hybrid.missing == ("cpuset", "pids", "devices", "freezer")


def test_a_v2_machine_without_controllers_says_which(tmp_path: Path) -> None:
    v2 = hierarchy(tmp_path / "v2", cgroup__controllers="cpu pids")
    (tmp_path / "mounts").write_text(f"cgroup2 {v2} cgroup2 rw 0 0\n")
    assert Cgroups.detect(tmp_path / "mounts").missing == ("cpuset", "memory")


def test_v2_controllers_that_are_not_handed_down_are_a_fault(tmp_path: Path) -> None:
    v2 = hierarchy(tmp_path / "v2", cgroup__controllers="cpuset cpu memory pids", cgroup__subtree_control="")
    with pytest.raises(EnvironmentFault, match="cpu, cpuset, memory, pids can't be handed down"):
        Cgroups((v2,), unified=True).create("top/cluster")
    assert (v2 / "cgroup.subtree_control").read_text() == "+pids", "the last of one write each"


def test_a_cgroup_of_all_clusters_that_goes_with_another_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gone = cgroups._make_child, list[Path]()

    def going(parent: Path, element: str) -> Path:
        if element == "mine" and not gone:
            gone.append(parent)
            parent.rmdir()
        return made(parent, element)

    monkeypatch.setattr(cgroups, "_make_child", going)
    Cgroups((tmp_path,), unified=False).create("top/mine")
    assert gone == [tmp_path / "top"]
    assert (tmp_path / "top/mine").is_dir()


def test_a_log_link_of_another_cluster_may_go_while_ours_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, ours = tmp_path / "links", tmp_path / "ours"
    links.mkdir()
    for name in ("a", "b", "c"):
        (links / name).symlink_to((ours if name == "c" else tmp_path) / name)
    is_link = Path.is_symlink

    def going(link: Path) -> bool:
        found = is_link(link)
        if link.name != "c":
            link.unlink()
        return found

    monkeypatch.setattr(cleanup, "CONTAINER_LOG_LINKS", links)
    monkeypatch.setattr(Path, "is_symlink", going)
    cleanup._remove_log_links(ours)
    assert not list(links.iterdir())


HEADLESS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_ended_is_waited_for_until_the_last_one_has() -> None:
    command = [sys.executable, "-c", HEADLESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        record = record_of("headless", process.pid)
        assert record is not None
        status = Path(f"/proc/{process.pid}/status")
        wait_for(lambda: "State:\tZ" in status.read_text(), 60, "its first thread ends")
        assert record.alive
        assert wait_gone([record], 0) == [record]
        process.kill()
        assert wait_gone([record], 60) == []
