"""The parameters and defaults of all public names: `python -m tests.helpers.signatures` writes tests/signatures.txt."""

import importlib
import inspect
from pathlib import Path

import snapshot
from snapshot import extensions, settings
from snapshot.io import storage

FILE = Path(__file__).parents[1] / "signatures.txt"


def find_signatures():
    """Yield a line for each public function, class and method: parameters and defaults, without types."""
    places = {f"snapshot.{name}": getattr(snapshot, name) for name in snapshot.__all__}
    places |= {
        f"{home}.{name}": getattr(importlib.import_module(home), name) for name, home in extensions.NAMES.items()
    }
    places |= {f"storage.{name}": getattr(storage, name) for name in ("Storage", "Capabilities")}
    places["settings.Settings"] = settings.Settings
    for place, value in sorted(places.items()):
        if not inspect.isclass(value):
            yield _line(place, value)
            continue
        if not issubclass(value, Exception):
            yield _line(place, value)
        for name, method in sorted(vars(value).items()):
            function = getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(function):
                yield _line(f"{place}.{name}", function)


def _line(place, function):
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name not in ("self", "cls")]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return f"{place}{inspect.Signature(plain)}"


if __name__ == "__main__":
    FILE.write_text("\n".join(find_signatures()) + "\n")
