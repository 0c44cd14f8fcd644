"""Settings have defaults, the environment overrides them, and what cannot be meant is refused by name."""

import dataclasses

import pytest

from snapshot.settings import Settings


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for field in dataclasses.fields(Settings):
        monkeypatch.delenv(f"SNAPSHOT_{field.name.upper()}", raising=False)


def test_settings_without_environment_are_the_defaults():
    assert Settings.current() == Settings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("SNAPSHOT_DIRECT_IO", "never", "direct_io", "never"),
        ("SNAPSHOT_FILE_IO", "portable", "file_io", "portable"),
        ("SNAPSHOT_LANES", "3", "lanes", 3),
        ("SNAPSHOT_ARENA_BYTES", "-1", "arena_bytes", -1),
        ("SNAPSHOT_PART_BYTES", "1_048_576", "part_bytes", 1 << 20),
        ("SNAPSHOT_TIMEOUT", "1.5", "timeout", 1.5),
        ("SNAPSHOT_TIMEOUT", "60", "timeout", 60.0),
    ],
)
def test_settings_are_read_from_environment_variables(monkeypatch, name, text, field, value):
    monkeypatch.setenv(name, text)
    assert Settings.current() == dataclasses.replace(Settings(), **{field: value})


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("SNAPSHOT_LANES", "many", "a whole number"),
        ("SNAPSHOT_LANES", "1.5", "a whole number"),
        ("SNAPSHOT_LANES", "", "a whole number"),
        ("SNAPSHOT_TIMEOUT", "soon", "a number"),
    ],
)
def test_settings_error_for_a_wrong_value_names_the_variable(monkeypatch, name, text, what):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} must be {what}, got '{text}'"):
        Settings.current()


def test_settings_snapshot_direct_io_refuses_unknown_modes(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_DIRECT_IO", "sometimes")
    with pytest.raises(ValueError, match="SNAPSHOT_DIRECT_IO must be auto, always or never, got 'sometimes'"):
        Settings.current()


def test_settings_snapshot_file_io_refuses_unknown_values(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_FILE_IO", "never")
    with pytest.raises(ValueError, match="SNAPSHOT_FILE_IO must be auto or portable, got 'never'"):
        Settings.current()


def test_settings_all_have_an_environment_variable(monkeypatch):
    texts = {field.name: "never" for field in dataclasses.fields(Settings) if field.type == "str"}
    texts["file_io"] = "portable"
    for field in dataclasses.fields(Settings):
        monkeypatch.setenv(f"SNAPSHOT_{field.name.upper()}", texts.get(field.name, "1"))
    current = Settings.current()
    for field in dataclasses.fields(Settings):
        assert getattr(current, field.name) == texts.get(field.name, 1)


def test_settings_lanes_and_threads_follow_the_cores_within_bounds(monkeypatch):
    for cores, processes, lanes, threads in [
        (1, 1, 1, 3),
        (2, 2, 2, 4),
        (16, 1, 12, 16),
        (64, 8, 8, 16),
        (64, 64, 4, 16),
    ]:
        monkeypatch.setattr(Settings, "cores", lambda self, cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert (Settings().lane_count(), Settings().thread_count()) == (lanes, threads)
        assert (Settings(lanes=7).lane_count(), Settings(io_threads=9).thread_count()) == (7, 9)


def test_settings_cores_is_at_least_one():
    assert Settings().cores() >= 1


def test_settings_are_comparable_and_immutable():
    assert Settings(lanes=2) == Settings(lanes=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().lanes = 3  # type: ignore[misc]
