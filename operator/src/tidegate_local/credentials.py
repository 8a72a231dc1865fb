"""A cluster's certificates, keys and tokens, made with openssl into its state folder; called by `cluster` only."""

import base64
import json
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_local import templates

VALID_DAYS = "365"
_P256 = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", VALID_DAYS)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files in the state folder, and the administrator's token."""

    folder: Path
    admin_token: str

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"


def create(folder: Path, addresses: Sequence[str]) -> Credentials:
    """Make an authority, the API server's and its kubelet client's certificate, the signing key and the token file."""
    names = ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"]
    names += ["DNS:kubernetes.default.svc.cluster.local", *(f"IP:{address}" for address in addresses)]
    config = folder / "openssl.cnf"
    config.write_text(templates.render("openssl.cnf", {"alternative_names": ",".join(names)}))
    _certify(folder, "ca", "/CN=tidegate-local", section="authority")
    _certify(folder, "apiserver", "/CN=kube-apiserver", section="server")
    _certify(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", section="client")
    key, public = folder / "service-accounts.key", folder / "service-accounts.pub"
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    _openssl("pkey", "-in", key, "-pubout", "-out", public)
    token = secrets.token_hex(20)
    tokens = folder / "tokens.csv"
    tokens.touch(mode=0o600)
    tokens.write_text(f'{token},tidegate-admin,tidegate-admin,"system:masters"\n')
    return Credentials(folder=folder, admin_token=token)


def kubeconfig(path: Path, *, server: str, credentials: Credentials) -> None:
    """Write an administrator's kubeconfig (JSON is YAML) that needs no other file."""
    authority = base64.b64encode(credentials.ca_file.read_bytes()).decode()
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tidegate", "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": "admin", "user": {"token": credentials.admin_token}}],
        "contexts": [{"name": "tidegate", "context": {"cluster": "tidegate", "user": "admin"}}],
        "current-context": "tidegate",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=2))


def _certify(folder: Path, name: str, subject: str, *, section: str) -> None:
    signer = [] if name == "ca" else ["-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key"]
    request = ["req", "-x509", *_P256, "-config", f"{folder}/openssl.cnf", "-extensions", section, "-subj", subject]
    _openssl(*request, *signer, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True)
