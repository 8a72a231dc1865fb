"""What the operator sends as batch settings is what the engine takes, at its start and while it runs."""

import json

from tidegate_engine.batching import Change, parse_change
from tidegate_engine.settings import SETTING_NAMES, BatchSettings, SettingsFile, parse_settings_file
from tidegate_operator import api, render


def test_a_running_engine_takes_the_operators_patch() -> None:
    settings = BatchSettings(32, 2048, 512)
    change = parse_change({"generation": 7, **settings.as_dict()}, if_match=None)
    assert isinstance(change, Change)
    assert (change.generation, dict(change.settings)) == (7, settings.as_dict())


def test_every_setting_of_the_object_has_its_name_on_the_wire() -> None:
    spec = api.parse_spec({"model": {"uri": "file:///m.gguf"}})
    assert set(spec.initial_settings().as_dict()) == set(SETTING_NAMES)
    assert all(spec.envelope().bounds(name) for name in SETTING_NAMES)


def test_a_new_engine_starts_with_the_config_map_of_the_object() -> None:
    spec = api.parse_spec({"model": {"uri": "file:///m.gguf"}})
    target = api.Target("chat", "team", "uid", 1, spec)
    plan = render.Plan(1, SettingsFile(3, spec.initial_settings(), spec.envelope(), spec.patterns()), {"keys": []})
    data = render.config_map(target, plan)["data"]
    assert parse_settings_file(json.loads(data["settings.json"])) == plan.settings_file
    assert json.loads(data["admin-keys.json"]) == {"keys": []}
