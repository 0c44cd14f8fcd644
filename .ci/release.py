"""Make a release, step by step: `python .ci/release.py STEP --help`.

    prepare 0.2.0          set the version, and date the changelog; then review, commit and tag
    build dist             build twice, compare every byte, and write digests, an SBOM and the notes
    check dist             install from that folder alone, on the oldest and the newest Python and torch
    sign dist --key KEY    sign the digests with a key of ssh
    verify dist --signers  check the digests and their signature, as a user does
    switch                 after the upload: let README and the documentation name the published package

`build` needs git. It takes the files of this checkout, so `prepare` must be committed. Nothing here uploads: the
workflow in `.ci/release.yml` does, after a person has approved it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

TOOLS = ("build==1.6.1", "setuptools==84.2.1")
"""The tools that build. Other versions may write other bytes."""
SUMS, SBOM, NOTES, SIGNATURE = "SHA256SUMS", "sbom.cdx.json", "NOTES.md", "SHA256SUMS.sig"
NAMESPACE = "snapshot-release"
"""What the signature is for: it must not count for anything else."""
NAME = "snapshot-torch"
EXTRAS = ("s3", "gcs", "azure", "http", "zstd", "sign", "otel", "cli")
"""Extras whose packages the SBOM lists as optional."""
SENTENCES = {
    "README.md": (
        "In a checkout,\n`pip install -e .` installs the library. To try it, paste",
        "`pip install snapshot-torch`\ninstalls the library. To try it in a checkout, paste",
    ),
    "docs/start/getting-started.md": (
        "Install from a checkout:\n\n    pip install -e .\n",
        "Install the package:\n\n    pip install snapshot-torch\n",
    ),
    "docs/storage/index.md": ("Run these lines in a checkout of the library. The extra", "The extra"),
    "docs/guides/troubleshooting.md": ("In a checkout, `pip install -e '.[s3]'`", "`pip install 'snapshot-torch[s3]'`"),
    "docs/migrate/from-lightning.md": (" in a\ncheckout.", "."),
    "docs/integrations/interop.md": (
        "`pip install -e '.[zstd]'` in a checkout",
        "`pip install 'snapshot-torch[zstd]'`",
    ),
    "docs/reference/cli/completion.md": (
        "`pip install -e '.[cli]'` in a checkout.",
        "`pip install 'snapshot-torch[cli]'`.",
    ),
}
"""Sentences that mention a checkout, and what they say once the package is published."""
COMMAND = re.compile(r"pip install -e '\.\[(\w+)\]'")


class ReleaseError(Exception):
    """Raised if a step cannot go on. Its text says why, and what to do."""


# Steps that edit the checkout


def prepare(version: str, today: str, root: Path = ROOT) -> None:
    """Set the version, and give the unreleased changes a heading with it."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version):
        raise ReleaseError(f"the version must be like 1.2.3 or 1.2.3rc1, got {version!r}")
    changes = (root / "CHANGELOG.md").read_text()
    if f"## [{version}]" in changes:
        raise ReleaseError(f"CHANGELOG.md: already has a section {version}")
    if not _section(changes, "Unreleased"):
        raise ReleaseError("CHANGELOG.md: has no unreleased changes")
    _replace(root / "pyproject.toml", rf'(?m)^version = "{re.escape(_version(root))}"', f'version = "{version}"')
    _replace(root / "CHANGELOG.md", r"(?m)^## \[Unreleased\]$", f"## [Unreleased]\n\n## [{version}] - {today}")


def switch(root: Path = ROOT) -> list[str]:
    """Let the pages name the published package. Return the names of the changed files."""
    changed: dict[Path, str] = {}
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        name = path.relative_to(root).as_posix()
        before = text = path.read_text()
        if name in SENTENCES:
            old, new = SENTENCES[name]
            there, made = (re.compile(r"\s+".join(map(re.escape, each.split()))) for each in (old, new))
            if not there.search(text) and not made.search(text):
                raise ReleaseError(f"{name}: must have the text {old!r}; change it in .ci/release.py, too")
            text = there.sub(lambda _, new=new: new, text)
        text = COMMAND.sub(rf"pip install '{NAME}[\1]'", text)
        if text != before:
            changed[path] = text
    if not changed:
        raise ReleaseError("the pages name the published package already")
    for path, text in changed.items():
        path.write_text(text)
    return [path.relative_to(root).as_posix() for path in changed]


def _version(root: Path) -> str:
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def _replace(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, lambda _: new, path.read_text())
    if count != 1:
        raise ReleaseError(f"{path}: {pattern} must be there once, got {count} times")
    path.write_text(text)


