"""How the demo and the end-to-end tests reach a cluster: kubectl, helm and addresses of Services.

Two kinds: a cluster of this machine (`of_cluster`), or a context of the user's own kubeconfig (`of_context`). Knows
nothing of Tidegate's objects.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubernetes import client, config

from tidegate_local import binaries
from tidegate_local.cluster import Cluster, CommandFailed

Reach = Callable[[str, str, int], AbstractContextManager[str]]
"""(namespace, service, port) to a base URL that works on this machine for as long as the block lasts."""


class MissingTool(Exception):
    """A command that the user has to bring is not there; the message says which and what for."""


@dataclass(frozen=True, slots=True)
class Access:
    """A cluster, by the commands that work on it."""

    kubectl_argv: tuple[str, ...]
    helm_argv: tuple[str, ...]
    environment: Mapping[str, str]
    kubeconfig: str | None
    context: str | None
    reach: Reach

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """Standard output of kubectl. Raises CommandFailed with what it printed to standard error."""
        return _run([*self.kubectl_argv, *arguments], self.environment, input)

    def helm(self, *arguments: str) -> str:
        return _run([*self.helm_argv, *arguments], self.environment, None)

    def follow(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a kubectl that goes on talking, such as `logs --follow`; the caller ends it."""
        return subprocess.Popen(
            [*self.kubectl_argv, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(self.environment),
        )

    def api(self) -> client.ApiClient:
        """A client of the API server with the same identity."""
        return config.new_client_from_config(config_file=self.kubeconfig, context=self.context)


def of_cluster(cluster: Cluster) -> Access:
    @contextmanager
    def reach(namespace: str, service: str, port: int) -> Iterator[str]:
        where = f"--namespace={namespace}"
        address = cluster.kubectl("get", "service", service, where, "--output=jsonpath={.spec.clusterIP}")
        yield f"http://{cluster.forward(address, port)}"

    return Access(
        kubectl_argv=(str(binaries.path("kubectl")),),
        helm_argv=(str(binaries.path("helm")),),
        environment=cluster.environment(),
        kubeconfig=str(cluster.kubeconfig),
        context=None,
        reach=reach,
    )


def of_context(context: str) -> Access:
    """The user's own kubectl, helm and kubeconfig. Raises MissingTool."""
    for tool in ("kubectl", "helm"):
        if shutil.which(tool) is None:
            raise MissingTool(f"{tool} is not on the PATH; with a cluster of your own the demo uses your {tool}.")
    kubectl = ("kubectl", f"--context={context}")

    @contextmanager
    def reach(namespace: str, service: str, port: int) -> Iterator[str]:
        argv = [*kubectl, "port-forward", f"--namespace={namespace}", f"service/{service}", f":{port}"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if "Forwarding from" not in line:
                    raise CommandFailed(f"kubectl port-forward to {service} did not start: {line.strip()}")
                yield f"http://{line.split()[2]}"
            finally:
                process.terminate()

    return Access(
        kubectl_argv=kubectl,
        helm_argv=("helm", f"--kube-context={context}"),
        environment=dict(os.environ),
        kubeconfig=None,
        context=context,
        reach=reach,
    )


def _run(argv: list[str], environment: Mapping[str, str], input: str | None) -> str:
    done = subprocess.run(argv, input=input, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        words = " ".join([Path(argv[0]).name, *argv[1:]])
        raise CommandFailed(f"{words}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
