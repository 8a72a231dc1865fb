"""The command `tidegate-local`: a thin layer over `setup` and `cluster`; the demo's own command line is in `demo`."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from tidegate_local import (
    activity,
    binaries,
    builder,
    cache,
    cluster,
    images,
    machine,
    model,
    namespaces,
    setup,
    store,
)

DESCRIPTION = """\
A Kubernetes cluster on this one machine, for trying and testing Tidegate: upstream's own etcd, API server,
controllers, scheduler, kubelet and proxy, with Debian's containerd. It lives in its own namespaces: the machine's
routes, firewall, mounts and cgroups stay as they are, and `down` leaves nothing but the cache.
"""
EPILOG = """\
examples:
  tidegate-local setup                      make everything once (about half an hour; later it takes a second)
  tidegate-local up --gpus 4 --prometheus   start a cluster that stays up
  tidegate-local kubectl get nodes          use it; kubectl's and helm's own options follow as they are
  eval "$(tidegate-local kubeconfig)"       use it from this shell with your own tools
  tidegate-local exec -- nft list ruleset   look around inside the node
  tidegate-local down                       stop it

The cache is $TIDEGATE_CACHE, or $XDG_CACHE_HOME/tidegate, or ~/.cache/tidegate.
"""
PASSED_THROUGH = ("kubectl", "helm", "exec", "demo")
EXPECTED = (
    activity.StepFailed,
    binaries.MissingBinary,
    builder.NoMirror,
    cache.Busy,
    cluster.ClusterFailed,
    cluster.CommandFailed,
    cluster.NotRunning,
    images.NoSources,
    machine.Unsuitable,
    model.ModelUnavailable,
    namespaces.NamespaceFailed,
    store.StoreFailed,
)
"""What a user can do something about: shown as one message. Anything else is a bug and shows its traceback."""


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    words, passed = split(list(sys.argv[1:] if arguments is None else arguments))
    options = _parser().parse_args(words, argparse.Namespace(passed=passed))
    try:
        command: Callable[[argparse.Namespace], int] = options.run
        return command(options)
    except EXPECTED as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Our reader (`| head`) has seen enough; Python must not try to flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("Interrupted. What was finished is kept; running this again goes on from there.", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    """A polite kill takes the way of Ctrl-C, so that what was started is ended too."""
    raise KeyboardInterrupt


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and those that belong to another tool: argparse would take the tool's options for ours."""
    if not words or words[0] not in PASSED_THROUGH:
        return list(words), []
    own = 3 if words[1:2] == ["--name"] else 1
    rest = list(words[own:])
    return list(words[:own]), rest[1:] if rest[:1] == ["--"] else rest


def _setup(options: argparse.Namespace) -> int:
    names = [] if options.no_images else [name for name in options.images.split(",") if name]
    with activity.Progress() as progress:
        setup.everything(progress, names)
    return 0


def _up(options: argparse.Namespace) -> int:
    with activity.Progress() as progress:
        setup.everything(progress, setup.ALL_IMAGES if options.node else ())
    plan = cluster.Plan(options.name, options.node, options.gpus, options.prometheus, detached=True)
    running = cluster.bring_up(plan, lambda line: print(line, file=sys.stderr))
    name = "" if options.name == cluster.DEFAULT_NAME else f" --name {options.name}"
    print(f"{options.name} is up: {running.server}, kubeconfig {running.kubeconfig}")
    print(f"Use it: tidegate-local kubectl{name} get nodes    Stop it: tidegate-local down{name}")
    return 0


def _down(options: argparse.Namespace) -> int:
    cluster.attach(options.name).stop()
    cluster.sweep()
    return 0


