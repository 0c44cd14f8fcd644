"""Lightning, and Hugging Face's Trainer and accelerate, resumed to the same bits: the scripts `on_...py`, each in a
process of its own, since the libraries change what they are imported into, and side by side, since importing them is
most of the work."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries

HERE = Path(__file__).parent
NEEDED = {
    "on_lightning.py": ("lightning",),
    "on_transformers.py": ("transformers", "accelerate", "peft"),
    "on_transformers_order.py": ("transformers", "accelerate"),
    "on_accelerate_order.py": ("accelerate", "torchdata"),
}


def missing(script):
    return [name for name in NEEDED[script] if importlib.util.find_spec(name) is None]


def text_of(script, marks):
    return f"""
import pytest, sys
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", {marks!r}, {str(HERE / script)!r}]))
"""


@pytest.fixture(scope="module")
def started(warm):
    """All, on their way."""
    return {script: warm.start(text_of(script, "smoke")) for script in NEEDED if not missing(script)}


@pytest.mark.parametrize("script", NEEDED)
@pytest.mark.timeout(900)
def test_lightning_and_transformers_save_and_resume_with_snapshots(warm, started, script):
    if missing(script):
        pytest.skip(f"{', '.join(missing(script))} is not installed")
    assert " passed" in warm.finish(started[script])


@pytest.mark.parametrize("script", NEEDED)
@pytest.mark.timeout(900)
def test_rest_of_the_script_of_a_trainer(warm, script):
    if missing(script):
        pytest.skip(f"{', '.join(missing(script))} is not installed")
    assert " passed" in warm.finish(warm.start(text_of(script, "not smoke")))


def test_transformers_is_not_imported_with_its_adapter(warm):
    shown = warm.run("""
import sys
import snapshot_trainers.transformers
trainers = ("lightning", "pytorch_lightning", "transformers", "accelerate")
print([name for name in sys.modules if name.partition(".")[0] in trainers])
""")
    assert shown == "[]\n"