def _section(changes: str, heading: str) -> str:
    """Return the text below a heading of the changelog, which may be empty."""
    found = re.search(rf"(?ms)^## \[{re.escape(heading)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changes)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md: must have a section {heading}; run `prepare` first")
    return found[1].strip()


# Builds that have the same bytes


def build(out: Path, *, here: bool = False, dirty: bool = False) -> list[Path]:
    """Build twice, in folders of their own, and keep one build if both are equal."""
    if not dirty and _git("status", "--porcelain"):
        raise ReleaseError("the checkout has uncommitted changes; commit them, or pass --dirty for a trial")
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out}: must be empty")
    version, changes = _version(ROOT), (ROOT / "CHANGELOG.md").read_text()
    if not dirty:
        check_changes(version, changes)
    epoch = int(_git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        python = sys.executable if here else _tools(folder / "tools")
        built = [_build_once(folder / each, python, epoch) for each in ("one", "another-folder")]
        digests = [{path.name: digest(path) for path in paths} for paths in built]
        if digests[0] != digests[1]:
            raise ReleaseError(f"two builds differ: {digests[0]} and {digests[1]}")
        out.mkdir(parents=True, exist_ok=True)
        kept = [Path(shutil.copy(path, out)) for path in built[0]]
    wheel = next(path for path in kept if path.suffix == ".whl")
    (out / SBOM).write_text(json.dumps(describe_parts(wheel, kept, epoch), indent=2) + "\n")
    (out / NOTES).write_text(write_notes(version, changes, kept))
    kept += [out / SBOM, out / NOTES]
    (out / SUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in sorted(kept)))
    return kept


def _tools(folder: Path) -> str:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)
    return python


def _build_once(folder: Path, python: str, epoch: int) -> list[Path]:
    source, out = folder / "source", folder / "dist"
    for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate").split("\0"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    command = [python, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"the build failed: {(done.stdout + done.stderr)[-3000:]}")
    built = sorted(out.iterdir())
    for path in built:
        (settle_wheel if path.suffix == ".whl" else settle_sdist)(path, epoch)
    return built


def settle_sdist(path: Path, epoch: int) -> None:
    """Write a source distribution again, with one time for all files, no owners, and names in order."""
    found: list[tuple[tarfile.TarInfo, bytes]] = []
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is None and not member.isdir():
                raise ReleaseError(f"{path.name}: {member.name} must be a file or a folder")
            found.append((member, file.read() if file else b""))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in sorted(found, key=lambda each: each[0].name):
            made = tarfile.TarInfo(member.name)
            made.type, made.size, made.mtime = member.type, len(data), epoch
            made.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            archive.addfile(made, io.BytesIO(data))
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, epoch) as file:
        file.write(packed.getvalue())


def settle_wheel(path: Path, epoch: int) -> None:
    """Write a wheel again, with one time for all files, and modes that no umask has changed."""
    with zipfile.ZipFile(path) as archive:
        found = [(info, archive.read(info)) for info in archive.infolist()]
    when = time.gmtime(max(epoch, 315_532_800))[:6]  # an archive knows no time before 1980
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for info, data in sorted(found, key=lambda each: (each[0].filename.endswith("/RECORD"), each[0].filename)):
            made = zipfile.ZipInfo(info.filename, when)
            made.compress_type, made.create_system = zipfile.ZIP_DEFLATED, 3
            made.external_attr = (0o100755 if (info.external_attr >> 16) & 0o100 else 0o100644) << 16
            archive.writestr(made, data)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip("\n")


# What is in it, and what changed


def check_changes(version: str, changes: str) -> None:
    """Raise unless the changelog has a section of this version, and all changes are in a version."""
    if not _section(changes, version):
        raise ReleaseError(f"CHANGELOG.md: the section {version} must have text, got none")
    if _section(changes, "Unreleased"):
        raise ReleaseError(f"CHANGELOG.md: has changes that are not in {version}; run `prepare` first")


def write_notes(version: str, changes: str, built: Iterable[Path]) -> str:
    """Return the notes of a release: its section of the changelog, and the digests."""
    sums = "\n".join(f"    {digest(path)}  {path.name}" for path in built)
    try:
        section = _section(changes, version)
    except ReleaseError:
        section = _section(changes, "Unreleased")  # a trial
    return f"# {NAME} {version}\n\n{section}\n\n## Digests\n\nSHA-256, of two builds with equal bytes:\n\n{sums}\n"


