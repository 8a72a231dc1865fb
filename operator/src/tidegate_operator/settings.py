"""The operator's own settings: the only reader of the environment. The chart sets these variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate_operator.gpus import PriceError, Prices, parse_prices

SERVICE_ACCOUNT_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"
DEFAULT_RUN_AS_USER = 10001
DEFAULT_JOURNAL_MEGABYTES = 64.0
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class SettingsError(ValueError):
    """A variable is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the operator runs; not what it runs."""

    namespace: str
    """Its own namespace: the Secret of the admin keys lies here."""
    watch_namespaces: tuple[str, ...]
    """Namespaces it works in; empty means the whole cluster."""
    engine_image: str
    engine_image_pull_policy: str
    engine_run_as_user: int | None
    """None where the cluster assigns user ids itself (OpenShift)."""
    gpu_budgets: Mapping[str, int]
    """Most GPUs that all objects may take together, by the name under which nodes offer them; the rest is unbounded."""
    prometheus_url: str | None
    """For objects that give none; None means that the pods are scraped."""
    admin_key_secret: str
    metrics_port: int
    health_port: int
    resync_seconds: float
    log_level: str
    kubeconfig: str | None
    """None inside a cluster: the service account is used."""
    pod_name: str
    gpu_prices: Prices = field(default_factory=Prices)
    """US dollars an hour of a GPU, before the table's defaults."""
    journal: Path | None = None
    """File in which every decision is recorded; None = none is."""
    journal_megabytes: float = DEFAULT_JOURNAL_MEGABYTES

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces to list, None for the whole cluster."""
        return self.watch_namespaces or (None,)


def read(environment: Mapping[str, str]) -> Settings:
    """Read and check the variables; raises `SettingsError` with one sentence."""

    def number(name: str, default: float, bounds: tuple[float, float]) -> float:
        text = environment.get(name, "").strip()
        try:
            value = float(text) if text else default
        except ValueError as error:
            raise SettingsError(f"{name} is {text!r}, which is not a number") from error
        if not bounds[0] <= value <= bounds[1]:
            raise SettingsError(f"{name} is {text}; allowed are {bounds[0]:g} to {bounds[1]:g}")
        return value

    def required(name: str) -> str:
        value = environment.get(name, "").strip()
        if not value:
            raise SettingsError(f"{name} is not set; the chart sets it")
        return value

    level = environment.get("TIDEGATE_LOG_LEVEL", "").strip().upper() or "INFO"
    if level not in LOG_LEVELS:
        raise SettingsError(f"TIDEGATE_LOG_LEVEL is {level}; allowed are {', '.join(LOG_LEVELS)}")
    in_cluster = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    kubeconfig = environment.get("KUBECONFIG", "").strip()
    if not in_cluster and not kubeconfig:
        raise SettingsError("outside a cluster KUBECONFIG must name a kubeconfig file")
    user = environment.get("TIDEGATE_ENGINE_RUN_AS_USER", str(DEFAULT_RUN_AS_USER)).strip()
    if user and not user.isdecimal():
        raise SettingsError(f"TIDEGATE_ENGINE_RUN_AS_USER is {user!r}, which is not a user id")
    run_as_user = int(user) if user else None
    try:
        prices = parse_prices(item for item in environment.get("TIDEGATE_GPU_PRICES", "").split(",") if item.strip())
    except PriceError as error:
        raise SettingsError(f"TIDEGATE_GPU_PRICES: {error}") from error
    journal = environment.get("TIDEGATE_JOURNAL", "").strip()
    watched = environment.get("TIDEGATE_WATCH_NAMESPACES", "").split(",")
    return Settings(
        namespace=required("TIDEGATE_NAMESPACE"),
        watch_namespaces=tuple(dict.fromkeys(name.strip() for name in watched if name.strip())),
        engine_image=required("TIDEGATE_ENGINE_IMAGE"),
        engine_image_pull_policy=environment.get("TIDEGATE_ENGINE_IMAGE_PULL_POLICY", "").strip() or "IfNotPresent",
        engine_run_as_user=run_as_user,
        gpu_budgets=_budgets(environment.get("TIDEGATE_GPU_BUDGETS", "")),
        prometheus_url=environment.get("TIDEGATE_PROMETHEUS_URL", "").strip() or None,
        admin_key_secret=required("TIDEGATE_ADMIN_KEY_SECRET"),
        metrics_port=int(number("TIDEGATE_METRICS_PORT", 9090, (0, 65535))),
        health_port=int(number("TIDEGATE_HEALTH_PORT", 8080, (0, 65535))),
        resync_seconds=number("TIDEGATE_RESYNC_SECONDS", 300, (1, 86400)),
        log_level=level,
        kubeconfig=kubeconfig or None,
        pod_name=environment.get("HOSTNAME", "").strip() or "tidegate-operator",
        gpu_prices=prices,
        journal=Path(journal) if journal else None,
        journal_megabytes=number("TIDEGATE_JOURNAL_MEGABYTES", DEFAULT_JOURNAL_MEGABYTES, (1, 100_000)),
    )


def _budgets(text: str) -> dict[str, int]:
    budgets = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, _, count = part.rpartition("=")
        if not name or not count.isdecimal():
            raise SettingsError(f"TIDEGATE_GPU_BUDGETS holds {part!r}; give NAME=COUNT, such as nvidia.com/gpu=16")
        budgets[name] = int(count)
    return budgets
