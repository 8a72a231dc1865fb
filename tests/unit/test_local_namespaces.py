from pathlib import Path

from tidegate_local.namespaces import Hierarchy, Namespaces, hierarchies

HYBRID_MOUNTS = """\
24 1 0:22 / /proc rw,relatime shared:5 - proc proc rw
40 30 0:30 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw
41 30 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct
42 30 0:32 / /sys/fs/cgroup/systemd rw shared:11 - cgroup cgroup rw,xattr,name=systemd
"""
HYBRID_OWN = "3:rdma:/\n2:cpu,cpuacct:/user.slice\n1:name=systemd:/init.scope\n0::/\n"


def test_each_mounted_hierarchy_is_found_and_unmounted_ones_are_left_out() -> None:
    assert hierarchies(HYBRID_MOUNTS, HYBRID_OWN) == [
        Hierarchy("cpu,cpuacct", Path("/sys/fs/cgroup/cpu,cpuacct"), "/user.slice"),
        Hierarchy("name=systemd", Path("/sys/fs/cgroup/systemd"), "/init.scope"),
        Hierarchy("cgroup2", Path("/sys/fs/cgroup/unified"), "/"),
    ]


def test_a_machine_with_cgroup_v2_alone_has_one_hierarchy() -> None:
    mounts = "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    (found,) = hierarchies(mounts, "0::/user.slice/session-1.scope\n")
    assert found.options == "cgroup2"
    assert found.child("tidegate-x") == Path("/sys/fs/cgroup/user.slice/session-1.scope/tidegate-x")


def test_commands_in_a_control_plane_join_no_network_of_their_own() -> None:
    control_plane = Namespaces(pid=7, cgroups=(), node=False)
    assert "-n" not in control_plane.enter(["true"])
    assert control_plane.enter_network(["curl", "url"]) == ["curl", "url"]
    node = Namespaces(pid=7, cgroups=(), node=True)
    assert node.enter_network(["curl", "url"]) == ["nsenter", "-t", "7", "-n", "--", "curl", "url"]


def test_a_process_id_that_now_belongs_to_another_is_not_taken_for_the_cluster(tmp_path: Path) -> None:
    assert not Namespaces(pid=1, cgroups=(), node=True).belong_to(tmp_path)