def describe_parts(wheel: Path, built: Sequence[Path], epoch: int) -> dict[str, object]:
    """Return a bill of materials (CycloneDX 1.6): the packages that this environment has for the wheel's needs.

    The wheel contains no code of others. Its parts are what it installs, so their versions are those that were tested.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        held = HeaderParser().parsestr(archive.read(name).decode())
    parts: dict[str, dict[str, object]] = {}
    needs: dict[str, list[str]] = {}
    visited: set[tuple[object, ...]] = set()

    def visit(owner: str, lines: Iterable[str], extras: Sequence[str], scope: str) -> None:
        for line in lines:
            need = Requirement(line)
            marker = need.marker
            if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            if need.name == NAME:
                continue
            try:
                found = metadata.distribution(need.name)
            except metadata.PackageNotFoundError as error:
                raise ReleaseError(f"{need.name}: is needed, but not installed here; install the group dev") from error
            reference = f"pkg:pypi/{canonicalize_name(need.name)}@{quote(found.version, safe='')}"
            if reference not in needs.setdefault(owner, []):
                needs[owner].append(reference)
            part = parts.setdefault(reference, _part(need.name, found, reference, scope))
            if scope == "required":
                part["scope"] = scope
            asked = (reference, *sorted(need.extras), scope)  # a package may be needed again, with other extras
            if asked not in visited:
                visited.add(asked)
                visit(reference, found.requires or (), sorted(need.extras), scope)

    own = f"pkg:pypi/{NAME}@{held['Version']}"
    lines = held.get_all("Requires-Dist") or []
    visit(own, [line for line in lines if "extra ==" not in line], (), "required")
    visit(own, [line for line in lines if "extra ==" in line], EXTRAS, "optional")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest(wheel))}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "component": {
                "type": "library",
                "bom-ref": own,
                "purl": own,
                "name": NAME,
                "version": held["Version"],
                "licenses": [{"license": {"id": held["License-Expression"]}}],
                "components": [
                    {"type": "file", "name": path.name, "hashes": [{"alg": "SHA-256", "content": digest(path)}]}
                    for path in built
                ],
            },
        },
        "components": [parts[reference] for reference in sorted(parts)],
        "dependencies": [{"ref": reference, "dependsOn": sorted(needs[reference])} for reference in sorted(needs)],
    }


def _part(name: str, found: metadata.Distribution, reference: str, scope: str) -> dict[str, object]:
    expression = found.metadata["License-Expression"]
    text = (found.metadata["License"] or "").strip().splitlines()[:1]
    classified = [
        each.rsplit(" :: ", 1)[1] for each in found.metadata.get_all("Classifier") or () if "License ::" in each
    ]
    part: dict[str, object] = {
        "type": "library",
        "bom-ref": reference,
        "purl": reference,
        "name": name,
        "version": found.version,
        "scope": scope,
    }
    if expression:
        part["licenses"] = [{"expression": expression}]
    elif text or classified:
        part["licenses"] = [{"license": {"name": (classified or text)[0][:200]}}]
    return part


# Checks that a user could make


def check(out: Path, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Install the wheel, and then the source distribution, from the folder alone, and run the quickstart."""
    verify_sums(out)
    version = next(out.glob("*.whl")).name.split("-")[1]
    for python, torch in pairs:
        with tempfile.TemporaryDirectory(prefix="release-") as name:
            folder = Path(name)
            _run([python, "-m", "venv", str(folder / "venv")], folder)
            own = str(folder / "venv" / "bin" / "python")
            pip = [own, "-m", "pip", "install", "--quiet"]
            _run([*pip, "torch" if torch == "newest" else f"torch=={torch}", "setuptools>=77", "wheel"], folder)
            lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
            _run([*pip, *(line for line in lines if not line.startswith("torch"))], folder)
            index = ["--no-index", "--find-links", str(out.resolve()), "--force-reinstall", "--no-deps"]
            for kind in (["--only-binary", NAME], ["--no-binary", NAME, "--no-build-isolation"]):
                _run([*pip, *index, *kind, f"{NAME}=={version}"], folder)
                _run([own, "-m", "pip", "check"], folder)
                _run([own, "-c", PROBE, version], folder)
                _run([own, str(ROOT / "examples" / "quickstart.py")], folder)
            yield f"{_run([own, '-c', SAY], folder).strip()}: the wheel and the source distribution pass"


SAY = "import sys, torch; print('Python', sys.version.split()[0], 'with torch', torch.__version__)"
PROBE = """
import importlib.metadata, pathlib, subprocess, sys
import snapshot
from snapshot.storages import memory
folder = pathlib.Path(snapshot.__file__).parent
assert folder.parent.name == "site-packages", folder
assert pathlib.Path(memory.__file__).resolve().is_relative_to(folder), memory.__file__
packages = [folder, *folder.parent.glob("snapshot_*/")]
packages = [each for each in packages if (each / "__init__.py").is_file()]
assert len(packages) > 10, packages
assert not [path for each in packages for path in each.rglob("*") if path.is_symlink()]
assert all((each / "py.typed").is_file() for each in packages)
assert importlib.metadata.version("snapshot-torch") == sys.argv[1]
command = pathlib.Path(sys.executable).parent / "snapshot"
assert sys.argv[1] in subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
"""