def _status(options: argparse.Namespace) -> int:
    names = cluster.names()
    for name in names:
        running = cluster.attach(name)
        print(f"{name}: {running.server}, process {running.description.pid}, kubeconfig {running.kubeconfig}")
        if running.description.node:
            print(running.kubectl("get", "nodes", "--output=wide").rstrip())
            print("images: " + ", ".join(running.images))
    if not names:
        print("No cluster is running; start one with: tidegate-local up")
    missing = ", ".join(setup.missing(setup.ALL_IMAGES))
    state = f"without {missing} (tidegate-local setup adds that)" if missing else "complete"
    print(f"cache: {cache.root()}, {state}")
    return 0


def _kubeconfig(options: argparse.Namespace) -> int:
    print(f"export KUBECONFIG={cluster.attach(options.name).kubeconfig}")
    return 0


def _kubectl(options: argparse.Namespace) -> int:
    running = cluster.attach(options.name)
    return _become([str(binaries.path("kubectl")), *options.passed], running)


def _helm(options: argparse.Namespace) -> int:
    running = cluster.attach(options.name)
    return _become([str(binaries.path("helm")), *options.passed], running)


def _exec(options: argparse.Namespace) -> int:
    running = cluster.attach(options.name)
    return _become(running.enter(list(options.passed) or ["bash"]), running)


def _become(argv: Sequence[str], running: cluster.Cluster) -> int:
    """Replace this process by a tool, so that its terminal, signals and exit status are the tool's own."""
    sys.stdout.flush()
    os.execvpe(argv[0], list(argv), running.environment())  # noqa: S606 (no shell is wanted)


def _fake_gpus(options: argparse.Namespace) -> int:
    cluster.attach(options.name).set_gpus(options.count)
    return 0


def _clean(options: argparse.Namespace) -> int:
    removed = setup.clean(everything=options.all)
    print(f"Removed {removed / 1e9:.1f} GB from {cache.root()}.")
    return 0


def _demo(options: argparse.Namespace) -> int:
    # The demo's dependencies take a second to import, which the other commands are spared.
    from tidegate_local import demo

    return demo.main(options.passed)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tidegate-local", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    def named(command: argparse.ArgumentParser) -> None:
        text = f"which cluster (default: {cluster.DEFAULT_NAME})"
        command.add_argument("--name", default=cluster.DEFAULT_NAME, help=text)

    made = add(
        "setup", _setup, "Make what a cluster needs: packages, binaries, images, the model. Instant when it is there."
    )
    made.add_argument("--no-images", action="store_true", help="only packages and binaries: enough for a control plane")
    known = ",".join(setup.ALL_IMAGES)
    made.add_argument("--images", default=known, metavar="A,B", help=f"only these images (of {known})")

    up = add("up", _up, "Start a cluster that stays until `down`; does `setup` first.")
    named(up)
    up.add_argument(
        "--no-node", dest="node", action="store_false", help="etcd, API server and controllers only: no pods run"
    )
    up.add_argument("--gpus", type=int, default=0, metavar="N", help="pretend that the node has N GPUs")
    up.add_argument("--prometheus", action="store_true", help="run Prometheus on the node, scraping the engines")

    named(add("down", _down, "Stop a cluster and remove everything of it but the cache."))
    add("status", _status, "Say which clusters run, and whether the cache is complete.")
    named(add("kubeconfig", _kubeconfig, "Print the line that points your own tools at a cluster."))
    named(add("kubectl", _kubectl, "Run the cluster's kubectl; all that follows is kubectl's (after --name NAME)."))
    named(add("helm", _helm, "Run the cluster's Helm; all that follows is Helm's (after --name NAME)."))
    named(add("exec", _exec, "Run a command inside the node, or a shell: tidegate-local exec -- ip address"))
    gpus = add("fake-gpus", _fake_gpus, "Change how many GPUs the node pretends to have.")
    named(gpus)
    gpus.add_argument("count", type=int)
    clean = add("clean", _clean, "Remove what an older state of the sources left in the cache.")
    clean.add_argument("--all", action="store_true", help="remove the whole cache: the next set-up starts from nothing")
    add("demo", _demo, "Show Tidegate at work, from an empty machine to a report (demo --help has the options).")
    return parser
