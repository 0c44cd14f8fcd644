"""Files that hide a pickle, or other code: archives that are broken on purpose, compressed files and models."""

import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib

from tests.plugins.snapshot_scan.hostile_pickles import STACKED, SYSTEM, headed

EVIL = headed(STACKED)
PLAIN = headed(b"}.")


def zipped(members, method=zipfile.ZIP_STORED, comment=b""):
    """The bytes of a zip archive of these names and contents."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        archive.comment = comment
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return made.getvalue()


def tarred(members, **fields):
    """The bytes of a tar archive; the fields are those of each member."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def flagged(bits, both):
    """An archive whose member claims to be encrypted or a patch, in both headers or only in its own."""
    made = bytearray(zipped([("model/data.pkl", EVIL)]))
    made[6] |= bits
    if both:
        made[made.index(b"PK\1\2") + 8] |= bits
    return bytes(made)


def npy(descr, content):
    """The bytes of a NumPy file."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': (1,), }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + content


class Escaped:
    """A type of objects, as a header may write it."""

    def __repr__(self):
        return r"'|\x4f'"


def without_magic(archive):
    """The tar archive of one member in the oldest format, which its checksum alone shows."""
    head = archive[:148] + b" " * 8 + archive[156:257] + bytes(255)
    return head[:148] + b"%06o\0 " % sum(head) + head[156:] + archive[512:]


def renamed(archive, name, other):
    """The archive with another name in the first header only."""
    return archive.replace(name, other, 1)


def with_two_directories(first, second):
    """An archive whose two end records point to two directories."""
    one, two = zipped([("model/data.pkl", first)]), zipped([("model/data.pkl", second)])
    end = two.index(b"PK\5\6")
    size, begin = struct.unpack_from("<2L", two, end + 12)
    both = one + two[:end]  # the old end record of the first is between them
    place = len(both)
    cd = one.index(b"PK\1\2")
    long = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, one.index(b"PK\5\6") - cd, cd)
    return (
        both
        + long
        + struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
        + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, begin + len(one), 0)
    )


def with_gap(length):
    """An archive with bytes that belong to no member, before its directory."""
    made = zipped([("a", PLAIN)])
    place = made.index(b"PK\1\2")
    changed = made[:place] + b"x" * length + made[place:-6] + struct.pack("<L", place + length) + made[-2:]
    return bytes(changed)


KERAS = json.dumps({"config": {"layers": [{"class_name": "Dense"}, {"class_name": "Lambda", "config": {}}]}})
ESCAPED = KERAS.replace("Lambda", "\\u004cambda").replace("class_name", "class\\u005fname")
INNER = zipped([("model/data.pkl", EVIL)])

HIDDEN = {
    "data.zip": INNER,
    "wrong suffix.zip": zipped([("data.txt", EVIL)]),
    "no suffix": INNER,
    "text.json": INNER,
    "deflated.npz": zipped([("model/data.pkl", EVIL)], zipfile.ZIP_DEFLATED),
    "lzma.zip": zipped([("model/data.pkl", EVIL)], zipfile.ZIP_LZMA),
    "bzip2.zip": zipped([("model/data.pkl", EVIL)], zipfile.ZIP_BZIP2),
    "crc.zip": INNER.replace(b"touch ran", b"touch RAN", 1),
    "names.zip": renamed(INNER, b"data.pkl", b"datap.kl"),
    "encrypted.zip": flagged(1, both=True),
    "encrypted in one header.zip": flagged(1, both=False),
    "patch.zip": flagged(0x20, both=True),
    "strongly encrypted.zip": flagged(0x40, both=True),
    "before.pt": b"\x7f" * 100 + INNER,
    "after.pt": INNER + b"\x7f" * 100,
    "comment.pt": zipped([("model/data.pkl", EVIL)], comment=b"comment"),
    "no directory.pt": INNER[: INNER.index(b"PK\1\2")],
    "two archives.pt": INNER + zipped([("model/data.pkl", PLAIN)]),
    "two directories.pt": with_two_directories(EVIL, PLAIN),
    "pickle and archive.pt": EVIL + zipped([("model/data.pkl", PLAIN)]),
    "same name.pt": zipped([("model/data.pkl", PLAIN), ("model/Data.pkl", EVIL)]),
    "zip in zip.pt": zipped([("a.zip", zipped([("b.zip", INNER)]))]),
    "data.distcp": zipped([("archive/data.pkl", PLAIN)]) + INNER + zipped([("archive/data.pkl", PLAIN)]),
    "model.nemo": tarred([("./model_weights.ckpt", INNER)]),
    "model.tar.gz": gzip.compress(tarred([("weights.pt", EVIL)]), mtime=0),
    "data.pkl.gz": gzip.compress(EVIL, mtime=0),
    "data.bz2": bz2.compress(EVIL),
    "data.xz": lzma.compress(EVIL),
    "data.lzma": lzma.compress(EVIL, lzma.FORMAT_ALONE),
    "data.joblib": zlib.compress(EVIL),
    "array.npy": npy("|O", EVIL),
    "record.npy": npy([("a", "<i4"), ("b", "|O")], EVIL),
    "pickle.npy": EVIL,
    "arrays.npz": zipped([("a.npy", npy("|O", EVIL))], zipfile.ZIP_DEFLATED),
    "data.txt": b"\n".join([SYSTEM, b"text"]),
    "0_0.distcp": EVIL,
    ".metadata": EVIL,
    "common.pt": EVIL,
    "model.safetensors": EVIL,
    "model.gguf": EVIL,
    "data.msgpack": EVIL,
    "saved_model.pb": b"\n\x08ReadFile\x12" + b"\0" * 90,
    "write.pb": b"\0" * (1 << 20) + b"WriteFile\x12",
    "keras_metadata.pb": b"\x0a\xff" + KERAS.encode(),
    "config.json": KERAS.encode(),
    "model.keras": zipped([("config.json", KERAS)]),
    "escaped.keras": zipped([("config.json", ESCAPED)]),
    "hparams.yaml": b"a: !!python/object/apply:os.system ['touch ran']\n",
    "pickle in a dataset.h5": b"\x89HDF\r\n\x1a\n" + b"\0" * 90 + EVIL,
    "type by name.npy": npy("object", EVIL),
    "escaped type.npz": zipped([("a.npy", npy(Escaped(), EVIL))]),
    "empty member.gz": gzip.compress(b"", mtime=0) + gzip.compress(EVIL, mtime=0),
    "empty member.joblib": bz2.compress(b"") + bz2.compress(EVIL),
    "empty member.xz": lzma.compress(b"") + lzma.compress(EVIL),
    "old.bin": without_magic(tarred([("pickle", EVIL)])),
    "utf16.keras": zipped([("config.json", KERAS.encode("utf-16"))]),
    "utf16 without a mark.keras": zipped([("config.json", KERAS.encode("utf-16-le"))]),
    "spaces.keras": zipped([("config.json", " " * 70 + ESCAPED)]),
    "mark.keras": zipped([("config.json", b"\xef\xbb\xbf" + ESCAPED.encode())]),
    "utf16.yaml": "a: !!python/object/apply:os.system [x]\n".encode("utf-16"),
    "percent.yaml": b"a: !!pyth%6fn/object/apply:os.system [x]\n",
    "verbatim.yaml": b"a: !<tag:yaml.org,2002:python/object/apply:os.system> [x]\n",
    "prefix.yaml": b"%TAG !p! tag:yaml.org,2002:python/\n---\na: !p!object/apply:os.system [x]\n",
    "next.pb": b"\n\x08ReadFile2\0",
    "graph.pbtxt": b'op: "WriteFile"\n',
    "library.so": b"\x7fELF" + b"\0" * 99,
    "script.pt": zipped([("m/data.pkl", PLAIN), ("m/code/__torch__.py", b"def f(): pass")]),
}
"""Files with something that runs code."""
SUSPICIOUS = {
    "path.pt": (zipped([("../data.pkl", PLAIN)]), "link"),
    "absolute.pt": (zipped([("/etc/data.pkl", PLAIN)]), "link"),
    "path.tar": (tarred([("a/../../b", PLAIN)]), "link"),
    "link.tar": (tarred([("a", b"")], type=tarfile.SYMTYPE, linkname="/etc/passwd"), "link"),
    "hard link.tar": (tarred([("a", b"")], type=tarfile.LNKTYPE, linkname="../b"), "link"),
    "pipe.tar": (tarred([("a", b"")], type=tarfile.FIFOTYPE), "unexamined"),
    "twice.tar": (tarred([("a", PLAIN), ("a", PLAIN)]), "archive"),
    "two tars.tar": (tarred([("a", PLAIN)]) + tarred([("a", PLAIN)]), "archive"),
    "twice.pt": (zipped([("a", PLAIN), ("A", PLAIN)]), "archive"),
    "before.pt": (b"\x7f" * 100 + zipped([("a", PLAIN)]), "archive"),
    "after.pt": (zipped([("a", PLAIN)]) + b"\x7f" * 100, "archive"),
    "two archives.pt": (zipped([("a", PLAIN)]) + zipped([("a", PLAIN)]), "archive"),
    "two directories.pt": (with_two_directories(PLAIN, PLAIN), "archive"),
    "names.pt": (renamed(zipped([("data.pkl", PLAIN)]), b"data", b"atad"), "archive"),
    "gap.pt": (with_gap(200), "archive"),
    "deep.zip": (zipped([("a", zipped([("b", zipped([("c", zipped([("d", zipped([("e", b"")]))]))]))]))]), "limit"),
    "bomb.gz": (gzip.compress(b"\0" * (70 << 20), mtime=0), "limit"),
    "cut.gz": (gzip.compress(b"a" * 1000, mtime=0)[:-5], "unexamined"),
    "flags.gz": (gzip.compress(EVIL, mtime=0).replace(b"\x08\0", b"\x08\xe0", 1), "unexamined"),
    "large.xz": (lzma.compress(EVIL, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 400 << 20}]), "unexamined"),
    "two arrays.npy": (npy("<f8", b"\0" * 8) + npy("|O", EVIL), "code"),
    "import.model": (b"cmy_evil\nrun\n\xff", "unknown"),
    "created.model": (b"cmy_evil\nRun\n)\x81\xff", "unknown"),
    "moved.distcp": (b"\0" * 64 + EVIL + zipped([("archive/data.pkl", PLAIN)]), "archive"),
    "nested.json": (b"[" * 100_000 + b"]" * 100_000, "limit"),
    "headers.bin": (b"PK\3\4" * 60_000, "limit"),
    "places.pkl": (PLAIN + b"\x80\x02\xff\xff" * 60_000, "limit"),
    "model.7z": (b"7z\xbc\xaf\x27\x1c\0\4" + b"\0" * 50, "unexamined"),
    "model.zst": (b"\x28\xb5\x2f\xfd" + b"\0" * 50, "unexamined"),
    "noise.pt": (bytes(range(255, 100, -1)), "unexamined"),
    "pointer.pt": (b"version https://git-lfs.github.com/spec/v1\n", "unexamined"),
    "model.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 90 + KERAS.encode(), "model"),
    "spaces.h5": (b"\x89HDF\r\n\x1a\n" + KERAS.replace(": ", ":" + " " * 400).encode(), "model"),
    "escaped.h5": (b"\x89HDF\r\n\x1a\n" + ESCAPED.encode(), "model"),
    "long.npy": (b"\x93NUMPY\2\0\xff\xff\xff\x7f{", "unexamined"),
}
"""Files in which something is suspicious, or cannot be examined, and the rule that says so."""
SAFE = {
    "model.pkl": PLAIN,
    "model.safetensors": struct.pack("<Q", 2) + b"{}" + b"\0" * 64,
    "model.gguf": b"GGUF\3\0\0\0" + b"\0" * 64,
    "model.msgpack": b"\x82\xa1a\x01\xa1b\x02",
    "config.json": b'{"class_name": "Dense"}',
    "image.png": b"\x89PNG\r\n\x1a\n\0\0",
    "README.md": "# Modell für alle\n".encode(),
    "empty": b"",
    "array.npy": npy("<f8", b"\0" * 8),
    "texts.npy": npy("<U2", "OObb".encode("utf-32-le")[:8]),
    "named.npy": npy([("O_o", "<f4")], b"OOOO"),
    "array.npz": zipped([("a.npy", npy("<f8", b"\0" * 8))], zipfile.ZIP_DEFLATED),
    "bomb.npz": zipped([("a.npy", npy("<f8", b"\0" * (70 << 20)))], zipfile.ZIP_DEFLATED),
    "data.json.gz": gzip.compress(b"{}", mtime=0),
    "two.txt.gz": gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0) + bytes(9),
    "arrays/d/0123456789abcdef0123456789abcdef": b"\x28\xb5\x2f\xfd" + b"\0" * 50,
    "empty.zip": zipped([("a", b"")], zipfile.ZIP_DEFLATED),
    "empty.gz": gzip.compress(b"", mtime=0),
    "array/c": b"\x28\xb5\x2f\xfd" + b"\0" * 50,
    "saved_model.pb": b"\n\x04Conv\x12\0",
    "model.tar": tarred([("a.json", b"{}")]),
}
"""Files with nothing to find."""