def _run(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder, without this checkout on its path, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)[:300]}: failed\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def choose_pairs() -> list[tuple[str, str]]:
    """Return the oldest and the newest claimed Python of this machine, each with the torch of its end."""
    from tests.matrix.__main__ import NEWEST, claims, find

    minors, oldest, claimed = claims()
    found = [each for minor in minors if not isinstance(each := find(minor, claimed), str)]
    if not found:
        raise ReleaseError(f"none of Python {', '.join(minors)} is installed")
    return [(found[0].path, oldest), (found[-1].path, NEWEST)]


def _read_sums(out: Path) -> bytes:
    if not (out / SUMS).is_file():
        raise ReleaseError(f"{out / SUMS}: is missing")
    return (out / SUMS).read_bytes()


def verify_sums(out: Path) -> None:
    """Raise unless all files of a release have the digests of its list, and are in it."""
    listed = dict(reversed(line.split("  ", 1)) for line in _read_sums(out).decode().splitlines())
    for name, wanted in listed.items():
        if not (out / name).is_file():
            raise ReleaseError(f"{out / name}: is missing")
        if digest(out / name) != wanted:
            raise ReleaseError(f"{out / name}: has another digest than {SUMS} says")
    extra = {path.name for path in out.iterdir()} - set(listed) - {SUMS, SIGNATURE}
    if extra:
        raise ReleaseError(f"{out}: {', '.join(sorted(extra))} must be listed in {SUMS}")


def sign(out: Path, key: Path) -> None:
    """Sign the list of digests."""
    verify_sums(out)
    (out / SIGNATURE).unlink(missing_ok=True)
    _run(["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(key.resolve()), str(out.resolve() / SUMS)], out)


def verify(out: Path, signers: Path, identity: str) -> None:
    """Check the signature of a release, and all digests."""
    files = ["-f", str(signers), "-s", str(out / SIGNATURE)]
    command = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-I", identity, *files]
    done = subprocess.run(command, input=_read_sums(out), capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{out / SIGNATURE}: is not a signature by {identity}: {done.stderr.decode().strip()}")
    verify_sums(out)


# The command


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python .ci/release.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    each = steps.add_parser("prepare", help="set the version, and date the changelog")
    each.add_argument("version")
    each = steps.add_parser("build", help="build twice, compare, and describe")
    each.add_argument("out", type=Path)
    each.add_argument("--here", action="store_true", help="with the tools of this environment, not with pinned ones")
    each.add_argument("--dirty", action="store_true", help="allow uncommitted changes")
    each = steps.add_parser("check", help="install from the folder alone")
    each.add_argument("out", type=Path)
    each.add_argument("--python", help="an interpreter, instead of the oldest and the newest")
    each.add_argument("--torch", default="newest", help="its torch (default: newest)")
    each = steps.add_parser("sign", help="sign the digests with a key of ssh")
    each.add_argument("out", type=Path)
    each.add_argument("--key", type=Path, required=True)
    each = steps.add_parser("verify", help="check the digests and their signature")
    each.add_argument("out", type=Path)
    each.add_argument("--signers", type=Path, required=True, help="a file of allowed signers, as ssh-keygen has it")
    each.add_argument("--identity", default="release")
    steps.add_parser("switch", help="let the pages name the published package")
    return parser


def run(given: argparse.Namespace) -> Iterator[str]:
    """Run a step, and yield what to print."""
    if given.step == "prepare":
        prepare(given.version, time.strftime("%Y-%m-%d"))
        yield f"Review the changelog. Then: git commit -am 'Release {given.version}' && git tag -s v{given.version}"
    elif given.step == "build":
        for path in build(given.out, here=given.here, dirty=given.dirty):
            yield f"{digest(path)}  {path}"
    elif given.step == "check":
        yield from check(given.out, [(given.python, given.torch)] if given.python else choose_pairs())
    elif given.step == "sign":
        sign(given.out, given.key)
        yield f"{given.out / SIGNATURE}"
    elif given.step == "verify":
        verify(given.out, given.signers, given.identity)
        yield "the signature and all digests are right"
    else:
        yield from switch()


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Run a step, and return the exit status."""
    given = _arguments().parse_args(arguments)
    try:
        for line in run(given):
            say(line)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
