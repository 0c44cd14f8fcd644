"""Pickles written opcode by opcode, and archives of them."""

import io
import struct
import zipfile

PROTO = b"\x80\x02"
FLOATS = [("data/0", struct.pack("<4f", 1, 2, 3, 4))]


def archive(content, members=FLOATS, method=zipfile.ZIP_STORED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        file.writestr("a/data.pkl", content)
        for name, data in members:
            file.writestr(f"a/{name}", data)
    return made.getvalue()


def name_of(module, name):
    return f"c{module}\n{name}\n".encode()


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def put(index):
    return b"r" + struct.pack("<I", index) + b"0"


def get(index):
    return b"j" + struct.pack("<I", index)


def doubling(first, last, join):
    """Values that each hold the one before twice: a few bytes that stand for 2 ** 200."""
    made = first + put(0)
    for index in range(200):
        made += join(get(index)) + put(index + 1)
    return made + get(200) + last
