"""The version of the library that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("snapshot-torch")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0+unknown"
