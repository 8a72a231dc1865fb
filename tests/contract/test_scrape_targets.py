from tidegate_local import targets
from tidegate_operator import api


def test_prometheus_selects_the_pods_that_the_operator_labels_at_the_port_that_it_names() -> None:
    wanted = dict(pair.split("=") for pair in targets.SELECTOR.split(","))
    assert wanted.items() <= api.labels("a-model").items()
    assert targets.ADMIN_PORT == api.ADMIN_PORT
