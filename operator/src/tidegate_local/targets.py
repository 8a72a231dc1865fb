"""Service discovery for Prometheus: watches engine pods and keeps a file of scrape targets (Debian's has no other way).

Run by path inside the node, standard library only, by `cluster`: `targets.py SERVER CA_FILE TOKEN_FILE OUTPUT`
"""

import json
import ssl
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SELECTOR = "app.kubernetes.io/managed-by=tidegate-operator,app.kubernetes.io/name=tidegate-engine"
ADMIN_PORT = 8001
RETRY_SECONDS = 1.0

Pod = Mapping[str, Any]


def targets(pods: Iterable[Pod]) -> list[dict[str, Any]]:
    """Prometheus's file format: one group a running pod, with the labels `namespace` and `pod`."""
    groups = []
    for pod in pods:
        address, phase = pod["status"].get("podIP"), pod["status"].get("phase")
        if address and phase == "Running":
            labels = {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}
            groups.append({"targets": [f"{address}:{ADMIN_PORT}"], "labels": labels})
    return sorted(groups, key=lambda group: str(group["targets"]))


def write(output: Path, pods: Iterable[Pod]) -> None:
    part = output.with_suffix(".part")
    part.write_text(json.dumps(targets(pods)))
    part.rename(output)


def follow(address: str, opener: urllib.request.OpenerDirector, output: Path) -> None:
    """List, write, and write again at each change, until the API server ends the watch."""
    query = {"labelSelector": SELECTOR}
    with opener.open(f"{address}/api/v1/pods?{urllib.parse.urlencode(query)}") as answer:
        listed = json.load(answer)
    pods = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
    write(output, pods.values())
    watch = {**query, "watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
    with opener.open(f"{address}/api/v1/pods?{urllib.parse.urlencode(watch)}") as events:
        for line in events:
            event = json.loads(line)
            if event["type"] == "ERROR":
                return
            pod = event["object"]
            if event["type"] == "DELETED":
                pods.pop(pod["metadata"]["uid"], None)
            else:
                pods[pod["metadata"]["uid"]] = pod
            write(output, pods.values())


def main(address: str, ca_file: str, token_file: Path, output: Path) -> None:
    trust = ssl.create_default_context(cafile=ca_file)
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trust))
    opener.addheaders = [("Authorization", f"Bearer {token_file.read_text().split(',')[0]}")]
    while True:
        try:
            follow(address, opener, output)
        except OSError as error:
            print(f"watching pods: {error}", flush=True)
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
