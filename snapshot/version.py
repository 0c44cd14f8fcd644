"""The version of the installed library."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("snapshot-torch")
except PackageNotFoundError:  # imported from a checkout that is not installed
    VERSION = "0+unknown"
