"""The script of a release: builds with equal bytes, checked digests, notes, and pages that name what exists."""

import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CHANGES = """# Changelog

## [Unreleased]

### Added

- A thing.

## [0.1.0]

The first version.
"""


def load():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load()


def checkout(folder, changes=CHANGES):
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0" # the one place\n')
    (folder / "CHANGELOG.md").write_text(changes)
    return folder


def test_release_prepare_moves_the_unreleased_changes(tmp_path):
    root = checkout(tmp_path)
    release.prepare("0.2.0", "2026-11-25", root)
    assert 'version = "0.2.0" # the one place' in (root / "pyproject.toml").read_text()
    changes = (root / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0] - 2026-11-25\n\n### Added\n\n- A thing.\n" in changes
    notes = release.write_notes("0.2.0", changes, [])
    assert "- A thing." in notes
    assert "The first version" not in notes
    with pytest.raises(release.ReleaseError, match="no unreleased changes"):
        release.prepare("0.3.0", "2026-11-26", root)
    assert 'version = "0.2.0"' in (root / "pyproject.toml").read_text()


@pytest.mark.parametrize(("version", "why"), [("0.2", "must be like 1.2.3"), ("0.1.0", "already has a section")])
def test_release_prepare_refuses_an_invalid_version_and_changes_nothing(tmp_path, version, why):
    root = checkout(tmp_path)
    with pytest.raises(release.ReleaseError, match=why):
        release.prepare(version, "2026-11-25", root)
    assert (root / "CHANGELOG.md").read_text() == CHANGES


def test_release_switch_makes_docs_name_the_published_package(tmp_path):
    """Before, another person could publish something under this name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path.relative_to(ROOT): path.read_text() for path in pages if "_build" not in path.parts}
    code = [path.read_text() for folder in ("snapshot", "plugins") for path in (ROOT / folder).rglob("*.py")]
    naming = re.compile(r"pip install[^\n]*snapshot-torch")
    is_published = "pip install snapshot-torch" in texts[Path("README.md")]
    if not is_published:
        changes = (ROOT / "CHANGELOG.md").read_text()
        assert not [text for text in [*texts.values(), *code, changes] if naming.search(text)]
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if not is_published:
        changed = release.switch(tmp_path)
        assert {"README.md", "docs/start/getting-started.md", "docs/storage/index.md"} <= set(changed)
    with pytest.raises(release.ReleaseError, match="name the published package already"):
        release.switch(tmp_path)
    assert "`pip install snapshot-torch`" in (tmp_path / "README.md").read_text()
    for name in texts:
        assert not re.search(r"pip install -e '\.\[\w+\]'", (tmp_path / name).read_text()), name


def test_release_switch_with_an_unknown_text_changes_no_page(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs/storage").mkdir(parents=True)
    (tmp_path / "docs/storage/index.md").write_text("Another sentence.")
    with pytest.raises(release.ReleaseError, match=r"docs/storage/index\.md: must have the text"):
        release.switch(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("version", "changes", "why"),
    [
        ("0.1.0", CHANGES, "has changes that are not in 0.1.0"),
        ("0.2.0", CHANGES, "must have a section 0.2.0"),
        ("0.2.0", "## [Unreleased]\n\n## [0.2.0]\n\n## [0.1.0]\n\nFirst.\n", "must have text"),
    ],
)
def test_release_check_changes_refuses_a_release_without_notes(version, changes, why):
    with pytest.raises(release.ReleaseError, match=why):
        release.check_changes(version, changes)
    release.check_changes("0.2.0", CHANGES.replace("## [Unreleased]", "## [Unreleased]\n\n## [0.2.0]"))


def test_release_describe_parts_of_a_package_required_again_with_extras(tmp_path, monkeypatch):
    """The first of two needs lacks the extra."""
    needs = {"first": ["second"], "second": ['third ; extra == "more"'], "third": []}

    def find(name):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir(exist_ok=True)
        lines = [f"Requires-Dist: {each}" for each in needs[name]]
        (folder / "METADATA").write_text("\n".join([f"Name: {name}", "Version: 1.0+cpu", *lines]) + "\n\n")
        return importlib.metadata.PathDistribution(folder)

    monkeypatch.setattr(release.metadata, "distribution", find)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as made:
        lines = [
            "Name: x",
            "Version: 1",
            "License-Expression: MIT",
            "Requires-Dist: first",
            "Requires-Dist: second[more]",
        ]
        made.writestr("x-1.dist-info/METADATA", "\n".join(lines) + "\n\n")
    bill = release.describe_parts(tmp_path / "x.whl", [], 0)
    assert [each["name"] for each in bill["components"]] == ["first", "second", "third"]
    assert bill["components"][0]["purl"] == "pkg:pypi/first@1.0%2Bcpu"


def archive(path, *, mtime, order, mode):
    with tarfile.open(path, "w:gz") as made:
        for name in order:
            member = tarfile.TarInfo(f"x-1/{name}")
            member.mtime, member.mode, member.size, member.uname = mtime, mode, len(name), "someone"
            made.addfile(member, io.BytesIO(name.encode()))


def wheel(path, *, mtime, order, mode):
    with zipfile.ZipFile(path, "w") as made:
        for name in order:
            info = zipfile.ZipInfo(name, (mtime, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            made.writestr(info, name)


def test_release_archives_do_not_depend_on_build_time_and_place(tmp_path):
    names = ["a", "b", "x.dist-info/RECORD"]
    for number, (mtime, order, mode) in enumerate([(1985, names, 0o664), (2020, names[::-1], 0o600)]):
        archive(tmp_path / f"{number}.tar.gz", mtime=mtime, order=order, mode=mode)
        wheel(tmp_path / f"{number}.whl", mtime=mtime, order=order, mode=mode)
        release.settle_sdist(tmp_path / f"{number}.tar.gz", 1_700_000_000)
        release.settle_wheel(tmp_path / f"{number}.whl", 1_700_000_000)
    for kind in ("tar.gz", "whl"):
        assert release.digest(tmp_path / f"0.{kind}") == release.digest(tmp_path / f"1.{kind}")
    with zipfile.ZipFile(tmp_path / "0.whl") as made:
        assert made.namelist() == names
        assert made.read("a") == b"a"
    with tarfile.open(tmp_path / "0.tar.gz") as made:
        assert next((each.name, each.mtime, each.mode, each.uname) for each in made) == (
            "x-1/a",
            1_700_000_000,
            0o644,
            "",
        )


def test_release_refuses_a_link_in_a_source_distribution(tmp_path):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as made:
        member = tarfile.TarInfo("x-1/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(member)
    with pytest.raises(release.ReleaseError, match="must be a file or a folder"):
        release.settle_sdist(tmp_path / "x.tar.gz", 0)


def released(folder):
    folder.mkdir()
    (folder / "a.whl").write_bytes(b"a")
    (folder / release.SUMS).write_text(f"{release.digest(folder / 'a.whl')}  a.whl\n")
    return folder


@pytest.mark.parametrize("what", ["changed", "missing", "added"])
def test_release_verify_sums_refuses_changed_missing_and_added_files(tmp_path, what):
    out = released(tmp_path / "dist")
    release.verify_sums(out)
    if what == "changed":
        (out / "a.whl").write_bytes(b"b")
    elif what == "missing":
        (out / "a.whl").unlink()
    else:
        (out / "b.whl").write_bytes(b"b")
    with pytest.raises(release.ReleaseError, match="whl"):
        release.verify_sums(out)


@pytest.mark.parametrize("command", [["sign", "--key", "x"], ["verify", "--signers", "x"], ["check", "--python", "x"]])
def test_release_sign_and_verify_without_sha256sums_is_an_error(tmp_path, capsys, command):
    assert release.main([command[0], str(tmp_path), *command[1:]]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/SHA256SUMS: is missing\n"


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
def test_release_signature_is_of_one_key_and_one_list(tmp_path, capsys):
    for name in ("ours", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    for name in ("ours", "other"):
        public = (tmp_path / f"{name}.pub").read_text()
        (tmp_path / f"signers-{name}").write_text(f'release namespaces="{release.NAMESPACE}" {public}')
    out = released(tmp_path / "dist")
    assert release.main(["sign", str(out), "--key", str(tmp_path / "ours")]) == 0
    verify = ["verify", str(out), "--signers"]
    assert release.main([*verify, str(tmp_path / "signers-ours")]) == 0
    assert release.main([*verify, str(tmp_path / "signers-other")]) == 1
    assert "not a signature by release" in capsys.readouterr().err
    (out / "a.whl").write_bytes(b"b")
    (out / release.SUMS).write_text(f"{release.digest(out / 'a.whl')}  a.whl\n")
    assert release.main([*verify, str(tmp_path / "signers-ours")]) == 1


def test_release_workflow_runs_steps_that_exist():
    jobs = yaml.safe_load((ROOT / ".ci" / "release.yml").read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    steps = re.findall(r"python \.ci/release\.py (\w+ dist)((?: --\w+)*)", "\n".join(lines))
    assert [step for step, _ in steps] == ["build dist", "check dist", "sign dist"]
    assert jobs["publish"]["environment"] == "release"
    assert jobs["publish"]["needs"] == "check"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_release_build_is_reproducible_and_lists_its_parts(tmp_path):
    out = tmp_path / "dist"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, str(ROOT / ".ci" / "release.py"), "build", str(out), "--here", "--dirty"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    release.verify_sums(out)
    bill = json.loads((out / release.SBOM).read_text())
    parts = {each["name"].lower(): each for each in bill["components"]}
    assert {"torch", "numpy", "msgspec", "aiofiles"} <= set(parts)
    assert parts["numpy"]["scope"] == "required"
    assert parts["cryptography"]["scope"] == "optional"
    assert all(each["version"] and each["purl"].startswith("pkg:") for each in parts.values())
    references = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {each["ref"] for each in bill["dependencies"]} <= references
    assert {other for each in bill["dependencies"] for other in each["dependsOn"]} <= references
